"""How a Triton kernel of ours is launched."""

from __future__ import annotations

from typing import Any

import torch

#: Numbers that a program of most kernels takes.
NUMBERS = 2048
#: Rows and columns that a program takes which writes FP8 in both layouts.
TILE = 64


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the GPU of its first argument."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants)
