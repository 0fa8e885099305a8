"""Where a GPU's memory goes: parameters, gradients, optimizer states, and the rest.

Two peaks matter. The first step's holds what compilation and the first allocation of the
optimizer's states take; the steady one is what a long run needs. torch's allocator keeps more than
it hands out ("reserved"); where even that does not suffice it gives memory back to the driver and
tries again, which stalls the GPU, so such events inside the timed window void a timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8study.model.fsdp import peers
from fp8study.model.local import held

GIB = 2**30


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes that tensors hold on this rank, whatever they are wrapped in."""
    parts = (part for tensor in tensors if tensor is not None for part in held(tensor))
    return sum(part.numel() * part.element_size() for part in parts)


class MemoryMeter:
    """One rank's memory. Outside a GPU only what tensors hold is known, no peak."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.facts: dict[str, float | int] = {}

    def start(self) -> None:
        """Forget the peak so far: a GPU held the whole model while it was built."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def gradients_ready(self, model: torch.nn.Module) -> None:
        """Note what the gradients take at most; call in the first step before they are freed."""
        gradients = local_bytes(p.grad for p in model.parameters()) / GIB
        self.facts["gradients_gib"] = max(gradients, self.facts.get("gradients_gib", 0.0))

    def first_step_done(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Note what parameters and optimizer states take, and the first step's peak."""
        states = (v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
        self.facts["parameters_gib"] = local_bytes(model.parameters()) / GIB
        self.facts["optimizer_gib"] = local_bytes(states) / GIB
        if self._cuda:
            self.facts["first_step_allocated_gib"], self.facts["first_step_reserved_gib"] = _peaks()

    def open_window(self, replays: bool = False) -> None:
        """Begin the steady state: the timed window.

        A CUDA graph that it `replays` asks for no memory: what it was recorded with counts.
        """
        if self._cuda:
            self._peak_before, _ = _peaks()
            if not replays:
                torch.cuda.reset_peak_memory_stats()
            self._retries, self._allocations = _events()

    def close_window(self) -> None:
        """Note the steady peaks and what the allocator had to do meanwhile."""
        if not self._cuda:
            return
        retries, allocations = _events()
        allocated, reserved = _peaks()
        known = sum(self.facts[f"{what}_gib"] for what in ("parameters", "gradients", "optimizer"))
        self.facts |= {
            "peak_gib": max(allocated, self._peak_before),
            "steady_allocated_gib": allocated,
            "steady_reserved_gib": reserved,
            "rest_gib": allocated - known,
            "num_alloc_retries": retries - self._retries,
            "num_device_allocs": allocations - self._allocations,
        }


def _peaks() -> tuple[float, float]:
    """Return the most that was allocated and reserved, GiB, with what torch does not count."""
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    allocated, reserved = ((peak + peers.held_bytes()) / GIB for peak in peaks)
    return allocated, reserved


def _events() -> tuple[int, int]:
    """Return retries after a failed allocation, and allocations from the driver, so far."""
    return num_retries(), int(torch.cuda.memory_stats().get("num_device_alloc", 0))


def num_retries() -> int:
    """Return how often the allocator gave back what it kept, as the GPU's memory was full."""
    try:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    except RuntimeError:  # after an error nothing may be asked of the GPU any more
        return 0


def summarise_memory(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest value over ranks of each rank's `MemoryMeter.facts`, and ``ranks``.

    Peaks and the split are GiB; ``rest_gib`` is the steady peak less parameters, all gradients and
    optimizer states: the least that activations, gathered weights and work space take. Where the
    peak comes before the gradients, they take up to ``gradients_gib`` more.
    """
    names = dict.fromkeys(name for facts in ranks for name in facts)
    return {n: max(f[n] for f in ranks if n in f) for n in names} | {"ranks": ranks}
