"""Where things are in a checkout; the one place that knows."""

from __future__ import annotations

import os
from pathlib import Path


def project_root() -> Path:
    """Return the nearest folder, from the current one upwards, that holds ``pipelines/studies``.

    Outside a checkout that is the current folder, so that ``results/`` appears where one works.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "pipelines" / "studies").is_dir():
            return folder
    return here


def studies_dir() -> Path:
    """Return the folder of the study files."""
    return project_root() / "pipelines" / "studies"


def results_dir() -> Path:
    """Return the folder that holds ``local/`` and ``reference/``."""
    return project_root() / "results"


def report_dir() -> Path:
    """Return the Quarto project."""
    return project_root() / "report"


def run_notebook() -> Path:
    """Return the notebook that trains one run."""
    return project_root() / "notebooks" / "run.ipynb"


def cache_dir() -> Path:
    """Return ``$FP8STUDY_CACHE``, or ``fp8study`` below the user's cache folder."""
    chosen = os.environ.get("FP8STUDY_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base) / "fp8study"
