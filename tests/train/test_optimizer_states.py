"""Runs whose optimizer keeps narrow states: they train, and their records say how."""

from __future__ import annotations

from typing import Any

import pytest

from fp8study.core.audit_rules import problems
from tests.train.tiny_runs import Run

#: What is set beside the state, and the dtypes that the record must name. The first two are in
#: every run of the tests.
ARMS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("bf16", {"strategy": "none"}, ["bfloat16"]),
    ("fp8", {"strategy": "none", "master_dtype": "bf16"},
     ["bfloat16", "float32", "float8_e4m3fn"]),
    ("bf16", {"num_gpus": 2, "precision": "fp8"}, ["bfloat16"]),
    ("fp8", {"num_gpus": 2, "precision": "fp8", "path": "tuned"}, ["float32", "float8_e4m3fn"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "values", "dtypes"),
    [*ARMS[:2], *(pytest.param(*arm, marks=pytest.mark.long) for arm in ARMS[2:])],
)
def test_narrow_states_train_as_the_usual_ones(
    state: str, values: dict[str, Any], dtypes: list[str], run: Run
) -> None:
    usual, _ = run(**values)
    record, _ = run(optimizer_state=state, **values)
    assert record.status == "completed", record.status_detail
    assert problems(record.audit) == []
    assert record.audit["optimizer_state_dtypes"] == dtypes
    ours, theirs = (r.results["loss_last20_mean"] for r in (record, usual))
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours != theirs
    held, usually = (r.instruments["memory"]["optimizer_gib"] for r in (record, usual))
    assert held < 0.6 * usually
