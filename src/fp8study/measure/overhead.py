"""What measuring costs: the same steps with and without it, in turns, after the timed window."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")

#: Pairs of blocks, and steps in each block.
NUM_PAIRS = 8
BLOCK_STEPS = 6


def measure_overhead(
    step: Callable[[], T],
    watched: Callable[[Callable[[], T]], AbstractContextManager[Callable[[], object]]],
    device: torch.device,
) -> dict[str, list[float]]:
    """Time blocks of steps in turns, so that a drift of the clocks meets both alike.

    Every rank must call it: a step communicates. `step` does one without any instrument;
    `watched` switches them on for one block and gives the step as the timed window does it.

    Returns:
        ``plain_ms`` and ``measured_ms``: each block's time per step, pair by pair. They are kept
        apart because a stall of the host can hit any block: see
        `fp8study.analysis.instruments.overhead_pairs`.
    """
    found: dict[str, list[float]] = {"plain_ms": [], "measured_ms": []}
    for pair in range(NUM_PAIRS):
        # Which of the two goes first changes too.
        for name in sorted(found, reverse=bool(pair % 2)):
            with watched(step) if name == "measured_ms" else nullcontext(step) as chosen:
                found[name].append(_block_ms(chosen, device))
    return found


def _block_ms(step: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        step()
    wait_for(device)
    return 1000 * (time.perf_counter() - started) / BLOCK_STEPS


def wait_for(device: torch.device) -> None:
    """Let a GPU finish what is queued; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
