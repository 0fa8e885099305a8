"""The update of AdamW; `fp8study.model.optimizer` says what for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8study.model.kernels.launching import NUMBERS, launch


def adamw(
    weight: torch.Tensor, gradient: torch.Tensor, averages: tuple[torch.Tensor, torch.Tensor],
    largest: torch.Tensor, kept: torch.Tensor | None, divisor: torch.Tensor | None,
    numbers_8: torch.Tensor,
) -> None:  # fmt: skip
    """Update a weight and its averages, and raise `largest` to the weight's largest size.

    A gradient is divided by `divisor` as it is read. `kept`, which may be the gradient itself,
    receives the weight in its own dtype. `numbers_8`: those of `optimizer.numbers_of`.
    """
    assert all(tensor.is_contiguous() for tensor in (weight, gradient, *averages))
    grid = (triton.cdiv(weight.numel(), NUMBERS),)
    launch(
        _adamw, grid, weight, gradient, *averages, largest, kept, divisor, numbers_8,
        weight.numel(), SIZE=NUMBERS,
    )  # fmt: skip


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, largest, kept, divisor, numbers, num, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    decay, step_size = tl.load(numbers), tl.load(numbers + 5)
    beta1, rest1, beta2 = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    rest2, root, eps = tl.load(numbers + 4), tl.load(numbers + 6), tl.load(numbers + 7)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    if divisor is not None:
        g = g / tl.load(divisor)
    # Left to itself the compiler rounds another of a sum's two terms for gradients in BF16.
    w = tl.fma(w, -decay, w)
    m = tl.fma(m, beta1, rest1 * g)
    v = tl.fma(v, beta2, rest2 * g * g)
    w -= step_size * m / (tl.sqrt_rn(v) / root + eps)
    updated = w.to(weight.dtype.element_ty)
    tl.store(weight + at, updated, mask=inside)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=inside)
    if kept is not None:
        tl.store(kept + at, updated.to(kept.dtype.element_ty), mask=inside)
    tl.atomic_max(largest, tl.max(tl.abs(updated.to(tl.float32))))
