"""Run another trainer for one repeat on given GPUs, and keep what it says in a record.

A configuration, a trainer in one precision in one cell, gets a folder with its logs and one
``peer.json``. It has the fields of `fp8study.analysis.peers.PeerRecord`; of these and of its
further ones:

``status``: ``interrupted`` while repeats are still to come; ``status_detail`` says why.
``windows_tokens_per_second``: what the trainer reports each ``log_every`` of its ``num_steps``
steps, without the windows that overlap the first ``num_warmup_steps``. Older records have their
median, not the rate over all of them, in ``tokens_per_second_per_gpu``.
``mfu_pct``: one number a repeat, the windows' median, as the trainer counts FLOPs and peak;
``num_parameters`` is its count, too.
``memory_peak_gib``: reserved by rank 0, warm-up included.
"""

from __future__ import annotations

import os
import re
import shlex
import statistics
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fp8study.core.records import utc_now, write_json
from fp8study.run.children import end
from fp8study.run.gpu_lease import lease
from fp8study.run.machine import Machine, machine_facts, versions

SCRIPTS = Path(__file__).resolve().parent
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What a rank raised, not torchrun's ChildFailedError; the last is what tyro says of a flag.
_ERROR = re.compile(
    r"^(?:\[\w+\]: ?)+(?P<error>(?:\w+\.)*\w*(?:Error|Exception)\b.*|\W*Unrecognized options: .*)$"
)
_PACKAGES = ("torchdata", "tyro")
_TIMEOUT_SECONDS = 600
#: Of each repeat, in a record.
_MEASURED = (
    "tokens_per_second_per_gpu", "windows_tokens_per_second", "mfu_pct", "memory_peak_gib",
    "blocks",
)  # fmt: skip
#: Blocks on other GPUs add to the same record.
_writing = threading.Lock()


@dataclass(frozen=True)
class Cell:
    """What all trainers do alike."""

    model: str
    num_gpus: int
    micro_batch_size: int
    sequence_length: int
    num_steps: int
    """Those that warm up included."""
    num_warmup_steps: int
    log_every: int


class Repeat(NamedTuple):
    """What the log of one repeat says."""

    windows: list[float]
    """Tokens/s per GPU in each timed window."""
    mfu_pct: float | None
    memory_peak_gib: float
    num_parameters: int | None


class RepeatFailed(Exception):
    """A repeat gave no number; the message is one line."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PeerTrainer(NamedTuple):
    """Another trainer: how it is started, and how its log is read."""

    name: str
    version: str
    commit: str | None
    command_of: Callable[[Cell, str, Path, int], list[str]]
    """The cell, a precision, a folder of its own, a seed → the command line."""
    read: Callable[[str, Cell, str], Repeat]
    """Its log, the cell, the precision → what it says; `RepeatFailed` if that is not it."""
    environment: Mapping[str, str]


def run_repeat(
    trainer: PeerTrainer,
    command: list[str],
    log: Path,
    cell: Cell,
    precision: str,
    gpus: Sequence[int],
) -> Repeat:
    """Run a trainer once, its output in `log`; raise `RepeatFailed` if it gives no number."""
    chosen = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }  # fmt: skip
    with log.open("wb") as output, lease(cell.num_gpus, list(gpus)):
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **trainer.environment, **chosen}, cwd=log.parent,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RepeatFailed("failed", f"no end within {_TIMEOUT_SECONDS} s") from None
        finally:  # torchrun's workers must not keep the GPUs
            end(child)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code:
        raise why_failed(text, code)
    return trainer.read(text, cell, precision)


def why_failed(text: str, code: int) -> RepeatFailed:
    """Name the first error in the log of a trainer that ended with `code`."""
    lines = [line.strip() for line in COLOUR.sub("", text).splitlines() if line.strip()]
    errors = [found["error"].strip("│ ") for found in map(_ERROR.match, lines) if found]
    memory = [error for error in errors if "OutOfMemory" in error]
    reason = (memory or errors or lines[-1:] or ["no output"])[0][:300]
    return RepeatFailed("out_of_memory" if memory else "failed", f"exit status {code}: {reason}")


@dataclass
class Configuration:
    """A trainer in one precision in one cell, and the record of its repeats so far."""

    trainer: PeerTrainer
    cell: Cell
    precision: str
    output: Path
    """Where its folder is to lie."""
    num_repeats: int
    machine: Machine

    def __post_init__(self) -> None:
        cell, installed = self.cell, {d.name: d.version for d in metadata.distributions()}
        words = [cell.model, self.precision, f"{cell.num_gpus}gpu", f"b{cell.micro_batch_size}"]
        self.name = "-".join([*words, self.trainer.name])
        self.record: dict[str, Any] = {
            "configuration": self.name, "precision": self.precision, **vars(cell),
            "name": self.trainer.name, "version": self.trainer.version,
            "commit": self.trainer.commit, "machine": machine_facts(self.machine),
            "versions": versions() | {name: installed.get(name) for name in _PACKAGES},
            "started_at": utc_now(), "num_parameters": None, "status": "interrupted",
            "status_detail": "repeats were still to come",
            **{name: [] for name in (*_MEASURED, "log_files")},
        }  # fmt: skip

    def measure(self, repeat: int, gpus: Sequence[int]) -> None:
        """Do one repeat, add it to the record and write that; nothing after one that failed."""
        if self.record["status"] != "interrupted":
            return  # it would fail again
        folder = self.output / self.name
        folder.mkdir(parents=True, exist_ok=True)
        log, record = folder / f"repeat-{repeat}.log", self.record
        changes: dict[str, Any]
        command = self.trainer.command_of(self.cell, self.precision, folder / "dump", repeat)
        # Records are published: they say what was called, not where this machine keeps it.
        told = shlex.join(["python", *command[1:]]).replace(str(self.output), "OUTPUT")
        try:
            found = run_repeat(self.trainer, command, log, self.cell, self.precision, gpus)
        except RepeatFailed as failure:
            changes = {"status": failure.status, "status_detail": f"repeat {repeat}: {failure}"}
            shown, measured = f"{failure.status}: {failure}", None
        else:
            rate = statistics.harmonic_mean(found.windows)  # they are of equally many tokens
            measured = (rate, found.windows, found.mfu_pct, found.memory_peak_gib, repeat)
            changes = {"num_parameters": found.num_parameters}
            shown = f"{rate:,.0f} tokens/s/GPU, {found.memory_peak_gib:.1f} GiB reserved"
        with _writing:
            for name, value in zip(_MEASURED, measured or (), strict=measured is not None):
                record[name].append(value)
            if len(record["blocks"]) == self.num_repeats:
                changes |= {"status": "completed", "status_detail": None}
            record |= changes | {"ended_at": utc_now()}
            record["command"] = told.replace(str(SCRIPTS), "scripts")
            record["log_files"].append(log.name)
            write_json(folder / "peer.json", record)
        print(f"{self.name} repeat {repeat}: {shown}", flush=True)
