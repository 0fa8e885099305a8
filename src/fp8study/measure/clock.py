"""Time and loss of a run, read without making the GPU wait.

Asking a GPU for a number stalls it until everything queued so far is done. So each step leaves
its loss and a time stamp on the GPU's own queue, and the host reads them one step later, when
the next step is already queued behind. Only the timed window's two ends wait for the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
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


class _HostMark:
    """A moment on the host's clock, with the two calls of a `torch.cuda.Event`."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: _HostMark) -> float:
        return 1000 * (later._at - self._at)


def _gpu_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StepMeter:
    """Reads each step's loss and time one step late.

    A step's time is that between two consecutive marks: CUDA gives it in FP32 milliseconds, so
    that the difference of two times since the start would be off by 0.25 ms after an hour.
    """

    def __init__(self, device: torch.device, num_steps: int) -> None:
        is_cuda = device.type == "cuda"
        self._mark: Callable[[], Any] = _gpu_mark if is_cuda else _HostMark
        self._losses = torch.zeros(num_steps, pin_memory=is_cuda)
        self._norms = torch.zeros(num_steps, pin_memory=is_cuda)
        self._tolds = torch.zeros(num_steps, pin_memory=is_cuda)
        self._unread: deque[Any] = deque()  # the marks at the ends of the steps that come next
        self._num_read = 0
        self._has_norm: set[int] = set()
        self.is_told = False
        """Whether some rank had been told to stop in a step read so far; the same on all ranks."""

    def start(self, step: int = 0) -> None:
        """Mark the beginning of the first step, counted from 0."""
        self._num_read = step
        self._last_end = self._mark()

    def end_step(
        self,
        loss: torch.Tensor,
        gradient_norm: torch.Tensor | None = None,
        told: bool | None = None,
    ) -> Iterator[FinishedStep]:
        """Queue the reading of a step that was just issued; yield the one before it.

        Two are scalars on the device: this rank's mean loss, averaged over ranks here, and the
        gradients' norm, the same on all ranks, if it was computed. `told` travels with the loss:
        whether this rank has been told to stop; None where nobody may be.
        """
        step = self._num_read + len(self._unread)
        if told is not None:
            loss = torch.stack([loss, torch.full_like(loss, told)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        if told is not None:
            loss, any_told = loss
            self._tolds[step].copy_(any_told, non_blocking=True)
        self._losses[step].copy_(loss, non_blocking=True)
        if gradient_norm is not None:
            self._norms[step].copy_(gradient_norm, non_blocking=True)
            self._has_norm.add(step)
        self._unread.append(self._mark())
        yield from self._read(leave=1)

    def finish(self) -> Iterator[FinishedStep]:
        """Wait for the device and yield what is left."""
        yield from self._read(leave=0)

    def restart(self) -> None:
        """Leave the time since the last step out of the next one; call after `finish`."""
        self._last_end = self._mark()
        self._last_end.synchronize()

    def _read(self, leave: int) -> Iterator[FinishedStep]:
        while len(self._unread) > leave:
            step, end = self._num_read, self._unread.popleft()
            end.synchronize()
            duration_ms = self._last_end.elapsed_time(end)
            self._num_read, self._last_end = step + 1, end
            norm = float(self._norms[step]) if step in self._has_norm else None
            self.is_told |= bool(self._tolds[step] > 0)
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

    names = {"hits": "fxgraph_cache_hit", "misses": "fxgraph_cache_miss"}
    return {f"compile_cache_{k}": int(counters["inductor"][v]) for k, v in names.items()}
