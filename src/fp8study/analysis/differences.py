"""What else differs between two sets of runs, besides what is being compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fp8study.analysis.arms import Arm
from fp8study.core.records import RunRecord

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

    Returns:
        As ``driver 580 → 590``; a side that mixes several shows them all, and what no run of a
        side knows is ``unknown``.
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
    """Say what limits an arm's figures: its end, its timings, its memory, its code.

    Args:
        side: What the folder is called, put before each.
        arm: Of that folder.
    """
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
    return emulates and record.config.get("precision") != "bf16"


def side_line(side: str, folder: str, records: list[RunRecord]) -> str:
    """Describe a folder in one line: runs, dates, hardware, commit."""
    hardware = _values(r.machine.get("gpu_name") or r.machine.get("cpu_name") for r in records)
    days = sorted({record.started_at[:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    commits = _values(str(r.git.get("commit") or "unknown")[:10] for r in records)
    number = f"{len(records)} run{'' if len(records) == 1 else 's'}"
    return f"{side}: {folder}: {number}, {when}, {hardware}, commit {commits}"
