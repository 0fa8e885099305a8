"""Real runs with a planted fault, on CPU processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.audit_rules import problems
from fp8study.core.errors import UserError
from fp8study.core.records import RunRecord, read_record
from fp8study.run.launch import RunFailed
from tests.train.tiny_runs import Run, launch_tiny

#: What a stale run with the default ``skip`` loses: every linear layer but the loss head.
LOST = "model.layers.*"

#: Trains as usual and fails if a planted weight moved or any other stood still.
WATCH = """
import sys, torch, fp8study.train.__main__ as train
from fp8study.model.updates import untrained_weights
inside = train.Trainer.train
def watched(trainer, *arguments):
    left_out = {id(w) for w in untrained_weights(trainer.config, trainer.bare_model)}
    held = [id(p) for g in trainer.optimizer.param_groups for p in g["params"]]
    everything = {id(p) for p in trainer.bare_model.parameters()}
    assert set(held) == everything - left_out and len(held) == len(set(held))
    before = {n: p.detach().clone() for n, p in trainer.bare_model.named_parameters()}
    steps = inside(trainer, *arguments)
    for name, p in trainer.bare_model.named_parameters():
        assert torch.equal(p, before[name]) == (id(p) in left_out), name
    print("watched", len(left_out))
    return steps
train.Trainer.train = watched
sys.exit(train.main())
"""


def train(run_dir: Path, **changes: Any) -> RunRecord:
    return launch_tiny(run_dir, **{"strategy": "none", "profile": False} | changes)


def test_planted_weights_do_not_move_and_all_others_do(
    tmp_path: Path, instead_of_training: Callable[[str], None]
) -> None:
    instead_of_training(WATCH)
    record = train(tmp_path / "run", untrained=LOST)
    assert "watched 28" in (tmp_path / "run" / "train.log").read_text()
    assert record.audit["num_planted"] == 28
    assert problems(record.audit) == []
    assert any(w.startswith("planted fault: ") for w in record.warnings)


def test_a_planted_run_loses_what_the_stale_run_loses(run: Run) -> None:
    planted, _ = run(strategy="none", untrained=LOST)
    stale, _ = run(
        strategy="none", precision="fp8", fp8_all_gather=True,
        optimizer_binding="before_conversion",
    )  # fmt: skip
    share = "parameters_outside_optimizer_pct"
    assert planted.model[share] == pytest.approx(stale.model[share])
    assert planted.model[share] > 50
    assert planted.audit["num_planted"] == stale.audit["num_outside_optimizer"]


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_fault_can_be_planted_on_two_processes(strategy: str, run: Run) -> None:
    record, _ = run(strategy=strategy, num_gpus=2, untrained=LOST)
    assert record.status == "completed"
    assert record.audit["num_planted"] == 28
    assert record.model["parameters_outside_optimizer_pct"] > 50


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "of the weights are not in the optimizer"),
        (
            {"untrained": ["model.layers.0.*"]},
            "21 of 39 trainable parameters are not in the optimizer",
        ),
    ],
)
def test_losing_more_than_was_asked_for_is_stopped(
    asked: dict[str, Any], told: str, tmp_path: Path, instead_of_training: Callable[[str], None]
) -> None:
    instead_of_training(
        "import sys, dataclasses, fp8study.train.__main__ as train; "
        "import fp8study.model.updates as updates; "
        "full = updates.trained_parameters; "
        "updates.trained_parameters = lambda config, model: full("
        "dataclasses.replace(config, untrained=('model.layers.*',)), model); sys.exit(train.main())"
    )
    with pytest.raises(RunFailed, match=told):
        train(tmp_path / "run", **asked)
    assert read_record(tmp_path / "run" / "run.json").status == "failed"


def test_a_misspelt_pattern_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"untrained: 'model\.layer\.' matches no linear layer"):
        train(tmp_path / "run", untrained=["model.layer."])
    assert not (tmp_path / "run").exists()


def test_loading_by_rank_0_fails_with_fp8_all_gather_and_changes_nothing_without(
    run: Run, tmp_path: Path
) -> None:
    shared = {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8", "profile": False}
    with pytest.raises(RunFailed, match="left 28 of 39 weights FP8's on rank 0 and plain on other"):
        train(tmp_path / "run", **shared, cpu_ram_efficient_loading=True)
    runs = (
        run(**shared, fp8_all_gather=False, cpu_ram_efficient_loading=loads)[0]
        for loads in (True, False)
    )
    assert len({record.results["loss_last20_mean"] for record in runs}) == 1
