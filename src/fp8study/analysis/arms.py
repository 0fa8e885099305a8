"""The arms in folders of results: their runs, rates and ratios, and what else tells two apart.

Two runs are of one arm if their configurations agree but for what tells repeats apart: seed,
repetition, and the names of the data, which are compared by their hash. That holds across folders,
machines and versions, unlike ``arm_key`` of `fp8study.analysis.runs.frames`, which adds where and
with what a run was made: here the installation may be the question.

Rates are compared on a log scale: a factor of 1.1 and one of 1/1.1 are the same step, and the
interval of a ratio has no negative end. It speaks of the spread between the runs at hand; two
sessions on one machine can differ by more, which only repeated sessions show.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fp8study.analysis.runs.frames import key_of, runs_frame
from fp8study.analysis.runs.naming import arm_label
from fp8study.analysis.stats import Interval, welch_t_interval
from fp8study.core.config import RunConfig, completed
from fp8study.core.errors import UserError, one_line
from fp8study.core.fields import BY_HAND, varying
from fp8study.core.recipes import SIXTEEN_BIT
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL, RunRecord, StoredRun, read_whole
from fp8study.core.words import count

#: Confidence level of the intervals of ratios.
LEVEL = 0.95
#: Already in an arm's name, as `fp8study.analysis.runs.naming.arm_label` writes it.
_NAMED = ("model", "num_gpus", "precision")


@dataclass(frozen=True)
class Arm:
    """The runs of one configuration, whatever their end."""

    config: dict[str, Any]
    """From `arm_config`."""
    records: tuple[RunRecord, ...]
    runs: pd.DataFrame
    """Their rows of `fp8study.analysis.runs.frames.runs_frame`."""

    @cached_property
    def completed(self) -> pd.DataFrame:
        """The rows of the runs that completed."""
        return self.runs[self.runs["status"] == "completed"]

    @cached_property
    def is_void(self) -> pd.Series:
        """Which completed runs have timings that the allocator may have made."""
        has_rate = self.completed["tokens_per_second_per_gpu"].notna()
        return self.completed["timing_void"] & has_rate

    @property
    def timed(self) -> pd.DataFrame:
        """The rows of the runs whose timings count."""
        return self.completed[~self.is_void].dropna(subset=["tokens_per_second_per_gpu"])

    @property
    def rates(self) -> list[float]:
        """Tokens per second and GPU of the runs whose timings count."""
        return list(self.timed["tokens_per_second_per_gpu"])

    @property
    def blocks(self) -> dict[int, float]:
        """The same rates by their run's ``repeat``; of runs with equal ones the last counts."""
        return dict(zip(self.timed["repeat"], self.rates, strict=True))

    @property
    def blocks_on_gpus(self) -> dict[tuple[str, int, int, tuple[str, ...]], float]:
        """The same by study, seed, ``repeat`` and GPUs' UUIDs; without runs on unknown GPUs."""
        there = {(record.study, record.run_id): record.machine for record in self.records}
        columns = ["study", "run_id", "seed", "repeat", "tokens_per_second_per_gpu"]
        found = {}
        for study, run_id, seed, repeat, rate in self.timed[columns].itertuples(index=False):
            machine = there[study, run_id]  # a run's id is its own within a study alone
            gpus = tuple(gpu["uuid"] for gpu in machine.get("gpus", ()))
            if gpus or machine.get("device") != "cuda":
                found[study, seed, repeat, gpus] = rate
        return found

    @property
    def memory_peak_gib(self) -> float | None:
        """The largest peak of a completed run; None where none was measured."""
        peak = self.completed["memory_peak_gib"].max()
        return None if pd.isna(peak) else float(peak)

    @property
    def losses(self) -> pd.Series:
        """Final training loss by seed and number of steps, nats per token, mean over repeats."""
        ended = self.completed.dropna(subset=["seed", "loss_last20_mean"])
        return ended.groupby(["seed", "steps_completed"], dropna=False)["loss_last20_mean"].mean()


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    return statistics.median(values) if values else None


def geometric_mean(rates: Sequence[float]) -> float | None:
    """Return the mean that `ratio_of` divides, or None of nothing."""
    return statistics.geometric_mean(rates) if rates else None


def arm_config(
    config: Mapping[str, Any], ignored: Iterable[str] = (), device: str | None = None
) -> dict[str, Any]:
    """Return what a run is: its configuration without what tells repeats apart.

    Fields that a record's version did not know yet are as they were then, and fields that do
    nothing in BF16 have their defaults in a BF16 run.

    `config` and `device` are a record's; fields in `ignored` are left out too.
    """
    full = completed(config, device)
    if full.get("precision") in SIXTEEN_BIT:
        defaults = RunConfig().resolved().to_dict()
        idle = {*varying("pair")} - {"precision", *BY_HAND}
        full |= {name: value for name, value in defaults.items() if name in idle}
    return {k: v for k, v in full.items() if k not in {*varying("folder"), *ignored}}


def read_folder(folder: Path, name: str) -> list[RunRecord]:
    """Read every record at or below a folder, in the order of their paths.

    Args:
        folder: A folder of results, a run's folder, or a ``run.json``.
        name: What the caller calls it, for the message.

    Raises:
        UserError: There is no record, or one cannot be read or is contradicted by its metrics.
    """
    paths = [folder] if folder.is_file() else sorted(folder.rglob("run.json"))
    if not paths:
        what = "holds no run.json" if folder.is_dir() else "is no folder"
        raise UserError(
            f"{name}: '{folder}' {what}; give a folder of results, as results/local/<study>"
        )
    try:
        return [read_whole(path, alone=True)[0] for path in paths]
    except UserError as error:
        raise UserError(f"{name}: {one_line(error)}") from None


def group_arms(records: Iterable[RunRecord], ignored: Iterable[str] = ()) -> dict[str, Arm]:
    """Group records by arm: `key_of` its `arm_config` → arm, in the order in which they are met.

    A record that is there twice (a copied folder) counts once.
    """
    ignored, every = tuple(ignored), list(records)
    rows = runs_frame(StoredRun(record, Path(), "") for record in every)
    configs = [arm_config(record.config, ignored, record.machine.get("device")) for record in every]
    places: dict[str, dict[tuple[str, str], int]] = {}
    for place, (record, config) in enumerate(zip(every, configs, strict=True)):
        places.setdefault(key_of(config), {})[record.run_id, record.started_at] = place
    return {
        key: Arm(configs[min(found.values())], tuple(every[n] for n in found.values()),
                 rows.iloc[[*found.values()]])
        for key, found in places.items()
    }  # fmt: skip


def arm_names(arms: Mapping[str, Arm]) -> dict[str, str]:
    """Name arms by model, GPUs and precision, and by whatever else tells equal names apart.

    They are the arms of all folders that are shown together.
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
    on = f" × {number}" if (number := arm.config.get("num_gpus")) else ""  # it may differ
    return f"{model}{on}, {arm_label(arm.records[0])}"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) or "nothing" if isinstance(value, list) else str(value)


def differing(one: Arm, other: Arm, free: Iterable[str] = ()) -> list[str]:
    """Name the fields in which two arms differ, with both values, but for those that are `free`."""
    names, a, b = differing_fields(one, other, free), one.config, other.config
    return [f"{name}: {_plain(a.get(name))} v {_plain(b.get(name))}" for name in names]


def differing_fields(one: Arm, other: Arm, free: Iterable[str] = ()) -> list[str]:
    """Name the fields in which two arms differ, but for those that are `free`.

    A field that one of them lacks counts, as it makes them two arms.
    """
    a, b, missing = one.config, other.config, object()
    names = [name for name in {**a, **b} if name not in {*free}]
    return [name for name in names if a.get(name, missing) != b.get(name, missing)]


#: What a rate depends on besides the configuration.
_FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "GPU": lambda r: r.machine.get("gpu_name"),
    "GPUs in the machine": lambda r: r.machine.get("num_gpus_on_machine"),
    "GPU link": lambda r: r.machine.get("gpu_link"),
    "power limit, W": lambda r: r.machine.get("power_limit_watts"),
    "CPU": lambda r: r.machine.get("cpu_name"),
    "CPU cores": lambda r: r.machine.get("num_cpus"),
    "driver": lambda r: r.machine.get("driver"),
    "torch": lambda r: r.versions.get("torch"),
    "torchao": lambda r: r.versions.get("torchao"),
    "accelerate": lambda r: r.versions.get("accelerate"),
    "transformers": lambda r: r.versions.get("transformers"),
    "CUDA": lambda r: r.versions.get("cuda"),
    "parameters": lambda r: r.model.get("num_parameters"),
}


def machine_differences(a: Iterable[RunRecord], b: Iterable[RunRecord]) -> list[str]:
    """Name the facts of machine, software and model that A's and B's runs do not share.

    As ``driver 580 → 590``; a side that mixes several shows them all, and what no run of a side
    knows is ``unknown``.
    """
    a, b = list(a), list(b)
    found = []
    for name, fact in _FACTS.items():
        ours, theirs = _values(map(fact, a)), _values(map(fact, b))
        if ours != theirs:
            found.append(f"{name} {ours} → {theirs}")
        elif " / " in ours:
            found.append(f"{name} {ours} on both sides")
    return found


def _values(values: Iterable[Any]) -> str:
    return " / ".join(sorted({"unknown" if value is None else str(value) for value in values}))


def same_data(a: Iterable[RunRecord], b: Iterable[RunRecord]) -> bool:
    """Whether all runs trained on one text under one tokenizer, so that losses compare."""
    data = {(r.data.get("corpus_sha256"), r.data.get("tokenizer_sha256")) for r in (*a, *b)}
    return len(data) == 1 and None not in next(iter(data))[:1]


def arm_caveats(side: str, arm: Arm) -> list[str]:
    """Say what limits an arm's figures, after its `side`: its end, timings, memory, code."""
    found = []
    ends = Counter(arm.runs["status"])
    found += [f"{number} {status}" for status, number in ends.items() if status != "completed"]
    if num_void := int(arm.is_void.sum()):
        found.append(f"timings of {num_void} void (memory nearly full, or the allocator at work)")
    retries = arm.completed["num_alloc_retries"].max()
    if retries > 0:
        found.append(f"allocator retried up to {retries:.0f} times")
    if num_untimed := int(arm.completed["tokens_per_second_per_gpu"].isna().sum()):
        found.append(f"{num_untimed} without timings")
    if num_emulated := sum(_emulates_fp8(record) for record in arm.records):
        found.append(f"FP8 emulated in {num_emulated}: the speed says nothing of FP8")
    if num_dirty := sum(record.git.get("dirty") is True for record in arm.records):
        found.append(f"{num_dirty} from uncommitted changes")
    return [f"{side}: {words}" for words in found]


def _emulates_fp8(record: RunRecord) -> bool:
    told = record.config.get("fp8_emulate")
    emulates = record.machine.get("device") == "cpu" if told is None else bool(told)
    return emulates and record.config.get("precision") not in SIXTEEN_BIT


def side_line(side: str, folder: str, records: list[RunRecord]) -> str:
    """Describe a folder in one line: runs, dates, hardware, commit."""
    hardware = _values(r.machine.get("gpu_name") or r.machine.get("cpu_name") for r in records)
    days = sorted({record.started_at[:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    commits = _values(str(r.git.get("commit") or "unknown")[:10] for r in records)
    number = count(len(records), "run")
    return f"{side}: {folder}: {number}, {when}, {hardware}, commit {commits}"


@dataclass(frozen=True)
class Ratio:
    """A ratio with what is known of its error."""

    estimate: float
    """Ratio of the geometric means, which lies inside the interval."""
    interval: Interval | None
    """None where a group has fewer than `MIN_PAIRS_FOR_INTERVAL` runs."""
    counts: tuple[int, ...]
    """Runs in each group, those above the line first."""

    @property
    def is_within_blocks(self) -> bool:
        """Whether it is the mean of ratios within blocks, and not the ratio of two means."""
        return len(self.counts) == 1

    def interval_text(self) -> str:
        """Write the interval, or say why there is none."""
        if self.interval is not None:
            return f"{self.interval.low:.3f} to {self.interval.high:.3f}"
        return f"no interval: {count(min(self.counts), 'run')}"


def ratio_of(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Ratio | None:
    """Divide the geometric mean of a group of rates by another's, with Welch's interval.

    Two groups above and two below make a ratio of ratios; a single group above, of ratios within
    pairs, has the interval of a paired t test. None if a group is empty.

    Raises:
        UserError: A rate is not positive.
    """
    groups = [*above, *below]
    counts = tuple(len(group) for group in groups)
    if not all(counts):
        return None
    if any(not value > 0 for group in groups for value in group):
        raise UserError("rates: not all are positive; leave out runs without timings")
    logs = [[math.log(value) for value in group] for group in groups]
    weights = [1.0] * len(above) + [-1.0] * len(below)
    means = [sum(values) / len(values) for values in logs]
    estimate = math.exp(sum(w * mean for w, mean in zip(weights, means, strict=True)))
    if min(counts) < MIN_PAIRS_FOR_INTERVAL:
        return Ratio(estimate, None, counts)
    log = welch_t_interval(logs, weights, LEVEL)
    return Ratio(estimate, Interval(math.exp(log.low), math.exp(log.high)), counts)


def ratio_in_blocks(above: Mapping[int, float], below: Mapping[int, float]) -> Ratio | None:
    """Return the geometric mean of the ratios within blocks.

    A block is done by turns on the same GPUs, so that neither they nor the hour are compared. Each
    side maps blocks to rates; what has no partner does not count. None without a common block.
    """
    return ratio_of([[above[block] / below[block] for block in sorted({*above} & {*below})]], [])
