"""The MLP of a decoder layer as one function, whose SwiGLU writes FP8.

What torch.compile makes of SwiGLU between FP8 layers reads three matrices for their largest numbers
and again to cast them, and writes five, three of them transposed: kernels that reach a third to a
half of the memory's speed (docs/log.md, entry 68). Here two kernels write the same numbers as they
are, and a third turns them. Numbers are rounded wherever torch's own operators would write them.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.presets import SWIGLU_MLPS
from fp8study.model.float8 import as_autocast, fp8_layouts, is_converted, kept_of, to_fp8, turned
from fp8study.model.fsdp.patches import applies
from fp8study.model.kept_weights import FP8

#: The format of gradients, torchao's for tensorwise scaling.
GRADIENT = torch.float8_e5m2
#: Those of the gradients of gate and up, and of what SwiGLU computes.
_FORMATS = (GRADIENT, GRADIENT, FP8)
#: Layers of an MLP that computes ``down(silu(gate(x)) * up(x))``.
_LAYERS = ("gate_proj", "up_proj", "down_proj")


def _scale(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from torchao.float8.float8_utils import amax_to_scale

    return amax_to_scale(numbers.abs().max().float(), dtype)


@torch.library.custom_op("fp8study::gated", mutates_args=())
def _gated(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SwiGLU's output in FP8 and its scale."""
    fp8_NF = torch.empty_like(gate_NF, dtype=FP8)
    scale = gate_NF.new_empty((), dtype=torch.float32)
    if gate_NF.is_cuda:
        from torchao.float8.float8_utils import EPS

        from fp8study.model.kernels import gated

        gated(gate_NF, up_NF, torch.zeros_like(scale), scale, fp8_NF, torch.finfo(FP8).max, EPS)
    else:
        output_NF = torch.nn.functional.silu(gate_NF) * up_NF
        scale.copy_(_scale(output_NF, FP8))
        fp8_NF.copy_(to_fp8(output_NF, scale, FP8))
    return fp8_NF, scale


@_gated.register_fake
def _(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(gate_NF, dtype=FP8), gate_NF.new_empty((), dtype=torch.float32)


@torch.library.custom_op("fp8study::gated_gradients", mutates_args=())
def _gated_gradients(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, gradient_NF: torch.Tensor, scale: torch.Tensor,
    turns: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Return both scales and, in FP8, the gradients of gate and up, and SwiGLU's output by `scale`.

    If it `turns`, the output is transposed, after both gradients transposed, too.
    """
    scales, *fp8 = made = _empty(gate_NF, turns)
    if gate_NF.is_cuda:
        from torchao.float8.float8_utils import EPS

        from fp8study.model.kernels import gated_gradients

        gated_gradients(
            gate_NF, up_NF, gradient_NF, scale, torch.zeros_like(scales), scales, (*fp8,),
            torch.finfo(GRADIENT).max, EPS,
        )  # fmt: skip
        return made
    silu_NF = torch.nn.functional.silu(gate_NF)
    of_gate_NF = torch.ops.aten.silu_backward(gradient_NF * up_NF, gate_NF)
    of_up_NF = gradient_NF * silu_NF
    scales.copy_(torch.stack([_scale(of_gate_NF, GRADIENT), _scale(of_up_NF, GRADIENT)]))
    exact = (of_gate_NF, of_up_NF, silu_NF * up_NF)
    cast = [to_fp8(*each) for each in zip(exact, (*scales, scale), _FORMATS, strict=True)]
    if turns:
        cast = [*cast[:2], *(each_NF.t() for each_NF in cast)]
    for room, each in zip(fp8, cast, strict=True):
        room.copy_(each)
    return made


@_gated_gradients.register_fake
def _(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, gradient_NF: torch.Tensor, scale: torch.Tensor,
    turns: bool,
) -> list[torch.Tensor]:  # fmt: skip
    return _empty(gate_NF, turns)


def _empty(like_NF: torch.Tensor, turns: bool) -> list[torch.Tensor]:
    shapes = [(dtype, like_NF.shape) for dtype in _FORMATS]
    if turns:
        shapes[2:] = [(dtype, like_NF.shape[::-1]) for dtype in _FORMATS]
    fp8 = [like_NF.new_empty(shape, dtype=dtype) for dtype, shape in shapes]
    return [like_NF.new_empty((2,), dtype=torch.float32), *fp8]


@cache
def _function(turns: bool) -> Any:
    """Make the class where it is needed: torchao takes seconds to import."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    rows, columns = fp8_layouts()

    @torch._dynamo.allow_in_graph
    class Gated(torch.autograd.Function):
        """The nine GEMMs of an MLP; N: tokens, K: features, F: features between.

        Its input comes twice, for gate and for up: autograd adds up what it gets for both as it
        does for two layers, in FP32 where the input was. `weights`: three that are given gradients.
        What a layer keeps of its own lies in `kept`: both layouts in FP8 and the scale, or three
        times None where the weight itself is in FP8.
        """

        @staticmethod
        def forward(
            ctx: Any, input_NK: torch.Tensor, again_NK: torch.Tensor, gemms: Any, config: Any,
            *tensors: Any,
        ) -> torch.Tensor:  # fmt: skip
            weights, kept = tensors[:3], tensors[3:]
            ctx.gemms, ctx.config = gemms, config
            input = hp_tensor_to_float8_dynamic(
                input_NK, config.cast_config_input.target_dtype, gemms
            )
            in_fp8 = [rows(weights[n], kept[3 * n : 3 * n + 3], input) for n in range(3)]
            gate_NF, up_NF = (torch.mm(input, weight.t()) for weight in in_fp8[:2])
            fp8_NF, scale = _gated(gate_NF, up_NF)
            output = Float8TrainingTensor(fp8_NF, scale, input_NK.dtype, gemms)
            ctx.save_for_backward(input_NK, gate_NF, up_NF, scale, *tensors)
            return torch.mm(output, in_fp8[2].t())

        @staticmethod
        def backward(ctx: Any, gradient_NK: torch.Tensor) -> tuple[Any, ...]:
            input_NK, gate_NF, up_NF, scale, *tensors = ctx.saved_tensors
            weights, kept, gemms = tensors[:3], tensors[3:], ctx.gemms
            gradient = hp_tensor_to_float8_dynamic(
                gradient_NK, ctx.config.cast_config_grad_output.target_dtype, gemms,
                gemm_input_role=GemmInputRole.GRAD_OUTPUT,
            )  # fmt: skip
            turned_MK = [columns(weights[n], kept[3 * n : 3 * n + 3], gradient) for n in range(3)]
            of_output = torch.mm(gradient, turned_MK[2])
            scales, *fp8 = _gated_gradients(gate_NF, up_NF, of_output, scale, turns)
            roles = (GemmInputRole.GRAD_OUTPUT, GemmInputRole.GRAD_OUTPUT, GemmInputRole.INPUT)
            by = (*scales.unbind(), scale)
            turn = partial(turned, after=gradient)

            def tensor(n: int, data: torch.Tensor) -> Any:
                return Float8TrainingTensor(data, by[n], gradient_NK.dtype, gemms, roles[n])

            def left(n: int) -> Any:
                return tensor(n, fp8[2 + n]) if turns else turn(tensor(n, fp8[n]))

            input = hp_tensor_to_float8_dynamic(
                input_NK, ctx.config.cast_config_input.target_dtype, gemms
            )
            right = turn(input).t()
            return (
                *(torch.mm(tensor(n, fp8[n]), turned_MK[n]) for n in range(2)), None, None,
                torch.mm(left(0), right), torch.mm(left(1), right),
                torch.mm(turn(gradient), left(2).t()), *[None] * 9,
            )  # fmt: skip

    return Gated


def _forward(self: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
    inputs = [as_autocast(x).reshape(-1, x.shape[-1]) for _ in range(2)]
    layers = [getattr(self, name) for name in _LAYERS]
    parts = [kept_of(layer) for layer in layers]
    output_NK: torch.Tensor = function.apply(
        *inputs, layers[0].linear_mm_config, layers[0].config,
        *[part[0] for part in parts], *[kept for part in parts for kept in part[1:]],
    )  # fmt: skip
    return output_NK.reshape(*x.shape[:-1], output_NK.shape[-1])


class WritesFp8:
    """An MLP whose SwiGLU writes FP8."""


@cache
def _class_of(mlp: Any, turns: bool) -> Any:
    function = _function(turns)
    methods = {"forward": lambda self, x: _forward(self, x, function)}
    return type(f"Gated{mlp.__name__}", (mlp, WritesFp8), methods)


def write_fp8_between(model: torch.nn.Module, config: ResolvedConfig) -> None:
    """Let the MLPs of a converted model do their SwiGLU as a run asks for, in place.

    Only those whose three layers are in FP8 and have no bias; the others stay the compiler's.
    """
    if asks_for_kernels(config):
        turns = config.cast_kernels == "both_layouts"
        for module in model.modules():
            if _is_swiglu(module):
                kind: Any = type(module)
                module.__class__ = _class_of(kind, turns)


def asks_for_kernels(config: ResolvedConfig) -> bool:
    """Return whether a run's MLPs are to write FP8, where this installation can."""
    return applies(config, "swiglu") and applies(config, "weight_cast")


def num_gated(model: torch.nn.Module) -> int:
    """Return how many of a model's MLPs write FP8 between their layers."""
    return sum(isinstance(module, WritesFp8) for module in model.modules())


def _is_swiglu(module: Any) -> bool:
    layers = [getattr(module, name, None) for name in _LAYERS]
    return (
        type(module).__name__ in SWIGLU_MLPS.values()
        and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and all(
            layer is not None and is_converted(layer) and layer.bias is None for layer in layers
        )
    )
