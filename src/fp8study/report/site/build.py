"""Build a whole site beside the old one, then put it in its place."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fp8study.core.errors import UserError
from fp8study.report.site.config import Site, load_site
from fp8study.report.site.links import check_links
from fp8study.report.site.qmd import Page, read_page


@dataclass(frozen=True)
class Job:
    """What the process that runs the cells is handed on its standard input, pickled."""

    site: Site
    pages: list[Page]
    build: Path
    scratch: Path
    preload: str
    """a function to call before the pages part, as `module:name`; empty: none"""

    @property
    def complaint(self) -> Path:
        """The file that says what was wrong."""
        return self.scratch / "complaint.txt"


def render_site(project_dir: Path, output_dir: Path | None = None, preload: str = "") -> Path:
    """Render every page of a Quarto website project.

    The site is built in a folder beside `output_dir` and moved into its place at the end, so
    a render that fails leaves the site of the last one untouched.

    Args:
        project_dir: the folder that holds `_quarto.yml`; cells run in it.
        output_dir: where the site goes; None means the project's own `_site`.
        preload: a function to call, as `module:name`, before the pages part: what it keeps, as
            the records that all pages read, is there for each of them.

    Returns:
        The path of `index.html`.

    Raises:
        UserError: something in the project is wrong, unsupported or fails.
        OSError: the site cannot be written, as on a full disk.
    """
    site = load_site(project_dir.resolve())
    target = (output_dir or site.root / site.config.project.output_dir).resolve()
    _check_target(site, target)
    # Reading every page first finds a slip in the last page before the first one is run.
    pages = [read_page(site, name) for name in site.config.project.render]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        scratch = Path(folder)
        build = scratch / "new"
        build.mkdir()
        shutil.copyfile(Path(__file__).with_name("style.css"), build / "style.css")
        _work(Job(site, pages, build, scratch, preload))
        check_links(site, build)
        _swap(build, target, scratch / "old")
    return target / "index.html"


def _check_target(site: Site, target: Path) -> None:
    is_site = (target / "index.html").is_file()
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if site.root.is_relative_to(target) or not (is_site or is_free):
        raise UserError(f"output folder {target} is no rendered site; empty it or choose another.")


def _work(job: Job) -> None:
    """Start `__main__` in a clean Python, in which the same page gives the same bytes."""
    environment = os.environ | {
        "PYTHONHASHSEED": "0",  # a fixed order of sets
        "MPLBACKEND": "agg",
        "IPYTHONDIR": str(job.scratch / "ipython"),  # no personal profile
    }
    command = [sys.executable, "-m", "fp8study.report.site"]
    done = subprocess.run(
        command, input=pickle.dumps(job), cwd=job.site.root, env=environment, check=False
    )
    if done.returncode == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(job.build))
    if done.returncode:
        if job.complaint.is_file():
            raise UserError(job.complaint.read_text(encoding="utf-8"))
        raise UserError(f"{job.site.root.name}: rendering ended with {done.returncode}; see above.")


def _swap(new: Path, target: Path, old: Path) -> None:
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
