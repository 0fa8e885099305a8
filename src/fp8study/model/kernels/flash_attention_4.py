"""FlashAttention 4's kernels by the names under which torch's adapter looks for them.

The adapter of torch 2.11 to 2.13 takes two results of a forward pass, where ``flash-attn-4`` gives
more by now. Import needs that package.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*tensors: Any, **options: Any) -> tuple[Any, Any]:
    """Return the output and the logs of the softmax's sums."""
    output, sums, *_ = interface._flash_attn_fwd(*tensors, **options)
    return output, sums
