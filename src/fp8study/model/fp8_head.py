"""A loss head in FP8 with tensorwise scales: chunk by chunk, logits become their gradient in FP8.

A token's gradient by its logits is its softmax, less one at its label: no number is larger than
one. So the scale of all chunks is known before there are logits, and nobody looks for the largest.
The gradient is written in both layouts as it is made, in the bytes that BF16's would take; where a
chunk ends it is multiplied by the weight, and where a group of chunks ends by their inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8study.core.recipes import GROUP
from fp8study.model import chunked_head
from fp8study.model.chunked_head import IGNORED, gradient, hand_out, loss_and_sums
from fp8study.model.compiling import compiled
from fp8study.model.float8 import fp8_layouts, kept_of, to_fp8, turned
from fp8study.model.swiglu import GRADIENT

#: The largest number of the gradient's format.
MOST = torch.finfo(GRADIENT).max


def fp8_cross_entropy(
    head: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, compiles: bool
) -> torch.Tensor:
    """Return the mean cross-entropy of an FP8 loss head, differentiable once.

    The three GEMMs are those of a `Float8Linear` with tensorwise scales; only the gradient's scale
    is that of its bound. N: tokens, D: hidden size, V: vocabulary; `targets_N` is int64, `IGNORED`
    where no loss is taken. None left gives NaN, as in torch.
    """
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(device))
    loss: torch.Tensor = _function().apply(
        hidden_ND, *kept_of(head), targets_N, head.linear_mm_config, head.config, compiles
    )
    return loss


@cache
def _function() -> Any:
    """Make the class where it is needed: torchao takes seconds to import."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    rows, columns = fp8_layouts()

    class CrossEntropy(torch.autograd.Function):
        """Computes the gradient with the loss; the backward pass only scales it."""

        @staticmethod
        def forward(
            ctx: Any, hidden_ND: torch.Tensor, weight_VD: Any, rows_VD: torch.Tensor | None,
            columns_DV: torch.Tensor | None, scale: torch.Tensor | None, targets_N: torch.Tensor,
            gemms: Any, config: Any, compiles: bool,
        ) -> torch.Tensor:  # fmt: skip
            ctx.compiles, dtype = compiles, weight_VD.dtype
            with torch.autocast(hidden_ND.device.type, enabled=False):
                input = hp_tensor_to_float8_dynamic(
                    hidden_ND, config.cast_config_input.target_dtype, gemms
                )
                if rows_VD is None and not isinstance(weight_VD, Float8TrainingTensor):
                    weight_VD = hp_tensor_to_float8_dynamic(
                        weight_VD, config.cast_config_weight.target_dtype, gemms,
                        gemm_input_role=GemmInputRole.WEIGHT,
                    )  # fmt: skip
                kept = rows_VD, columns_DV, scale
                both = rows(weight_VD, kept, input), columns(weight_VD, kept, input)
                loss, *gradients = _multiplied(input, *both, targets_N, compiles)
            ctx.gradients = (gradients[0].to(hidden_ND.dtype), gradients[1].to(dtype))
            return loss

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
            return *hand_out(ctx, gradient), *[None] * 7

    return CrossEntropy


def _multiplied(
    input_ND: Any, rows_VD: Any, columns_VD: Any, targets_N: torch.Tensor, compiles: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the loss, its gradient by the input and that by the weight, from FP8 tensors.

    `rows_VD` and `columns_VD` are the weight, in the layouts of its two GEMMs.
    """
    from torchao.float8.float8_training_tensor import GemmInputRole

    def part(of: Any, data: torch.Tensor) -> Any:
        return type(of)(data, of._scale, of._orig_dtype, of._linear_mm_config, of._gemm_input_role)

    score = compiled(loss_and_sums) if compiles else loss_and_sums
    num_tokens, num_labels = len(targets_N), len(rows_VD)
    num_counted = (targets_N != IGNORED).sum()
    turned_DN = turned(input_ND, rows_VD)
    gradient_VG = input_ND._data.new_empty((num_labels, min(GROUP, num_tokens)), dtype=GRADIENT)
    of_input_ND = input_ND._data.new_empty(input_ND.shape, dtype=input_ND._orig_dtype)
    of_weight_VD: torch.Tensor | None = None
    loss = torch.zeros((), device=targets_N.device)

    def as_gradient(data: torch.Tensor) -> Any:
        return type(input_ND)(
            data, MOST * num_counted.float(), input_ND._orig_dtype, input_ND._linear_mm_config,
            GemmInputRole.GRAD_OUTPUT,
        )  # fmt: skip

    for group in range(0, num_tokens, GROUP):
        end = min(group + GROUP, num_tokens)
        for start in range(group, end, chunked_head.CHUNK):
            at = slice(start, min(start + chunked_head.CHUNK, end))
            logits_CV = torch.mm(part(input_ND, input_ND._data[at]), rows_VD.t())
            chunk_loss, sums_C = score(logits_CV, targets_N[at])
            loss += chunk_loss
            columns_VC = gradient_VG[:, start - group : at.stop - group]
            fp8_CV = _gradient(logits_CV, sums_C, targets_N[at], columns_VC)
            of_input_ND[at] = torch.mm(as_gradient(fp8_CV), columns_VD)
            del logits_CV, fp8_CV  # before the next chunk's
        product_VD = torch.mm(
            as_gradient(gradient_VG[:, : end - group]),
            part(input_ND, turned_DN._data[:, group:end]).t(),
        )
        if num_tokens <= GROUP:
            of_weight_VD = product_VD
        elif of_weight_VD is None:
            of_weight_VD = product_VD.float()
        else:
            of_weight_VD += product_VD
        del product_VD  # before the next group's logits
    assert of_weight_VD is not None
    return loss / num_counted, of_input_ND, of_weight_VD


def _gradient(
    logits_CV: torch.Tensor, sums_C: torch.Tensor, targets_C: torch.Tensor, columns_VC: torch.Tensor
) -> torch.Tensor:
    """Return a chunk's gradient in FP8, `MOST` for one, and write it transposed as well."""
    fp8_CV = torch.empty_like(logits_CV, dtype=GRADIENT)
    if logits_CV.is_cuda:
        from fp8study.model.kernels import logits_gradient

        logits_gradient(logits_CV, sums_C, targets_C, fp8_CV, columns_VC, MOST, IGNORED)
    else:
        plain_gradient(logits_CV, sums_C, targets_C, fp8_CV, columns_VC)
    return fp8_CV


def plain_gradient(
    logits_CV: torch.Tensor, sums_C: torch.Tensor, targets_C: torch.Tensor, fp8_CV: torch.Tensor,
    columns_VC: torch.Tensor,
) -> None:  # fmt: skip
    """Do what the kernel `logits_gradient` does, where there is no GPU."""
    gradient_CV = gradient(logits_CV, sums_C, targets_C)
    fp8_CV.copy_(to_fp8(gradient_CV, gradient_CV.new_tensor(MOST), GRADIENT))
    columns_VC.copy_(fp8_CV.t())
