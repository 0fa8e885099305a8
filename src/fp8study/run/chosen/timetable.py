"""Who does what on which GPU, and for how long: blocks of runs go where there is time first."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp8study.core.config import RunConfig, make_config
from fp8study.run.chosen.estimates import compile_minutes, held_minutes
from fp8study.run.machine import Machine

#: What every chosen run has, under its own values.
BASE: dict[str, Any] = {
    "path": "tuned", "sequence_length": 4096, "num_steps": 20_000, "num_warmup_steps": 5,
    "timed_seconds": 20.0, "learning_rate": 3e-4, "lr_warmup_steps": 20, "log_every": 5,
}  # fmt: skip

#: What is compared in several precisions: model, number of GPUs and batch.
Cell = tuple[str, int, int]


@dataclass(frozen=True)
class Chosen:
    """One run: what differs from `BASE`, where and how long it runs, and why."""

    values: Mapping[str, Any]
    gpus: tuple[int, ...]
    """Places in the machine's list of GPUs."""
    minutes: float
    why: str

    @cached_property
    def config(self) -> RunConfig:
        return make_config(BASE | dict(self.values))


@dataclass(frozen=True)
class Block:
    """A cell's arms, one after the other on the same GPUs; or one run of the part about loss."""

    arms: tuple[Mapping[str, Any], ...]
    why: str

    @cached_property
    def configs(self) -> tuple[RunConfig, ...]:
        return tuple(make_config(BASE | dict(arm)) for arm in self.arms)

    @property
    def cell(self) -> Cell:
        return cell_of(self.configs[0])

    def without(self, precision: str) -> Block:
        kept = (arm for arm in self.arms if arm["precision"] != precision)
        return dataclasses.replace(self, arms=tuple(kept))


def cell_of(config: RunConfig) -> Cell:
    return config.model, config.num_gpus, config.micro_batch_size


class Timetable:
    """What each GPU does, in minutes since the first run began; wide runs come first."""

    def __init__(self, machine: Machine, kept: Sequence[Chosen] = ()) -> None:
        self.machine, self.runs = machine, list(kept)
        # The same each time, so that a study can be gone on with.
        self._random = random.Random(" ".join(gpu.uuid for gpu in machine.gpus))
        self._compiled = {_code(run.config): 0.0 for run in kept}
        """When the code of a run is there for others: at the end of its first block."""

    def ends(self, width: int | None = None) -> list[float]:
        """Return until when each GPU is busy, with runs on `width` GPUs if it is given."""
        runs = [run for run in self.runs if width in (None, len(run.gpus))]
        gpus = range(len(self.machine.gpus))
        return [sum(run.minutes for run in runs if gpu in run.gpus) for gpu in gpus]

    def fill(self, blocks: Sequence[Block], until: float, spare: str = "") -> list[Block]:
        """Put blocks in their order and return those that would end after `until`.

        A cell's next block is of no use without the one before. One arm in the precision `spare`
        is enough, and none where it would not let its block fit.
        """
        left: list[Block] = []
        for block in blocks:
            pair = block.without(spare)
            wants_spare = all(run.config.precision != spare for run in self.runs)
            tries = [block, pair] if wants_spare else [pair]
            is_cut = block.cell in {other.cell for other in left}
            if is_cut or not any(self._add(tried, until) for tried in tries):
                left.append(block)
        return left

    def holds(self, blocks: Sequence[Block], until: float) -> bool:
        """Return whether there is time for all these blocks."""
        trial = copy.copy(self)
        trial.runs, trial._compiled = [*self.runs], {**self._compiled}
        trial._random = random.Random()
        return not trial.fill(blocks, until)

    def _add(self, block: Block, until: float) -> bool:
        width = block.configs[0].num_gpus
        ends, alike = self.ends(), self.ends(width)
        # Neighbours: where widths divide each other, nobody waits in between.
        places = (range(first, first + width) for first in range(0, len(ends), width))
        whole = [place for place in places if place.stop <= len(ends)]
        place = min(whole, key=lambda gpus: max(ends[gpu] for gpu in gpus))
        # Code is found only if it was compiled before, on any GPU. Runs as wide as this one are
        # all that count: the wider ones come first, on all GPUs.
        start = max(alike[gpu] for gpu in place)
        minutes = [
            held_minutes(config, self.machine)
            + compile_minutes(config) * (self._compiled.get(_code(config), start + 1) > start)
            for config in block.configs
        ]
        if max(ends[gpu] for gpu in place) + sum(minutes) > until:
            return False
        for config in block.configs:
            self._compiled.setdefault(_code(config), start + sum(minutes))
        runs = [
            Chosen(arm, tuple(place), time, block.why)
            for arm, time in zip(block.arms, minutes, strict=True)
        ]
        self.runs += self._random.sample(runs, len(runs))
        return True


def _code(config: RunConfig) -> tuple[Cell, str, bool]:
    """Return what tells a run's compiled code from that of others in the same study."""
    return cell_of(config), config.precision, config.timed_seconds is None
