"""Render the report, with Quarto where it is and with `fp8study.report.site` where it is not."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fp8study.core.errors import UserError
from fp8study.core.paths import report_dir, results_dir
from fp8study.report.site import render_site


def render_report(only_if_changed: bool = False) -> Path:
    """Render ``report/`` and return the path of its first page.

    Args:
        only_if_changed: Do nothing if neither the pages, nor the records, nor the code between
            them changed since the last rendering.

    Raises:
        UserError: A page cannot be rendered; the last good site stays.
    """
    project = report_dir()
    if not (project / "_quarto.yml").is_file():
        raise UserError(f"report: there is no '{project}/_quarto.yml'; run in a checkout")
    index = project / "_site" / "index.html"
    stamp = project / ".rendered"
    inputs = _fingerprint(project)
    if only_if_changed and index.exists() and stamp.exists() and stamp.read_text() == inputs:
        return index
    quarto = shutil.which("quarto")
    if quarto is None:
        render_site(project, preload="fp8study.report.page:load_report")
    else:
        _render_with_quarto(quarto, project)
    stamp.write_text(inputs)
    return index


def _render_with_quarto(quarto: str, project: Path) -> None:
    environment = os.environ | {"QUARTO_PYTHON": sys.executable}
    done = subprocess.run([quarto, "render", str(project)], env=environment, check=False)
    if done.returncode:
        raise UserError(f"report: quarto render failed with status {done.returncode}; see above")


def _fingerprint(project: Path) -> str:
    """Return a hash over everything that the rendered pages depend on."""
    files = [p for p in project.iterdir() if p.is_file() and not p.name.startswith(".")]
    files += results_dir().glob("*/*/*/run.json")
    files += results_dir().glob("*/*/*/*/run.json")
    files += Path(__file__).parent.rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
