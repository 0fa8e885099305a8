"""What the committed records said when their tables were published, they say for ever."""

from __future__ import annotations

from pathlib import Path

from fp8study.core.records import load_runs
from fp8study.report.export import write_tables

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
GOLDEN = REFERENCE / "h200x4" / "tables"


def test_the_committed_records_give_the_committed_tables(tmp_path: Path) -> None:
    records = [run for run in load_runs(REFERENCE.parent) if run.machine_label == "h200x4"]
    written = {path.name: path.read_text() for path in write_tables(records, tmp_path)}
    published = {path.name: path.read_text() for path in GOLDEN.glob("*.csv")}
    assert written.keys() == published.keys()
    for name, text in published.items():
        assert written[name].splitlines() == text.splitlines(), name
