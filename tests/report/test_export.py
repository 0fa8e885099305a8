from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fp8study import cli
from fp8study.core.errors import UserError
from fp8study.core.records import StoredRun, load_runs
from fp8study.report import export
from tests.factories import make_record, make_results, store

ROOT = Path(__file__).parents[2]


def of_machine(machine: str) -> list[StoredRun]:
    return [run for run in load_runs(ROOT / "results") if run.machine_label == machine]


@pytest.fixture(scope="module")
def computed() -> dict[str, pd.DataFrame]:
    return export.tables_of(of_machine("h200x4"))


@pytest.mark.parametrize("name", export.TABLES)
def test_committed_tables_are_what_the_committed_records_give(
    name: str, computed: dict[str, pd.DataFrame], tmp_path: Path
) -> None:
    path = ROOT / f"results/reference/h200x4/tables/{name}.csv"
    if name not in computed:  # without rows there is no table
        assert not path.exists()
        return
    computed[name].to_csv(tmp_path / "now.csv", index=False, float_format="%.6g")
    now = pd.read_csv(tmp_path / "now.csv")
    pd.testing.assert_frame_equal(pd.read_csv(path), now, rtol=1e-4)


def test_no_committed_table_is_left_over() -> None:
    names = {path.stem for path in (ROOT / "results/reference/h200x4/tables").glob("*")}
    assert names <= set(export.TABLES)


def test_one_machine_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_results(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(
        cli.app, ["report", "--tables", str(tmp_path / "t"), "--machine", "h200x8"]
    )
    assert found.exit_code == 0, found.output
    table = pd.read_csv(tmp_path / "t" / "loss-gaps.csv")
    assert set(table["machine"]) == {"h200x8"}
    assert "arm_key" not in table
    wrong = CliRunner().invoke(
        cli.app, ["report", "--tables", str(tmp_path / "t"), "--machine", "h2"]
    )
    assert wrong.exit_code == 2
    assert "machine: no record of 'h2'" in wrong.output


def test_without_records_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli.app, ["report", "--tables", str(tmp_path / "t")])
    assert found.exit_code == 2
    assert "there are no records" in found.output


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record())
    file = tmp_path / "taken.txt"
    file.touch()
    with pytest.raises(UserError, match=r"^folder: '.*taken.txt' cannot be one \(File exists\)"):
        export.write_tables(load_runs(tmp_path), file)
