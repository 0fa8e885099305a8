"""What only GPUs can show of ``step_launch=as_graph``: that a step is recorded, and trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8study.core.audit_rules import audit_of
from fp8study.core.config import make_config
from fp8study.core.record_shape import as_run
from fp8study.core.records import read_metrics
from fp8study.run import launch as launcher
from tests.train.tiny_runs import started_as

pytestmark = [pytest.mark.requires_gpu, pytest.mark.slow]

WAITING = Path(__file__).with_name("waiting_worker.py")
STEPS: dict[str, Any] = {
    "model": "tiny-llama", "path": "tuned", "update_kernel": "one_pass",
    "sequence_length": 256, "num_steps": 12, "num_warmup_steps": 5, "learning_rate": 1e-3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("num_gpus", "precision", "max_grad_norm", "attention"),
    [(1, "bf16", None, "cudnn"), (1, "bf16", 1.0, "cudnn"), (1, "fp8_tensorwise", None, "cudnn"),
     (1, "fp8_tensorwise", 1.0, "cudnn"), (1, "fp8_tensorwise", 1.0, "flash4"),
     (2, "bf16", None, "cudnn"), (2, "bf16", 1.0, "cudnn"), (2, "fp8_tensorwise", None, "cudnn"),
     (2, "fp8_tensorwise", 1.0, "cudnn"), (2, "fp8_rowwise", 1.0, "cudnn"),
     (4, "bf16", 1.0, "cudnn"), (4, "fp8_tensorwise", None, "cudnn"),
     (4, "fp8_tensorwise", 1.0, "cudnn")],
)  # fmt: skip
def test_a_replayed_step_trains_as_one_launched_by_kernel(
    num_gpus: int, precision: str, max_grad_norm: float | None, attention: str, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    if attention == "flash4":
        pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    values = STEPS | {"num_gpus": num_gpus, "precision": precision, "max_grad_norm": max_grad_norm}
    values |= {"attention": attention}
    if max_grad_norm is None:  # replays go on after the first; such a run profiles no step
        values |= {"validation_sequences": 4, "validation_points": 3}
    found = {}
    for how in ("by_kernel", "as_graph"):
        config = make_config(values | {"step_launch": how}).resolved()
        record = launcher.launch(config, tmp_path / how, show=str)
        assert as_run(record.config, record.warnings)["step_launch"] == how
        assert not record.audit["num_frozen"]
        assert bool(record.audit["num_linear_fp8"]) == config.is_fp8
        if max_grad_norm:
            dtypes = record.audit["matmul_dtypes"]
            assert any("float8" in names for names in dtypes) == config.is_fp8
            assert audit_of(record)["attention_kernels"] == [attention.removesuffix("4")]
        validation = [row["loss"] for row in record.results.get("validation_losses", ())]
        found[how] = [row["loss"] for row in read_metrics(tmp_path / how)] + validation
        assert len(validation) == (0 if max_grad_norm else 3)
    assert found["as_graph"] == pytest.approx(found["by_kernel"], rel=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_a_step_that_waits_for_a_number_goes_on_by_kernel(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's step reads its loss, which a recording forbids."""
    values = STEPS | {"num_gpus": 1, "strategy": "none", "precision": precision}
    losses = {}
    for how, worker in (("by_kernel", None), ("as_graph", WAITING)):
        if worker is not None:
            monkeypatch.setattr(launcher, "training_command", started_as(worker))
        config = make_config(values | {"max_grad_norm": 1.0, "step_launch": how}).resolved()
        record = launcher.launch(config, tmp_path / how, show=str)
        losses[how] = [row["loss"] for row in read_metrics(tmp_path / how)]
    assert as_run(record.config, record.warnings)["step_launch"] == "by_kernel"
    assert losses["as_graph"] == pytest.approx(losses["by_kernel"], rel=2e-3)
