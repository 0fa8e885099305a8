"""The two small files by which the launcher and the training processes talk."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def save(self, run_dir: Path) -> None:
        """Write ``job.json``."""
        write_json(run_dir / "job.json", dataclasses.asdict(self))

    @staticmethod
    def load(run_dir: Path) -> Job:
        """Read ``job.json``."""
        content = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))
        gpus = {int(index): name for index, name in content["gpus"].items()}
        return Job(**content | {"data": PreparedData(**content["data"]), "gpus": gpus})


@dataclass(frozen=True)
class Outcome:
    """What training has to say at its end, good or bad."""

    status: str
    status_detail: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    instruments: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    noise: dict[str, Any] = field(default_factory=dict)

    def save(self, run_dir: Path, replace: bool = False) -> None:
        """Write ``outcome.json``.

        Args:
            run_dir: The run's folder.
            replace: Take the place of an earlier one. By default the first one stays: where
                several ranks fail, its reason is the cause of the others'.
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
