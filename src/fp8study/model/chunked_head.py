"""The cross-entropy of a loss head without whole logits: `CHUNK` tokens at a time, in BF16.

The loss is the last thing that a forward pass computes, so its gradient is known there too: each
chunk's logits become their own gradient, which is multiplied out at once, and nothing of that size
is kept for the backward pass.

torch has ``torch.nn.functional.linear_cross_entropy`` with chunking from 2.13 on; 2.11, which is
supported too, has not. Replace ours by it once 2.13 is the oldest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8study.core.recipes import CHUNK as CHUNK  # the FP8 head takes ours
from fp8study.model.compiling import compiled

#: Rows of the weight's gradient that are added at a time where that takes a GEMM of its own.
_ROWS = 8192
#: The label that no loss is taken of, in transformers as in torch.
IGNORED = -100


def chunked_cross_entropy(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, compiles: bool
) -> torch.Tensor:
    """Return the mean cross-entropy of ``hidden @ weight.T``, differentiable once.

    Products are in the autocast dtype where autocast is on, else in the weight's; the softmax is
    in FP32, and the weight's gradient is summed over chunks in FP32.

    N: tokens, D: hidden size, V: vocabulary; `targets_N` is int64, `IGNORED` where no loss is
    taken. None left gives NaN, as in torch. The elementwise part is compiled if `compiles`.
    """
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, targets_N, compiles)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradient with the loss; the backward pass only scales it."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor,
        compiles: bool,
    ) -> torch.Tensor:  # fmt: skip
        device = hidden_ND.device.type
        autocasts = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocasts else weight_VD.dtype
        ctx.compiles = compiles
        with torch.autocast(device, enabled=False):
            return _forward(ctx, hidden_ND, weight_VD, targets_N, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return *hand_out(ctx, gradient), None, None


def hand_out(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients that a forward pass has left in `ctx`, once, times that of the loss."""
    gradients, ctx.gradients = ctx.gradients, (None, None)
    if all(held is None for held in gradients):
        raise RuntimeError("the loss head's gradient was used up by an earlier backward pass")
    # torch's own kernel for a factor on the GPU runs at a fifth of the memory's speed.
    scale = compiled(_scale, dynamic=True) if ctx.compiles else _scale
    for held in gradients:
        if held is not None:
            scale(held.view(-1), gradient)
    return gradients


def _forward(
    ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    score = compiled(_loss_and_gradient) if ctx.compiles else _loss_and_gradient
    x_ND, w_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    # One chunk needs no sum; and if the gradient is wanted in FP32, that is where it is summed.
    is_sum = len(targets_N) > CHUNK or weight_VD.dtype == torch.float32
    needs_x, needs_w = ctx.needs_input_grad[:2]
    # `_scale` wants them flat.
    x_gradient_ND = x_ND.new_empty(x_ND.shape) if needs_x else None
    w_dtype = torch.float32 if is_sum else dtype
    w_gradient_VD = w_VD.new_empty(w_VD.shape, dtype=w_dtype) if needs_w else None
    scale = 1 / (targets_N != IGNORED).sum()
    loss = torch.zeros((), device=x_ND.device)
    for start in range(0, len(targets_N), CHUNK):
        x_CD, targets_C = x_ND[start : start + CHUNK], targets_N[start : start + CHUNK]
        chunk_loss, gradient_CV = score(x_CD @ w_VD.T, targets_C, scale)
        loss += chunk_loss
        if x_gradient_ND is not None:
            torch.mm(gradient_CV, w_VD, out=x_gradient_ND[start : start + CHUNK])
        if w_gradient_VD is not None:
            _add_product(w_gradient_VD, gradient_CV.T, x_CD, is_first=start == 0)
        del gradient_CV  # before the next chunk's logits
    ctx.gradients = (
        None if x_gradient_ND is None else x_gradient_ND.to(hidden_ND.dtype),
        None if w_gradient_VD is None else w_gradient_VD.to(weight_VD.dtype),
    )
    return loss


def _loss_and_gradient(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's share of the mean loss and its gradient by the logits, in their dtype.

    C: the chunk's tokens, V: vocabulary; `scale`: one over the number of tokens in all chunks that
    count.
    """
    loss, sums_C = loss_and_sums(logits_CV, targets_C)
    gradient_CV = gradient(logits_CV, sums_C, targets_C) * scale
    return loss * scale, gradient_CV.to(logits_CV.dtype)


def loss_and_sums(
    logits_CV: torch.Tensor, targets_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a chunk's losses and, of each token, the log of its exponentials' sum."""
    exact_CV = logits_CV.float()
    counts_C = targets_C != IGNORED
    sums_C = torch.logsumexp(exact_CV, dim=1)
    labels_C = torch.where(counts_C, targets_C, 0)
    loss_C = sums_C - exact_CV.gather(1, labels_C[:, None])[:, 0]
    return torch.where(counts_C, loss_C, 0.0).sum(), sums_C


def gradient(
    logits_CV: torch.Tensor, sums_C: torch.Tensor, targets_C: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of that sum by the logits, in FP32: the softmax, less one at a label."""
    # A comparison, not a scatter: it is fused with the rest.
    labels_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    is_label_CV = labels_V == targets_C[:, None]
    gradient_CV = torch.exp(logits_CV.float() - sums_C[:, None]) - is_label_CV.float()
    return gradient_CV * (targets_C != IGNORED).float()[:, None]


def _scale(total_N: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place: a copy would be as large as the weight."""
    total_N.mul_(factor)


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, is_first: bool
) -> None:
    """Add ``left @ right`` to `total`, or overwrite it, in its dtype, without a tensor between."""
    beta = 0 if is_first else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif _adds_into_fp32(left.device, left.dtype):
        torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)
    else:
        for total_RD, left_RC in zip(total.split(_ROWS), left.split(_ROWS), strict=True):
            product_RD = _fp32_product(left_RC, right)
            total_RD.copy_(product_RD) if is_first else total_RD.add_(product_RD)


@cache
def _adds_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch adds a GEMM of `dtype` to an FP32 matrix in one go.

    Some versions want the matrix in the factors' dtype, and none does it on a CPU.
    """
    factor = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


def _fp32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a GEMM of BF16 factors that was never rounded to BF16."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
