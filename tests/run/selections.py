"""What several tests ask of the runs that are chosen for machines."""

from collections.abc import Iterable
from functools import cache

from fp8study.run.chosen.selection import Selection, select
from fp8study.run.chosen.timetable import Chosen
from fp8study.run.machine import Machine
from tests.machines import A100, B200, H100, H200, RTX_4090, UNKNOWN, machine

TEXT = ("text:my.txt", 50_000_000)


#: `select`, of which several tests ask the same.
selected = cache(select)


MACHINES = {
    "RTX 4090": machine(RTX_4090),
    "H100": machine(H100),
    "H200": machine(H200),
    "2 H200": machine(H200, H200),
    "4 H100": machine(*4 * [H100]),
    "8 H200": machine(*8 * [H200]),
    "8 B200": machine(*8 * [B200]),
    "mixed": machine(H200, H100, H100),
    "A100": machine(A100),
    "unknown": machine(UNKNOWN, UNKNOWN),
}


def minutes(chosen: Selection, there: Machine) -> float:
    """How long the busiest GPU has to do, in whatever order wide runs and narrow ones come."""
    return max(
        sum(run.minutes for run in chosen.runs if gpu in run.gpus) for gpu in range(len(there.gpus))
    )


def timed(chosen: Selection) -> list[Chosen]:
    return [run for run in chosen.runs if run.config.timed_seconds]


def cells(runs: Iterable[Chosen]) -> set[tuple[str, int, int]]:
    return {(c.model, c.num_gpus, c.micro_batch_size) for c in (run.config for run in runs)}
