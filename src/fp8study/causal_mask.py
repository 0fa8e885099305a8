"""Attention without a look for masks: ``attention_mask=causal``.

In each forward pass transformers asks whether a row of the batch holds several packed sequences.
It asks the GPU and waits for the answer, that is, until all work queued so far is done. Then the
GPU waits in turn, because nothing is queued behind. Our rows are one sequence each, without
padding, so that the answer is known: attention is causal.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8study.config import RunConfig
from fp8study.errors import UserError
from fp8study.models import text_config

#: What transformers calls our attention. No function that makes masks is registered under that
#: name, which is transformers' way to say that none are needed.
_NAME = "fp8study_causal"


def imply_causal_mask(model: Any, config: RunConfig) -> None:
    """Do what ``attention_mask=causal`` asks for, in place.

    Args:
        model: A causal language model of transformers, before it is compiled or sharded; its
            weights in place (on the meta device only its settings are looked at).
        config: The run.

    Raises:
        UserError: The model attends to something else than all earlier tokens.
    """
    if config.attention_mask == "checked":
        return

    def refuse(reason: str) -> UserError:
        return UserError(
            f"attention_mask: 'causal' does not suit {type(model).__name__}: {reason}; use "
            "attention_mask=checked"
        )

    implementation = model.config._attn_implementation
    if implementation != "sdpa":
        raise refuse(f"its attention is '{implementation}', not torch's own")
    settings = text_config(model.config)
    kinds = getattr(settings, "layer_types", None) or []
    if others := sorted(set(kinds) - {"full_attention"}):
        raise refuse(f"it has layers of {', '.join(others)}")
    if not kinds and getattr(settings, "sliding_window", None) is not None:
        raise refuse(f"sliding_window={settings.sliding_window}")
    expected = _logits(model)
    _register()
    model.set_attn_implementation(_NAME)
    found = _logits(model)
    if (
        expected is not None
        and found is not None
        and not torch.allclose(found, expected, rtol=1e-3)
    ):
        raise refuse("without masks it computes something else")


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_NAME, sdpa_attention_forward)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor | None:
    """Return what the model makes of four tokens; nothing on the meta device."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return None
    ids_BT = torch.arange(1, 5, device=device)[None]
    was_training = model.training
    model.eval()  # no dropout
    try:
        logits: torch.Tensor = model(input_ids=ids_BT).logits
    finally:
        model.train(was_training)
    return logits
