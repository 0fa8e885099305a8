import gzip
import json
from pathlib import Path

import pytest

from fp8study.core.errors import UserError
from fp8study.core.records import (
    NewerRecord,
    RunRecord,
    load_runs,
    read_metrics,
    read_record,
    set_aside,
    write_json,
    write_record,
)
from tests.checkout import committed_runs
from tests.factories import loss_curve, make_record, store


def test_record_survives_the_round_trip(tmp_path: Path) -> None:
    record = make_record(status="diverged", status_detail="loss is not finite", warnings=["w"])
    write_record(record, tmp_path)
    assert read_record(tmp_path / "run.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [float("nan"), (float("inf"), 1.5)]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, [None, 1.5]]}


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", "fine"),
        ("schema_version", 3),
        ("run_id", 3),
        ("started_at", None),
        ("config", []),
        ("results", None),
    ],
)
def test_broken_schema_is_refused(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field):
        make_record(**{field: value})


def test_unknown_field_of_a_newer_writer_is_ignored(tmp_path: Path) -> None:
    write_record(make_record(), tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new_field": 1}))
    assert read_record(path) == make_record()


@pytest.mark.parametrize(
    ("text", "told"),
    [("", ""), ("{", ""), ("null", ""), ("[]", "it holds no mapping"),
     ('{"run_id": "x"}', "without study, status, ")],
)  # fmt: skip
def test_what_is_no_record_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"run\.json: not a run record \(.*{told}"):
        read_record(path)


def test_metrics_stop_at_a_half_written_line(tmp_path: Path) -> None:
    run_dir = store(tmp_path, "local", make_record(), loss_curve(3, 5.0))
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3]


def test_packed_metrics_are_read_where_there_are_no_others(tmp_path: Path) -> None:
    run_dir = store(tmp_path, "local", make_record(), loss_curve(3, 5.0))
    plain, as_logged = run_dir / "metrics.jsonl", read_metrics(run_dir)
    (run_dir / "metrics.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.write_text("")  # a run that has begun anew
    assert read_metrics(run_dir) == []
    plain.unlink()
    assert read_metrics(run_dir) == as_logged


def test_no_metrics_is_no_error(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_runs_are_labelled_by_machine(tmp_path: Path) -> None:
    store(tmp_path, "reference/box", make_record())
    store(tmp_path, "local", make_record())
    assert [run.machine_label for run in load_runs(tmp_path)] == ["local", "box"]


def test_no_results_are_no_runs(tmp_path: Path) -> None:
    assert load_runs(tmp_path / "missing") == []


def test_corrupt_record_is_reported_and_the_rest_used(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record(run_id="good"))
    for place in ("local", "reference/box"):
        bad = store(tmp_path, place, make_record(run_id="bad"))
        (bad / "run.json").write_text("{")
    with pytest.warns(UserWarning, match="left out") as caught:
        runs = load_runs(tmp_path)
    assert [run.record.run_id for run in runs] == ["good"]
    assert len(caught) == 2
    # Reading writes nothing.
    for place in ("local", "reference/box"):
        names = sorted(path.name for path in (tmp_path / place / "quick/bad").iterdir())
        assert names == ["metrics.jsonl", "run.json"]


def test_record_of_another_schema_is_named_but_not_corrupt(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record(run_id="good"))
    path = store(tmp_path, "local", make_record(run_id="newer")) / "run.json"
    path.write_text('{"schema_version": 3, "name": "another layout"}')
    with pytest.raises(NewerRecord, match=r"run\.json: schema_version: 3 is none of 1, 2"):
        read_record(path)
    with pytest.warns(UserWarning, match=r"newer/run\.json: schema_version") as caught:
        assert [run.record.run_id for run in load_runs(tmp_path)] == ["good"]
    assert len(caught) == 1
    assert path.exists()
    path.write_text('{"schema_version": "two"}')
    with pytest.raises(UserError, match="not a run record") as error:
        read_record(path)
    assert not isinstance(error.value, NewerRecord)


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = store(tmp_path, "local", make_record()).parent
    # Root may read anything.
    monkeypatch.setattr("os.access", lambda folder, mode: Path(folder) != closed)
    with pytest.warns(UserWarning, match=r"left out: .*; give yourself access") as caught:
        load_runs(tmp_path)
    assert [str(closed) in str(item.message) for item in caught] == [True]


def test_set_aside_never_overwrites(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "run.json").write_text(text)
        set_aside(tmp_path / "run.json", "corrupt")
    assert (tmp_path / "run.corrupt1.json").read_text() == "first"
    assert (tmp_path / "run.corrupt2.json").read_text() == "second"


def test_every_committed_record_states_its_judgement() -> None:
    for run in committed_runs():
        assert {"margin_pct", "speed_only", "question"} <= run.record.judgement.keys()


def test_minimal_record_is_valid() -> None:
    assert RunRecord("id", "study", "failed", {}, "a", "b").schema_version == 2


def test_numbers_stay_on_one_line_and_texts_as_they_are(tmp_path: Path) -> None:
    content = {
        "gram": [[1.5, -2e-30], [float("nan"), 4]],
        "texts": ["[ 1,  2 ]", "a  b", "[\n 1,\n 2\n]"],
        "mixed": [1, "two  spaces", {"deep": [1e5, None]}],
        "empty": [],
    }
    write_json(tmp_path / "a.json", content)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "[1.5, -2e-30]" in text
    content["gram"] = [[1.5, -2e-30], [None, 4]]
    assert json.loads(text) == content
