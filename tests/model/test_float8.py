from dataclasses import replace
from typing import Any

import pytest
import torch
from torchao.float8 import convert_to_float8_training
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear

from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8, float8_config, float8_filter, is_converted
from fp8study.model.kept_weights import keep_weights
from fp8study.model.sharding import parameters_outside_optimizer_pct
from tests.checkout import ROOT, run_python


def fp8(**changes: Any) -> RunConfig:
    return make_config({"model": "tiny-llama", "precision": "fp8", "fp8_emulate": True} | changes)


def tiny(seed: int = 0) -> torch.nn.Module:
    return build_model("tiny-llama", torch.float32, torch.device("cpu"), seed)


def fp8_names(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    """A tiny model that tests may look at but not change."""
    return tiny()


def test_all_linear_layers_but_the_head_become_fp8() -> None:
    model = tiny()
    convert_to_float8(model, fp8())
    assert len(fp8_names(model)) == 28
    assert "lm_head" not in fp8_names(model)


def test_bf16_run_is_left_as_it_is() -> None:
    model = tiny()
    convert_to_float8(model, make_config({"precision": "bf16"}))
    assert not fp8_names(model)


@pytest.mark.parametrize("path", ["plain", "tuned"])
@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_rowwise"])
def test_gemms_of_the_backward_pass_add_up_with_fewer_bits_where_that_is_asked(
    precision: str, path: str
) -> None:
    for asked, expected in (("forward", [True, False, False]), ("all", [True] * 3)):
        config = fp8(
            precision=precision, fast_accumulation=asked, path=path, strategy="none", skip="lm_head"
        ).resolved()
        model = tiny()
        convert_to_float8(model, config)
        if config.weight_cast == "each_update":
            keep_weights(model, config)
        layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
        assert len(layers) == 28
        for layer in layers:
            gemm = layer.linear_mm_config
            found = [gemm.output, gemm.grad_input, gemm.grad_weight]
            assert [each.use_fast_accum for each in found] == expected


@pytest.mark.parametrize(
    ("skip", "num_fp8"),
    [
        ((), 29),
        (("lm_head", "model.layers.0.*"), 21),
        (("lm_head", "*.self_attn.[qk]_proj"), 20),
        (("*",), 0),
    ],
)
def test_skip_patterns_keep_layers_out(
    skip: tuple[str, ...], num_fp8: int, plain: torch.nn.Module
) -> None:
    convert = float8_filter(fp8(skip=skip), plain)
    assert sum(convert(module, name) for name, module in plain.named_modules()) == num_fp8


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("lm_haed", "did you mean 'lm_head'"), ("q_proj", "full module names"), ("model", "skip")],
)
def test_skip_pattern_that_matches_no_linear_layer_is_refused(
    pattern: str, words: str, plain: torch.nn.Module
) -> None:
    with pytest.raises(UserError, match=rf"^skip: '{pattern}' matches no linear layer") as caught:
        float8_filter(fp8(skip=("lm_head", pattern)), plain)
    assert words in str(caught.value)


def test_layers_that_do_not_divide_by_sixteen_are_left() -> None:
    shapes = {"good": (32, 48), "narrow": (24, 32), "short": (32, 40)}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(*s) for name, s in shapes.items()})
    convert_to_float8(model, fp8(skip=()))
    assert fp8_names(model) == {"good"}


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("gather", [True, False])
def test_emulation_and_all_gather_are_handed_to_torchao(emulate: bool, gather: bool) -> None:
    recipe = float8_config(fp8(fp8_all_gather=gather, fp8_emulate=emulate))
    assert (recipe.emulate, recipe.enable_fsdp_float8_all_gather) == (emulate, gather)


@pytest.mark.parametrize(
    ("precision", "granularity", "weight_gradient"),
    [
        ("fp8_tensorwise", ScalingGranularity.TENSORWISE, ScalingType.DYNAMIC),
        ("fp8_rowwise", ScalingGranularity.AXISWISE, ScalingType.DYNAMIC),
        ("fp8_rowwise_gw_hp", ScalingGranularity.AXISWISE, ScalingType.DISABLED),
    ],
)
def test_precision_chooses_the_recipe(
    precision: str, granularity: ScalingGranularity, weight_gradient: ScalingType
) -> None:
    recipe = float8_config(fp8(precision=precision, strategy="fsdp2"))
    assert recipe.cast_config_weight.scaling_granularity is granularity
    assert recipe.cast_config_input_for_grad_weight.scaling_type is weight_gradient


@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_rowwise"])
def test_emulated_product_is_rounded_as_fp8_would(precision: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    batch = torch.randn(16, 64)
    exact = model(batch)
    convert_to_float8(model, fp8(precision=precision, skip=()))
    rounded = model(batch)
    error = float(((rounded - exact).norm() / exact.norm()).detach())
    assert 0.005 < error < 0.08  # three mantissa bits
    rounded.sum().backward()
    assert model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("gather", [True, False])
def test_optimizer_made_before_conversion_misses_the_weights_only_with_fp8_all_gather(
    gather: bool,
) -> None:
    model = tiny()
    before = torch.optim.AdamW(model.parameters())
    convert_to_float8(model, fp8(fp8_all_gather=gather))
    after = torch.optim.AdamW(model.parameters())
    outside = parameters_outside_optimizer_pct(model, before)
    converted = sum(model.get_parameter(f"{name}.weight").numel() for name in fp8_names(model))
    total = sum(p.numel() for p in model.parameters())
    assert outside == (pytest.approx(100 * converted / total) if gather else 0)
    assert (outside > 50) is gather
    assert parameters_outside_optimizer_pct(model, after) == 0


def test_optimizer_made_before_conversion_trains_nothing_with_fp8_all_gather() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    stale = torch.optim.AdamW(model.parameters(), lr=0.01)
    convert_to_float8(model, fp8(fp8_all_gather=True, skip=()))
    batch, fresh = torch.randn(16, 32), torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for optimizer in (stale, stale, fresh, fresh):
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1] == losses[2] > losses[3]


def test_frozen_weights_are_not_missed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    assert parameters_outside_optimizer_pct(model, optimizer) == 0


def tied() -> torch.nn.Module:
    model = tiny()
    model.get_output_embeddings().weight = model.get_input_embeddings().weight  # type: ignore[operator]
    return model


def test_all_gather_would_part_a_tied_loss_head_and_is_refused() -> None:
    with pytest.raises(UserError, match=r"^skip: the loss head shares its weight"):
        convert_to_float8(tied(), fp8(skip=[], fp8_all_gather=True))


@pytest.mark.parametrize("changes", [{"skip": []}, {"fp8_all_gather": True}])
def test_a_tied_loss_head_may_be_converted_or_gathered_but_not_both(
    changes: dict[str, Any],
) -> None:
    model = tied()
    convert_to_float8(model, fp8(**changes))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]


def test_uneven_shards_of_fp8_weights_are_refused_before_anything_is_converted() -> None:
    model, config = tiny(), fp8(num_gpus=3)
    with pytest.raises(UserError, match=r"num_gpus: 3 does not divide the 128 rows of .*q_proj"):
        convert_to_float8(model, config.resolved())
    assert not any(is_converted(module) for module in model.modules())
    convert_to_float8(model, replace(config, fp8_all_gather=False))
    assert any(is_converted(module) for module in model.modules())


def test_libraries_say_nothing_before_an_answer() -> None:
    """Nor torch of Triton, where our operators are made without it."""
    modules = "fp8study.model.build, fp8study.model.swiglu, torchao, torchao.float8"
    done = run_python(ROOT, "-c", f"import {modules}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"])
@pytest.mark.parametrize("tokens", [7, 16])
def test_a_run_on_a_gpu_is_refused_where_torch_refuses_its_tokens(
    precision: str, tokens: int
) -> None:
    """Shapes are checked on the meta device as on a GPU."""
    config = fp8(precision=precision, fp8_emulate=None, strategy="fsdp2")
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16))
    convert_to_float8_training(layer.to("meta"), config=float8_config(config))
    inputs = torch.empty(tokens, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    asked = replace(config, sequence_length=tokens)
    asked.resolved(on_gpu=False)  # emulated, any number can be
    outputs = layer(inputs)
    if tokens % 16 == 0 or precision == "fp8_rowwise_gw_hp":
        outputs.backward(torch.empty_like(outputs))
        asked.resolved(on_gpu=True)
        return
    with pytest.raises(RuntimeError, match="divisible by 16"):
        outputs.backward(torch.empty_like(outputs))
    with pytest.raises(UserError, match="passes that are no multiple of 16 tokens"):
        asked.resolved(on_gpu=True)


def test_a_model_without_a_loss_head_is_told_what_to_set() -> None:
    layers = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(16, 16, bias=False)})
    with pytest.raises(UserError, match=r"has no linear layer 'lm_head', .*; .* or use skip=none$"):
        float8_filter(make_config({"precision": "fp8"}).resolved(), layers)
    everything = make_config({"precision": "fp8", "skip": "none"}).resolved()
    assert float8_filter(everything, layers)(layers["q_proj"], "q_proj")
