"""The loss head: from the last hidden states to the mean cross-entropy, without whole logits.

With a vocabulary of 128,256 the logits of 4,096 tokens and their gradient are the largest tensors
of a step: transformers makes them in BF16 and again in FP32, several times over.

``compiled``
    one torch.compile over the GEMM and the cross-entropy: whole logits, in BF16 only.
``chunked``
    `CHUNK` tokens at a time. The loss is the last thing that a forward pass computes, so its
    gradient is known there too: each chunk's logits become their own gradient, which is
    multiplied out at once, and nothing of that size is kept for the backward pass.

The new head replaces the `forward` of the loss head's module, and is called as a module, so that
whatever sharding hooks to that module (FSDP2 gathers its weight there) happens as before.

torch has ``torch.nn.functional.linear_cross_entropy`` with chunking from 2.13 on; 2.11, which is
supported too, has not. Replace ours by it once 2.13 is the oldest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.presets import reshapes_logits
from fp8study.model.build import on_four_tokens
from fp8study.model.compiling import compiled
from fp8study.model.float8 import is_converted

#: Tokens whose logits exist at a time. A multiple of 16, as FP8 GEMMs ask; large enough that
#: a GEMM with them keeps a GPU busy.
CHUNK = 2048
#: Rows of the weight's gradient that are added at a time where that takes a GEMM of its own.
_ROWS = 8192
#: The label that no loss is taken of, in transformers as in torch.
IGNORED = -100


def check_loss_head(model: Any, config: ResolvedConfig) -> None:
    """Refuse a model whose loss is more than the cross-entropy of one GEMM.

    Known settings are looked up; anything else shows on four tokens, on which the model's own
    loss is held against that of its hidden states and its head (not on the meta device). Call it
    before the model is compiled, converted or sharded.

    Raises:
        UserError: The loss head of this model cannot be replaced.
    """
    if config.loss_head == "plain":
        return

    def refuse(reason: str) -> UserError:
        return UserError(
            f"loss_head: '{config.loss_head}' does not suit {type(model).__name__}: {reason}; "
            "use loss_head=plain"
        )

    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise refuse("its loss head is no nn.Linear")
    if getattr(head, "bias", None) is not None:
        raise refuse("its loss head has a bias")
    if model.base_model is model:
        raise refuse("it has no base model apart from its loss head")
    if setting := reshapes_logits(model.config):
        raise refuse(setting)
    if not head.weight.is_meta and not _is_cross_entropy_of_one_product(model):
        raise refuse("its loss is not the cross-entropy of its loss head's product")


def _is_cross_entropy_of_one_product(model: Any) -> bool:
    """Return whether model and decomposition give the same loss on four tokens."""
    head = model.get_output_embeddings()
    with on_four_tokens(model) as ids_BT:
        theirs = model(input_ids=ids_BT, labels=ids_BT)
        hidden_BTD = model.base_model(input_ids=ids_BT)[0]
        if hidden_BTD.shape[-1] != head.in_features:
            return False
        logits_BTV = head(hidden_BTD)
    loss = cross_entropy(logits_BTV[0].float(), next_tokens(ids_BT), ignore_index=IGNORED)
    is_same = torch.allclose(theirs.logits, logits_BTV, rtol=1e-5, atol=1e-6)
    return is_same and torch.allclose(theirs.loss.float(), loss, rtol=1e-4)


def replace_loss_head(model: Any, config: ResolvedConfig) -> None:
    """Make ``model(input_ids=…, labels=…).loss`` use the head that the run asks for, in place.

    Call it on a model that `check_loss_head` has let pass, after conversion to FP8, which replaces
    modules, and before sharding. The model then computes a loss and nothing else.

    An FP8 loss head stays one. With tensorwise scales `fp8study.model.fp8_head` computes its
    chunks; with others its GEMMs are its module's own, and chunks are run again in the backward
    pass, since FP8 has no GEMM that would add to a buffer.
    """
    if config.loss_head == "plain":
        return
    head = model.get_output_embeddings()
    product = type(head).forward  # sharding derives a class from this one

    def whole(
        self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        logits_NV = product(self, hidden_ND).float()
        return cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction=reduction)

    def chunked(self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(hidden_ND, self.weight, targets_N, config.compile)

    def chunked_fp8(self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for chunk in zip(hidden_ND.split(CHUNK), targets_N.split(CHUNK), strict=True):
            loss = loss + checkpoint(
                whole, self, *chunk, "sum", use_reentrant=False, preserve_rng_state=False
            )
        return loss / (targets_N != IGNORED).sum()

    def chunked_tensorwise(
        self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor
    ) -> torch.Tensor:
        from fp8study.model.fp8_head import fp8_cross_entropy

        return fp8_cross_entropy(self, hidden_ND, targets_N, CHUNK, config.compile)

    def forward(self: Any, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        targets_N = next_tokens(labels_BT)
        return loss_of(self, hidden_BTD.reshape(len(targets_N), -1), targets_N)

    if config.compile or config.loss_head == "compiled":
        whole = torch.compile(whole)
    loss_of: Callable[..., torch.Tensor] = whole
    if config.loss_head == "chunked":
        loss_of = chunked
        if is_converted(head):
            alike = config.precision == "fp8_tensorwise" and not config.precision_schedule
            loss_of = chunked_tensorwise if alike else chunked_fp8
    head.forward = MethodType(forward, head)
    model.forward = MethodType(_loss_only, model)


def _loss_only(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """Stand in for a causal language model's `forward` in training."""
    from transformers.modeling_outputs import CausalLMOutput

    hidden_BTD = self.base_model(input_ids=input_ids)[0]
    return CausalLMOutput(loss=self.get_output_embeddings()(hidden_BTD, labels))


def next_tokens(labels_BT: torch.Tensor) -> torch.Tensor:
    """Return what each position predicts: int64[B·T], the last of a sequence predicts nothing."""
    return torch.nn.functional.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:].reshape(-1)


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
    exact_CV = logits_CV.float()
    counts_C = targets_C != IGNORED
    safe_C = torch.where(counts_C, targets_C, 0)
    log_sum_C = torch.logsumexp(exact_CV, dim=1)
    loss_C = log_sum_C - exact_CV.gather(1, safe_C[:, None])[:, 0]
    loss = torch.where(counts_C, loss_C, 0.0).sum() * scale
    # A comparison, not a scatter: it is fused with the rest.
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == safe_C[:, None]
    gradient_CV = torch.exp(exact_CV - log_sum_C[:, None]) - is_target_CV.float()
    weights_C = torch.where(counts_C, scale, 0.0)
    return loss, (gradient_CV * weights_C[:, None]).to(logits_CV.dtype)


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
