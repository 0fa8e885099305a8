"""Triton kernels that read FP32 weights once; `kept_weights` and `optimizer` say what for.

Imported where there is a GPU alone: torch for CPUs comes without Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE, _NUMBERS = 128, 2048


def cast_both(
    weight_MK: torch.Tensor, scale: torch.Tensor, rows_MK: torch.Tensor, columns_KM: torch.Tensor
) -> None:
    """Write a scaled weight in FP8 as it is and transposed; each contiguous, of any size.

    Without a clamp: the GPU's cast saturates, and leaves what is no number one that all will see.
    In two kernels, though one would read a byte a weight less: where one casts and stores both
    layouts, the ptxas of CUDA 12.8 and 12.9, which Triton brings, builds for Hopper what reads
    registers that nothing wrote (https://github.com/triton-lang/triton/issues/11111).
    """
    assert weight_MK.is_contiguous() and rows_MK.is_contiguous()
    with torch.cuda.device_of(weight_MK):
        _cast[(triton.cdiv(weight_MK.numel(), _NUMBERS),)](
            weight_MK, scale, rows_MK, weight_MK.numel(), SIZE=_NUMBERS
        )
    transpose(rows_MK, columns_KM)


def transpose(rows_MK: torch.Tensor, columns_KM: torch.Tensor) -> None:
    """Write FP8 numbers transposed; both contiguous, of any size."""
    assert rows_MK.is_contiguous() and columns_KM.is_contiguous()
    num_rows, num_columns = rows_MK.shape
    grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(num_columns, _TILE))
    with torch.cuda.device_of(rows_MK):
        _transpose[grid](rows_MK, columns_KM, num_rows, num_columns, TILE=_TILE, num_warps=8)


def adamw(
    weight: torch.Tensor, gradient: torch.Tensor, averages: tuple[torch.Tensor, torch.Tensor],
    largest: torch.Tensor, kept: torch.Tensor | None, divisor: torch.Tensor | None,
    numbers: tuple[float, ...],
) -> None:  # fmt: skip
    """Update a weight and its averages, and raise `largest` to the weight's largest size.

    A gradient is divided by `divisor` as it is read. `kept`, which may be the gradient itself,
    receives the weight in its own dtype. `numbers`: those of `fp8study.model.optimizer.numbers_of`.
    """
    assert all(tensor.is_contiguous() for tensor in (weight, gradient, *averages))
    grid = (triton.cdiv(weight.numel(), _NUMBERS),)
    with torch.cuda.device_of(weight):
        _adamw[grid](
            weight, gradient, *averages, largest, kept, divisor, weight.numel(), *numbers,
            SIZE=_NUMBERS,
        )  # fmt: skip


@triton.jit
def _cast(weight, scale, rows, num, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    scaled = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(rows + at, scaled.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _transpose(rows, columns, num_rows, num_columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = (tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
    j = (tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE))[None, :]
    inside = (i < num_rows) & (j < num_columns)
    fp8 = tl.load(rows + i * num_columns + j, mask=inside)
    tl.store(columns + j * num_rows + i, fp8, mask=inside)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, largest, kept, divisor, num,
    decay, beta1, rest1, beta2, rest2, step_size, root, eps, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
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
