"""What the launcher and the training processes tell each other, in two small files."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fp8study.core.records import write_json
from fp8study.data.tokens import PreparedData

#: Lines of the training process that start with this are its live progress line.
PROGRESS = "progress: "


@dataclass(frozen=True)
class Job:
    """What the launcher has decided before training starts."""

    data: PreparedData
    gpus: dict[int, str]
    """Names of the GPUs to choose from, numbered as the driver does; none on a machine without."""
    launched_at: float
    """Seconds since the epoch: start-up is counted from here."""
    first_step: int = 0
    """Optimizer steps that are done already."""
    start_from: str | None = None
    """A checkpoint to go on from, if steps are done; else what holds the weights to begin with."""

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / "job.json", dataclasses.asdict(self))

    @staticmethod
    def load(run_dir: Path) -> Job:
        content = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))
        gpus = {int(index): name for index, name in content["gpus"].items()}
        return Job(**content | {"data": PreparedData(**content["data"]), "gpus": gpus})


@dataclass(frozen=True)
class Outcome:
    """What training has to say at its end, good or bad."""

    status: str
    status_detail: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    instruments: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    noise: dict[str, Any] = field(default_factory=dict)

    def save(self, run_dir: Path, replace: bool = False) -> None:
        """Write ``outcome.json``; unless told to `replace` it, an earlier one stays.

        Where several ranks fail, the first one's reason is the cause of the others'.
        """
        if replace or not (run_dir / "outcome.json").exists():
            write_json(run_dir / "outcome.json", dataclasses.asdict(self))

    @staticmethod
    def load(run_dir: Path) -> Outcome | None:
        """Read ``outcome.json``, or return None where training could not even write it."""
        try:
            return Outcome(**json.loads((run_dir / "outcome.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


class StartupClock:
    """Splits a process's start-up into `record_shape.PARTS`, each from the end of the one before.

    The first two are closed at once: until this process existed, and until now, its imports.
    """

    def __init__(self, launched_at: float) -> None:
        existed_at = psutil.Process().create_time()
        self._last = time.time()
        self.parts: dict[str, float] = {
            "launch_seconds": max(0.0, existed_at - launched_at),
            "imports_seconds": max(0.0, self._last - existed_at),
        }

    def end(self, part: str) -> None:
        now = time.time()
        self.parts[f"{part}_seconds"] = now - self._last
        self._last = now

    @property
    def busy_seconds(self) -> float:
        """All parts closed so far, but for the wait for a GPU, which is others' time."""
        return sum(v for k, v in self.parts.items() if k != "gpu_wait_seconds")
