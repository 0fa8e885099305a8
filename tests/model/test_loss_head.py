"""The replaced loss heads against transformers' own: loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS
from fp8study.measure.flops import num_matmul_parameters
from fp8study.model import chunked_head, fp8_head
from fp8study.model.chunked_head import chunked_cross_entropy
from fp8study.model.float8 import convert_to_float8, is_converted
from fp8study.model.loss_head import check_loss_head, replace_loss_head

Gradients = dict[str, torch.Tensor]
HEADS = ("chunked", "compiled")


def tiny(tied: bool = False, seed: int = 0) -> Any:
    values = PRESETS["tiny-llama"] | {
        "num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "head_dim": 16, "tie_word_embeddings": tied,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**values)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def with_head(head: str, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny(tied).to(dtype)
    config = make_config({"model": "tiny-llama", "loss_head": head, "compile": False}).resolved()
    check_loss_head(model, config)
    replace_loss_head(model, config)
    return model


def tokens(shape: tuple[int, int] = (3, 14), ignored: int = 0) -> tuple[Any, Any]:
    """Return ids and labels; the first `ignored` labels of each sequence do not count."""
    ids = torch.randint(0, 512, shape, generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return ids, labels


def loss_and_gradients(
    model: Any, batches: list[tuple[Any, Any]], autocast: bool = False
) -> tuple[float, Gradients]:
    """Accumulate over `batches`, as training does, and watch the last hidden states too."""
    hidden: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        hidden.append(output)

    hook = model.model.norm.register_forward_hook(keep)
    total = 0.0
    for ids, labels in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=labels).loss / len(batches)
        loss.backward()
        total += float(loss.detach())
    hook.remove()
    found = {n: p.grad.float() for n, p in model.named_parameters()}
    return total, found | {f"hidden.{i}": h.grad.float() for i, h in enumerate(hidden)}  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("head", "chunk"),  # of 42 tokens: rests of 10, 1 and 0
    [*(("chunked", chunk) for chunk in (16, 41, 21, 42, 1000)), ("compiled", 0)],
)
def test_head_gives_the_loss_and_every_gradient_of_the_plain_one(
    head: str, tied: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK", chunk)
    batches = [tokens(ignored=5)]
    loss, expected = loss_and_gradients(tiny(tied), batches)
    own_loss, found = loss_and_gradients(with_head(head, tied), batches)
    assert own_loss == pytest.approx(loss, rel=1e-6)
    assert set(found) == set(expected)
    assert ("lm_head.weight" in found) is not tied
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("head", HEADS)
def test_accumulation_adds_up_as_with_the_plain_head(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK", 16)
    batches = [tokens((3, 14)), tokens((2, 9), ignored=3)]
    loss, expected = loss_and_gradients(tiny(True), batches)
    own_loss, found = loss_and_gradients(with_head(head, True), batches)
    assert own_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * scale, msg=name)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("autocast", [False, True])  # BF16 weights as under FSDP2; FP32 masters
def test_bf16_head_is_as_near_to_fp32_as_the_plain_one(
    head: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK", 64)
    monkeypatch.setattr(chunked_head, "_ROWS", 200)  # of a vocabulary of 512
    dtype = torch.float32 if autocast else torch.bfloat16
    batches = [tokens((4, 100), ignored=7)]
    # The same rounded weights for all three, or their rounding would be part of the reference.
    exact = tiny().to(dtype).float()
    loss, expected = loss_and_gradients(exact, batches)
    plain_loss, plain = loss_and_gradients(tiny().to(dtype), batches, autocast)
    own_loss, found = loss_and_gradients(with_head(head, dtype=dtype), batches, autocast)
    assert abs(own_loss - loss) <= 1.5 * abs(plain_loss - loss) + 1e-5
    for name, gradient in expected.items():
        allowed = 1.5 * distance(plain[name], gradient)
        assert 0 < distance(found[name], gradient) <= allowed, name


def test_gradients_of_many_chunks_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    targets = torch.randint(0, 64, (512,))

    def gradient(chunk: int) -> torch.Tensor:
        monkeypatch.setattr(chunked_head, "CHUNK", chunk)
        leaf = weight.clone().requires_grad_()
        chunked_cross_entropy(hidden, leaf, targets, compiles=False).backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        return leaf.grad.float()

    # One rounding at the end, whatever the number of chunks.
    assert distance(gradient(8), gradient(512)) < 1e-3


def test_the_elementwise_part_gives_the_same_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK", 16)
    torch.manual_seed(0)
    targets = torch.randint(0, 48, (40,))
    targets[::3] = -100
    found = []
    for compiles in (False, True):
        torch.manual_seed(1)
        hidden, weight = (torch.randn(n, 32, requires_grad=True) for n in (40, 48))
        loss = chunked_cross_entropy(hidden, weight, targets, compiles)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1])


def test_no_label_left_is_no_number_as_in_torch() -> None:
    model = with_head("chunked")
    ids, labels = tokens(ignored=14)
    assert torch.isnan(model(input_ids=ids, labels=labels).loss)
    assert torch.isnan(tiny()(input_ids=ids, labels=labels).loss)


def test_a_gradient_is_handed_out_once() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8)
    loss = chunked_cross_entropy(hidden, weight, torch.arange(4), compiles=False)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()


@pytest.mark.parametrize(
    ("head", "precision", "group", "nearness"),
    [
        # A row has a scale of its own, so forward chunks change nothing; BF16 sums do a little.
        *((head, "fp8_rowwise", 0, 0.5) for head in HEADS),
        ("compiled", "fp8_tensorwise", 0, 0.5),
        # The bound of a gradient is nearly the largest of it: 1 - 1/512 here.
        *(("chunked", "fp8_tensorwise", group, 0.15) for group in (16, 32, 48, 1000)),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_fp8_head_stays_in_fp8(
    head: str, precision: str, group: int, nearness: float, tied: bool, autocast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(chunked_head, "CHUNK", 16)
    monkeypatch.setattr(fp8_head, "GROUP", group)
    config = make_config(
        {"model": "tiny-llama", "precision": precision, "skip": "", "loss_head": head,
         "compile": False, "fp8_emulate": True, "fp8_all_gather": False}
    ).resolved()  # fmt: skip
    plain, own, bf16 = (tiny(tied) if autocast else tiny(tied).bfloat16() for _ in range(3))
    for model in (plain, own):
        convert_to_float8(model, config)
    replace_loss_head(own, config)
    assert is_converted(own.lm_head)
    (loss, expected), (own_loss, found), (_, wide) = (
        loss_and_gradients(model, [tokens((2, 32), ignored=3)], autocast)
        for model in (plain, own, bf16)
    )
    assert own_loss == pytest.approx(loss, abs=2e-3)
    names = ["hidden.0"] if tied else ["hidden.0", "lm_head.weight"]
    for name in names:
        off = distance(found[name], expected[name])
        # torchao's layer does not see a CPU's autocast, and casts its FP32 input at once.
        near = 0.5 if autocast else nearness
        assert off < near * distance(wide[name], expected[name]), name


def test_an_fp8_heads_gradient_follows_that_of_the_loss_and_is_handed_out_once() -> None:
    config = make_config(
        {"model": "tiny-llama", "precision": "fp8_tensorwise", "skip": "", "loss_head": "chunked",
         "compile": False, "fp8_emulate": True}
    ).resolved()  # fmt: skip
    found = []
    for factor in (1.0, 4.0):
        model = tiny().bfloat16()
        convert_to_float8(model, config)
        replace_loss_head(model, config)
        ids, labels = tokens((2, 32))
        loss = model(input_ids=ids, labels=labels).loss * factor
        loss.backward(retain_graph=True)
        found.append(model.lm_head.weight.grad.float())
    torch.testing.assert_close(found[1], 4 * found[0])
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()


def test_the_head_is_still_counted_as_a_product() -> None:
    assert num_matmul_parameters(with_head("chunked")) == num_matmul_parameters(tiny())


def _biased(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(512))


def _capped(model: Any) -> None:
    model.config.final_logit_softcapping = 30.0


def _without_head(model: Any) -> None:
    model.get_output_embeddings = lambda: None


def _scaled_by_something_unknown(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, logits: logits)
    loss_function = model.loss_function
    model.loss_function = lambda **values: 1.01 * loss_function(**values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_biased, "has a bias"),
        (_capped, "final_logit_softcapping=30"),
        (_without_head, "no nn.Linear"),
        (_scaled_by_something_unknown, "not the cross-entropy"),
    ],
)
def test_a_head_that_does_more_is_refused(change: Callable[[Any], None], words: str) -> None:
    model = tiny()
    change(model)
    config = make_config({"model": "tiny-llama", "loss_head": "chunked"}).resolved()
    with pytest.raises(UserError, match=rf"^loss_head: 'chunked' .*{words}.*use loss_head=plain"):
        check_loss_head(model, config)
    check_loss_head(
        model, make_config({"model": "tiny-llama"}).resolved()
    )  # the plain one suits any


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "granite", "logits_scaling": 4.0}, "logits_scaling=4"),
        ({"model_type": "cohere", "logit_scale": 0.5}, "logit_scale=0.5"),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "softcapping=30"),
        ({"model_type": "qwen3", "head_dim": 16}, None),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}, None),
    ],
)
def test_real_architectures_are_told_apart(values: dict[str, Any], words: str | None) -> None:
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
             "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    if values["model_type"] == "gpt2":
        shape = {"vocab_size": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(shape | values)))
    config = make_config({"model": "tiny-llama", "loss_head": "chunked"}).resolved()
    if words is None:
        check_loss_head(model, config)
        return
    with pytest.raises(UserError, match=words):
        check_loss_head(model, config)


@pytest.mark.parametrize("compiles", [False, True])
def test_strides_do_not_matter(compiles: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(16, 40).t().requires_grad_()
    weight = torch.randn(16, 64).t().requires_grad_()
    targets = torch.randint(0, 64, (40,))
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets) / 3
    loss = chunked_cross_entropy(hidden, weight, targets, compiles) / 3
    for a, b in zip(
        torch.autograd.grad(loss, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
