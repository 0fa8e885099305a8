"""Layers that keep their weights, from one update to the next, as they multiply with them.

In FP8 torchao looks for a weight's largest size and casts it in each forward pass, and casts it
again, transposed, in each backward pass. That moves 14 bytes a weight, though a weight changes at
its update alone. Layers that keep it are given both layouts then, and cast nothing but inputs and
gradients. The values are torchao's to the bit.

With ``gradient_dtype=compute`` the gradient is that of the kept weight, not of the FP32 one: in
BF16, as its GEMM makes it. Autograd would write the same numbers again in FP32, for the norm and
the update to read. All other linear layers of the decoder then keep their weights in BF16, which
the update writes into the memory of the gradient that it has read; or, where a CUDA graph replays
the step, over those of before.

Whatever changes weights must call `refresh` afterwards; the audit asks `is_current` whether it did.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.model.build import decoder_layers
from fp8study.model.float8 import (
    as_autocast,
    fp8_layouts,
    is_converted,
    kept_of,
    part_of_mixture,
    to_fp8,
    turned,
)
from fp8study.model.fsdp.patches import applies
from fp8study.model.local import stride

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear

FP8 = torch.float8_e4m3fn


@cache
def _fp8_linear() -> type[Float8Linear]:
    """Make the class where it is needed: torchao takes seconds to import."""
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    rows, columns = fp8_layouts()

    @torch._dynamo.allow_in_graph
    class Multiply(torch.autograd.Function):
        """The three GEMMs of a layer; N: tokens, K and M: input and output features.

        The input is cast as a matrix both times, so that a compiler finds its scale once. A weight
        that is kept is there for its gradient alone.
        """

        @staticmethod
        def forward(
            ctx: Any, input_NK: torch.Tensor, weight_MK: Any, rows_MK: torch.Tensor | None,
            columns_KM: torch.Tensor | None, scale: torch.Tensor | None, gemms: Any, config: Any,
            turns: bool,
        ) -> torch.Tensor:  # fmt: skip
            kept = rows_MK, columns_KM, scale
            own = weight_MK if rows_MK is None else None
            ctx.save_for_backward(input_NK, own, columns_KM, scale)
            ctx.gemms, ctx.config, ctx.turns = gemms, config, turns
            fp8_NK = hp_tensor_to_float8_dynamic(
                input_NK, config.cast_config_input.target_dtype, gemms
            )
            return torch.mm(fp8_NK, rows(weight_MK, kept, fp8_NK).t())

        @staticmethod
        def backward(ctx: Any, gradient_NM: torch.Tensor) -> tuple[Any, ...]:
            input_NK, weight_MK, columns_KM, scale = ctx.saved_tensors
            fp8_NM = hp_tensor_to_float8_dynamic(
                gradient_NM, ctx.config.cast_config_grad_output.target_dtype, ctx.gemms,
                gemm_input_role=GemmInputRole.GRAD_OUTPUT,
            )  # fmt: skip
            fp8_NK = hp_tensor_to_float8_dynamic(
                input_NK, ctx.config.cast_config_input.target_dtype, ctx.gemms
            )
            weight = columns(weight_MK, (None, columns_KM, scale), fp8_NM)
            left_MN, right_NK = fp8_NM.t(), fp8_NK
            if ctx.turns:
                left_MN = turned(fp8_NM, fp8_NM)
                right_NK = turned(fp8_NK, fp8_NM).t()
            return torch.mm(fp8_NM, weight), torch.mm(left_MN, right_NK), *[None] * 6

    class OwnFloat8Linear(Float8Linear):
        """A converted linear layer with the GEMMs of `Multiply`.

        Its weight may be in FP8 already, in the layouts of both GEMMs.
        """

        turns: bool

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            product_NM = Multiply.apply(
                as_autocast(input).reshape(-1, input.shape[-1]), *kept_of(self),
                self.linear_mm_config, self.config, self.turns,
            )  # fmt: skip
            output = product_NM.reshape(*input.shape[:-1], self.out_features)
            return output if self.bias is None else output + self.bias.to(output.dtype)

    return OwnFloat8Linear


class KeepingLinear(torch.nn.Linear):
    """A linear layer that keeps its weight in BF16, and takes the gradient of that."""

    gradient_of: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply by the kept weight; autocast casts the rest."""
        return torch.nn.functional.linear(input, self.gradient_of, self.bias)


def keep_weights(model: torch.nn.Module, config: ResolvedConfig) -> None:
    """Let a model's layers keep their weights in place, as a run asks for; they are whole.

    Where all gradients are kept, a step is fullest at its end: a layer gives up what it keeps once
    it has its weight's gradient, until that is made anew. A weight that two modules hold keeps its
    wide gradient, which is the sum of both.
    """
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    narrow = config.gradient_dtype == "compute"
    if applies(config, "weight_cast"):
        for module in model.modules():
            if is_converted(module):
                _keep_in_fp8(module, config, narrow and owners[id(module.weight)] == 1)
    if narrow:
        for layer in decoder_layers(model):
            for name, module in layer.named_modules(prefix="layer"):
                if type(module) is not torch.nn.Linear or part_of_mixture(name) is not None:
                    continue
                if owners[id(module.weight)] == 1:
                    module.__class__ = KeepingLinear
                    _take_gradients(module, config)
    refresh(model)


def turn_apart(model: torch.nn.Module, config: ResolvedConfig) -> None:
    """Let layers that FSDP2 gathers in FP8 transpose by kernels of their own, as a run asks."""
    if applies(config, "transposes") and config.strategy == "fsdp2":
        for module in model.modules():
            if is_converted(module):
                module.__class__ = _fp8_linear()
                module.turns = True  # type: ignore[assignment]


def _keep_in_fp8(module: torch.nn.Module, config: ResolvedConfig, narrow: bool) -> None:
    module.__class__ = _fp8_linear()
    weight = module.get_parameter("weight")
    weight_MK = weight.detach()
    # Not saved with the model: it follows from the weight.
    for name, made in (
        ("fp8_rows_MK", weight_MK.new_empty(weight_MK.shape, dtype=FP8)),
        ("fp8_columns_KM", weight_MK.new_empty(weight_MK.shape[::-1], dtype=FP8)),
        ("fp8_scale", weight_MK.new_zeros((), dtype=torch.float32)),
    ):
        module.register_buffer(name, made, persistent=False)
    module.turns = applies(config, "transposes")  # type: ignore[assignment]
    module.casts_at_once = config.cast_kernels == "both_layouts"  # type: ignore[assignment]
    if narrow:
        _take_gradients(module, config)
    elif config.frees_casts:
        weight.register_post_accumulate_grad_hook(partial(_resize, module, 0))


def _take_gradients(module: Any, config: ResolvedConfig) -> None:
    """Give a layer's weight, in BF16, the gradients of a tensor that is nobody's parameter.

    It is the weight that a `KeepingLinear` keeps. In an FP8 layer it has no numbers.
    """
    weight = module.weight
    module.gradient_of = _no_numbers(weight).requires_grad_(weight.requires_grad)
    weight.grad_dtype, weight.gradient_of = torch.bfloat16, module.gradient_of
    if isinstance(module, KeepingLinear):
        weight.kept, weight.kept_moves = module.gradient_of, config.moves_weights
        if not weight.kept_moves:
            weight.kept.data = torch.empty_like(weight, dtype=torch.bfloat16)

    def arrived(kept: torch.Tensor) -> None:
        weight.grad, kept.grad = kept.grad, None
        if isinstance(module, KeepingLinear) and weight.kept_moves:
            kept.data = _no_numbers(weight)
        elif config.frees_casts:
            _resize(module, 0)

    if weight.requires_grad:
        module.gradient_of.register_post_accumulate_grad_hook(arrived)


def _no_numbers(weight: torch.Tensor) -> torch.Tensor:
    """Return BF16 numbers of a weight's shape that take no memory."""
    zero = torch.zeros((), dtype=torch.bfloat16, device=weight.device)
    return zero.expand(weight.shape).detach()


def keeping_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers of `keep_weights` by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, KeepingLinear) or hasattr(module, "fp8_rows_MK")
    }


@torch.no_grad()
def refresh(model: torch.nn.Module) -> None:
    """Cast the weights of a model from `keep_weights` anew; to be called whenever they changed."""
    layers = []
    for layer in keeping_layers(model).values():
        weight: Any = layer.weight
        if not isinstance(layer, KeepingLinear):
            layers.append(layer)
        elif getattr(weight, "written", None) != weight._version:
            made = weight.detach().to(torch.bfloat16)
            if weight.kept_moves:
                weight.kept.data = made
            else:
                weight.kept.copy_(made)
    if not layers:
        return
    from torchao.float8.float8_utils import amax_to_scale

    weights = [layer.weight for layer in layers]
    largest = noted_largest(weights) or [*torch._foreach_norm(weights, math.inf)]
    scales = amax_to_scale(torch.stack(largest), FP8).unbind()
    torch._foreach_copy_([layer.fp8_scale for layer in layers], [*scales])
    for layer in layers:
        _resize(layer, layer.weight.numel())
        cast = _cast_both
        if layer.weight.is_cuda:
            from fp8study.model.kernels import cast_both as cast
        kept = layer.fp8_scale, layer.fp8_rows_MK, layer.fp8_columns_KM
        cast(layer.weight.detach(), *kept, layer.casts_at_once)


def _resize(layer: Any, num_bytes: int, *_: Any) -> None:
    for kept in (layer.fp8_rows_MK, layer.fp8_columns_KM):
        storage = kept.untyped_storage()
        if storage.nbytes() != num_bytes:  # else torch would copy it
            storage.resize_(num_bytes)


def room_for_kept(weight: Any, gradient: torch.Tensor) -> torch.Tensor | None:
    """Return where an update shall write a weight in BF16, if anywhere; best over its gradient."""
    if not hasattr(weight, "kept"):
        return None
    return gradient if weight.kept_moves else weight.kept.data


def note_update(weight: Any, largest: torch.Tensor, written: torch.Tensor | None = None) -> None:
    """Remember what an update found and wrote, until the weight changes again.

    `largest`: the weight's largest size; `written`: the weight itself in `room_for_kept`.
    """
    torch.autograd.graph.increment_version(weight)  # of Triton's writing torch knows nothing
    weight.largest = (largest, weight._version)
    if written is not None:
        weight.kept.data, weight.written = written, weight._version


def forget_updates(model: torch.nn.Module) -> None:
    """Forget what `note_update` was told: a checkpoint read into shards changes no version."""
    for weight in model.parameters():
        for name in ("largest", "written"):
            if hasattr(weight, name):
                delattr(weight, name)


def noted_largest(weights: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return what the update found largest in each weight; None if one has changed otherwise."""
    noted: list[Any] = [getattr(weight, "largest", (None, None)) for weight in weights]
    if all(version == w._version for w, (_, version) in zip(weights, noted, strict=True)):
        return [largest for largest, _ in noted]
    return None


def _cast_both(
    weight_MK: torch.Tensor, scale: torch.Tensor, rows_MK: torch.Tensor, columns_KM: torch.Tensor,
    at_once: bool = False,
) -> None:  # fmt: skip
    """Do what the kernel of that name does, where there is no GPU."""
    rows_MK.copy_(to_fp8(weight_MK, scale, FP8))
    columns_KM.copy_(rows_MK.t())


@torch.no_grad()
def is_current(layer: Any, num_samples: int) -> bool:
    """Return whether a layer of `keep_weights` keeps what torch or torchao would multiply with.

    Some numbers are looked at; an FP8 layer's scale is made anew from the whole weight.
    """
    weight_MK = layer.weight.detach()
    every = stride(weight_MK, num_samples)
    at = torch.arange(0, weight_MK.numel(), every, device=weight_MK.device)
    i, j = at // weight_MK.shape[1], at % weight_MK.shape[1]
    if isinstance(layer, KeepingLinear):
        return torch.equal(layer.gradient_of[i, j], weight_MK[i, j].to(torch.bfloat16))
    from torchao.float8.float8_utils import amax_to_scale

    scale = amax_to_scale(torch.linalg.vector_norm(weight_MK, ord=math.inf), FP8)
    made, rows_MK, columns_KM = (
        fp8.view(torch.uint8)
        for fp8 in (to_fp8(weight_MK[i, j], scale, FP8), layer.fp8_rows_MK, layer.fp8_columns_KM)
    )
    same = (made == rows_MK[i, j]) & (made == columns_KM[j, i])
    return bool(same.all() & (scale == layer.fp8_scale))
