"""Time, loss and memory of a run, read without making the GPU wait.

Asking a GPU for a number stalls it until everything queued so far is done. So each step leaves
its loss and a time stamp on the GPU's own queue, and the host reads them one step later, when
the next step is already queued behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fp8study.config import RunConfig
from fp8study.hardware import mfu_bf16_peak_pct


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step, read back."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean over micro-steps and ranks; the same number on every rank."""
    ended_s: float
    """Seconds since `StepMeter.start`, on the device's clock."""
    step_time_ms: float


class StepMeter:
    """Reads each step's loss and time one step late."""

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self._cuda = device.type == "cuda"
        self._losses = torch.zeros(num_steps, pin_memory=self._cuda)
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._num_read = 0
        self._last_end = 0.0

    def start(self) -> None:
        """Mark the beginning of the first step."""
        self._stamp()

    def end_step(self, loss: torch.Tensor) -> Iterator[FinishedStep]:
        """Queue the reading of a step that was just issued; yield the one before it.

        Args:
            loss: Scalar on the device, this rank's mean; averaged over ranks here.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        self._losses[len(self._stamps) - 1].copy_(loss, non_blocking=True)
        self._stamp()
        yield from self._read(until=len(self._stamps) - 2)

    def finish(self) -> Iterator[FinishedStep]:
        """Wait for the device and yield what is left."""
        yield from self._read(until=len(self._stamps) - 1)

    @property
    def _stamps(self) -> list[Any]:
        return self._events if self._cuda else self._times

    def _stamp(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def _seconds(self, index: int) -> float:
        if not self._cuda:
            return self._times[index] - self._times[0]
        self._events[index].synchronize()
        return self._events[0].elapsed_time(self._events[index]) / 1000

    def _read(self, until: int) -> Iterator[FinishedStep]:
        while self._num_read < until:
            step = self._num_read
            ended = self._seconds(step + 1)
            self._num_read += 1
            duration_ms = 1000 * (ended - self._last_end)
            self._last_end = ended
            yield FinishedStep(step, float(self._losses[step]), ended, duration_ms)


def reset_memory_peak(device: torch.device) -> None:
    """Forget the peak so far: each GPU held the whole model while it was built."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def memory_peak_gib(device: torch.device) -> float | None:
    """Return the largest peak of GPU memory in training over all ranks; None on a CPU."""
    if device.type != "cuda":
        return None
    return over_ranks(torch.cuda.max_memory_allocated() / 2**30, device)


def over_ranks(number: float, device: torch.device) -> float:
    """Return the largest of the ranks' numbers; every rank must call it."""
    largest = torch.tensor(float(number), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def allocator_retries(device: torch.device) -> int:
    """Return how often this rank's allocator had to give memory back and try again so far."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


_RATES = (
    "step_time_ms_median", "step_time_ms_p10", "step_time_ms_p90", "tokens_per_second_per_gpu",
    "tflops_per_gpu", "mfu_bf16_peak_pct", "compile_seconds",
)  # fmt: skip


def summarise(
    steps: list[FinishedStep], config: RunConfig, flops_per_token: int, gpu_name: str | None
) -> dict[str, Any]:
    """Return the measured part of a record's ``results``.

    Rates are tokens over wall time of the whole timed window: the steps after
    ``num_warmup_steps``. Without any such step, or with pauses to measure noise, they are null.

    Args:
        steps: In order, from the first.
        config: The run.
        flops_per_token: From `fp8study.flops.flops_per_token`.
        gpu_name: Decides the peak of the utilisation.
    """
    losses = [s.loss for s in steps]
    results: dict[str, Any] = {
        "steps_completed": len(steps),
        "loss_start": losses[0] if losses else None,
        "loss_last20_mean": statistics.fmean(losses[-20:]) if losses else None,
        "first_step_seconds": steps[0].step_time_ms / 1000 if steps else None,
    }
    # Pauses to measure noise are inside the steps' times, and leave the GPU's caches cold.
    timed = [] if config.noise_at_steps else steps[config.num_warmup_steps :]
    results["num_timed_steps"] = len(timed)
    if not timed:
        return results | dict.fromkeys(_RATES)
    times = sorted(s.step_time_ms for s in timed)
    median = statistics.median(times)
    window_s = sum(times) / 1000
    rate = len(timed) * config.tokens_per_step / config.num_gpus / window_s
    tflops = rate * flops_per_token / 1e12
    return results | {
        "step_time_ms_median": median,
        "step_time_ms_p10": times[int(0.1 * (len(times) - 1))],
        "step_time_ms_p90": times[round(0.9 * (len(times) - 1))],
        "tokens_per_second_per_gpu": rate,
        "tflops_per_gpu": tflops,
        "mfu_bf16_peak_pct": mfu_bf16_peak_pct(tflops, gpu_name),
        "compile_seconds": max(0.0, steps[0].step_time_ms - median) / 1000
        if config.compile
        else None,
    }
