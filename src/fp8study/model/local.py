"""A rank's own numbers of a parameter, whatever wraps them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's plain tensor of a sharded one, whatever that is wrapped in."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return getattr(local, "_tensor", local)  # torchao's wrapper for the FP8 all-gather


def held(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of which this rank's part consists: FP8 states are two."""
    local = unwrapped(tensor)
    if not hasattr(local, "__tensor_flatten__"):
        return [local]
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's numbers of a parameter, flat and detached."""
    return unwrapped(tensor).detach().reshape(-1)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter detached, sharded as it is, and freed of torchao's wrapper: no copy."""
    numbers = unwrapped(tensor).detach()
    if not isinstance(tensor, DTensor):
        return numbers
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(numbers, mesh, placements, shape=shape, stride=stride)
