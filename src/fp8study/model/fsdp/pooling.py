"""Reduced gradients in the memory that the activations leave.

torch hands out GPU memory by stream: what one stream has freed, no other can have. FSDP2 reduces
gradients on a stream of its own. Where they are kept until the end of the backward pass, to be
clipped, their memory would be reserved beside that of the activations, although the activations are
gone by then. Here they take what the activations leave.

Safe as long as what is reduced is freed after the backward pass: the reducing stream has waited for
all that the computing one did with the memory before, and that one waits for the reducing one at
the end of the backward pass. So a gradient must become a weight's own as it is, neither cast nor
added to an older one; the configuration refuses the rest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_stream: torch.cuda.Stream | None = None


def compute_on(stream: torch.cuda.Stream | None) -> None:
    """Take memory of this stream from here on: that on which steps run; None: the default one."""
    global _stream
    _stream = stream


@cache
def pooled_reduce_scatter() -> type:
    """Return torch's reduce-scatter, but into memory of the stream that computes."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class PooledReduceScatter(DefaultReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            if device.type != "cuda":
                return super().allocate(size, dtype=dtype, device=device)
            with torch.cuda.stream(_stream or torch.cuda.default_stream(device)):
                return super().allocate(size, dtype=dtype, device=device)

    return PooledReduceScatter
