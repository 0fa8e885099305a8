"""Precision that changes inside a run: what it trains, what it compiles, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8study.core.audit_rules import audit_text, problems
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.recipes import phases, precision_at
from fp8study.core.records import read_metrics
from fp8study.model.build import build_model, decoder_layers
from fp8study.model.float8 import compute_in, convert_to_float8, let_change
from tests.train.tiny_runs import Run

FP8 = {"precision": "fp8_tensorwise", "fp8_all_gather": False}
THERE_AND_BACK = ("bf16:3", "fp8_tensorwise:-2", "bf16")


def losses(run: Run, **values: Any) -> list[float]:
    _, run_dir = run(**values)
    return [row["loss"] for row in read_metrics(run_dir)]


@pytest.mark.parametrize(
    "where",
    [
        {"strategy": "none"},
        pytest.param({"strategy": "fsdp2", "num_gpus": 2}, marks=pytest.mark.long),
    ],
)
def test_each_part_of_a_run_computes_in_its_precision(run: Run, where: dict[str, Any]) -> None:
    bf16, fp8 = losses(run, **where), losses(run, **where, **FP8)
    assert bf16[0] != fp8[0]
    changing = losses(run, **where, **FP8, precision_schedule=THERE_AND_BACK)
    assert changing[:3] == bf16[:3]
    assert changing[3] != bf16[3]
    early = losses(run, **where, **FP8, precision_schedule=("fp8_tensorwise:5", "bf16"))
    assert early[:5] == fp8[:5]
    assert early[5] != fp8[5]


def test_the_record_holds_an_audit_of_each_part(run: Run) -> None:
    record, _ = run(strategy="none", **FP8, precision_schedule=THERE_AND_BACK)
    assert not problems(record.audit)
    parts = record.audit["phases"]
    assert [(part["step"], part["precision"]) for part in parts] == [
        (0, "bf16"), (3, "fp8_tensorwise"), (6, "bf16"),
    ]  # fmt: skip
    number = record.audit["num_linear_fp8"]
    assert number > 0
    assert [part["num_linear_fp8"] for part in parts] == [0, number, 0]
    assert all(part["stalled_pct"] < 10 and not part["num_frozen"] for part in parts)
    assert "fp8_tensorwise from step 4" in audit_text(record.audit)
    assert any("precision changes" in warning for warning in record.warnings)
    assert record.results["tokens_per_second_per_gpu"] is None


def test_a_part_that_begins_as_the_run_diverges_has_an_audit_to_print(run: Run) -> None:
    values = {"strategy": "none", "learning_rate": 1000.0, "profile": False}
    record, _ = run(**values, **FP8, precision_schedule=("bf16:1", "fp8_tensorwise"))
    assert record.status == "diverged"
    assert record.audit["phases"][1]["stalled_pct"] is None
    assert "no gradient in its first step was a number" in audit_text(record.audit)


def test_what_was_compiled_for_a_precision_is_kept() -> None:
    config = make_config(FP8 | {"model": "tiny-llama", "strategy": "none"}).resolved(on_gpu=False)
    torch._dynamo.reset()
    model = build_model("tiny-llama", torch.float32, torch.device("cpu"), seed=0)
    for layer in decoder_layers(model):
        layer.compile(backend="eager")
    convert_to_float8(model, config)
    let_change(model)
    ids_BT = torch.arange(64)[None]
    counts = torch._dynamo.utils.counters["stats"]

    def new_graphs(precision: str) -> int:
        before = counts["unique_graphs"]
        compute_in(model, precision)
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        return counts["unique_graphs"] - before

    assert new_graphs("bf16") > 0
    assert new_graphs("fp8_tensorwise") > 0
    assert [new_graphs(p) for p in ("bf16", "fp8_tensorwise", "bf16")] == [0, 0, 0]


def test_ends_are_counted_from_either_end_of_the_run() -> None:
    config = make_config(FP8 | {"num_steps": 50, "precision_schedule": "bf16:10,fp8:-5,bf16"})
    assert phases(config) == ((0, "bf16"), (10, "fp8_tensorwise"), (45, "bf16"))
    assert [precision_at(config, step) for step in (0, 9, 10, 44, 45, 49)] == [
        "bf16", "bf16", "fp8_tensorwise", "fp8_tensorwise", "bf16", "bf16",
    ]  # fmt: skip
    assert not config.is_timed


@pytest.mark.parametrize(
    "changes",
    [
        {"precision_schedule": "bf16:10"},
        {"precision_schedule": "bf16:30,fp8:20,bf16"},
        {"precision_schedule": "bf16,fp8"},
        {"precision_schedule": "bf16:50,fp8"},
        {"precision_schedule": "fp8:10,fp8"},
        {"precision_schedule": "bf16:10,fp8_rowwise"},
        {"precision": "bf16", "precision_schedule": "bf16:10,fp8"},
        {"precision_schedule": "bf16:ten,fp8"},
        {"precision_schedule": "bf16:10,fp8", "fp8_all_gather": True},
        {"precision_schedule": "bf16:10,fp8", "optimizer_binding": "before_conversion"},
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^precision_schedule: .*; (give|leave|use)") as refused:
        make_config(FP8 | {"num_steps": 50} | changes)
    assert "\n" not in str(refused.value)
