"""Triton kernels.

Imported where there is a GPU alone: torch for CPUs comes without Triton.
"""

from fp8study.model.kernels.adamw import adamw
from fp8study.model.kernels.casts import cast_both, transpose
from fp8study.model.kernels.logits import logits_gradient
from fp8study.model.kernels.sums import add_two, squares
from fp8study.model.kernels.swiglu import gated, gated_gradients

__all__ = [
    "adamw", "add_two", "cast_both", "gated", "gated_gradients", "logits_gradient", "squares",
    "transpose",
]  # fmt: skip
