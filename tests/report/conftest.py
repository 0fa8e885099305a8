"""The real report, rendered once for all tests that read it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fp8study.core.records import StoredRun, load_runs
from fp8study.report import page as pages
from fp8study.report.site import render_site
from tests.instrument_factories import make_instruments
from tests.noise_factories import make_noise
from tests.report.small_site import make_site
from tests.study_factories import make_results

ROOT = Path(__file__).parents[2]
#: Python imports a module of this name first of all.
BARE_MACHINE = """
import socket, sys

def refuse(*_, **__):
    raise OSError("no network on this machine")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchao", "accelerate"}:
            raise ImportError(f"{name} is not installed on this machine")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
sys.meta_path.insert(0, Missing())
"""


@contextmanager
def bare_machine(folder: Path) -> Iterator[None]:
    """Let the processes that are started meanwhile find neither torch nor a network."""
    (folder / "sitecustomize.py").write_text(BARE_MACHINE)
    before = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT / "src"), *before]))
        for module in ("torch", "urllib.request; urllib.request.urlopen('http://localhost:9')"):
            check = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
            assert b"this machine" in check.stderr
        yield


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All synthetic records."""
    folder = make_results(tmp_path_factory.mktemp("results"))
    make_instruments(folder)
    make_noise(folder)
    return folder


@pytest.fixture(scope="session")
def records(results: Path) -> list[StoredRun]:
    return load_runs(results)


@pytest.fixture(scope="session")
def built_site(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report on all synthetic records, made without torch and network."""
    output = tmp_path_factory.mktemp("site") / "_site"
    bare = tmp_path_factory.mktemp("bare")
    with pytest.MonkeyPatch.context() as patch, bare_machine(bare):
        patch.setenv(pages.RESULTS_VARIABLE, str(results))
        render_site(ROOT / "report", output, preload="fp8study.report.page:load_report")
    return output


@pytest.fixture(scope="session")
def site(built_site: Path) -> dict[str, str]:
    """The text of every page, by its name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in built_site.glob("*.html")}


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_site(tmp_path_factory.mktemp("rich") / "report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "86400")
        return render_site(root).parent
