"""Each silent failure, injected, and a healthy step beside it."""

from __future__ import annotations

from typing import Any

import torch

from fp8study.audit import FirstStepAudit, conversion
from fp8study.config import RunConfig, make_config
from fp8study.findings import audit_text, cautions, problems
from fp8study.models import build_model
from fp8study.precision import convert_to_float8

FP8 = make_config({"model": "tiny-llama", "precision": "fp8", "fp8_all_gather": True,
                   "strategy": "none"})  # fmt: skip


def tiny(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return build_model("tiny-llama", dtype, torch.device("cpu"), seed=0)


def adamw(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def first_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, lose: str | None = None
) -> dict[str, Any]:
    """Do one step; `lose` names a parameter whose gradient never reaches the optimizer."""
    ids = torch.randint(0, 2048, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    audit = FirstStepAudit(model, optimizer)
    audit.before()
    if lose is not None:
        model.get_parameter(lose).grad = None
    optimizer.step()
    return audit.after()


def converted(config: RunConfig = FP8) -> torch.nn.Module:
    model = tiny()
    convert_to_float8(model, config, emulate=True)
    return model


def test_a_healthy_fp8_step_has_nothing_to_report() -> None:
    model = converted()
    audit = conversion(model, FP8) | first_step(model, adamw(model))
    assert problems(audit) == cautions(audit) == []
    assert (audit["num_linear_fp8"], audit["num_linear"]) == (28, 29)
    assert audit["skipped"] == {"skip pattern 'lm_head'": 1}
    assert audit["stalled_pct"] < 1
    assert audit["master_dtypes"] == audit["optimizer_state_dtypes"] == ["float32"]
    assert "healthy" in audit_text(audit)


def test_a_stale_optimizer_is_found_by_identity_and_by_effect() -> None:
    model = tiny()
    optimizer = adamw(model)
    convert_to_float8(model, FP8, emulate=True)
    audit = conversion(model, FP8) | first_step(model, optimizer)
    assert audit["num_outside_optimizer"] == audit["num_frozen"] == 28
    assert audit["stalled_pct"] > 50
    first, second = problems(audit)
    assert "not in the optimizer: model.layers.0" in first
    assert "the first step did not touch them" in second
    assert "problem" in audit_text(audit)


def test_a_frozen_weight_is_named_although_the_optimizer_holds_it() -> None:
    model = tiny()
    name = "model.layers.2.mlp.up_proj.weight"
    audit = first_step(model, adamw(model), lose=name)
    assert audit["num_outside_optimizer"] == 0
    assert audit["frozen"] == [name]
    assert name in problems(audit)[0]


def test_a_weight_that_is_held_twice_is_found() -> None:
    model = tiny()
    optimizer = adamw(model)
    optimizer.param_groups[0]["params"].append(model.get_parameter("lm_head.weight"))
    assert first_step(model, optimizer)["num_in_optimizer_twice"] == 1


def test_bf16_masters_stall_at_document_as_learning_rate() -> None:
    """1e-5 is below half a unit in the last place of most weights drawn from N(0, 0.02)."""
    model = tiny(torch.bfloat16)
    audit = first_step(model, adamw(model, lr=1e-5))
    assert 75 < audit["stalled_pct"] < 95
    assert problems(audit) == []  # slow, but nothing is lost
    assert "too small for bfloat16 masters" in cautions(audit)[0]
    healthy = tiny()
    assert cautions(first_step(healthy, adamw(healthy, lr=1e-5))) == []


def test_fp8_that_was_silently_switched_off_is_found() -> None:
    audit = conversion(tiny(), FP8)
    assert audit["num_linear_fp8"] == 0
    assert audit["num_unexplained"] == 28
    assert problems(audit)[0].startswith("28 linear layers should compute in FP8 but do not")


def test_layers_of_odd_shape_are_explained() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even, self.odd = torch.nn.Linear(32, 32), torch.nn.Linear(32, 17)

    config = make_config({"precision": "fp8_rowwise", "skip": ()})
    model = Odd()
    convert_to_float8(model, config, emulate=True)
    audit = conversion(model, config)
    assert audit["skipped"] == {"a dimension does not divide by 16": 1}
    assert (audit["num_linear_fp8"], audit["num_unexplained"]) == (1, 0)


def test_a_bf16_run_explains_all_of_its_layers() -> None:
    audit = conversion(tiny(), make_config({"model": "tiny-llama"}))
    assert audit["skipped"] == {"precision=bf16": 29}
    assert problems(audit) == []


def test_a_converted_layer_is_known_under_the_class_that_sharding_gives_it() -> None:
    model = converted()
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.__class__ = type("FSDPFloat8Linear", (type(layer),), {})
    audit = conversion(model, FP8)
    assert (audit["num_linear_fp8"], audit["num_unexplained"]) == (28, 0)
