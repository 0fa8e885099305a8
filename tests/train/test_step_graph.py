"""Steps that are replayed compute what steps launched by kernel do; here they are done again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.record_shape import as_run
from fp8study.core.records import read_metrics
from fp8study.train.step_graph import STEPS_BEFORE
from tests.checkout import tiny_folder
from tests.train.tiny_runs import Run, Train, launch_tiny

TUNED: dict[str, Any] = {
    "path": "tuned", "update_kernel": "one_pass", "num_steps": 8, "num_warmup_steps": 5,
    "lr_schedule": "cosine", "lr_warmup_steps": 3, "profile": True, "skip": "lm_head",
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "none", "max_grad_norm": 0.1},
        {"strategy": "none", "precision": "fp8_tensorwise"},
        {"strategy": "none", "precision": "fp8_tensorwise", "skip": ""},
        {"strategy": "none", "max_grad_norm": 0.1, "gradient_dtype": "master"},
        {"strategy": "none", "precision": "fp8_tensorwise", "gradient_dtype": "master"},
        {"num_gpus": 2, "max_grad_norm": 0.1, "precision": "fp8_tensorwise"},
        {"num_gpus": 2, "precision": "fp8_tensorwise", "gather_cast": "compiled"},
    ],
    ids=str,
)
def test_a_replayed_step_trains_as_one_launched_by_kernel(run: Run, values: dict[str, Any]) -> None:
    launched, replayed = (
        read_metrics(run(**TUNED | values, step_launch=how)[1]) for how in ("by_kernel", "as_graph")
    )
    assert [row["loss"] for row in replayed] == [row["loss"] for row in launched]
    for before, row in zip(launched, replayed, strict=True):
        is_clipped = "max_grad_norm" in values
        known = is_clipped or row["step"] <= STEPS_BEFORE  # else a replayed step has no norm
        assert row.get("gradient_norm") == (before.get("gradient_norm") if known else None)


def test_a_graph_is_recorded_and_replayed_before_steps_are_timed() -> None:
    """What the configuration refuses follows from what the trainer does."""
    few = TUNED | {"strategy": "none", "step_launch": "as_graph"}
    make_config(few | {"num_warmup_steps": STEPS_BEFORE + 2})
    with pytest.raises(UserError, match="num_warmup_steps"):
        make_config(few | {"num_warmup_steps": STEPS_BEFORE + 1})


def test_the_profiled_step_shows_its_gemms(run: Run) -> None:
    record, _ = run(**TUNED | {"strategy": "none"}, step_launch="as_graph")
    assert record.audit["matmul_dtypes"]
    assert record.config["step_launch"] == "as_graph"


def test_a_model_that_needs_its_masks_is_launched_by_kernel_and_says_so(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", model_type="mistral", sliding_window=8)
    values = TUNED | {"model": model, "strategy": "none", "step_launch": "as_graph"}
    record = launch_tiny(tmp_path / "run", **values)
    assert as_run(record.config, record.warnings)["step_launch"] == "by_kernel"


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_a_step_that_no_graph_can_hold_is_launched_by_kernel_on_one_gpu(
    precision: str, train: Train, tmp_path: Path
) -> None:
    values = TUNED | {"strategy": "none", "precision": precision, "max_grad_norm": 0.1}
    record = train(tmp_path / "graph", "graph:0", **values, step_launch="as_graph")
    train(tmp_path / "kernel", **values, step_launch="by_kernel")
    assert as_run(record.config, record.warnings)["step_launch"] == "by_kernel"
    assert any("cannot hold this step (operation not permitted)" in w for w in record.warnings)
    losses = [[row["loss"] for row in read_metrics(tmp_path / how)] for how in ("graph", "kernel")]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_several_gpus_end_with_a_line_where_a_step_cannot_be_recorded(
    train: Train, tmp_path: Path
) -> None:
    values = TUNED | {"num_gpus": 2, "precision": "fp8_tensorwise", "step_launch": "as_graph"}
    record = train(tmp_path / "run", "graph:0", **values)
    assert record.status == "failed" and "use by_kernel" in str(record.status_detail)
