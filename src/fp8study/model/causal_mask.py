"""Attention without a look for masks: ``attention_mask=causal``.

In each forward pass transformers asks whether a row of the batch holds several packed sequences.
It asks the GPU and waits for the answer, that is, until all work queued so far is done. Then the
GPU waits in turn, because nothing is queued behind. Our rows are one sequence each, without
padding, so that the answer is known: attention is causal. Models that attend to less than all
earlier tokens keep their masks.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8study.core.config import RunConfig
from fp8study.core.presets import text_config

#: What transformers calls our attention. No function that makes masks is registered under that
#: name, which is transformers' way to say that none are needed.
_NAME = "fp8study_causal"


def imply_causal_mask(model: Any, config: RunConfig) -> str | None:
    """Do what ``attention_mask=causal`` asks for, in place, if this model computes the same then.

    Args:
        model: A causal language model of transformers, before it is compiled or sharded; its
            weights in place (on the meta device only its settings are looked at).
        config: The run.

    Returns:
        Why masks are looked for all the same; None if they are not, or if the run asks for it.
    """
    if config.attention_mask == "checked":
        return None
    if reason := _needs_masks(model, config.sequence_length):
        return reason
    expected, before = _logits(model), model.config._attn_implementation
    _register()
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        return "its attention cannot be replaced"
    found = _logits(model)
    if expected is None or found is None or torch.equal(found, expected):
        return None
    model.set_attn_implementation(before)
    return "without masks it computes something else"


def _needs_masks(model: Any, sequence_length: int) -> str | None:
    """Return what a model's settings say against attention to all earlier tokens."""
    implementation = model.config._attn_implementation
    if implementation != "sdpa":
        return f"its attention is '{implementation}', not torch's own"
    settings = text_config(model.config)
    kinds = set(getattr(settings, "layer_types", None) or [])
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of {', '.join(others)}"
    window = getattr(settings, "sliding_window", None)
    has_windows = "sliding_attention" in kinds or not kinds
    if has_windows and window is not None and window < sequence_length:
        return f"its window of {window} tokens is shorter than the sequences"
    return None


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
