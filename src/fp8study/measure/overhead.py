"""What measuring costs: the same steps with and without it, in turns, after the timed window."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
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

    Every rank must call it: a step communicates.

    Args:
        step: Does one step without any instrument.
        watched: Switches the instruments on for one block and gives the step as the timed
            window does it.
        device: Waited for at the ends of each block.

    Returns:
        ``plain_ms`` and ``measured_ms``: each block's time per step, pair by pair. They are kept
        apart because a stall of the host can hit any block: see
        `fp8study.analysis.instruments.overhead_pairs`.
    """
    plain_ms, measured_ms = [], []
    for pair in range(NUM_PAIRS):
        # Which of the two goes first changes too.
        for is_watched in (False, True) if pair % 2 else (True, False):
            if is_watched:
                with watched(step) as measured:
                    measured_ms.append(_block_ms(measured, device))
            else:
                plain_ms.append(_block_ms(step, device))
    return {"plain_ms": plain_ms, "measured_ms": measured_ms}


def _block_ms(step: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        step()
    _wait(device)
    return 1000 * (time.perf_counter() - started) / BLOCK_STEPS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
