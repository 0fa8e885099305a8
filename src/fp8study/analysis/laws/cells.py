"""Measured cells: everything that was run of one configuration on one kind of GPU, pooled.

Repeats, seeds, sessions and studies of a configuration are one cell; fields that change neither
speed nor memory (corpus, learning rate, number of steps …) do not count. What a cell says is the
median over its runs.
"""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8study.analysis.laws.shape import ModelShape, shape_of
from fp8study.analysis.runs.frames import key_of
from fp8study.core.config import ResolvedConfig, completed, make_config
from fp8study.core.errors import UserError
from fp8study.core.fields import FIELDS
from fp8study.core.path.switches import RETIRED
from fp8study.core.presets import PRESETS
from fp8study.core.recipes import RECIPES
from fp8study.core.record_shape import as_run, complete_texts, whence
from fp8study.core.records import RunRecord, read_record

#: Fields of the task that change no kernel.
_INERT = (
    "seed", "corpus", "tokenizer", "learning_rate", "lr_schedule", "lr_warmup_steps",
    "weight_decay", "adam_beta2", "num_steps", "fp8_emulate",
)  # fmt: skip
_IGNORED = (*_INERT, *(name for name, field in FIELDS.items() if field.group == "measurement"))


@dataclass(frozen=True)
class Cell:
    """All completed runs of one configuration on one kind of GPU."""

    config: ResolvedConfig
    shape: ModelShape
    gpu: str
    """As its driver names it."""
    runs: tuple[tuple[str, RunRecord], ...]
    """``machine/study/run_id`` and record, oldest first."""

    @property
    def ids(self) -> list[str]:
        return [name for name, _ in self.runs]

    @cached_property
    def peak_gib(self) -> float | None:
        """Peak of what tensors took on the fullest rank."""
        return _median(record.results.get("memory_peak_gib") for _, record in self.runs)

    @cached_property
    def step_ms(self) -> float | None:
        """Median step; runs whose allocator was at work are left out."""
        return _median(record.results.get("step_time_ms_median") for _, record in self.timed)

    @cached_property
    def kernels_ms(self) -> dict[str, float]:
        """Kernels of a profiled step by kind, medians; empty where no run has one."""
        steps = [record.instruments.get("step", {}) for _, record in self.timed]
        times = [step["by_kind_ms"] for step in steps if step.get("by_kind_ms")]
        names = dict.fromkeys(name for kinds in times for name in kinds)
        return {name: _median(kinds.get(name, 0.0) for kinds in times) or 0.0 for name in names}

    @property
    def timed(self) -> list[tuple[str, RunRecord]]:
        return [run for run in self.runs if not run[1].timing_is_void]

    @property
    def rates(self) -> list[tuple[str, float]]:
        """Name and tokens per second and GPU of each run whose timing holds."""
        found = [(name, record.results.get("tokens_per_second_per_gpu"))
                 for name, record in self.timed]  # fmt: skip
        return [(name, float(rate)) for name, rate in found if rate]


def _median(values: Iterable[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.median(known) if known else None


def cell_key(config: ResolvedConfig, gpu: str, *free: str) -> str:
    """Return what runs of one cell have in common, as one text; of several, that differ in `free`.

    Nothing of what is said of FP8 alone tells BF16 runs apart.
    """
    values = config.to_dict() | {"max_grad_norm": config.max_grad_norm is not None}
    of_fp8 = () if config.is_fp8 else ("skip", "fp8_all_gather", "gather_cast", "fast_accumulation")
    return key_of(values, (*_IGNORED, *of_fp8, *free), gpu)


def cells_of(runs: Iterable[tuple[str, RunRecord]]) -> list[Cell]:
    """Pool completed runs of presets on GPUs into cells, in the order in which they are met.

    `runs`: ``machine/study/run_id`` and record.
    """
    groups: dict[str, tuple[ResolvedConfig, list[tuple[str, RunRecord]]]] = {}
    for name, record in sorted(runs, key=lambda run: run[1].ended_at):
        gpu = record.machine.get("gpu_name")
        if record.status != "completed" or record.machine.get("device") != "cuda" or not gpu:
            continue
        if (config := recorded_config(record)) is None:
            continue
        _, found = groups.setdefault(cell_key(config, gpu), (config, []))
        found.append((name, record))
    return [
        Cell(config, shape_of(config.model), found[0][1].machine["gpu_name"], tuple(found))
        for config, found in groups.values()
    ]


def recorded_config(record: RunRecord) -> ResolvedConfig | None:
    """Return a record's configuration; None of one refused today, of no preset, or in FP16.

    Nor is one known of a run that set a switch which was taken out since. With
    ``fast_accumulation=all`` there is none either: the laws do not know it.
    """
    values = completed(as_run(record.config, record.warnings), record.machine.get("device"))
    if any(values.get(name, field.plain) != field.plain for name, field in RETIRED.items()):
        return None
    known = {name: value for name, value in values.items() if name in FIELDS}
    try:
        config = make_config(known, record.run_id).resolved()
    except UserError:
        return None
    is_judged = config.model in PRESETS and not RECIPES[config.precision].scales_loss
    adds_up_as_usual = not config.is_fp8 or config.fast_accumulation == "forward"
    return config if is_judged and adds_up_as_usual else None


def read_runs(
    results: Path, place: str = "reference/*", but_for: Sequence[tuple[str, RunRecord]] = ()
) -> list[tuple[str, RunRecord]]:
    """Read the records below a folder of results, without their steps.

    Damaged ones are named in a warning and left out, and so are copies, of one another or of those
    in `but_for`. Names are ``machine/study/run_id``; `place` says of which machines, by default all
    committed.
    """
    found: list[tuple[str, RunRecord]] = []
    seen = {key for _, record in but_for for key in whence(record)}
    for path in sorted(results.glob(f"{place}/*/*/run.json")):
        try:
            record = dataclasses.replace(read_record(path), study=path.parents[1].name)
        except UserError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
            continue
        if seen.isdisjoint(keys := whence(record)):
            seen.update(keys)
            found.append(("/".join(path.parts[-4:-1]), record))
        else:
            warnings.warn(f"left out: {path.parent}: a copy; remove it", stacklevel=2)
    complete_texts(record.data for _, record in found)
    return found
