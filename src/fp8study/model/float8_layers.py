"""Layers of torchao's that do more: change their precision, or keep their weights in FP8.

`let_change`: weights, optimizer and sharding stay as they are. What was compiled for a precision is
kept, so that only the first step of a precision compiles.

`keep_casts`: torchao looks for a weight's largest size and casts it in each forward pass, and casts
it again, transposed, in each backward pass. That moves 14 bytes a weight, though a weight changes
at its update alone. Layers that keep it are given both layouts then, and cast nothing but inputs
and gradients. The values are torchao's to the bit. Whatever changes weights must call `refresh`
afterwards; the audit asks `is_current` whether it did.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from fp8study.core.recipes import RECIPES
from fp8study.model.float8 import is_converted, to_fp8
from fp8study.model.local import stride

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear

FP8 = torch.float8_e4m3fn


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


@cache
def _keeping_linear() -> type[Float8Linear]:
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    @torch._dynamo.allow_in_graph
    class Multiply(torch.autograd.Function):
        """The three GEMMs of a layer; N: tokens, K and M: input and output features.

        The input is cast as a matrix both times, so that a compiler finds its scale once.
        """

        @staticmethod
        def forward(
            ctx: Any, input_NK: torch.Tensor, weight_MK: torch.Tensor, rows_MK: torch.Tensor,
            columns_KM: torch.Tensor, scale: torch.Tensor, gemms: Any, config: Any,
        ) -> torch.Tensor:  # fmt: skip
            ctx.save_for_backward(input_NK, columns_KM, scale)
            ctx.gemms, ctx.config = gemms, config
            fp8_NK = hp_tensor_to_float8_dynamic(
                input_NK, config.cast_config_input.target_dtype, gemms
            )
            weight = Float8TrainingTensor(
                rows_MK.t(), scale, input_NK.dtype, gemms, GemmInputRole.WEIGHT
            )
            return torch.mm(fp8_NK, weight)

        @staticmethod
        def backward(ctx: Any, gradient_NM: torch.Tensor) -> tuple[Any, ...]:
            input_NK, columns_KM, scale = ctx.saved_tensors
            fp8_NM = hp_tensor_to_float8_dynamic(
                gradient_NM, ctx.config.cast_config_grad_output.target_dtype, ctx.gemms,
                gemm_input_role=GemmInputRole.GRAD_OUTPUT,
            )  # fmt: skip
            fp8_NK = hp_tensor_to_float8_dynamic(
                input_NK, ctx.config.cast_config_input.target_dtype, ctx.gemms
            )
            weight = Float8TrainingTensor(
                columns_KM.t(), scale, gradient_NM.dtype, ctx.gemms, GemmInputRole.WEIGHT
            )
            return torch.mm(fp8_NM, weight), torch.mm(fp8_NM.t(), fp8_NK), *[None] * 5

    class KeepingFloat8Linear(Float8Linear):
        """A converted linear layer whose weight is in FP8 already, in the layouts of both GEMMs."""

        fp8_rows_MK: torch.Tensor
        fp8_columns_KM: torch.Tensor
        fp8_scale: torch.Tensor

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled():  # as torchao does: the GPU's autocast, whatever device
                input = input.to(torch.get_autocast_gpu_dtype())
            product_NM = Multiply.apply(
                input.reshape(-1, input.shape[-1]), self.weight, self.fp8_rows_MK,
                self.fp8_columns_KM, self.fp8_scale, self.linear_mm_config, self.config,
            )  # fmt: skip
            output = product_NM.reshape(*input.shape[:-1], self.out_features)
            return output if self.bias is None else output + self.bias.to(output.dtype)

    return KeepingFloat8Linear


def keep_casts(model: torch.nn.Module, frees: bool = False) -> None:
    """Let a model's converted layers keep their weights in FP8, in place; they are whole.

    If it `frees`, a layer gives their memory back once it has its weight's gradient, until they are
    made anew: where all gradients are kept, a step is fullest at its end.
    """
    for module in model.modules():
        if is_converted(module):
            module.__class__ = _keeping_linear()
            weight_MK = module.get_parameter("weight").detach()
            # Not saved with the model: it follows from the weight.
            for name, made in (
                ("fp8_rows_MK", weight_MK.new_empty(weight_MK.shape, dtype=FP8)),
                ("fp8_columns_KM", weight_MK.new_empty(weight_MK.shape[::-1], dtype=FP8)),
                ("fp8_scale", weight_MK.new_zeros((), dtype=torch.float32)),
            ):
                module.register_buffer(name, made, persistent=False)
            if frees:
                weight = module.get_parameter("weight")
                weight.register_post_accumulate_grad_hook(partial(_resize, module, 0))
    refresh(model)


def keeping_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers of `keep_casts` by name."""
    return {n: m for n, m in model.named_modules() if type(m).__name__ == "KeepingFloat8Linear"}


@torch.no_grad()
def refresh(model: torch.nn.Module) -> None:
    """Cast the weights of a model from `keep_casts` anew; to be called whenever they changed."""
    from torchao.float8.float8_utils import amax_to_scale

    layers = [*keeping_layers(model).values()]
    largest = torch.stack(_largest([layer.weight for layer in layers]))
    scales = amax_to_scale(largest, FP8).unbind()
    torch._foreach_copy_([layer.fp8_scale for layer in layers], [*scales])
    for layer in layers:
        _resize(layer, layer.weight.numel())
        cast = _cast_both
        if layer.weight.is_cuda:
            from fp8study.model.kernels import cast_both as cast
        cast(layer.weight.detach(), layer.fp8_scale, layer.fp8_rows_MK, layer.fp8_columns_KM)


def _resize(layer: Any, num_bytes: int, *_: Any) -> None:
    for kept in (layer.fp8_rows_MK, layer.fp8_columns_KM):
        storage = kept.untyped_storage()
        if storage.nbytes() != num_bytes:  # else torch would copy it
            storage.resize_(num_bytes)


def note_largest(weight: torch.Tensor, largest: torch.Tensor) -> None:
    """Remember the largest size in a weight, found as it was updated, until it changes again."""
    torch.autograd.graph.increment_version(weight)  # of Triton's writing torch knows nothing
    weight.largest = (largest, weight._version)  # type: ignore[attr-defined]


def _largest(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the largest size in each weight; nothing is read where all were noted."""
    noted: list[Any] = [getattr(weight, "largest", (None, None)) for weight in weights]
    if all(version == w._version for w, (_, version) in zip(weights, noted, strict=True)):
        return [largest for largest, _ in noted]
    return [*torch._foreach_norm(weights, math.inf)]


def _cast_both(
    weight_MK: torch.Tensor, scale: torch.Tensor, rows_MK: torch.Tensor, columns_KM: torch.Tensor
) -> None:
    """Do what the kernel of that name does, where there is no GPU."""
    rows_MK.copy_(to_fp8(weight_MK, scale, FP8))
    columns_KM.copy_(rows_MK.t())


@torch.no_grad()
def is_current(layer: Any, num_samples: int) -> bool:
    """Return whether what a layer of `keep_casts` keeps is what torchao would make of its weight.

    The scale is made anew from the whole weight; of both layouts some numbers are looked at.
    """
    from torchao.float8.float8_utils import amax_to_scale

    weight_MK = layer.weight.detach()
    scale = amax_to_scale(torch.linalg.vector_norm(weight_MK, ord=math.inf), FP8)
    at = torch.arange(0, weight_MK.numel(), stride(weight_MK, num_samples), device=scale.device)
    i, j = at // weight_MK.shape[1], at % weight_MK.shape[1]
    made, rows_MK, columns_KM = (
        fp8.view(torch.uint8)
        for fp8 in (to_fp8(weight_MK[i, j], scale, FP8), layer.fp8_rows_MK, layer.fp8_columns_KM)
    )
    same = (made == rows_MK[i, j]) & (made == columns_KM[j, i])
    return bool(same.all() & (scale == layer.fp8_scale))
