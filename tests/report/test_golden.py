"""What the committed records said when their tables were published, they say for ever."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fp8study.core.records import load_runs
from fp8study.report.export import write_tables

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
PUBLISHED = {f"{path.parts[-3]}/{path.name}": path for path in REFERENCE.glob("*/tables/*.csv")}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each machine that has tables."""
    folder, runs = tmp_path_factory.mktemp("tables"), load_runs(REFERENCE.parent)
    for machine in {name.partition("/")[0] for name in PUBLISHED}:
        write_tables([run for run in runs if run.machine_label == machine], folder / machine)
    return folder


def columns(path: Path) -> dict[str, list[str]]:
    head, *rows = csv.reader(path.read_text().splitlines())
    return {name: [row[place] for row in rows] for place, name in enumerate(head)}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_committed_records_give_the_committed_tables(written: Path, name: str) -> None:
    """Tables and columns may be added; what was published holds to the digit."""
    now, published = columns(written / name), columns(PUBLISHED[name])
    assert {column: now.get(column) for column in published} == published


def test_every_row_names_the_records_that_it_was_made_from(written: Path) -> None:
    for path in written.glob("*/*.csv"):
        for ids in columns(path)["run_ids"]:
            assert ids or path.name == "claims.csv"  # arithmetic needs none
            for run in ids.split():
                assert (REFERENCE / run / "run.json").exists(), f"{path.name}: {run}"
