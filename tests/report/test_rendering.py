"""When the report must be rendered anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8study
from fp8study.report import rendering
from fp8study.report.page import RESULTS_VARIABLE

KINDS = (
    "CITATION.cff", "report/index.qmd", "report/_quarto.yml", "report/published.csv",
    "pipelines/studies/quick.yaml",
    "results/local/quick/a/run.json", "results/local/quick/a/metrics.jsonl",
    "results/reference/box/quick/b/run.json", "results/reference/box/quick/b/metrics.jsonl.gz",
    "results/reference/box/quick/peer/one/peer.json",
    "package/analysis/speed.py", "package/core/hardware.py", "package/report/layouts.py",
    "package/report/site/style.css", "package/report/site/template.html",
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in KINDS:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RESULTS_VARIABLE, raising=False)
    monkeypatch.setattr(fp8study, "__file__", str(tmp_path / "package" / "__init__.py"))
    return tmp_path


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_input_changes_the_fingerprint(name: str, checkout: Path) -> None:
    before = rendering.fingerprint()
    assert rendering.fingerprint() == before
    (checkout / name).write_text("after!")
    assert rendering.fingerprint() != before


def test_what_rendering_leaves_changes_nothing(checkout: Path) -> None:
    before = rendering.fingerprint()
    for name in ("report/.rendered", "report/_site/index.html", "package/core/x.pyc"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("left")
    assert rendering.fingerprint() == before
