"""Steps that end before the host has launched them, and what the tuned path leaves out for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8study.analysis.laws import speed
from fp8study.analysis.laws.account import HOST_PCT
from fp8study.analysis.laws.nearby import as_fp8
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.pairing import BEFORE
from fp8study.core.config import RunConfig
from fp8study.core.fields import DEFAULTS, varying
from fp8study.core.hardware import GpuPeak


def for_small_steps(config: RunConfig, gpu: GpuPeak | None) -> dict[str, Any]:
    """Return what the tuned path should not choose by itself for several GPUs' small steps.

    `BEFORE` where they have small steps. NCCL for collectives where the host is busy for half of
    the GPU's time: what copy engines do to such steps is not known yet (docs/log.md, 70).

    Raises:
        UserError: No law is known of such a model.
    """
    if config.num_gpus == 1:
        return {}
    if has_small_steps(config, gpu):
        return dict(BEFORE)
    busy = any(step.host > HOST_PCT / 100 * step.device for step in _in_fp8(config, gpu))
    copies = config.resolved().collectives == "copy_engines"
    return {"collectives": "nccl"} if busy and copies else {}


def has_small_steps(config: RunConfig, gpu: GpuPeak | None) -> bool:
    """Return whether several GPUs gather FP8 tensorwise weights faster in BF16, by the speed law.

    FP8 halves what is sent, but costs the host a millisecond a layer (docs/log.md): for a small
    model at a small batch BF16 all-gather is faster. Of what the FP8 runs of a setting may differ
    in, and of its BF16 run, the answer does not depend.

    Raises:
        UserError: No law is known of such a model.
    """
    if config.num_gpus == 1:
        return False
    fp8, bf16 = _in_fp8(config, gpu)
    return bf16.total < fp8.total


def _in_fp8(config: RunConfig, gpu: GpuPeak | None) -> Iterator[speed.StepParts]:
    """Yield the steps of FP8 tensorwise that gathers its weights in FP8, and in BF16."""
    open_ = {name: DEFAULTS[name] for name in {*varying("pair"), "update_kernel", "collectives"}}
    shape, alike = shape_of(config.model), RunConfig(**{**config.to_dict(), **open_}).resolved()
    for gathers in (True, False):
        yield speed.predicted_step(as_fp8(alike, "fp8_tensorwise", gathers), shape, gpu)
