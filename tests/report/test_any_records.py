"""Every page stands on any records, and says what to run where there are none."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8study.report import page as pages
from tests.instrument_factories import make_instruments
from tests.noise_factories import make_noise
from tests.report.pages import NAMES, REPORT, plain
from tests.study_factories import (
    make_attribution,
    make_broken,
    make_document_a,
    make_effective_batch,
    make_quick,
    make_smoke,
)

#: The pages that show something of the records.
MEASURED = [name for name in NAMES if "load_report" in (REPORT / f"{name}.qmd").read_text()]


@pytest.fixture
def own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results, which the pages read from now on."""
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(REPORT)
    return tmp_path


def run_cells(page: str) -> str:
    """Run the cells of a page in this process and return what they would show, as text."""
    text = (REPORT / f"{page}.qmd").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    shown = []
    for cell in re.findall(r"```\{python\}\n(.*?)```", text, flags=re.DOTALL):
        code = "\n".join(line for line in cell.splitlines() if not line.startswith("#|"))
        if code.startswith(("from", "for")):
            exec(code, names)
            continue
        value = eval(f"({code})", names)
        data = str(getattr(value, "data", ""))
        shown += [data, *re.findall(r' alt="([^"]*)"', data)]
    shown += [eval(code, names).data for code in re.findall(r"`\{python\} (Markdown[^`]*)`", text)]
    return plain("\n".join(shown))


@pytest.mark.parametrize("page", MEASURED)
@pytest.mark.parametrize(
    "make",
    [
        make_quick,
        make_document_a,
        make_attribution,
        make_effective_batch,
        make_instruments,
        make_noise,
        make_smoke,
        make_broken,
    ],
)
def test_page_stands_on_any_subset(
    page: str, make: Callable[[Path], object], own_results: Path
) -> None:
    make(own_results)
    assert run_cells(page)


@pytest.mark.parametrize("page", MEASURED)
def test_page_says_what_to_run_when_there_is_nothing(page: str, own_results: Path) -> None:
    text = run_cells(page).replace("`", "")
    assert "run make reproduce" in text
    assert re.search("No GPU records (here )?yet|no records yet", text)


def test_cpu_runs_alone_claim_no_speed(own_results: Path) -> None:
    make_smoke(own_results)
    text = "".join(run_cells(page) for page in NAMES)
    assert "No answer yet" in text
    assert "once its loss is checked" not in text and "so far)" not in text
    assert "tokens/s per GPU" not in text
    assert "No GPU records yet" in text


@pytest.mark.parametrize("make", [make_attribution, make_document_a])
def test_attribution_says_which_parts_are_missing(
    make: Callable[[Path], object], own_results: Path
) -> None:
    make(own_results)
    text = run_cells("attribution").replace("`", "")
    _, _, missing = text.partition("Not measured there:")
    assert ("FP8 itself, rowwise (BF16 master weights)" in missing) == (make is make_document_a)
    assert "run make reproduce STUDY=effective-batch" in text
    if make is make_document_a:
        assert "run make reproduce STUDY=attribution" in text


def test_page_types_no_training_number() -> None:
    """A measured number in the prose would outlive its record."""
    for page in NAMES:
        text = (REPORT / f"{page}.qmd").read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found = re.findall(r"\d[\d,.]*\s*(?:tokens/s|TFLOP/s|GiB|nats)", prose)
        assert not found, (page, found)
