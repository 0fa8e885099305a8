"""Which fused attention kernel torch prefers on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8study.core.config import RunConfig

#: First choice first; the others take over where it does not suit a shape or a dtype.
_ORDER = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION),
}
_REST = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@contextmanager
def preferred_attention(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Prefer the run's kernel in a block of code; nothing changes outside a GPU.

    Args:
        config: Its ``attention`` chooses.
        device: Where the run computes.
    """
    if device.type != "cuda" or config.attention not in _ORDER:
        yield
        return
    # A compiled layer keeps the kernel that was preferred when it was compiled, and torch's cache
    # of compiled code does not tell the preferences apart.
    torch.compiler.config.cache_key_tag = f"attention={config.attention}"
    with sdpa_kernel([*_ORDER[config.attention], *_REST], set_priority=True):
        yield
