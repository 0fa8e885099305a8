"""Single FP8 products: what we cast is what torchao's layer casts, and the counts are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchao.float8.float8_linear import Float8Linear

from fp8study.core.config import make_config
from fp8study.core.recipes import FP8_RECIPES, GEMMS
from fp8study.measure.quantisation import (
    STATISTICS,
    cast_operands,
    largest_rounded,
    measure_products,
    operand_error,
    relative_error,
)
from fp8study.model.float8 import float8_config

#: The two operands of each GEMM, in order.
OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
M, K, N = 32, 48, 64  # tokens, inputs, outputs


def layer(precision: str) -> Any:
    config = make_config({"precision": precision, "strategy": "fsdp2", "fp8_emulate": True})
    plain = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    return Float8Linear.from_float(plain, float8_config(config))


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    input_MK = torch.randn(M, K, generator=draw) * torch.logspace(-3, 1, M)[:, None]
    grad_MN = torch.randn(M, N, generator=draw) * torch.logspace(-16, -4, N)
    return input_MK.bfloat16(), grad_MN.bfloat16()


@pytest.mark.parametrize("precision", FP8_RECIPES)
def test_our_products_are_the_layers_own_bit_for_bit(precision: str) -> None:
    torch.manual_seed(0)
    fp8, (input_MK, grad_MN) = layer(precision), operands()
    input_MK.requires_grad_()
    output = fp8(input_MK)
    grad_input, grad_weight = torch.autograd.grad(output, (input_MK, fp8.weight), grad_MN)
    theirs = {"output": output, "grad_input": grad_input, "grad_weight": grad_weight}
    for product in GEMMS:
        cast = cast_operands(fp8, product, input_MK.detach(), fp8.weight.detach(), grad_MN)
        assert torch.equal(torch.mm(*cast), theirs[product]), product


def test_formats_and_scales_are_the_recipes() -> None:
    input_MK, grad_MN = operands()
    formats, shapes = {}, {}
    for precision in FP8_RECIPES:
        fp8 = layer(precision)
        for product, names in OPERANDS.items():
            cast = cast_operands(fp8, product, input_MK, fp8.weight.detach(), grad_MN)
            for name, tensor in zip(names, cast, strict=True):
                key = (precision, product, name)
                formats[key] = getattr(tensor, "_data", tensor).dtype
                shapes[key] = tuple(tensor._scale.shape) if hasattr(tensor, "_scale") else None
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert formats["fp8_tensorwise", "grad_input", "grad_output"] == e5m2
    assert formats["fp8_rowwise", "grad_input", "grad_output"] == e4m3
    assert formats["fp8_rowwise_gw_hp", "grad_weight", "grad_output"] == torch.bfloat16
    assert shapes["fp8_tensorwise", "output", "input"] == ()
    assert shapes["fp8_rowwise", "output", "input"] == (M, 1)
    assert shapes["fp8_rowwise", "output", "weight"] == (1, N)
    assert shapes["fp8_rowwise", "grad_weight", "grad_output"] == (N, 1)
    assert shapes["fp8_rowwise_gw_hp", "grad_input", "weight"] == ()


@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_rowwise"])
def test_shares_and_errors_by_brute_force(precision: str) -> None:
    fp8, (input_MK, grad_MN) = layer(precision), operands()
    cast, _ = cast_operands(fp8, "grad_weight", input_MK, fp8.weight.detach(), grad_MN)
    exact = grad_MN.t()
    error, underflow, saturated = (float(v) for v in operand_error(exact, cast))
    lost, squares, total = 0, 0.0, 0.0
    for n in range(N):
        for m in range(M):
            scale = float(cast._scale if cast._scale.ndim == 0 else cast._scale[n, 0])
            value, stored = float(exact[n, m]), float(cast._data[n, m])
            lost += value != 0 and stored == 0
            squares += (stored / scale - value) ** 2
            total += value**2
    assert underflow == pytest.approx(lost / (N * M))
    assert error == pytest.approx((squares / total) ** 0.5, rel=1e-4)
    assert saturated == 0  # scales are made from the largest element
    if precision == "fp8_tensorwise":
        assert lost > 0  # outputs twelve decades apart under one scale


def test_what_lies_beyond_the_largest_number_is_counted() -> None:
    class Cast:
        _scale = torch.tensor(1.0)
        _data = torch.tensor([448.0, 448.0, 448.0, -448.0, 0.0]).to(torch.float8_e4m3fn)

    exact = torch.tensor([448.0, 463.0, 465.0, -1000.0, 0.0])  # 463 would round to 448 anyway
    _, underflow, saturated = operand_error(exact, Cast())
    assert float(saturated) == pytest.approx(2 / 5)
    assert float(underflow) == 0
    assert largest_rounded(torch.float8_e4m3fn) == 464
    assert largest_rounded(torch.float8_e5m2) == 61440


def test_one_number_far_out_underflows_the_rest_only_if_they_share_its_scale() -> None:
    input_MK = torch.full((M, K), 1e-3).bfloat16()
    input_MK[0, 0] = 1e4
    _, grad_MN = operands()
    found = {}
    for precision in ("fp8_tensorwise", "fp8_rowwise"):
        fp8 = layer(precision)
        cast, _ = cast_operands(fp8, "output", input_MK, fp8.weight.detach(), grad_MN)
        found[precision] = float(operand_error(input_MK, cast)[1])
    assert found["fp8_tensorwise"] == pytest.approx(1 - 1 / (M * K))
    assert found["fp8_rowwise"] == pytest.approx((K - 1) / (M * K))


def test_relative_error_of_a_known_pair() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert float(relative_error(torch.tensor([3.0, 4.5]), exact)) == pytest.approx(0.1)


class Model(torch.nn.Module):
    """One layer that is converted and one that is not, with the call of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, K, dtype=torch.bfloat16)
        self.first = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
        self.last = torch.nn.Linear(N, 16, bias=False, dtype=torch.bfloat16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.last(self.first(self.embed(input_ids)).relu()).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})()


def test_products_of_a_model_are_those_of_its_operands() -> None:
    torch.manual_seed(0)
    model = Model()
    converted = {}
    for recipe in ("fp8_tensorwise", "fp8_rowwise_gw_hp"):
        converted[recipe] = Model()
        converted[recipe].first = layer(recipe)
    ids_T = torch.arange(16)
    found = measure_products(model, converted, ids_T)
    assert found["layers"] == ["first"]
    assert found["statistics"] == list(STATISTICS)
    assert list(found["values"]) == ["bf16", *converted]
    assert all(len(by) == 3 for by in found["values"].values())

    input_MK = model.embed(ids_T).detach()
    exact = input_MK.float() @ model.first.weight.detach().float().t()
    fp8 = converted["fp8_tensorwise"].first
    cast = cast_operands(fp8, "output", input_MK, model.first.weight.detach(), exact)
    expected = float(relative_error(torch.mm(*cast), exact))
    row = dict(zip(STATISTICS, found["values"]["fp8_tensorwise"]["output"][0], strict=True))
    assert row["error"] == pytest.approx(expected, rel=5e-3)
    assert row["first_error"] > 0 < row["second_error"]
    high, plain = (found["values"][r]["grad_weight"][0] for r in ("fp8_rowwise_gw_hp", "bf16"))
    assert high == plain
    assert not model.first._forward_hooks
    assert all(p.grad is None for p in model.parameters())
