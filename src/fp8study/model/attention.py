"""Attention: the kernel that torch prefers, and no mask check that makes the CPU wait for the GPU.

FlashAttention 4 takes the place of torch's own FlashAttention, through torch's adapter for it.

In each forward pass transformers asks whether a row of the batch holds several packed sequences.
It asks the GPU and waits for the answer, until all work queued so far is done; then the GPU waits
for new work. Our rows are one sequence each, without padding, so the answer is known: attention is
causal. ``attention_mask=causal`` says so. Models that attend to less than all earlier tokens keep
their masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.nn import attention as of_torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention._fa4 import register_flash_attention_fa4

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError, one_line
from fp8study.core.presets import text_config
from fp8study.model.build import on_four_tokens

#: First choice first; the others take over where it does not suit a shape or a dtype.
_REST = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_ORDER = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_REST),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_REST),
    # A record tells it from no other version, but from math: no other fast one stands in for it.
    "flash4": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
}

#: The name under which torch knows FlashAttention 4.
_FLASH_4 = "FA4"

#: What transformers calls our attention. No function that makes masks is registered under that
#: name, which is transformers' way to say that none are needed.
_UNMASKED = "fp8study_causal"


@contextmanager
def preferred_attention(config: ResolvedConfig, device: torch.device) -> Iterator[None]:
    """Prefer the kernel of the run's ``attention`` in a block; nothing changes outside a GPU.

    Raises:
        UserError: It is that of a package that cannot be imported.
    """
    if device.type == "cuda":
        _let_flash_4_replace_flash(config.attention == "flash4")
    if device.type != "cuda" or config.attention not in _ORDER:
        yield
        return
    # A compiled layer keeps the kernel that was preferred when it was compiled, and torch's cache
    # of compiled code does not tell the preferences apart.
    torch.compiler.config.cache_key_tag = f"attention={config.attention}"
    _let_torch_decide()
    with sdpa_kernel([*_ORDER[config.attention]], set_priority=True):
        yield


@cache
def _let_torch_decide() -> None:
    """Do a process's first attention on its GPU.

    In it torch puts cuDNN first where it likes that GPU, whatever order was asked for before.
    """
    one_BHTD = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16, device="cuda")
    torch.nn.functional.scaled_dot_product_attention(one_BHTD, one_BHTD, one_BHTD)


def _let_flash_4_replace_flash(wanted: bool) -> None:
    """Let torch's FlashAttention be version 4, or its own again, from here on in this process."""
    if wanted == (of_torch.current_flash_attention_impl() == _FLASH_4):
        return
    if not wanted:
        of_torch.restore_flash_attention_impl()
        return
    kernels = f"{__package__}.kernels.flash_attention_4"
    of_torch.register_flash_attention_impl(
        _FLASH_4, register_fn=partial(register_flash_attention_fa4, kernels)
    )
    try:
        of_torch.activate_flash_attention_impl(_FLASH_4)
    except (ImportError, AttributeError, RuntimeError) as error:
        cuda = (torch.version.cuda or "").partition(".")[0]
        extra = "[cu13]" if cuda == "13" else ""
        raise UserError(
            f"attention: 'flash4' needs the package flash-attn-4 ({one_line(error)}); run pip "
            f"install 'flash-attn-4{extra}==4.0.0b36', or use cudnn"
        ) from error


def imply_causal_mask(model: Any, config: ResolvedConfig) -> str | None:
    """Do what ``attention_mask=causal`` asks for, in place, if this model computes the same then.

    Call it before the model is compiled or sharded. On the meta device only its settings are
    looked at.

    Returns:
        Why masks are looked for all the same; None if they are not, or if the run asks for it.
    """
    if config.attention_mask == "checked":
        return None
    if reason := _needs_masks(model, config.sequence_length):
        return reason
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    expected, before = _logits(model), model.config._attn_implementation
    AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
    model.set_attn_implementation(_UNMASKED)
    if model.config._attn_implementation != _UNMASKED:
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


def _logits(model: Any) -> torch.Tensor | None:
    """Return what the model makes of four tokens; nothing on the meta device."""
    with on_four_tokens(model) as ids_BT:
        return None if ids_BT.is_meta else model(input_ids=ids_BT).logits
