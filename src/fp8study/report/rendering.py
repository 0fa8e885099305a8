"""Render the report, with Quarto where it is and with `fp8study.report.site` where it is not."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fp8study
from fp8study.core.errors import UserError
from fp8study.core.files import project_root, report_dir, results_dir, studies_dir
from fp8study.report.page import RESULTS_VARIABLE
from fp8study.report.site import render_site


def render_report(only_if_changed: bool) -> Path:
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
    inputs = fingerprint()
    if only_if_changed and index.exists() and stamp.exists() and stamp.read_text() == inputs:
        return index
    print("rendering the report: two to three minutes on two cores", file=sys.stderr, flush=True)
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


def fingerprint() -> str:
    """Return a hash over everything that the rendered pages depend on: `inputs`, by content."""
    digest = hashlib.sha256()
    for path in sorted(inputs()):
        content = path.read_bytes()
        digest.update(f"{path}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def inputs() -> Iterator[Path]:
    """Yield every file that decides what the pages show.

    The pages with their settings, how to cite, the studies, every record with its metrics and peers
    (one's own too), and the package: its code, and the renderer's style and template.
    """
    yield from project_root().glob("CITATION.cff")
    yield from (p for p in report_dir().iterdir() if p.is_file() and not p.name.startswith("."))
    yield from studies_dir().glob("*.yaml")
    results = Path(os.environ.get(RESULTS_VARIABLE) or results_dir())
    for name in ("*.json", "metrics.jsonl*"):
        yield from results.rglob(name)
    package = Path(fp8study.__file__).parent
    yield from (p for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc")
