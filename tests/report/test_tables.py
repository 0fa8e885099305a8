"""How a table is written: its lines over groups, its numbers, and who warned behind a row."""

import math
import re
from pathlib import Path

import pytest

from fp8study.report import layouts, rows, sentences, words
from fp8study.report import page as pages
from fp8study.report.table import Layout, show
from tests.factories import make_record, store
from tests.study_factories import make_quick


def test_runs_that_warn_are_counted_where_their_numbers_are_judged(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record())
    warned = make_record(precision="fp8_rowwise", warnings=["a fallback <b>"])
    store(tmp_path, "local", warned)
    report = pages.load_report(tmp_path)
    assert report.with_warnings(report.throughput)["num_warned"].tolist() == [0, 1]
    shown = show(report.with_warnings(report.throughput), layouts.THROUGHPUT, "").data
    assert "runs with a warning" in shown
    listed = show(rows.warnings(report.stored), layouts.WARNINGS, "").data
    assert "a fallback &lt;b&gt;" in listed
    assert "warning" not in sentences.unknown(report)  # most tell what was asked for


def test_what_rows_share_is_their_header(tmp_path: Path) -> None:
    make_quick(tmp_path)
    report = pages.load_report(tmp_path)
    shown = show(report.with_warnings(report.throughput), layouts.THROUGHPUT, "").data
    groups = re.findall(r'<th scope="rowgroup" colspan="\d+"', shown)
    assert len(groups) == shown.count("<tbody>") > 1
    assert "master weights" in shown and "masters" not in shown
    said = re.findall("<caption>All rows: (.*?)</caption>", shown)[0]
    lines = re.findall(r"<th scope=.rowgroup.*?</th>", shown)
    assert said and not [part for part in said.split(", ") if part in " ".join(lines)]
    assert shown.count('scope="col"') == int(groups[0].split('"')[-2])


@pytest.mark.parametrize(("value", "spec", "text"), [
    (-0.001, "+.2f", "+0.00"), (-1.26, "+.1f", "\u22121.3"), (math.inf, ",.0f", "∞"),
    (-0.2, ".0f", "0"), (1234.5, ",.1f", "1,234.5"),
])  # fmt: skip
def test_numbers_are_written_one_way(value: float, spec: str, text: str) -> None:
    assert words.number(value, spec) == text
    assert words.span([value, value], spec, " %") == f"{text} %"


def test_every_cell_says_its_heading_where_tables_are_cards(tmp_path: Path) -> None:
    make_quick(tmp_path)
    report = pages.load_report(tmp_path)
    shown = show(report.with_warnings(report.throughput), layouts.THROUGHPUT, "").data
    assert '<table class="dataframe cards">' in shown or "searchable cards" in shown
    assert shown.count("<td") == shown.count("<td data-label=") > 1


def test_every_column_that_has_a_name_is_in_a_table() -> None:
    shown = [of for of in vars(layouts).values() if isinstance(of, Layout)]
    assert set(layouts._COLUMNS) <= {column for of in shown for column in of.columns}
