"""Records of before a judgement was kept get it once, and are otherwise left as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8study.core.records import read_record, write_record
from scripts.migrate_judgement import migrate
from tests.checkout import committed_runs
from tests.factories import make_record

ROOT = Path(__file__).parents[2]


def test_a_record_gains_its_judgement_and_nothing_else(tmp_path: Path) -> None:
    record = make_record(study="quick", schema_version=1)
    write_record(record, tmp_path)
    path = tmp_path / "run.json"
    content = json.loads(path.read_text())
    del content["judgement"]
    path.write_text(json.dumps(content, indent=1) + "\n")  # one number a line, as once
    before = path.read_text().splitlines()
    assert migrate(path)
    after = path.read_text().splitlines()
    assert [line for line in before if line not in after] == [' "schema_version": 1']
    found = read_record(path)
    assert found.schema_version == 2
    assert found.judgement["margin_pct"] == 0.25
    assert found.judgement["question"].startswith("What do FP8's speed-up and loss")
    assert not migrate(path)
    assert path.read_text().splitlines() == after


def test_a_run_of_no_study_has_no_judgement(tmp_path: Path) -> None:
    write_record(make_record(study="adhoc"), tmp_path)
    assert not migrate(tmp_path / "run.json")


def test_every_committed_record_states_its_judgement() -> None:
    for run in committed_runs():
        assert {"margin_pct", "speed_only", "question"} <= run.record.judgement.keys()


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
