"""What the log of one repeat of torchtitan says: its rates, its precision, and why it failed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STEP = re.compile(
    r"^(?:\[rank0\]:)?\[titan\].* step: +(?P<step>\d+) +loss: +(?P<loss>\S+) +grad_norm: +\S+"
    r" +memory: +(?P<memory>[\d.]+)GiB\([\d.]+%\) +tps: (?P<rate>[\d,]+)"
    r" +tflops: [\d.,]+ +mfu: (?P<mfu>[\d.]+)%\s*$",
    re.MULTILINE,
)
PARAMETERS = re.compile(r"size: ([\d,]+) total parameters")
SWAPPED = re.compile(r"Swapped to Float8Linear layers with enable_fsdp_float8_all_gather=(\w+)")
# What a rank raised, not torchrun's ChildFailedError; the last is what tyro says of a flag.
ERROR = re.compile(
    r"^(?:\[\w+\]: ?)+(?P<error>(?:\w+\.)*\w*(?:Error|Exception)\b.*|\W*Unrecognized options: .*)$"
)


class Repeat(NamedTuple):
    """What the log of one repeat says."""

    windows: list[float]
    mfu_pct: float | None
    memory_peak_gib: float
    num_parameters: int | None


class PeerTrainer(NamedTuple):
    """Another trainer: how it is started, and how its log is read."""

    name: str
    version: str
    commit: str | None
    command_of: Callable[[Any, str, int, Path, int], list[str]]
    """The options, precision, sequences a GPU, a folder of its own, a seed → the command line."""
    read: Callable[[str, Any, str], Repeat]
    """Its log, the options and the precision → what it says; `RepeatFailed` if that is not it."""


class RepeatFailed(Exception):
    """A repeat gave no number; the message is one line."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def read_log(text: str, num_steps: int, num_warmup_steps: int) -> Repeat:
    """Read the rates of the timed windows; a window reaches from one logged step to the next.

    Raises:
        RepeatFailed: The log does not reach the last step, or its loss is no number.
    """
    text, before = COLOUR.sub("", text), 0
    windows, shares, memory = [], [], []
    for found in STEP.finditer(text):
        step = int(found["step"])
        if found["loss"] in ("nan", "inf", "-inf"):
            raise RepeatFailed("diverged", f"the loss is {found['loss']} at step {step}")
        memory.append(float(found["memory"]))
        if before >= num_warmup_steps:
            windows.append(float(found["rate"].replace(",", "")))
            shares.append(float(found["mfu"]))
        before = step
    if before != num_steps or not windows:
        raise RepeatFailed("failed", f"the log ends at step {before} of {num_steps}")
    parameters = PARAMETERS.search(text)
    count = int(parameters[1].replace(",", "")) if parameters else None
    return Repeat(windows, statistics.median(shares), max(memory), count)


def check_precision(text: str, precision: str, num_gpus: int) -> None:
    """Refuse a log in which the linear layers were not converted as asked."""
    found = SWAPPED.findall(text)
    wanted = {str(num_gpus > 1)} if precision == "fp8_tensorwise" else set()
    if set(found) != wanted:
        raise RepeatFailed("failed", f"{precision}: FP8 all-gather was {found or 'not mentioned'}")


def why_failed(text: str, code: int) -> RepeatFailed:
    """Name the first error in the log of a peer that ended with `code`."""
    lines = [line.strip() for line in COLOUR.sub("", text).splitlines() if line.strip()]
    errors = [found["error"].strip("│ ") for found in map(ERROR.match, lines) if found]
    memory = [error for error in errors if "OutOfMemory" in error]
    reason = (memory or errors or lines[-1:] or ["no output"])[0][:300]
    return RepeatFailed("out_of_memory" if memory else "failed", f"exit status {code}: {reason}")
