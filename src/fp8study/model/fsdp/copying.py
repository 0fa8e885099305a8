"""Gradients copied together into the buffer that FSDP2 reduces."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def chunk_cat() -> Any:
    """Return torch's own function for what `copy_together` does; first called before it is gone."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    return collectives.foreach_reduce_scatter_copy_in


def restore() -> None:
    """Give torch its own function back, if it was taken."""
    if chunk_cat.cache_info().currsize:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        collectives.foreach_reduce_scatter_copy_in = chunk_cat()


def copy_together(gradients: list[torch.Tensor], buffer_N: torch.Tensor, world_size: int) -> None:
    """Copy gradients into the buffer that is reduced, one rank's shares of all behind another's.

    torch's own kernel for it, ``torch._chunk_cat``, reaches half of the memory's speed from BF16 to
    FP32 (https://github.com/pytorch/pytorch/pull/120678); here its foreach kernels do the work.

    Args:
        gradients: Each is split among the ranks along its first dimension. If one of them does not
            split evenly, torch's own kernel does the work, which knows how to pad.
        buffer_N: Overwritten; in the dtype in which gradients are reduced.
        world_size: Ranks among which gradients are split.
    """
    if any(g.shape[0] % world_size for g in gradients):
        chunk_cat()(gradients, buffer_N, world_size)
        return
    sizes = [g.numel() // world_size for g in gradients]
    shares = [share for row in buffer_N.view(world_size, -1) for share in row.split(sizes)]
    rows = [g.reshape(world_size, -1) for g in gradients]
    sources = [row[rank] for rank in range(world_size) for row in rows]
    torch._foreach_copy_(shares, sources)


class Later:
    """Gradients that the stream which reduces them copies together, not the one that computes."""

    def __init__(self) -> None:
        self._gradients: list[torch.Tensor] = []
        self._waits = False
        self._copied: torch.Event | None = None

    def put_off(self, gradients: list[torch.Tensor], buffer_N: torch.Tensor, _: int) -> None:
        """Keep gradients, in place of copying them, until they are `copy`'d."""
        assert not self._waits, "gradients were put off and never copied"
        self.let_go()
        self._waits = True
        self._gradients = [*gradients]

    def copy(self, buffer_N: torch.Tensor, world_size: int) -> None:
        """Copy what was put off, if anything was, as `copy_together` does, on this stream."""
        if self._waits:
            copy_together(self._gradients, buffer_N, world_size)
            self._waits = False
            if buffer_N.is_cuda:
                self._copied = torch.cuda.current_stream().record_event()

    def let_go(self) -> None:
        """Free what was put off once it is copied, for the current stream to use again."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        self._gradients, self._copied = [], None


later = Later()
