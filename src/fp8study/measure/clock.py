"""Time and loss of a run, read without making the GPU wait.

Asking a GPU for a number stalls it until everything queued so far is done. So each step leaves
its loss and a time stamp on the GPU's own queue, and the host reads them one step later, when
the next step is already queued behind. Only the timed window's two ends wait for the GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step, read back."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean over micro-steps and ranks; the same number on every rank."""
    step_time_ms: float
    gradient_norm: float | None = None
    """Before clipping, over all weights and ranks; None in a step where it was not computed."""


class StepMeter:
    """Reads each step's loss and time one step late."""

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self._cuda = device.type == "cuda"
        self._losses = torch.zeros(num_steps, pin_memory=self._cuda)
        self._norms = torch.full((num_steps,), math.nan, pin_memory=self._cuda)
        self._has_norm = [False] * num_steps
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._num_read = 0
        self._last_end = 0.0

    def start(self) -> None:
        """Mark the beginning of the first step."""
        self._stamp()

    def end_step(
        self, loss: torch.Tensor, gradient_norm: torch.Tensor | None = None
    ) -> Iterator[FinishedStep]:
        """Queue the reading of a step that was just issued; yield the one before it.

        Args:
            loss: Scalar on the device, this rank's mean; averaged over ranks here.
            gradient_norm: Scalar on the device, the same on all ranks, if it was computed.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        step = len(self._stamps) - 1
        self._losses[step].copy_(loss, non_blocking=True)
        if gradient_norm is not None:
            self._norms[step].copy_(gradient_norm, non_blocking=True)
            self._has_norm[step] = True
        self._stamp()
        yield from self._read(until=len(self._stamps) - 2)

    def finish(self) -> Iterator[FinishedStep]:
        """Wait for the device and yield what is left."""
        yield from self._read(until=len(self._stamps) - 1)

    def restart(self) -> None:
        """Leave the time since the last step out of the next one; call after `finish`."""
        if self._cuda:
            now = self._event()
            now.synchronize()
            self._last_end = self._events[0].elapsed_time(now) / 1000
        else:
            self._last_end = time.perf_counter() - self._times[0]

    @property
    def _stamps(self) -> list[Any]:
        return self._events if self._cuda else self._times

    def _stamp(self) -> None:
        if self._cuda:
            self._events.append(self._event())
        else:
            self._times.append(time.perf_counter())

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

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
            norm = float(self._norms[step]) if self._has_norm[step] else None
            yield FinishedStep(step, float(self._losses[step]), duration_ms, norm)


def from_all_ranks(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every rank's facts, in order, on every rank; every rank must call it."""
    if not dist.is_initialized():
        return [facts]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, facts)
    return gathered


def compile_cache() -> dict[str, int]:
    """Return how many compiled graphs this process found in torch's cache, and how many not.

    No misses: a warm start. No hits: a cold one.
    """
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return {
        "compile_cache_hits": int(found["fxgraph_cache_hit"]),
        "compile_cache_misses": int(found["fxgraph_cache_miss"]),
    }
