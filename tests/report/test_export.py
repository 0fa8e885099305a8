from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fp8study import cli
from fp8study.core.errors import UserError
from fp8study.core.records import load_runs
from fp8study.report import export
from tests.factories import make_record, store
from tests.study_factories import make_results


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
    with pytest.raises(UserError, match=r"^--tables: cannot write '.*taken.txt' \(File exists\)"):
        export.write_tables(load_runs(tmp_path), file)
    (tmp_path / "out" / "throughput.csv").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^--tables: cannot write '.*out' \(Is a directory\)"):
        export.write_tables(load_runs(tmp_path), tmp_path / "out")


def test_a_table_without_rows_any_more_goes(tmp_path: Path) -> None:
    store(tmp_path / "results", "local", make_record())
    (tmp_path / "peers.csv").write_text("of other records")
    (tmp_path / "mine.csv").write_text("another's")
    export.write_tables(load_runs(tmp_path / "results"), tmp_path)
    assert {"mine.csv", "throughput.csv"} <= {path.name for path in tmp_path.glob("*.csv")}
    assert not (tmp_path / "peers.csv").exists()


def test_a_damaged_record_is_left_out_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path / "results", "local", make_record())
    store(tmp_path / "results", "local", make_record(precision="fp8_rowwise"))
    damaged = sorted((tmp_path / "results").rglob("run.json"))[0]
    damaged.write_text("{")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fp8study", "report", "--tables", str(tmp_path / "t")])
    with pytest.raises(SystemExit) as end:
        cli.app()
    assert not end.value.code
    told = [line for line in capfd.readouterr().err.splitlines() if "left out" in line]
    assert len(told) == 1
    assert told[0].startswith(f"fp8study: left out: {damaged}: not a run record")
    assert damaged.parent.name in told[0]
