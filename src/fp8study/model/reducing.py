"""How FSDP2 reduces gradients: by what they are copied together, and into which memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from fp8study.core.config import RunConfig


def tune_reducing(config: RunConfig, model: torch.nn.Module) -> None:
    """Do what ``gradient_pool=shared`` and ``gradient_copy=foreach`` ask for.

    Args:
        config: The run.
        model: As it was sharded, before its first step.
    """
    if config.gradient_pool == "shared":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(SharedPoolReduceScatter())
    if config.gradient_copy == "foreach":
        _copy_by_foreach()


class SharedPoolReduceScatter(collectives.DefaultReduceScatter):
    """torch's reduce-scatter into memory of the default stream.

    torch hands out GPU memory by stream: what one stream has freed, no other can have. FSDP2
    reduces gradients on a stream of its own. Where they are kept until the end of the backward
    pass, to be clipped, their memory would be reserved beside that of the activations, although the
    activations are gone by then. Here they take what the activations leave.

    Safe as long as what is reduced is freed after the backward pass: the reducing stream has waited
    for all that the default stream did with the memory before, and the default stream waits for the
    reducing one at the end of the backward pass. So a gradient must become a weight's own as it is,
    neither cast nor added to an older one; `fp8study.core.fields` refuses the rest.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty tensor of that size, whichever stream is the current one."""
        if device.type != "cuda":
            return super().allocate(size, dtype=dtype, device=device)
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            return super().allocate(size, dtype=dtype, device=device)


_chunk_cat = collectives.foreach_reduce_scatter_copy_in


def _copy_by_foreach() -> None:
    """Let FSDP2 copy gradients together by torch's foreach kernels, for the rest of this process.

    Its own kernel, ``torch._chunk_cat``, reaches half of the memory's speed from BF16 to FP32
    (https://github.com/pytorch/pytorch/pull/120678). FSDP2 has no setting for it.
    """
    collectives.foreach_reduce_scatter_copy_in = copy_together  # type: ignore[assignment]


def copy_together(gradients: list[torch.Tensor], buffer_N: torch.Tensor, world_size: int) -> None:
    """Copy gradients into the buffer that is reduced, one rank's shares of all behind another's.

    Args:
        gradients: Each is split among the ranks along its first dimension. If one of them does not
            split evenly, torch's own kernel does the work, which knows how to pad.
        buffer_N: Overwritten; in the dtype in which gradients are reduced.
        world_size: Ranks among which gradients are split.
    """
    if any(g.shape[0] % world_size for g in gradients):
        _chunk_cat(gradients, buffer_N, world_size)
        return
    sizes = [g.numel() // world_size for g in gradients]
    shares = [share for row in buffer_N.view(world_size, -1) for share in row.split(sizes)]
    rows = [g.reshape(world_size, -1) for g in gradients]
    sources = [row[rank] for rank in range(world_size) for row in rows]
    torch._foreach_copy_(shares, sources)
