"""Other runs near one that is asked for: in FP8, with what would make it fit, or another task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fp8study.analysis.laws import memory, speed
from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig, RunConfig

#: A run → what a step of it takes.
Law = Callable[[ResolvedConfig], speed.StepParts]
#: Of a GPU's memory, what is left free.
HEADROOM = 0.1
#: A lead must move by as many points for a change to be worth a line.
_NOTABLE_POINTS = 3.0


def as_fp8(config: RunConfig, precision: str, gathers: bool | None = None) -> ResolvedConfig:
    """Return a BF16 run's FP8 partner, with all that follows from FP8 decided anew."""
    changes: dict[str, Any] = {"precision": precision, "fp8_all_gather": gathers}
    asked = RunConfig(**{**config.to_dict(), **changes, "gather_cast": None})
    return asked.resolved()


def remedies(config: ResolvedConfig, shape: ModelShape, capacity: float) -> list[str]:
    """Say what would make a run fit: more GPUs, BF16 master weights, recomputation."""
    asked = dataclasses.asdict(config)
    tries: dict[str, dict[str, Any]] = {}
    if config.micro_batch_size > 1:
        tries["--micro-batch-size 1"] = {"micro_batch_size": 1}
    for number in (2**n for n in range(1, 11)):
        if number > config.num_gpus:
            tries[f"--num-gpus {number}"] = {"num_gpus": number, "strategy": "fsdp2"}
    tries["master_dtype=bf16"] = {"master_dtype": "bf16"}
    tries["activation_checkpointing=true"] = {"activation_checkpointing": True}
    found: list[str] = []
    for name, changes in tries.items():
        if name.startswith("--num") and any(f.startswith("--num") for f in found):
            continue
        switches = {"reshard_after_forward": None, "gradient_copy": None, "gradient_pool": None}
        tried = RunConfig(**{**asked, **changes, **(switches if "num_gpus" in changes else {})})
        needed = memory.predicted_memory(tried, shape).needed
        if needed <= (1 - HEADROOM) * capacity:
            found.append(f"{name} ({needed:.0f} GiB)")
    return found


def changes(
    config: ResolvedConfig, shape: ModelShape, law: Law, capacity: float
) -> list[tuple[str, float]]:
    """Return changes of the task that move FP8's lead notably, with the lead by the law."""

    def lead(way: ResolvedConfig) -> float:
        fp8 = as_fp8(way, "fp8_tensorwise")
        return speed.lead_pct(law(way).total, law(fp8).total)

    here, found = lead(config), []
    for name, factor in (("micro_batch_size", 4), ("micro_batch_size", 0.25),
                         ("sequence_length", 4), ("sequence_length", 0.25)):  # fmt: skip
        value = round(getattr(config, name) * factor)
        if value < 1 or (name == "sequence_length" and value < 512):
            continue
        way = dataclasses.replace(config, **{name: value})
        fits = memory.predicted_memory(way, shape).needed <= (1 - HEADROOM) * capacity
        if (fits or factor < 1) and abs(lead(way) - here) >= _NOTABLE_POINTS:
            found.append((f"{name}={value}", lead(way)))
    return found


def command(config: ResolvedConfig) -> str:
    """Write a command that measures a configuration."""
    names = ("model", "precision", "path", "strategy", "num_gpus", "sequence_length",
             "micro_batch_size")  # fmt: skip
    values = [f"--set {name}={getattr(config, name)}" for name in names]
    if config.is_fp8 and config.num_gpus > 1:
        values.append(f"--set fp8_all_gather={str(bool(config.fp8_all_gather)).lower()}")
    return " ".join(["fp8study run", *values])
