"""Matrices cast to FP8 and transposed; `fp8study.model.kept_weights` and `float8` say what for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8study.model.kernels.launching import NUMBERS, TILE, launch

_TILE = 128


def cast_both(
    weight_MK: torch.Tensor, scale: torch.Tensor, rows_MK: torch.Tensor, columns_KM: torch.Tensor,
    at_once: bool = False,
) -> None:  # fmt: skip
    """Write a scaled weight in FP8 as it is and transposed; each contiguous, of any size.

    Without a clamp: the GPU's cast saturates, and leaves what is no number one that all will see.
    In two kernels, or `at_once`, in one that reads its rows again before it turns them: where one
    casts and stores both layouts from registers, the ptxas of CUDA 12.8 and 12.9, which Triton
    brings, builds for Hopper what reads registers that nothing wrote
    (https://github.com/triton-lang/triton/issues/11111).
    """
    assert all(tensor.is_contiguous() for tensor in (weight_MK, rows_MK, columns_KM))
    num = weight_MK.numel()
    if at_once:
        grid = tuple(triton.cdiv(size, TILE) for size in weight_MK.shape)
        launch(
            _cast_and_turn, grid, weight_MK, scale, rows_MK, columns_KM, *weight_MK.shape,
            TILE=TILE, num_warps=8,
        )  # fmt: skip
        return
    launch(_cast, (triton.cdiv(num, NUMBERS),), weight_MK, scale, rows_MK, num, SIZE=NUMBERS)
    transpose(rows_MK, columns_KM)


def transpose(rows_MK: torch.Tensor, columns_KM: torch.Tensor) -> None:
    """Write FP8 numbers transposed; both contiguous, of any size."""
    assert rows_MK.is_contiguous() and columns_KM.is_contiguous()
    num_rows, num_columns = rows_MK.shape
    grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(num_columns, _TILE))
    launch(_transpose, grid, rows_MK, columns_KM, num_rows, num_columns, TILE=_TILE, num_warps=8)


@triton.jit
def _cast(weight, scale, rows, num, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    scaled = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(rows + at, scaled.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def places(num_rows, num_columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where a program's numbers are, where they are transposed, and which there are."""
    i = (tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
    j = (tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE))[None, :]
    return i * num_columns + j, j * num_rows + i, (i < num_rows) & (j < num_columns)


@triton.jit
def _cast_and_turn(  # type: ignore[no-untyped-def]
    weight, scale, rows, columns, num_rows, num_columns, TILE: tl.constexpr
):
    at, turned, inside = places(num_rows, num_columns, TILE)
    scaled = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(rows + at, scaled.to(rows.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    tl.store(columns + turned, tl.load(rows + at, mask=inside), mask=inside)


@triton.jit
def _transpose(rows, columns, num_rows, num_columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at, turned, inside = places(num_rows, num_columns, TILE)
    tl.store(columns + turned, tl.load(rows + at, mask=inside), mask=inside)
