"""Each silent failure, injected, and a healthy step beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8study.core.audit_rules import (
    attention_kernels,
    attention_taken_over,
    audit_text,
    cautions,
    problems,
    without_hidden_products,
)
from fp8study.core.config import RunConfig, make_config
from fp8study.measure.audit import SAMPLES, FirstStepAudit, audited_products, conversion
from fp8study.measure.flops import Work
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8
from fp8study.model.kept_weights import keep_weights, refresh
from tests.checkout import committed_runs

FP8 = make_config({"model": "tiny-llama", "precision": "fp8", "fp8_all_gather": True,
                   "strategy": "none", "fp8_emulate": True})  # fmt: skip


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
    audit.gradients_ready(model.parameters())
    if lose is not None:
        model.get_parameter(lose).grad = None
    optimizer.step()
    return audit.after()


def converted(config: RunConfig = FP8) -> torch.nn.Module:
    model = tiny()
    convert_to_float8(model, config)
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
    convert_to_float8(model, FP8)
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


@pytest.mark.parametrize("stale", ["before", "after", None])
def test_fp8_weights_that_have_not_followed_their_weights_are_found(stale: str | None) -> None:
    values = {"precision": "fp8", "strategy": "none", "fp8_emulate": True}
    values |= {"weight_cast": "each_update", "gradient_accumulation_steps": 2}
    config = make_config(values)
    model = converted(config)
    keep_weights(model, config.resolved())
    optimizer = adamw(model)
    if stale == "before":  # as if they were not made anew from weights that were read
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.1)
    if stale != "after":
        optimizer.register_step_post_hook(lambda *_: refresh(model))
    audit = conversion(model, FP8) | first_step(model, optimizer)
    assert audit["num_stale_casts"] == {"before": 1, "after": 28, None: 0}[stale]
    if stale is None:
        assert problems(audit) == []
    else:
        (problem,) = problems(audit)
        assert "multiply with a kept weight that is not their weight's: model.layers" in problem


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


def test_products_that_ran_in_another_arithmetic_than_they_should_are_found() -> None:
    work = Work(flops_per_token=1100, attention_flops_per_token=100, fp8_flops_per_token=800)
    step = {"gemm": [{"dtypes": "bfloat16 × bfloat16"}], "fp8_gemm_flops_pct": 0.0,
            "communication": [{"collective": "all_gather", "dtype": "uint8"},
                              {"collective": "all_gather", "dtype": "bfloat16"}]}  # fmt: skip
    silent = audited_products(step, work, emulated=False)
    assert silent["fp8_gemm_flops_pct_expected"] == pytest.approx(80)
    assert silent["communication_dtypes"] == {"all_gather": ["uint8", "bfloat16"]}
    assert problems(silent) == [
        "0 % of the GEMMs' FLOPs ran in FP8 in the profiled step, but 80 % should"
    ]
    healthy = audited_products(step | {"fp8_gemm_flops_pct": 79.0}, work, emulated=False)
    assert problems(healthy) == []
    stray = audited_products(step | {"fp8_gemm_flops_pct": 3.0}, Work(1100, 100, 0.0), False)
    assert problems(stray) == ["3 % of the GEMMs' FLOPs ran in FP8, but none should"]
    # Emulated products are in high precision by design, and other ranks record nothing.
    assert problems(audited_products(step, work, emulated=True)) == []
    assert audited_products({}, work, emulated=False) == {}


def test_the_kernel_that_did_attention_is_told_if_another_was_preferred() -> None:
    backward = "_scaled_dot_product_flash_attention_backward"
    by_flash = {"operations": {
        "bfloat16": ["_scaled_dot_product_flash_attention", backward, "mul"],
        "float32": ["_scaled_dot_product_flash_attention", "_cudnn_attention_forward"],
    }}  # fmt: skip
    by_math = {"operations": {"bfloat16": ["_softmax", "mul"]}}
    assert attention_kernels(by_flash) == ["flash"] and attention_kernels(by_math) == []
    told = "attention: {} ran, where {} was preferred"
    assert attention_taken_over("cudnn", by_flash) == told.format("flash", "cudnn")
    none = "none of torch's fused kernels"
    assert attention_taken_over("flash4", by_math) == told.format(none, "flash4")
    for asked in ("default", "flash", "flash4"):
        assert attention_taken_over(asked, by_flash) == ""
    assert attention_taken_over("default", by_math) == ""
    assert attention_taken_over("cudnn", {}) == ""  # nothing was profiled


def test_all_records_did_attention_by_the_kernel_that_they_asked_for() -> None:
    asked = {"cudnn": 0, "flash4": 0}
    for run in committed_runs():
        step = run.record.instruments.get("step", {})
        preferred = run.record.config.get("attention")
        if step.get("operations") and preferred in asked:
            assert attention_taken_over(preferred, step) == "", run.record.run_id
            asked[preferred] += 1
    assert asked["cudnn"] > 600 and asked["flash4"] >= 10


def test_experts_and_routers_stay_out_of_fp8_whatever_their_shape() -> None:
    def linear() -> torch.nn.Linear:
        return torch.nn.Linear(32, 32)

    mlp = torch.nn.ModuleDict(
        {
            "gate": linear(),
            "experts": torch.nn.ModuleList([torch.nn.ModuleDict({"up_proj": linear()})]),
            "shared_expert": torch.nn.ModuleDict({"gate_proj": linear()}),
            "shared_expert_gate": linear(),
        }
    )
    layer = torch.nn.ModuleDict(
        {"mlp": mlp, "self_attn": torch.nn.ModuleDict({"o_proj": linear()})}
    )
    dense = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate_proj": linear()})})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer, dense])})
    config = make_config({"precision": "fp8", "skip": ()})
    convert_to_float8(model, config)
    audit = conversion(model, config)
    assert audit["skipped"] == {"router of a mixture of experts": 2, "expert of a mixture": 2}
    assert (audit["num_linear_fp8"], audit["num_unexplained"]) == (2, 0)


@pytest.mark.parametrize("shape", [(2048, 2048), (14336, 4096), (1024, 3072), (4096, 14336)])
def test_the_sample_of_a_weight_sees_many_of_its_columns(shape: tuple[int, int]) -> None:
    """Row lengths of Llama's weights; a stride that they divide by would meet few columns."""
    columns = torch.arange(shape[1], dtype=torch.float32).expand(shape).contiguous()
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(columns)
    audit = FirstStepAudit(model, torch.optim.SGD(model.parameters()))
    audit.before()
    sample = audit._before["weight"]
    assert SAMPLES / 2 < len(sample) <= 2 * SAMPLES
    assert len(sample.unique()) > 0.9 * min(shape[1], len(sample))


def test_layers_of_odd_shape_are_explained() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even, self.odd = torch.nn.Linear(32, 32), torch.nn.Linear(32, 17)

    config = make_config({"precision": "fp8_rowwise", "skip": ()})
    model = Odd()
    convert_to_float8(model, config)
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


def test_products_inside_of_cuda_graphs_are_not_judged() -> None:
    audit = {"num_linear": 3, "fp8_gemm_flops_pct": 0.0, "fp8_gemm_flops_pct_expected": 79.0}
    assert len(problems(without_hidden_products(audit, {"compile_mode": "default"}))) == 1
    assert without_hidden_products(audit, {"compile_mode": "reduce-overhead"}) == {"num_linear": 3}


def test_products_that_were_counted_twice_are_not_judged() -> None:
    audit = {"fp8_gemm_flops_pct": 38.0, "fp8_gemm_flops_pct_expected": 79.0}
    audit["matmul_dtypes"] = ["float8_e5m2 × float8_e4m3fn", "bfloat16 × bfloat16"]
    assert len(problems(without_hidden_products(audit, {}))) == 1
    audit["matmul_dtypes"].append("bfloat16 × float32")
    assert problems(without_hidden_products(audit, {"compile": True}))
    assert not problems(without_hidden_products(audit, {"compile": False}))
    step = {"fp8_gemm_flops_pct": 38.0, "gemm": [{"dtypes": "bfloat16 × float32"}]}
    assert without_hidden_products(step, {"compile": False}) == {"gemm": step["gemm"]}
