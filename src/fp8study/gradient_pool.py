"""Which memory FSDP2's reduced gradients take: ``gradient_pool``.

torch hands out GPU memory by stream: what one stream has freed, no other can have. FSDP2 reduces
gradients on a stream of its own. Where they are kept until the end of the backward pass, to be
clipped, their memory is reserved beside that of the activations, although the activations are gone
by then. Here they take what the activations leave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


class SharedPoolReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter into memory of the default stream.

    Safe as long as what is reduced is freed after the backward pass: the reducing stream has waited
    for all that the default stream did with the memory before, and the default stream waits for the
    reducing one at the end of the backward pass. So a gradient must become a weight's own as it is,
    neither cast nor added to an older one; `fp8study.tuned_path` refuses the rest.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty tensor of that size, whichever stream is the current one."""
        if device.type != "cuda":
            return super().allocate(size, dtype=dtype, device=device)
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            return super().allocate(size, dtype=dtype, device=device)


def share_pool(model: torch.nn.Module) -> None:
    """Let every sharded module's reduced gradients take the activations' memory."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(SharedPoolReduceScatter())
