"""What a study finds of its runs on disk, and what it leaves alone there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fp8study.core import records
from fp8study.core.config import load_config, save_config
from fp8study.core.errors import UserError
from fp8study.core.files import check_writable
from fp8study.core.records import RESULTS, STATUSES
from fp8study.run.pipeline import _with_records
from tests.core.test_studies import load
from tests.factories import CPU, finish, make_record, store


@pytest.mark.parametrize("status", STATUSES)
def test_only_runs_with_a_result_are_done(checkout: Path, status: str) -> None:
    study = load(checkout, seeds=[0, 1])
    first, second = study.runs
    finish(first, status=status)
    written = (first.run_dir / "run.json").read_bytes()
    assert study.pending() == ([second] if status in RESULTS else [first, second])
    assert (first.run_dir / "run.json").exists()  # looking changes nothing
    study.make_room()
    (kept,) = first.run_dir.iterdir()
    assert kept.read_bytes() == written
    assert kept.name == ("run.json" if status in RESULTS else f"run.{status}1.json")


def test_what_a_cpu_did_is_no_run_of_a_gpus(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = load(checkout)
    (run,) = study.runs
    finish(run, machine=CPU)
    assert study.pending() == []
    there = replace(study, on_gpu=True)
    assert there.pending() == [run]
    there.make_room()
    assert "is not this run's; set aside as run.other1.json" in capsys.readouterr().out


def test_corrupt_record_is_set_aside_and_said(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = load(checkout)
    (run,) = study.runs
    run.run_dir.mkdir(parents=True)
    for number in (1, 2):
        (run.run_dir / "run.json").write_text(f'{{"half": {number}')
        assert study.pending() == [run]
        study.make_room()
        assert (run.run_dir / f"run.corrupt{number}.json").read_text() == f'{{"half": {number}'
        assert f"set aside as run.corrupt{number}.json" in capsys.readouterr().out
    assert study.pending() == [run]
    assert {p.name for p in run.run_dir.iterdir()} == {"run.corrupt1.json", "run.corrupt2.json"}


def test_a_run_whose_metrics_are_cut_is_run_again_and_nothing_is_lost(checkout: Path) -> None:
    study = load(checkout, base={"model": "tiny-llama", "num_steps": 20})
    (run,) = study.runs
    record = make_record(study="mine", run_id=run.run_id, config=run.config.to_dict())
    folder = store(checkout / "results", "local", record, [5.0] * 20)
    assert (folder, study.pending()) == (run.run_dir, [])
    whole = (folder / "metrics.jsonl").read_text()
    cut = "".join(whole.splitlines(keepends=True)[:7])
    (folder / "metrics.jsonl").write_text(cut)
    (folder / "checkpoints").mkdir()
    assert study.pending() == [run]
    study.make_room()
    assert {path.name for path in folder.iterdir()} == {
        "run.corrupt1.json", "metrics.corrupt1.jsonl", "checkpoints.corrupt1"
    }  # fmt: skip
    assert (folder / "metrics.corrupt1.jsonl").read_text() == cut


def test_metrics_are_read_once(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load(checkout, seeds=[0, 1])
    finish(*study.runs)
    read: list[Path] = []
    monkeypatch.setattr(records, "read_metrics", lambda run_dir: read.append(run_dir) or [])
    assert study.pending() + study.pending() == []
    assert read == [run.run_dir for run in study.runs]


def test_a_record_of_another_configuration_is_no_result(checkout: Path) -> None:
    study = load(checkout)
    (run,) = study.runs
    finish(run, config={"precision": "fp8_rowwise"})
    assert study.pending() == [run]
    study.make_room()
    assert (run.run_dir / "run.other1.json").exists()


def test_a_newer_record_is_left_alone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = load(checkout)
    (run,) = study.runs
    finish(run)
    path = run.run_dir / "run.json"
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 3'))
    assert study.pending() == []
    study.make_room()
    assert path.exists()
    assert list(_with_records([run])) == []  # nor does it keep a study from its verdict
    assert re.match(r"left out: .*run\.json: schema_version: 3 is none of", capsys.readouterr().out)


def test_a_configuration_is_written_once_unless_damaged_and_never_for_a_finished_run(
    checkout: Path,
) -> None:
    study = load(checkout, seeds=[0, 1, 2])
    study.write_configs()
    first, damaged, finished = (run.run_dir / "config.yaml" for run in study.runs)
    written = first.stat().st_ino
    damaged.write_text("seed: 9\n")
    finished.with_name("run.json").write_text("{}")
    finished.write_text("# of an earlier version\n")
    study.write_configs()
    assert first.stat().st_ino == written
    assert [load_config(path).seed for path in (first, damaged)] == [0, 1]
    assert finished.read_text() == "# of an earlier version\n"


def test_configs_of_finished_runs_are_left_alone(checkout: Path) -> None:
    first, second = (study := load(checkout, seeds=[0, 1])).runs
    study.write_configs()
    ran = first.config.resolved(on_gpu=False)
    save_config(ran, first.run_dir / "config.yaml")
    finish(first, config=ran.to_dict(), machine=CPU)
    assert study.pending() == [second]  # although the plan leaves open whether FP8 is emulated
    study.write_configs()
    assert load_config(first.run_dir / "config.yaml") == ran


def test_unwritable_results_are_named(checkout: Path) -> None:
    (checkout / "results").write_text("a file in the way")
    with pytest.raises(UserError, match=r"^results: cannot write "):
        load(checkout).write_configs()


def test_results_that_link_to_a_disk_that_is_gone_say_so(checkout: Path) -> None:
    (checkout / "results").symlink_to("/nowhere/scratch")
    words = r"^results: cannot write .*/results' is a link to '/nowhere/scratch', which is not "
    with pytest.raises(UserError, match=words + r"there\); make the folder writable"):
        load(checkout).write_configs()
    with pytest.raises(UserError, match=words):
        check_writable(checkout / "results" / "local", "results")
