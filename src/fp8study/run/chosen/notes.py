"""What a plan says besides its runs: how often each cell is measured, and what the GPUs decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fp8study.core.config import RunConfig
from fp8study.core.field_types import shown
from fp8study.core.hardware import FP8_CAPABILITY
from fp8study.core.studies import WRONG, PlannedRun, Study
from fp8study.core.words import count, listed
from fp8study.run.chosen.timetable import Cell, cell_of
from fp8study.run.machine import Machine


def what_is_special(machine: Machine) -> list[str]:
    """Say what about the GPUs decides what can be asked of them."""
    notes = []
    if len({gpu.name for gpu in machine.gpus}) > 1:
        notes.append(
            f"The GPUs differ: {machine.gpus_in_words}. Runs must fit the smallest, and a "
            "comparison stays on its GPUs; CUDA_VISIBLE_DEVICES chooses"
        )
    if not machine.has_fp8:
        weakest = min(machine.gpus, key=lambda gpu: gpu.compute_capability)
        notes.append(
            "No part about speed: FP8 needs compute capability 8.9 (Ada, Hopper) or newer, and "
            f"{weakest.name} has {weakest.capability}; for losses FP8 is emulated"
        )
        newer = [g.index for g in machine.gpus if g.compute_capability >= FP8_CAPABILITY]
        if newer:
            notes[-1] += f". CUDA_VISIBLE_DEVICES={','.join(map(str, newer))} keeps those with FP8"
    return notes


def no_reference(study: Study) -> str | None:
    """Say that no run has what the others are to be divided by."""
    wanted = study.reference.items()
    if not wanted or any(wanted <= run.config.to_dict().items() for run in study.runs):
        return None
    said = " ".join(f"{name}={shown(value)}" for name, value in wanted)
    return f"reference: no run has {said}, by which others would be divided; mend it"


def done_before(study: Study, pending: list[PlannedRun]) -> list[str]:
    """Say which pending runs have a record already, and why they are done again."""
    by_reason: dict[str, list[str]] = {}
    for run in pending:
        by_reason.setdefault(study.missing(run) or "", []).append(run.config.digest())
    return [
        f"to do again ({', '.join(runs)}): the record "
        + (f"{WRONG[why]}; it will be kept aside" if why in WRONG else f"says '{why}'")
        for why, runs in by_reason.items()
        if why != "nothing"
    ]


def blocks_in_words(cells: Iterable[Cell], baselines: Iterable[RunConfig]) -> str:
    """Say how many blocks each cell has: one for each of its runs in BF16, the `baselines`."""
    numbers = Counter(map(cell_of, baselines))
    by_number: dict[int, dict[tuple[str, int], list[int]]] = {}
    for cell in cells:
        model, width, batch = cell
        by_number.setdefault(numbers[cell], {}).setdefault((model, width), []).append(batch)
    said = []
    for number, alike in sorted(by_number.items(), reverse=True):
        names = ", ".join(
            f"{model} at batch {listed(sorted(batches))} on {count(width, 'GPU')}"
            for (model, width), batches in alike.items()
        )
        said.append(f"{number} of {names}" if number else f"no time for {names}")
    return (
        "Blocks (BF16 and FP8 by turns on the same GPUs; 3 of each setting where there is time): "
        f"{'; '.join(said)}"
    )
