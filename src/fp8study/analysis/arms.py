"""The arms in a folder of results: its runs, grouped by what they are.

Two runs are of one arm if their configurations agree but for what tells repeats apart: seed,
repetition, and the names of the data, which are compared by their hash. That holds across folders,
machines and versions, unlike the keys of `analysis.frames`, which keep comparisons inside one
installation: here the installation may be the question.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fp8study.analysis.frames import arm_label, runs_frame
from fp8study.analysis.pairing import timing_is_void
from fp8study.core.config import RunConfig, completed
from fp8study.core.errors import UserError, one_line
from fp8study.core.fields import varying
from fp8study.core.records import RunRecord, StoredRun, read_record

#: Already in an arm's name, as `fp8study.analysis.frames.arm_label` writes it.
_NAMED = ("model", "num_gpus", "precision")


@dataclass(frozen=True)
class Arm:
    """The runs of one configuration, whatever their end."""

    config: dict[str, Any]
    """From `arm_config`."""
    records: tuple[RunRecord, ...]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The runs' rows of `fp8study.analysis.frames.runs_frame`."""
        return runs_frame(StoredRun(record, Path(), "") for record in self.records)

    @cached_property
    def completed(self) -> pd.DataFrame:
        """The rows of the runs that completed."""
        return self.runs[self.runs["status"] == "completed"]

    @cached_property
    def is_void(self) -> pd.Series:
        """Which completed runs have timings that the allocator may have made."""
        return timing_is_void(self.completed) & self.completed["tokens_per_second_per_gpu"].notna()

    @property
    def rates(self) -> list[float]:
        """Tokens per second and GPU of the runs whose timings count."""
        return list(self.completed.loc[~self.is_void, "tokens_per_second_per_gpu"].dropna())

    @property
    def memory_peak_gib(self) -> float | None:
        """The largest peak of a completed run; None where none was measured."""
        peak = self.completed["memory_peak_gib"].max()
        return None if pd.isna(peak) else float(peak)

    @property
    def losses(self) -> dict[int, float]:
        """Seed → final training loss, nats per token, mean over the seed's repeats."""
        ended = self.completed.dropna(subset=["seed", "loss_last20_mean"])
        by_seed = ended.groupby("seed")["loss_last20_mean"].mean()
        return {int(str(seed)): float(loss) for seed, loss in by_seed.items()}


def arm_config(
    config: Mapping[str, Any], ignored: Iterable[str] = (), device: str | None = None
) -> dict[str, Any]:
    """Return what a run is: its configuration without what tells repeats apart.

    Fields that a record's version did not know yet are as they were then, and fields that do
    nothing in BF16 have their defaults in a BF16 run.

    Args:
        config: A record's.
        ignored: Further fields to leave out.
        device: The record's, as `completed`.
    """
    full = completed(config, device)
    if full.get("precision") == "bf16":
        defaults = RunConfig().resolved().to_dict()
        full |= {name: defaults[name] for name in varying("pair")}
    return {k: v for k, v in full.items() if k not in {*varying("folder"), *ignored}}


def arm_key(config: Mapping[str, Any]) -> str:
    """Write a configuration from `arm_config` so that equal ones are equal texts."""
    return json.dumps(config, sort_keys=True, default=str)


def read_folder(folder: Path, name: str) -> list[RunRecord]:
    """Read every record at or below a folder, in the order of their paths.

    Args:
        folder: A folder of results, a run's folder, or a ``run.json``.
        name: What the caller calls it, for the message.

    Raises:
        UserError: There is no record, or one cannot be read.
    """
    paths = [folder] if folder.is_file() else sorted(folder.rglob("run.json"))
    if not paths:
        what = "holds no run.json" if folder.is_dir() else "is no folder"
        raise UserError(
            f"{name}: '{folder}' {what}; give a folder of results, as results/local/<study>"
        )
    try:
        return [read_record(path) for path in paths]
    except UserError as error:
        raise UserError(f"{name}: {one_line(error)}; move that record away or mend it") from None


def group_arms(records: Iterable[RunRecord], ignored: Iterable[str] = ()) -> dict[str, Arm]:
    """Group records by arm.

    Args:
        records: In any order; one that is there twice (a copied folder) counts once.
        ignored: As `arm_config`.

    Returns:
        `arm_key` → arm, in the order in which they are met.
    """
    ignored = tuple(ignored)
    grouped: dict[str, dict[tuple[str, str], RunRecord]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for record in records:
        config = arm_config(record.config, ignored, record.machine.get("device"))
        configs.setdefault(key := arm_key(config), config)
        grouped.setdefault(key, {})[record.run_id, record.started_at] = record
    return {key: Arm(configs[key], tuple(runs.values())) for key, runs in grouped.items()}


def arm_names(arms: Mapping[str, Arm]) -> dict[str, str]:
    """Name arms by model, GPUs and precision, and by whatever else tells equal names apart.

    Args:
        arms: By `arm_key`, of all folders that are shown together.
    """
    short = {key: _short_name(arm) for key, arm in arms.items()}
    names = {}
    for key, arm in arms.items():
        twins = [arms[other].config for other, name in short.items() if name == short[key]]
        telling = [
            f"{field}={_plain(value)}"
            for field, value in arm.config.items()
            if field not in _NAMED and any(twin.get(field) != value for twin in twins)
        ]
        names[key] = ", ".join([short[key], *telling])
    return names


def _short_name(arm: Arm) -> str:
    model = str(arm.config.get("model")).rstrip("/").split("/")[-1]
    return f"{model} × {arm.config.get('num_gpus')}, {arm_label(arm.records[0])}"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) or "nothing" if isinstance(value, list) else str(value)


def differing(one: Arm, other: Arm) -> list[str]:
    """Name the fields in which two arms differ, with both values."""
    names = [name for name in one.config if one.config[name] != other.config.get(name)]
    return [f"{n}: {_plain(one.config[n])} v {_plain(other.config.get(n))}" for n in names]
