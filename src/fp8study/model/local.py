"""A rank's own numbers of a parameter, whatever wraps them."""

from __future__ import annotations

import torch


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's plain numbers of a parameter, whatever it is wrapped in."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    inner = getattr(local, "_tensor", local)  # torchao's wrapper for the FP8 all-gather
    return inner.detach().reshape(-1)
