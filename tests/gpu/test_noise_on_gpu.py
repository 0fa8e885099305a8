"""What only a GPU can show: real FP8 products against emulated ones, and FP32 without TF32."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fp8study.core.config import make_config
from fp8study.measure.gradient_noise import exact_fp32, measure_noise
from fp8study.model.build import build_model
from fp8study.model.shadows import Shadows

CONFIG = make_config({"model": "tiny-llama", "fp8_emulate": False})
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)

pytestmark = [
    pytest.mark.requires_gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with FP8 tensor cores"),
]


@pytest.fixture(scope="module")
def trained() -> torch.nn.Module:
    return build_model("tiny-llama", torch.float32, DEVICE, seed=0)


@pytest.fixture(scope="module")
def ids_NT() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 2048, (4, 128), generator=draw).to(DEVICE)


def squares(point: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(c["precision"], c["reference"]): sum(c["error_square"]) for c in point["comparisons"]}


def test_real_fp8_errs_as_much_as_emulated(trained: torch.nn.Module, ids_NT: torch.Tensor) -> None:
    real = measure_noise(CONFIG, trained, ids_NT)
    emulated = measure_noise(replace(CONFIG, fp8_emulate=True), trained, ids_NT)
    found, expected = squares(real), squares(emulated)
    for pair in expected:
        assert found[pair] == pytest.approx(expected[pair], rel=0.2), pair
    for recipe, products in emulated["products"]["values"].items():
        for product, rows in products.items():
            theirs = np.array(real["products"]["values"][recipe][product])
            # Operands are cast alike; a product may differ by its accumulation.
            assert np.allclose(theirs[:, 1:], np.array(rows)[:, 1:], rtol=0.05, atol=1e-4)
            assert np.allclose(theirs[:, 0], np.array(rows)[:, 0], rtol=0.2, atol=1e-3)


def test_fp32_is_fp32_even_if_training_allows_tf32(
    trained: torch.nn.Module, ids_NT: torch.Tensor
) -> None:
    ids_T = ids_NT[0]
    exact = copy.deepcopy(trained).double()
    loss = exact(input_ids=ids_T[None], labels=ids_T[None]).loss
    theirs = torch.autograd.grad(loss, list(exact.parameters()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with exact_fp32():
            ours, _ = Shadows(CONFIG, trained).gradient("fp32", ids_T)
    finally:
        torch.set_float32_matmul_precision(before)
    wrong = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    assert wrong < 1e-9 * sum(float(b.square().sum()) for b in theirs)  # TF32: some 1e-6
