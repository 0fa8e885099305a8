"""Blocks with and without instruments, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fp8study.measure.overhead import BLOCK_STEPS, NUM_PAIRS, measure_overhead


def test_each_kind_gets_its_blocks_and_goes_first_every_other_time() -> None:
    done: list[str] = []

    @contextmanager
    def watched(step: Callable[[], None]) -> Iterator[Callable[[], None]]:
        done.append("[")

        def measured() -> None:
            time.sleep(0.002)
            done.append("m")

        yield measured
        done.append("]")

    found = measure_overhead(lambda: done.append("p"), watched, torch.device("cpu"))
    pair = ("[" + BLOCK_STEPS * "m" + "]", BLOCK_STEPS * "p")
    assert "".join(done) == "".join(
        part for number in range(NUM_PAIRS) for part in (pair[::-1] if number % 2 else pair)
    )
    assert len(found["plain_ms"]) == len(found["measured_ms"]) == NUM_PAIRS
    assert min(found["measured_ms"]) >= 2
