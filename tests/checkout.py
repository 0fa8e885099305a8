"""A small copy of the checkout, so that no test writes into the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fp8study.core.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent


def copy_checkout(target: Path) -> Path:
    """Copy what the pipeline and the notebooks need, and return the copy."""
    for name in ("notebooks", "pipelines", "report"):
        hidden = shutil.ignore_patterns("_site", ".*", "*_files")
        shutil.copytree(ROOT / name, target / name, ignore=hidden)
    return target


def tiny_folder(folder: Path) -> str:
    """Write the tiny model as a user's own: its layers are known only once it is built."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["tiny-llama"]), encoding="utf-8")
    return str(folder)


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
