"""A rank's own numbers of a parameter, whatever wraps them."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's plain tensor of a sharded one, whatever that is wrapped in.

    Not by ``to_local``: since torch 2.13 it makes a view of a parameter, which takes the host 75 µs
    where the shard is one of torchao's.
    """
    local = getattr(tensor, "_local_tensor", tensor)
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


def stride(tensor: torch.Tensor, num_samples: int) -> int:
    """Return how far apart about so many numbers lie that are a sample of a rank's own, flat.

    It has no divisor in common with the rows' length, or the sample would be of a few columns only.
    """
    every = max(1, unwrapped(tensor).numel() // num_samples)
    while math.gcd(every, tensor.shape[-1] if tensor.ndim else 1) > 1:
        every += 1
    return every


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter detached, sharded as it is, and freed of torchao's wrapper: no copy."""
    numbers = unwrapped(tensor).detach()
    if not isinstance(tensor, DTensor):
        return numbers
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(numbers, mesh, placements, shape=shape, stride=stride)
