"""Layers that change their precision during a run: nothing but their arithmetic changes.

Weights, optimizer and sharding stay as they are. What was compiled for a precision is kept, so
that only the first step of a precision compiles.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from fp8study.core.recipes import RECIPES
from fp8study.model.float8 import is_converted

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear


@cache
def _changing_linear() -> type[Float8Linear]:
    """Make the class where it is needed: torchao takes seconds to import."""
    from torchao.float8.float8_linear import Float8Linear

    class ChangingFloat8Linear(Float8Linear):
        """A converted linear layer that computes as a plain one while it is told to."""

        computes_in_fp8 = True

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.computes_in_fp8:
                return super().forward(input)
            return torch.nn.functional.linear(input, self.weight, self.bias)

    return ChangingFloat8Linear


def let_change(model: torch.nn.Module) -> None:
    """Let a model's converted layers change their precision; before it is sharded."""
    for module in model.modules():
        if is_converted(module):
            module.__class__ = _changing_linear()


def compute_in(model: torch.nn.Module, precision: str) -> int:
    """Compute in a precision from here on; return how many layers then do so in FP8.

    The model is one from `let_change`, sharded or not.
    """
    in_fp8 = bool(RECIPES[precision].fp8_gemms)  # type: ignore[index]
    layers = [module for module in model.modules() if is_converted(module)]
    for layer in layers:
        layer.computes_in_fp8 = in_fp8  # type: ignore[assignment]
    return len(layers) * in_fp8
