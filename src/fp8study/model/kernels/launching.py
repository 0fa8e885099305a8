"""How a Triton kernel of ours is launched."""

from __future__ import annotations

from typing import Any

import torch

#: Numbers that a program of most kernels takes.
NUMBERS = 2048
#: Rows and columns that a program takes which writes FP8 in both layouts.
TILE = 64


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, by_compiler: bool = False, **constants: Any
) -> None:
    """Launch a kernel, or let the compiler that traces this launch it as it does its own."""
    if by_compiler:
        torch.library.wrap_triton(kernel)[grid](*arguments, **constants)
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants)
