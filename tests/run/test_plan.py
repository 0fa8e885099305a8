"""What a study's plan says of its losses, of what was expected and of runs without a partner."""

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8study.core.studies import Study, load_study
from fp8study.run.machine import Machine
from fp8study.run.plan import plan_text
from tests.checkout import tiny_folder
from tests.factories import finish

LAPTOP = Machine((), 2)


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty checkout, with us in it."""
    (tmp_path / "pipelines" / "studies").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def load(**content: Any) -> Study:
    content = {"question": "Does it?", "base": {"model": "tiny-llama"}} | content
    Path("pipelines/studies/mine.yaml").write_text(yaml.safe_dump(content))
    return load_study("mine")


def test_the_plan_says_that_losses_are_not_judged() -> None:
    text = " ".join(plan_text(load(speed_only=True), LAPTOP).split())
    assert "losses are not judged." in text
    assert "%" not in text


def test_the_plan_names_fp8_runs_that_are_left_without_their_bf16_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = load(factors={"precision": ["bf16", "fp8_tensorwise"]})
    assert "without the BF16 run" not in plan_text(study, LAPTOP)
    impossible = {run: "too large" for run in study.runs if run.config.precision == "bf16"}
    monkeypatch.setattr("fp8study.run.plan.impossible_runs", lambda *_: impossible)
    text = " ".join(plan_text(study, LAPTOP).split())
    alone = [run.config.digest() for run in study.runs if run.config.is_fp8]
    assert f"beside it, which is impossible here: {', '.join(alone)}" in text


def test_the_plan_says_what_leaves_losses_without_a_verdict() -> None:
    both = {"precision": ["bf16", "fp8_tensorwise"]}
    few = "One pair of FP8 and BF16: a verdict on losses takes 3 seeds"
    assert few in " ".join(plan_text(load(factors=both), LAPTOP).split())
    assert "a verdict on losses" not in plan_text(load(), LAPTOP)  # nothing to compare
    study = load(factors=both, seeds=[0, 1, 2])
    assert "a verdict on losses" not in plan_text(study, LAPTOP)
    finish(study.runs[0], judgement={"margin_pct": 0.25})
    assert "margin_pct" not in plan_text(study, LAPTOP)
    text = " ".join(plan_text(load(factors=both, seeds=[0, 1, 2], margin_pct=5), LAPTOP).split())
    assert "margin_pct: done runs state ±0.25 %, and are judged by that; set it back, or" in text


def test_the_plan_names_files_that_were_written_after_runs_with_them() -> None:
    def shown() -> str:
        return " ".join(plan_text(study, LAPTOP).split())

    Path("my.txt").write_text("once upon a time " * 2000)
    study = load(
        base={"model": tiny_folder(Path("shape")), "corpus": "text:my.txt"}, seeds=[0, 1, 2]
    )
    began = datetime.now(UTC) + timedelta(minutes=1)
    finish(*study.runs[:2], started_at=began.isoformat())
    assert "was written" not in shown()
    late = began.timestamp() + 60
    os.utime("my.txt", (late, late))
    assert "corpus: 'my.txt' was written after 2 done runs with it began" in shown()
    assert "model: " not in shown()
    os.utime("shape/config.json", (late, late))
    assert "model: 'shape/config.json' was written after 2 done runs" in shown()


def test_the_plan_says_what_was_expected_and_the_margin() -> None:
    study = load(margin_pct=0.5, expectation="They are equal.")
    text = " ".join(plan_text(study, LAPTOP).split())
    assert "judged at ±0.5 % of BF16's. Expected: They are equal." in text
    assert "Expected" not in plan_text(load(), LAPTOP)


@pytest.mark.parametrize(("status", "why"), [("failed", "says 'failed'"), ("damaged", "damaged")])
def test_the_plan_says_why_a_run_with_a_record_runs_again(status: str, why: str) -> None:
    study = load(seeds=[0, 1, 2])
    done, again, never = study.runs
    finish(done)
    assert "again" not in plan_text(study, LAPTOP)
    finish(again, status="completed" if status == "damaged" else status)
    if status == "damaged":
        (again.run_dir / "run.json").write_text('{"half')
    text = " ".join(plan_text(study, LAPTOP).split())
    (line,) = re.findall(r"to do again \((\w+)\): the record ([^;.]*)", text)
    assert line[0] == again.config.digest() != never.config.digest()
    assert why in line[1]
    assert "3 runs, 1 done, 2 to do" in text


def test_the_plan_says_if_no_run_is_the_reference() -> None:
    arms = [{"precision": "bf16"}, {"precision": "fp8"}]
    assert "reference:" not in plan_text(load(arms=arms, reference={"precision": "bf16"}), LAPTOP)
    text = " ".join(plan_text(load(arms=arms, reference={"precision": "fp16"}), LAPTOP).split())
    assert "reference: no run has precision=fp16, by which others would be divided" in text
