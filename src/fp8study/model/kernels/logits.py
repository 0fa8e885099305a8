"""The gradient by a loss head's logits, in FP8; `fp8study.model.fp8_head` says what for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8study.model.kernels.launching import TILE, launch


def logits_gradient(
    logits_CV: torch.Tensor, sums_C: torch.Tensor, targets_C: torch.Tensor, rows_CV: torch.Tensor,
    columns_VC: torch.Tensor, most: float, ignored: int,
) -> None:  # fmt: skip
    """Write the softmax of logits, less one at each label, times `most`: as it is and transposed.

    `sums_C`: the log of each row's sum of exponentials; a row whose label is `ignored` is zero.
    `columns_VC` may be part of longer rows; the others are contiguous.
    """
    assert logits_CV.is_contiguous() and rows_CV.is_contiguous() and columns_VC.stride(1) == 1
    grid = tuple(triton.cdiv(size, TILE) for size in logits_CV.shape)
    launch(
        _logits_gradient, grid, logits_CV, sums_C, targets_C, rows_CV, columns_VC,
        *logits_CV.shape, columns_VC.stride(0), most, ignored, TILE=TILE, num_warps=8,
    )  # fmt: skip


@triton.jit
def _logits_gradient(  # type: ignore[no-untyped-def]
    logits, sums, targets, rows, columns, num_rows, num_columns, length, most, ignored,
    TILE: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
    j = (tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE))[None, :]
    at, inside = i * num_columns + j, (i < num_rows) & (j < num_columns)
    logit = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    label = tl.load(targets + i, mask=i < num_rows, other=0)
    softmax = tl.exp(logit - tl.load(sums + i, mask=i < num_rows, other=0.0))
    gradient = tl.where(label == ignored, 0.0, softmax - (j == label).to(tl.float32)) * most
    tl.store(rows + at, gradient.to(rows.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # what is turned is read again; `cast_both` says why
    tl.store(columns + j * length + i, tl.load(rows + at, mask=inside), mask=inside)
