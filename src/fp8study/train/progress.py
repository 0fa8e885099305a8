"""What a step says of itself: the learning rate, a line of metrics, a line of progress."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import TextIO

from fp8study.core.config import ResolvedConfig
from fp8study.measure.clock import FinishedStep
from fp8study.measure.flops import Work
from fp8study.run.job import PROGRESS
from fp8study.train.pace import Pace


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
            "loss": _finite(done.loss),
            "learning_rate": learning_rate(config, done.step),
            "gradient_norm": _finite(done.gradient_norm),
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


def _finite(number: float | None) -> float | None:
    """Return null for what JSON cannot hold."""
    return number if number is not None and math.isfinite(number) else None
