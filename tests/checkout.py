"""A small copy of the checkout, so that no test writes into the real one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fp8study.cli import app
from fp8study.core.presets import PRESETS
from fp8study.core.records import StoredRun, load_runs
from fp8study.report.page import Report, report_of

ROOT = Path(__file__).resolve().parent.parent


def copy_checkout(target: Path) -> Path:
    """Copy what the pipeline and the notebooks need, and return the copy."""
    for name in ("notebooks", "pipelines", "report"):
        hidden = shutil.ignore_patterns("_site", ".*", "*_files")
        shutil.copytree(ROOT / name, target / name, ignore=hidden)
    return target


def tiny_folder(folder: Path, **settings: Any) -> str:
    """Write the tiny model, changed, as a user's own: its layers are known once it is built."""
    folder.mkdir()
    values = PRESETS["tiny-llama"] | settings
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


@cache
def committed_runs() -> tuple[StoredRun, ...]:
    """The committed records, read once for all tests: change none of them."""
    return tuple(run for run in load_runs(ROOT / "results") if run.machine_label != "local")


@cache
def committed_report() -> Report:
    """What the pages are made of, of these records."""
    return report_of(committed_runs())


def unreadable_weights(folder: Path) -> str:
    """Write weights that only the training process finds out to be none."""
    folder.mkdir()
    (folder / "model.safetensors").touch()
    return str(folder)


def fp8study(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process and folder; what it takes to load is then paid once."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def run_python(
    folder: Path, *arguments: str, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in `folder` with this checkout's package."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def environment() -> dict[str, str]:
    """Return our environment with this checkout's package first on the path."""
    inherited = os.environ.get("PYTHONPATH")  # an empty entry would be the current folder
    path = os.pathsep.join([str(ROOT / "src"), *([inherited] if inherited else [])])
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def wait_until(holds: Callable[[], object], seconds: float = 200) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
