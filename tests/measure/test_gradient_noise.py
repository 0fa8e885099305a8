"""Per-sequence gradients, their errors and inner products, against straightforward ones."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fp8study.analysis.noise import moments as noise
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.recipes import FP8_RECIPES
from fp8study.data.tokens import BlockOrder
from fp8study.measure.gradient_noise import GradientSet, _gradients, measure_noise
from fp8study.measure.noise_meter import check_room, free_bytes
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8
from fp8study.model.shadows import Shadows

CONFIG = make_config({"model": "tiny-llama", "strategy": "none", "fp8_emulate": True})
CPU = torch.device("cpu")
N, T = 4, 24


@pytest.fixture(scope="module")
def trained() -> torch.nn.Module:
    return build_model("tiny-llama", torch.float32, CPU, seed=0)


@pytest.fixture(scope="module")
def ids_NT() -> torch.Tensor:
    return torch.randint(0, 2048, (N, T), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def point(trained: torch.nn.Module, ids_NT: torch.Tensor) -> dict[str, Any]:
    return measure_noise(CONFIG, trained, ids_NT)


def straightforward(trained: torch.nn.Module, ids_T: torch.Tensor, precision: str) -> torch.Tensor:
    """Return the gradient of a copy of the model, made and converted on its own, as one vector."""
    model = copy.deepcopy(trained)
    if precision != "fp32":
        model = model.to(torch.bfloat16)
        for (_, ours), (_, theirs) in zip(
            model.named_buffers(), trained.named_buffers(), strict=True
        ):
            ours.data = theirs.data.clone()  # FSDP2 leaves buffers in FP32
    if precision in FP8_RECIPES:
        recipe = dataclasses.replace(CONFIG, strategy="fsdp2", precision=precision)
        convert_to_float8(model, recipe)
    model(input_ids=ids_T[None], labels=ids_T[None]).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def comparison(point: dict[str, Any], precision: str, reference: str) -> dict[str, Any]:
    pairs = {(c["precision"], c["reference"]): c for c in point["comparisons"]}
    return pairs[precision, reference]


def test_all_pairs_that_matter_are_compared(point: dict[str, Any]) -> None:
    pairs = [(c["precision"], c["reference"], "error_grams" in c) for c in point["comparisons"]]
    expected = [("bf16", "fp32", True)]
    for recipe in FP8_RECIPES:
        expected += [(recipe, "bf16", True), (recipe, "fp32", False)]
    assert pairs == expected


def test_gradients_are_those_of_a_model_made_for_the_purpose(
    trained: torch.nn.Module, ids_NT: torch.Tensor, point: dict[str, Any]
) -> None:
    rows = torch.stack([straightforward(trained, ids_T, "bf16") for ids_T in ids_NT])
    gram = np.array(point["gradient_grams"]["all"])
    assert np.allclose(gram, (rows @ rows.T).numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("precision", "reference"),
    [("bf16", "fp32"), *((r, "bf16") for r in FP8_RECIPES), ("fp8_rowwise", "fp32")],
)
def test_errors_are_those_of_two_models(
    precision: str, reference: str, trained: torch.nn.Module, ids_NT: torch.Tensor,
    point: dict[str, Any],
) -> None:  # fmt: skip
    errors = torch.stack(
        [
            straightforward(trained, t, precision) - straightforward(trained, t, reference)
            for t in ids_NT
        ]
    )
    found = comparison(point, precision, reference)
    square = float(errors.square().sum(1).mean())
    assert sum(found["error_square"]) == pytest.approx(square, rel=1e-4)
    if "error_grams" in found:
        gram = np.array(found["error_grams"]["all"])
        assert np.allclose(gram, (errors @ errors.T).numpy(), rtol=0.01, atol=1e-3 * square)


def test_the_parts_add_up_and_fp8_layers_are_a_scope_of_their_own(point: dict[str, Any]) -> None:
    parts = point["parameters"]
    assert sum(parts["is_fp8"]) == 28
    assert not parts["is_fp8"][parts["names"].index("lm_head.weight")]
    everything, fp8 = (np.array(point["gradient_grams"][s]) for s in ("all", "fp8_layers"))
    square = np.array(parts["square"]["bf16"])
    assert square.sum() == pytest.approx(np.trace(everything) / N, rel=1e-3)
    assert square[parts["is_fp8"]].sum() == pytest.approx(np.trace(fp8) / N, rel=1e-3)


def test_fp8_is_worse_than_bf16_and_the_recipes_differ_as_they_should(
    point: dict[str, Any],
) -> None:
    error = {c["precision"]: sum(c["error_square"]) for c in point["comparisons"]}
    assert error["bf16"] < 0.05 * error["fp8_rowwise_gw_hp"]
    assert error["fp8_rowwise_gw_hp"] < error["fp8_rowwise"] < error["fp8_tensorwise"]
    assert len(point["losses"]["fp8_rowwise"]) == N
    assert point["losses"]["fp8_rowwise"] == point["losses"]["fp8_rowwise_gw_hp"]  # same forward


def test_measuring_leaves_no_trace(trained: torch.nn.Module, ids_NT: torch.Tensor) -> None:
    model = copy.deepcopy(trained)
    torch.manual_seed(1234)
    random_state = torch.get_rng_state()
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as a training with TF32 would
    try:
        measure_noise(CONFIG, model, ids_NT[:2, :8])
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(chosen)
    assert torch.equal(torch.get_rng_state(), random_state)
    for (name, before), after in zip(trained.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after), name
        assert after.grad is None
        assert after.requires_grad


def test_shadows_hold_one_copy_of_the_weights(trained: torch.nn.Module) -> None:
    shadows = Shadows(CONFIG, trained)
    name = "model.layers.0.mlp.up_proj.weight"
    master = trained.get_parameter(name)
    assert shadows.models["fp32"].get_parameter(name).data_ptr() == master.data_ptr()
    shared = {id(shadows.models[p].get_parameter(name)) for p in ("bf16", *FP8_RECIPES)}
    assert len(shared) == 1
    assert all(p.device.type == "cpu" for m in shadows.models.values() for p in m.parameters())
    assert all(b.device.type == "cpu" for m in shadows.models.values() for b in m.buffers())


def test_shadows_cast_in_each_pass_whatever_the_run_keeps(trained: torch.nn.Module) -> None:
    kept = {"precision": "fp8", "weight_cast": "each_update", "swiglu": "kernels",
            "transposes": "separate"}  # fmt: skip
    shadows = Shadows(make_config(CONFIG.to_dict() | kept).resolved(), trained)
    kinds = {type(m).__name__ for model in shadows.models.values() for m in model.modules()}
    assert {"Float8Linear", "LlamaMLP"} <= kinds
    assert not {"OwnFloat8Linear", "GatedLlamaMLP"} & kinds


def test_tied_weights_stay_tied_and_frozen_ones_are_left_out() -> None:
    config = make_config({"model": "tiny-llama", "fp8_emulate": True})
    model = build_model("tiny-llama", torch.float32, CPU, seed=0)
    model.model.norm.weight.requires_grad_(False)
    shadows = Shadows(config, model)
    assert "model.norm.weight" not in shadows.names
    assert len(shadows.trainable("bf16")) == len(shadows.names)
    tied = build_model("llama-3.2-1b", torch.float32, torch.device("meta"), seed=0)
    rebuilt = Shadows(make_config({"model": "llama-3.2-1b", "fp8_emulate": True}), tied)
    for shadow in rebuilt.models.values():
        assert shadow.lm_head.weight is shadow.model.embed_tokens.weight
    assert len(rebuilt.names) == 146


class Analytic:
    """Stands in for `Shadows`: a linear model whose gradients are known on paper.

    Loss (w·x - y)²/2 has the gradient (w·x - y) x. All numbers are small integers, which BF16
    holds exactly; each recipe adds a planted error.
    """

    names: tuple[str, ...] = ("first", "second")
    is_fp8: tuple[bool, ...] = (True, False)

    def __init__(self) -> None:
        self.models = dict.fromkeys(("fp32", "bf16", *FP8_RECIPES))
        self.weights = [torch.nn.Parameter(torch.tensor(v)) for v in ([1.0, -2.0], [[3.0], [1.0]])]

    def trainable(self, precision: str) -> list[torch.nn.Parameter]:
        return self.weights

    def planted(self, precision: str, ids_T: torch.Tensor) -> torch.Tensor:
        """Return a systematic 2 on the first weight, and ±4 on the third, by sequence."""
        error = torch.zeros(4)
        if precision in FP8_RECIPES:
            error[0], error[2] = 2, 4 * (-1) ** int(ids_T[0])
        return error

    def gradient(
        self, precision: str, ids_T: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        x = ids_T.float()
        flat = torch.cat([w.flatten() for w in self.weights])
        loss = (flat @ x - 1).square() / 2
        found = torch.autograd.grad(loss, self.weights)
        error = self.planted(precision, ids_T).split([2, 2])
        wrong = tuple(g + e.view(g.shape) for g, e in zip(found, error, strict=True))
        return wrong, loss.detach()


def test_a_linear_model_with_gradients_and_errors_known_on_paper() -> None:
    ids = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0], [2, 0, 1, 3], [3, 2, 0, 1]])
    point = _gradients(Analytic(), ids)  # type: ignore[arg-type]
    x = ids.double().numpy()
    paper = (x @ [1, -2, 3, 1] - 1)[:, None] * x
    assert np.array_equal(point["gradient_grams"]["all"], paper @ paper.T)
    assert np.array_equal(point["gradient_grams"]["fp8_layers"], paper[:, :2] @ paper[:, :2].T)
    squares = [np.square(part).sum(1).mean() for part in (paper[:, :2], paper[:, 2:])]
    assert point["parameters"]["square"]["bf16"] == pytest.approx(squares, rel=1e-4)
    assert point["parameters"]["square"]["fp32"] == pytest.approx(squares, rel=1e-4)
    assert sum(comparison(point, "bf16", "fp32")["error_square"]) == 0
    found = comparison(point, "fp8_tensorwise", "bf16")
    assert found["error_square"] == [4, 16]
    assert found["error_dot_reference"][0] == pytest.approx(2 * paper[:, 0].mean())
    signs = np.array([(-1) ** i for i in ids[:, 0].tolist()])
    assert np.array_equal(found["error_grams"]["all"], 4 + 16 * np.outer(signs, signs))
    assert noise.moments(noise.gram_matrix(found["error_grams"]["fp8_layers"])).trace == 0


@pytest.mark.parametrize("numel", [7, 1024, 10_000])
def test_inner_products_are_exact_whatever_the_size(numel: int) -> None:
    torch.manual_seed(0)
    stored = GradientSet([torch.nn.Parameter(torch.empty(numel))], 5)
    stored.blocks[0].copy_(torch.randn(5, numel) + 10)
    rows = stored.blocks[0].double()
    assert torch.allclose(stored.grams()[0], rows @ rows.T, rtol=2e-6)


def test_a_measurement_that_does_not_fit_is_refused_with_a_number_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert free_bytes(CPU) > 2**20
    monkeypatch.setattr("fp8study.measure.noise_meter.free_bytes", lambda device: 145e9)
    one_billion = [262_668_288, 973_146_112]  # Llama-3.2-1B: the embedding and the rest
    check_room(16, one_billion, CPU)
    with pytest.raises(UserError, match=r"^noise_samples: 32 need .* lower it to 1\d$") as caught:
        check_room(32, one_billion, CPU)
    check_room(int(str(caught.value).split()[-1]), one_billion, CPU)
    with pytest.raises(UserError, match="use a smaller model"):
        check_room(4, [8_000_000_000], CPU)


def test_the_sequences_are_unseen_fixed_and_refused_when_there_are_none() -> None:
    config = make_config({"num_steps": 20, "sequence_length": 10, "micro_batch_size": 2})
    order = BlockOrder(config, 500)
    chosen = order.unseen(10)
    seen = {b for step in range(20) for b in order.block_ids(step, 0, 0)}
    assert len(seen) == 40
    assert len(set(chosen)) == 10
    assert not seen & set(chosen)
    assert chosen == BlockOrder(config, 500).unseen(10)
    other = dataclasses.replace(config, seed=1)
    assert chosen != BlockOrder(other, 500).unseen(10)
    with pytest.raises(
        UserError, match=r"^noise_samples: 11 sequences .* the 10 that num_steps=20"
    ):
        order.unseen(11)
