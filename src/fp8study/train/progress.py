"""What a step says of itself: the learning rate, a line of metrics, a line of progress."""

from __future__ import annotations

import errno
import io
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from fp8study.core.config import ResolvedConfig
from fp8study.core.records import finite
from fp8study.measure.clock import FinishedStep
from fp8study.measure.flops import Work
from fp8study.run.job import PROGRESS
from fp8study.train.pace import Pace


class _Lines(io.FileIO):
    """A file to append to that, where the disk is full, has room made and tries once more."""

    def __init__(self, path: Path, make_room: Callable[[], None]) -> None:
        super().__init__(path, "a")
        self._make_room = make_room

    def write(self, text: Any, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        self._make_room()
        return super().write(text)


def open_metrics(path: Path, make_room: Callable[[], None]) -> TextIO:
    """Open ``metrics.jsonl`` to append to.

    A checkpoint that fails for want of room may for a moment take all there is: `make_room` waits
    until what was written of it is gone.
    """
    return io.TextIOWrapper(io.BufferedWriter(_Lines(path, make_room)), encoding="utf-8")


def learning_rate(config: ResolvedConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    if step < config.lr_warmup_steps:
        return config.learning_rate * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    done = (step - config.lr_warmup_steps) / max(1, config.num_steps - 1 - config.lr_warmup_steps)
    fall = done if config.lr_schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return config.learning_rate * (1 - 0.9 * fall)


def log_step(
    done: FinishedStep, config: ResolvedConfig, work: Work, metrics: TextIO, pace: Pace
) -> None:
    """Append a step to ``metrics.jsonl``, if it is its turn, and print it for the launcher."""
    number, first_timed = done.step + 1, pace.first_timed
    rate, tflops = work.rates(config, done.step_time_ms / 1000)
    if number % config.log_every == 0 or number == pace.num_steps:
        row = {
            "step": number,
            "loss": finite(done.loss),
            "learning_rate": learning_rate(config, done.step),
            "gradient_norm": finite(done.gradient_norm),
            "step_time_ms": done.step_time_ms,
            "tokens_per_second_per_gpu": rate,
            "tokens_seen": number * config.tokens_per_step,
            "timed": first_timed is not None and done.step >= first_timed and config.is_timed,
        }
        metrics.write(json.dumps(row) + "\n")
        metrics.flush()
    left_s = (pace.num_steps - number) * done.step_time_ms / 1000
    eta = f"  ETA {int(left_s) // 60}:{int(left_s) % 60:02}"
    of, then = (" (warm-up)", "") if first_timed is None else (f"/{pace.num_steps}", eta)
    line = (
        f"{PROGRESS}step {number:>5}{of}  loss {done.loss:7.4f}  "
        f"{rate:>9,.0f} tok/s/GPU  {tflops:7.1f} TFLOP/s/GPU{then}"
    )
    with suppress(BrokenPipeError):  # the launcher is gone; what is done is saved all the same
        print(line, flush=True)
