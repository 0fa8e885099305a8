"""Useful arithmetic of one training token."""

from __future__ import annotations

from typing import Any

import torch


def num_matmul_parameters(model: torch.nn.Module) -> int:
    """Return the weights that every token is multiplied with.

    All linear layers count, the loss head also when it shares the embedding's weights; the
    embedding look-up is no product and does not count. Call before sharding.
    """
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def flops_per_token(num_matmul_params: int, hf_config: Any, sequence_length: int) -> int:
    """Return forward and backward FLOPs of one token.

    ``6 · N_matmul + 12 · layers · heads · head_dim · sequence_length``: two FLOPs a weight
    forward and four backward; attention scores and their product with the values likewise,
    without the causal discount and without recomputation (Chowdhery et al. 2022, PaLM,
    appendix B).

    Args:
        num_matmul_params: From `num_matmul_parameters`.
        hf_config: A transformers configuration.
        sequence_length: Tokens per sequence.
    """
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    attention = 12 * hf_config.num_hidden_layers * heads * head_dim * sequence_length
    return 6 * num_matmul_params + attention
