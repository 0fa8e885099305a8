"""A rank's own numbers of a parameter, whatever wraps them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from fp8study.model.kept_weights import FP8
from fp8study.model.local import plain, unwrapped


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_shard_itself_is_returned_and_no_view_of_it_is_made(wrapped: bool) -> None:
    numbers = torch.randn(8, 4)
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(numbers, mesh, [Shard(0)])
    if wrapped:
        sharded._local_tensor = WeightWithDynamicFloat8CastTensor(numbers, LinearMMConfig(), FP8)
    parameter = torch.nn.Parameter(sharded)
    own = parameter._local_tensor
    assert unwrapped(parameter) is (own._tensor if wrapped else own)
    assert unwrapped(numbers) is numbers
    assert torch.equal(plain(parameter).full_tensor(), numbers)
