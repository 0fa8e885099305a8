"""Gradients copied together by foreach kernels, against FSDP2's own."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

from fp8study.model.reducing import copy_together

SHAPES = [(8, 3), (4,), (12, 2, 5), (4, 7)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_every_rank_gets_the_shares_that_torch_would_give_it(
    dtype: torch.dtype, uneven: bool, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [*SHAPES, (6, 3)] if uneven else SHAPES
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if strided:
        gradients.append(torch.randn(3, 8, generator=generator).to(dtype).T)
    padded = sum(-(-g.shape[0] // 4) * 4 * g[0].numel() for g in gradients)
    expected, found = torch.full((padded,), 9.0), torch.full((padded,), 9.0)
    fsdp.foreach_reduce_scatter_copy_in(list(gradients), expected, 4)
    copy_together(list(gradients), found, 4)
    assert torch.equal(found, expected)


def test_the_foreach_kernels_do_it_where_everything_is_even(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8study.model.reducing._chunk_cat", None)  # calling it would fail
    gradients = [torch.ones(shape) for shape in SHAPES] + [torch.ones(3, 8).T]  # and a strided one
    buffer = torch.zeros(sum(g.numel() for g in gradients))
    copy_together(gradients, buffer, 4)
    assert buffer.sum() == buffer.numel()
