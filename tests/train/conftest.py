from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import make_config
from fp8study.core.files import locked
from fp8study.core.records import RunRecord, read_record
from fp8study.run import launch as launcher
from fp8study.run.launch import RunFailed, launch
from tests.train.tiny_runs import FOUR, SAVING, TINY, Run, Train, launch_tiny, started_as

WORKER = Path(__file__).with_name("trouble_worker.py")


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_training: None) -> None:
    """Import torch once for all runs of these tests; `cold_training` does otherwise."""


@pytest.fixture(scope="session")
def run(shared_folder: Path) -> Run:
    """Train a configuration once, however many tests look at it, in whichever worker."""

    def trained(**values: Any) -> tuple[RunRecord, Path]:
        config = make_config(TINY | values)
        # All of it: the run's own digest leaves out what does not make it another run.
        run_dir = shared_folder / f"run-{hashlib.sha256(repr(config).encode()).hexdigest()[:12]}"
        with locked(run_dir.with_suffix(".lock"), "run"):
            if not (run_dir / "run.json").exists():
                launch_tiny(run_dir, **values)
        return read_record(run_dir / "run.json"), run_dir

    return trained


@pytest.fixture(scope="session")
def train() -> Train:
    """Train a run that saves its state, and let it meet with trouble."""

    def trained(run_dir: Path, trouble: str | None = None, **values: Any) -> RunRecord:
        with pytest.MonkeyPatch.context() as patch:
            if trouble:
                patch.setenv("TROUBLE", trouble)
                patch.setattr(launcher, "training_command", started_as(WORKER))
            try:
                return launch(make_config(SAVING | values), run_dir, show=str, machine=FOUR)
            except RunFailed:
                return read_record(run_dir / "run.json")

    return trained


@pytest.fixture
def instead_of_training(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let runs start other code than `fp8study.train`; its argument is the run's folder."""

    def start(code: str) -> None:
        def command(config: object, run_dir: Path) -> list[str]:
            return [sys.executable, "-c", code, str(run_dir)]

        monkeypatch.setattr(launcher, "training_command", command)

    return start
