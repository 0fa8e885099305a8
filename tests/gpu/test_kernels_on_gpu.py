"""The Triton kernels on a real GPU, and layers that keep what they made."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torchao.float8.float8_utils import tensor_to_scale

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from fp8study.core.config import make_config
from fp8study.measure.audit import stale_casts
from fp8study.model import kernels
from fp8study.model.attention import imply_causal_mask
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8
from fp8study.model.kept_weights import FP8, keep_weights, refresh
from fp8study.model.optimizer import OnePassAdamW, make_optimizer
from fp8study.model.sharding import after_update, make_accelerator, prepare
from fp8study.model.updates import _norm_by_kernel, _total_norm, make_updates
from tests.model.kernel_checks import (
    DTYPES,
    SHAPES,
    check_both_layouts,
    check_gated,
    check_logits_gradient,
    check_squares,
    check_sum,
    check_transpose,
    check_turned_gradients,
    check_update,
)

pytestmark = pytest.mark.requires_gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 14336), (14336, 1024), (1000, 1001)])
def test_both_layouts_are_to_the_bit_those_of_plain_torch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight_MK = torch.randn(shape, device=DEVICE)
    for spread in (0.0, 2.0):  # the second reaches FP8's smallest numbers, and zero
        spread_MK = (weight_MK * 10 ** (spread * torch.randn_like(weight_MK))).to(dtype)
        check_both_layouts(spread_MK, tensor_to_scale(spread_MK, FP8))
        check_both_layouts(spread_MK, 3 * tensor_to_scale(spread_MK, FP8))  # beyond the largest
    check_both_layouts(torch.zeros_like(weight_MK), torch.tensor(1e12, device=DEVICE))


@pytest.mark.parametrize("shape", [*SHAPES, (4096, 14336), (14336, 4096), (1000, 1001)])
def test_a_transpose_moves_every_byte(shape: tuple[int, int]) -> None:
    check_transpose(shape, "cuda")


@pytest.mark.parametrize("num", [7, 2048, 1_000_001, 1056 * 2048, 525_336_576])
def test_sums_of_two_gradients_are_to_the_bit_those_of_plain_torch(num: int) -> None:
    check_sum(num, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [7, 4096, 1_000_001, 1056 * 2048, 525_336_576])
def test_squares_add_up_as_in_fp64(num: int, dtype: torch.dtype) -> None:
    check_squares(num, dtype, "cuda")


def test_the_norm_of_many_gradients_is_torchs() -> None:
    gradients = [torch.randn(n, n, device=DEVICE).bfloat16() for n in (3, 64, 1000)]
    gradients += [torch.randn(n, device=DEVICE) for n in (5, 4096)]
    torch.testing.assert_close(_norm_by_kernel(gradients), _total_norm(gradients))


def test_what_is_no_number_stays_none() -> None:
    weight_MK = torch.ones(48, 32, device=DEVICE)
    weight_MK[7, 5] = float("nan")
    kept = torch.zeros(2, 48 * 32, device=DEVICE).to(FP8)
    scale = torch.tensor(1.0, device=DEVICE)
    kernels.cast_both(weight_MK, scale, kept[0].view(48, 32), kept[1].view(32, 48))
    rows_MK, columns_KM = kept[0].view(48, 32).float(), kept[1].view(32, 48).float()
    assert torch.equal(rows_MK.isnan(), weight_MK.isnan())
    assert torch.equal(columns_KM.isnan(), weight_MK.isnan().t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("num", [1, 2047, 2048, 1_000_001])
def test_one_pass_updates_as_plain_torch(
    num: int, divisor: float | None, dtype: torch.dtype
) -> None:
    check_update(num, divisor, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [1, 2047, 16_384, 8_388_608])
def test_swiglu_is_torchs_and_its_casts_torchaos(num: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_gated(num, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 14336), (1000, 1001)])
def test_one_kernel_turns_swiglus_gradients_to_the_bit_as_three_more(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check_turned_gradients(shape, dtype, "cuda")


class Layers(torch.nn.Module):
    """What has decoder layers: one linear layer."""

    def __init__(self, wide: int, high: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(wide, high, device=DEVICE))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]


NARROW = {"update_kernel": "one_pass", "gradient_dtype": "compute"}
WAYS: list[dict[str, Any]] = [
    {"precision": "fp8", "weight_cast": "each_update"},
    {"precision": "fp8", "weight_cast": "each_update", "transposes": "separate"},
    {"precision": "fp8", "weight_cast": "each_update", "cast_kernels": "both_layouts"},
    {"precision": "fp8", "weight_cast": "each_update", "transposes": "separate", **NARROW},
    {"precision": "bf16", **NARROW},
]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda v: "-".join(v.values()))
@pytest.mark.parametrize("shape", [(4, 64, 256, 512), (1, 48, 4096, 1040)])
def test_a_layer_multiplies_to_the_bit_as_torchs(
    shape: tuple[int, ...], way: dict[str, Any], compiles: bool
) -> None:
    sequences, tokens, wide, high = shape
    torch.manual_seed(0)
    torch._dynamo.reset()
    theirs = Layers(wide, high)
    values = way | {"strategy": "none", "skip": "", "fp8_emulate": False}
    config = make_config(values).resolved()
    convert_to_float8(theirs, config)
    ours = copy.deepcopy(theirs)
    keep_weights(ours, config)
    batches = [torch.randn(sequences, tokens, wide, device=DEVICE).bfloat16() for _ in range(3)]
    found: list[list[torch.Tensor]] = []
    for net in (theirs, ours):
        run = torch.compile(net, fullgraph=True) if compiles else net
        optimizer, seen = OnePassAdamW(net.parameters(), lr=0.01), []
        (layer,) = net.layers[0]  # type: ignore[misc]
        for batch in batches:
            x = batch.clone().requires_grad_()
            with torch.autocast("cuda", torch.bfloat16):
                output = run(x)
            output.backward(torch.linspace(-1, 1, output.numel()).to(output).view_as(output))
            assert x.grad is not None and layer.weight.grad is not None
            seen += [output.detach(), x.grad, layer.weight.grad.float()]
            optimizer.step()
            optimizer.zero_grad()
            if net is ours:
                refresh(net)
        found.append([*seen, layer.weight.detach()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[3]], ids=lambda v: "-".join(v.values()))
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_with_both_follows_its_weights_and_does_not_wait(
    max_grad_norm: float | None, way: dict[str, Any]
) -> None:
    values: dict[str, Any] = way | {
        "model": "tiny-llama", "strategy": "none", "path": "tuned", "compile": False,
        "update_kernel": "one_pass", "max_grad_norm": max_grad_norm, "fp8_emulate": False,
    }  # fmt: skip
    config = make_config(values).resolved()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    model: Any = build_model(config.model, torch.float32, DEVICE, seed=0)
    assert imply_causal_mask(model, config) is None
    model, optimizer = prepare(
        config, make_accelerator(config, model), model, partial(make_optimizer, config)
    )
    updates = make_updates(config, model, optimizer, after_update(config, model))
    ids_BT = torch.randint(0, 2048, (2, 64), device=DEVICE)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            updates.expect(wants_norm=False)
            model(input_ids=ids_BT, labels=ids_BT).loss.backward()
            updates.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert stale_casts(model) == {"num_stale_casts": 0, "stale_casts": []}
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("shape", [*SHAPES, (2048, 128256)])
def test_the_gradient_by_logits_is_plain_torchs_in_both_layouts(shape: tuple[int, int]) -> None:
    check_logits_gradient(shape, "cuda")
