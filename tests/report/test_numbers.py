"""Every number that the pages print is in a table, and every row of a table leads to its runs.

What is left out, because no record holds it: whole numbers (counts of runs, seeds, steps, GPUs;
levels of confidence) and what the text of a page itself says, as a document's figures. The page
Runs prints records.
"""

import bisect
import html
import re

import pandas as pd
import pytest

from fp8study.analysis import scale
from fp8study.analysis.laws import account
from fp8study.core.records import StoredRun
from fp8study.report import predictions
from fp8study.report.export import tables_of
from tests.report.pages import REPORT, plain

#: Tables that rest on no run in reach: data sheets, what others published, a fit that is frozen.
OF_NO_RUN = {
    "tbl-peaks", "tbl-published", "tbl-scale",
}  # fmt: skip
#: A claim that rests on no run: its row prints the document's figures, or those of data sheets.
UNANSWERED = re.compile(r'.*data-label="records"[^>]*>–</td>.*', re.S)
NUMBER = re.compile(r"(?<![\w.:,/-])[+\u2212]?\d[\d,]*(?:\.\d+)?(?![\w:/])")


def measured(text: str) -> list[str]:
    """The numbers of a text that have a sign, decimals or thousands, without a trailing comma."""
    found = (number.rstrip(",") for number in NUMBER.findall(text))
    return [number for number in found if re.search(r"[+\u2212.,]", number)]


def value_of(number: str) -> float:
    return float(number.replace(",", "").replace("\u2212", "-"))


class Known:
    """Values to look a printed number up in."""

    def __init__(self, values: list[float]) -> None:
        self.values = sorted(values)

    def holds(self, number: str) -> bool:
        value, decimals = value_of(number), len(number.partition(".")[2])
        half = 0.5000001 * 10.0**-decimals
        place = bisect.bisect_left(self.values, value - half)
        return place < len(self.values) and self.values[place] <= value + half


@pytest.fixture(scope="session")
def known(records: list[StoredRun], site: dict[str, str]) -> Known:
    """All numbers of the exported tables, and those that the tables of the pages print."""
    cells = predictions.cells(records)
    laws = [
        account.lead_verdicts(account.lead_table(cells)),
        account.memory_verdicts(account.memory_table(cells)),
        scale.check_means(scale.check_table(cells)),
        scale.published_table().eval("hopeful = predicted_pct - published_pct"),
    ]
    columns = [c for table in (*tables_of(records).values(), *laws) for _, c in table.items()]
    numeric = pd.concat([pd.to_numeric(c, errors="coerce") for c in columns]).dropna()
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", "".join(site.values()), flags=re.S)
    printed = [value_of(n) for cell in cells for n in NUMBER.findall(plain(cell))]
    return Known([*numeric.astype(float), *printed])


@pytest.mark.slow
def test_a_number_in_the_prose_is_in_a_table(site: dict[str, str], known: Known) -> None:
    checked, unknown = 0, []
    for name, page in site.items():
        if name == "runs":
            continue
        main = page.partition("<main")[2].partition("</main>")[0]
        main = re.sub(r"<(table|svg|math|code|time)\b.*?</\1>", " ", main, flags=re.S)
        own = (REPORT / f"{name}.qmd").read_text(encoding="utf-8")
        for number in measured(plain(main)):
            if number.replace("\u2212", "-") not in own:
                checked += 1
                if not known.holds(number):
                    unknown.append((name, number))
    assert not unknown
    assert checked > 20


@pytest.mark.slow
def test_every_figure_is_also_told_in_numbers(site: dict[str, str], known: Known) -> None:
    """Who cannot see a figure hears its result, or why there is none."""
    figures = 0
    for name, page in site.items():
        own = (REPORT / f"{name}.qmd").read_text(encoding="utf-8")
        for alt in re.findall(r'<img[^>]* alt="([^"]*)"', page):
            figures += 1
            told = [n for n in NUMBER.findall(html.unescape(alt)) if n not in own]
            assert told or "No GPU records here yet" in alt, (name, alt)
            assert all(map(known.holds, measured(html.unescape(alt)))), (name, alt)
    assert figures >= 12


@pytest.mark.slow
def test_every_row_with_a_number_leads_to_its_runs(site: dict[str, str]) -> None:
    checked, astray = 0, []
    for name, page in site.items():
        for label, table in re.findall(
            r'<figure id="(tbl-[\w-]+)".*?(<table.*?</table>)', page, flags=re.S
        ):
            for row in re.findall(r"<tr>(.*?)</tr>", table, flags=re.S):
                row = UNANSWERED.sub("", row)
                if label not in OF_NO_RUN and measured(plain(row)) and "<td" in row:
                    checked += 1
                    (target,) = re.findall(r'href="runs\.html\?[^#]+#([^"]+)"', row) or [None]
                    if target is None or f'id="{target}"' not in site["runs"]:
                        astray.append((name, label, plain(row)))
    assert not astray
    assert checked > 80


def test_a_number_that_no_table_holds_is_found_out() -> None:
    known = Known([12.3456, -0.5])
    assert all(map(known.holds, ("12.35", "12.3", "\u22120.50")))
    assert not any(map(known.holds, ("12.34", "+0.50", "1,234.6")))
    assert measured("n = 3, +1.5 % of 1,200 at 0.25, sm_90, v2.1") == ["+1.5", "1,200", "0.25"]
