"""Attention without a look for masks, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from fp8study.core.config import make_config
from fp8study.core.presets import PRESETS
from fp8study.model.attention import imply_causal_mask

CAUSAL = make_config(
    {"attention_mask": "causal", "compile": False, "sequence_length": 64}
).resolved()


def tiny(preset: str = "tiny-llama", attention: str = "sdpa", **changes: Any) -> Any:
    torch.manual_seed(0)
    values = {name: v for name, v in (PRESETS[preset] | changes).items() if v is not None}
    settings = AutoConfig.for_model(**values)
    settings.use_cache = False
    return AutoModelForCausalLM.from_config(settings, attn_implementation=attention).train()


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids_BT = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids_BT, labels=ids_BT).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Counts transformers' looks for packed sequences, each of which would wait for a GPU."""
    seen: list[Any] = []
    look = masking_utils.find_packed_sequence_indices

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments)
        return look(*arguments, **named)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", counted)
    return seen


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_loss_and_gradients_are_the_same_without_the_look(preset: str, looks: list[Any]) -> None:
    expected, expected_gradients = loss_and_gradients(tiny(preset))
    assert looks
    model = tiny(preset)
    assert imply_causal_mask(model, CAUSAL) is None
    assert model.training
    looks.clear()
    loss, gradients = loss_and_gradients(model)
    assert not looks
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))


def test_nothing_changes_unless_it_is_asked_for(looks: list[Any]) -> None:
    model = tiny()
    imply_causal_mask(model, make_config({"attention_mask": "checked"}).resolved())
    loss_and_gradients(model)
    assert looks


WINDOWS = {"use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "eager"}, "'eager'"),
        ({"model_type": "mistral", "sliding_window": 63}, "window of 63 tokens"),
        ({"preset": "tiny-qwen3", "sliding_window": 63, **WINDOWS}, "window of 63 tokens"),
        ({"layer_types": ["chunked_attention"] * 4}, "layers of chunked_attention"),
        ({"model_type": "falcon", "head_dim": None}, "cannot be replaced"),
    ],
)
def test_models_that_need_their_masks_keep_them(changes: dict[str, Any], reason: str) -> None:
    model = tiny(**changes)
    before = model.config._attn_implementation
    assert reason in str(imply_causal_mask(model, CAUSAL))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_a_window_as_long_as_the_sequences_is_none(preset: str) -> None:
    kind = {"model_type": "mistral"} if preset == "tiny-llama" else WINDOWS
    assert imply_causal_mask(tiny(preset, sliding_window=64, **kind), CAUSAL) is None


def test_a_model_that_would_compute_something_else_keeps_its_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = loss_and_gradients(tiny())
    model = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(
            "transformers.integrations.sdpa_attention.sdpa_attention_forward",
            lambda module, query, *_, **__: (query.transpose(1, 2), None),
        )
        assert "something else" in str(imply_causal_mask(model, CAUSAL))
    assert torch.equal(loss_and_gradients(model)[0], expected)
