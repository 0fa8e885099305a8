"""From a run's steps to the figures that its record gives first."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Any

import numpy as np

from fp8study.core.audit_rules import timing_is_void
from fp8study.core.config import ResolvedConfig
from fp8study.core.hardware import bf16_peak_tflops, mixed_peak_tflops
from fp8study.measure.clock import FinishedStep
from fp8study.measure.flops import Work

_RATES = (
    "step_time_ms_median", "step_time_ms_p10", "step_time_ms_p90", "tokens_per_second_per_gpu",
    "tflops_per_gpu", "mfu_bf16_peak_pct", "mfu_mixed_peak_pct", "compile_seconds",
    "warm_up_steps_seconds",
)  # fmt: skip


def summarise(
    steps: list[FinishedStep],
    config: ResolvedConfig,
    work: Work,
    gpu_names: Collection[str],
    num_warm_up: int,
    first_step: int,
) -> dict[str, Any]:
    """Return the measured part of a record's ``results``.

    Rates are tokens over wall-clock time of the whole timed window: the steps after the first
    `num_warm_up`. Without any such step, or in a run that is not timed, they are null. A run that
    went on from a checkpoint began here with `first_step`.

    The run's own GPUs, one name each, decide the peaks of the utilisations.

    Returns:
        See `fp8study.core.records.RunRecord.results`. ``compile_seconds`` is the first step's time
        beyond a usual one; ``warm_up_steps_seconds`` the same for all steps before the window.
    """
    losses, here = [s.loss for s in steps], steps[first_step:]
    # Pauses to measure noise are inside the steps' times, and so is another run on the GPU.
    timed = steps[num_warm_up:] if config.is_timed else []
    results: dict[str, Any] = {
        "steps_completed": len(steps),
        "loss_start": losses[0] if losses else None,
        "loss_last20_mean": statistics.fmean(losses[-20:]) if losses else None,
        "first_step_seconds": here[0].step_time_ms / 1000 if here else None,
        "num_timed_steps": len(timed),
    }
    bf16_peak = _mean([bf16_peak_tflops(name) for name in gpu_names])
    mixed_peak = _mean([mixed_peak_tflops(name, work.fp8_share) for name in gpu_names])
    results |= {"bf16_peak_tflops": bf16_peak, "mixed_peak_tflops": mixed_peak}
    if not timed:
        return results | dict.fromkeys(_RATES)
    times = [s.step_time_ms for s in timed]
    p10, median, p90 = (float(q) for q in np.quantile(times, [0.1, 0.5, 0.9]))
    rate, tflops = work.rates(config, statistics.fmean(times) / 1000)
    compile_s = max(0.0, here[0].step_time_ms - median) / 1000
    before = [s.step_time_ms for s in steps[first_step:num_warm_up]]
    return results | {
        "step_time_ms_median": median,
        "step_time_ms_p10": p10,
        "step_time_ms_p90": p90,
        "tokens_per_second_per_gpu": rate,
        "tflops_per_gpu": tflops,
        "mfu_bf16_peak_pct": 100 * tflops / bf16_peak if bf16_peak else None,
        "mfu_mixed_peak_pct": 100 * tflops / mixed_peak if mixed_peak else None,
        "warm_up_steps_seconds": sum(before) / 1000 - len(before) * median / 1000,
        "compile_seconds": compile_s if config.compile else None,
    }


def _mean(peaks: list[float | None]) -> float | None:
    """Return the mean peak of a run's GPUs; None without any, or where one is unknown."""
    known = [peak for peak in peaks if peak is not None]
    return statistics.fmean(known) if known and len(known) == len(peaks) else None


def headline(results: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return those figures of a record's ``results`` that come from its instruments.

    Args:
        results: From `summarise`, with ``startup_seconds``.
        found: The record's ``instruments``; what is absent there is null here.
    """
    memory, ceilings = found.get("memory", {}), found.get("ceilings", {})
    tflops, reachable = results["tflops_per_gpu"], ceilings.get("run_tflops")
    warm_up_seconds = results["warm_up_steps_seconds"]
    if warm_up_seconds is not None:
        warm_up_seconds += results["startup_seconds"]
    return {
        "memory_peak_gib": memory.get("peak_gib"),
        "num_alloc_retries": memory.get("num_alloc_retries", 0),
        "num_device_allocs": memory.get("num_device_allocs", 0),
        "energy_joule_per_token": found.get("energy", {}).get("joule_per_token"),
        "mfu_achievable_pct": 100 * tflops / reachable if tflops and reachable else None,
        "warm_up_seconds": warm_up_seconds,
    }


def notes_on_timing(results: dict[str, Any]) -> list[str]:
    """Return what makes a run's timings unfit for comparison, one line each."""
    events = {
        "retried after running out of memory": results["num_alloc_retries"],
        "took memory from the driver": results["num_device_allocs"],
    }
    return [
        f"the allocator {what} {number} times in the timed window: the timings measure that, "
        "compare no speed with this run"
        for what, number in events.items()
        if number and timing_is_void(results)
    ]
