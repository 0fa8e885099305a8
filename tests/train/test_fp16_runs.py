"""FP16 as a baseline: scaled losses, skipped steps, and records that tell of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.audit_rules import problems
from fp8study.core.records import read_metrics
from tests.train.tiny_runs import Run, Train

#: The first two in every run of the tests.
WAYS: list[dict[str, Any]] = [
    {"strategy": "none"},
    {"num_gpus": 2, "path": "tuned", "max_grad_norm": 1.0},
    {"strategy": "ddp", "num_gpus": 2},
    {"num_gpus": 2, "optimizer_state": "fp8"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [*WAYS[:2], *(pytest.param(way, marks=pytest.mark.long) for way in WAYS[2:])]
)
def test_fp16_trains_as_bf16(values: dict[str, Any], run: Run) -> None:
    bf16, _ = run(precision="bf16", **values)
    fp16, run_dir = run(precision="fp16", **values)
    assert fp16.status == "completed", fp16.status_detail
    assert problems(fp16.audit) == []
    assert fp16.audit["gradient_dtypes"] == fp16.audit["master_dtypes"] == ["float32"]
    assert "float16 × float16" in fp16.audit["matmul_dtypes"]
    assert not any("bfloat16" in dtypes for dtypes in fp16.audit["matmul_dtypes"])
    scaling = fp16.instruments["loss_scaling"]
    assert scaling["num_skipped"] <= 2
    assert scaling["scale"] == 2.0 ** (16 - scaling["num_skipped"])
    ours, theirs = (record.results["loss_last20_mean"] for record in (fp16, bf16))
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours != theirs
    assert "loss_scaling" not in bf16.instruments
    # The loss that is written down is the one before it is scaled.
    assert read_metrics(run_dir)[0]["loss"] == pytest.approx(bf16.results["loss_start"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_steps_that_overflow_are_skipped_counted_and_not_audited(
    num_gpus: int, train: Train, tmp_path: Path
) -> None:
    record = train(tmp_path, "scale:24", precision="fp16", num_gpus=num_gpus, num_steps=16)
    assert record.status == "completed"
    scaling = record.instruments["loss_scaling"]
    skipped = scaling["num_skipped"]
    assert 3 <= skipped < 16
    assert scaling["scale"] == 2.0 ** (24 - skipped)
    assert problems(record.audit) == []
    assert record.audit["stalled_pct"] < 5
    assert f"{skipped} steps changed nothing: a gradient overflowed in FP16" in record.warnings
    metrics = read_metrics(tmp_path)
    assert metrics[0]["gradient_norm"] is None  # infinite
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5


@pytest.mark.slow
def test_a_run_of_which_every_step_overflows_has_trained_nothing_and_fails(
    train: Train, tmp_path: Path
) -> None:
    """Also if it goes on from a checkpoint of which the same is true."""
    stopped = train(tmp_path, "told:1 scale:60", precision="fp16")
    assert (stopped.status, stopped.audit) == ("interrupted", {})
    record = train(tmp_path, "scale:60", precision="fp16")
    assert record.status == "failed"
    words = r"num_steps: 8 are too few for precision=fp16, .*; raise it"
    assert re.fullmatch(words, str(record.status_detail))
    assert record.results["resumed"][0]["from_step"] == 3


@pytest.mark.slow
def test_saving_before_a_step_changed_anything_changes_nothing(
    train: Train, tmp_path: Path
) -> None:
    values = {"precision": "fp16", "optimizer_state": "bf16", "num_steps": 10}
    ends = []
    for every in (0, 3):
        record = train(tmp_path / str(every), "scale:22", checkpoint_every=every, **values)
        assert 3 <= record.instruments["loss_scaling"]["num_skipped"] < 8
        ends.append([row["loss"] for row in read_metrics(tmp_path / str(every))])
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_a_resumed_run_that_trained_before_its_last_steps_overflowed_ends_well(
    train: Train, tmp_path: Path
) -> None:
    trained = train(tmp_path, "told:4 overflow:5", precision="fp16")
    assert (trained.status, trained.instruments["loss_scaling"]["num_skipped"]) == (
        "interrupted",
        1,
    )
    record = train(tmp_path, precision="fp16")
    assert (record.status, record.status_detail) == ("completed", None)
    assert record.results["resumed"][0]["from_step"] == 6
    assert record.instruments["loss_scaling"] == {"num_skipped": 3, "scale": 2.0**57}
    assert record.audit["stalled_pct"] == trained.audit["stalled_pct"]
