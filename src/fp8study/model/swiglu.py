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
from fp8study.model.float8 import fp8_layouts, is_converted, to_fp8, turned
from fp8study.model.fsdp.patches import applies
from fp8study.model.kept_weights import FP8

#: The format of gradients, torchao's for tensorwise scaling.
GRADIENT = torch.float8_e5m2
#: Layers of an MLP that computes ``down(silu(gate(x)) * up(x))``.
_LAYERS = ("gate_proj", "up_proj", "down_proj")


def _scale(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from torchao.float8.float8_utils import amax_to_scale

    return amax_to_scale(numbers.abs().max().float(), dtype)


@torch.library.custom_op("fp8study::gated", mutates_args=())
def _gated(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SwiGLU's output in FP8 and its scale."""
    return _gate(gate_NF, up_NF)


@_gated.register_fake
def _(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(gate_NF, dtype=FP8), gate_NF.new_empty((), dtype=torch.float32)


@torch.library.triton_op("fp8study::gated_by_compiler", mutates_args=())
def _gated_by_compiler(
    gate_NF: torch.Tensor, up_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `_gated`, by kernels that the compiler launches; on GPUs."""
    return _gate(gate_NF, up_NF, by_compiler=True)


def _gate(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, by_compiler: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    fp8_NF = torch.empty_like(gate_NF, dtype=FP8)
    # Of shape (), torch's compiler would write a zero into it by a kernel.
    scale = gate_NF.new_empty((1,), dtype=torch.float32)
    if gate_NF.is_cuda:
        from torchao.float8.float8_utils import EPS

        from fp8study.model.kernels import gated

        gated(
            gate_NF, up_NF, torch.zeros_like(scale), scale, fp8_NF, torch.finfo(FP8).max, EPS,
            by_compiler,
        )  # fmt: skip
    else:
        output_NF = torch.nn.functional.silu(gate_NF) * up_NF
        scale.copy_(_scale(output_NF, FP8))
        fp8_NF.copy_(to_fp8(output_NF, scale, FP8))
    return fp8_NF, scale.view(())


@torch.library.custom_op("fp8study::gated_gradients", mutates_args=())
def _gated_gradients(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, gradient_NF: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up in FP8, SwiGLU's output by its scale, and both scales."""
    return _gate_gradients(gate_NF, up_NF, gradient_NF, scale)


@_gated_gradients.register_fake
def _(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, gradient_NF: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(gate_NF)


@torch.library.triton_op("fp8study::gated_gradients_by_compiler", mutates_args=())
def _gated_gradients_by_compiler(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, gradient_NF: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do as `_gated_gradients`, by kernels that the compiler launches; on GPUs."""
    return _gate_gradients(gate_NF, up_NF, gradient_NF, scale, by_compiler=True)


def _gate_gradients(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, gradient_NF: torch.Tensor, scale: torch.Tensor,
    by_compiler: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    made = _empty(gate_NF)
    if gate_NF.is_cuda:
        from torchao.float8.float8_utils import EPS

        from fp8study.model.kernels import gated_gradients

        gated_gradients(
            gate_NF, up_NF, gradient_NF, scale, torch.zeros_like(made[3]), made[3], made[:3],
            torch.finfo(GRADIENT).max, EPS, by_compiler,
        )  # fmt: skip
        return made
    silu_NF = torch.nn.functional.silu(gate_NF)
    of_gate_NF = torch.ops.aten.silu_backward(gradient_NF * up_NF, gate_NF)
    of_up_NF = gradient_NF * silu_NF
    made[3].copy_(torch.stack([_scale(of_gate_NF, GRADIENT), _scale(of_up_NF, GRADIENT)]))
    made[0].copy_(to_fp8(of_gate_NF, made[3][0], GRADIENT))
    made[1].copy_(to_fp8(of_up_NF, made[3][1], GRADIENT))
    made[2].copy_(to_fp8(silu_NF * up_NF, scale, FP8))
    return made


def _empty(
    like_NF: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    of_gate, of_up, output = (
        torch.empty_like(like_NF, dtype=dtype) for dtype in (GRADIENT, GRADIENT, FP8)
    )
    return of_gate, of_up, output, like_NF.new_empty((2,), dtype=torch.float32)


@cache
def _function(by_compiler: bool) -> Any:
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
            launches = by_compiler and gate_NF.is_cuda
            fp8_NF, scale = (_gated_by_compiler if launches else _gated)(gate_NF, up_NF)
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
            turned_MK = [
                columns(weights[n], kept[3 * n : 3 * n + 3], gradient, by_compiler)
                for n in range(3)
            ]
            launches = by_compiler and gate_NF.is_cuda
            gated_gradients = _gated_gradients_by_compiler if launches else _gated_gradients
            made = gated_gradients(gate_NF, up_NF, torch.mm(gradient, turned_MK[2]), scale)
            of_gate, of_up = (
                Float8TrainingTensor(
                    made[n], made[3][n], gradient_NK.dtype, gemms, GemmInputRole.GRAD_OUTPUT
                )
                for n in range(2)
            )
            output = Float8TrainingTensor(made[2], scale, gradient_NK.dtype, gemms)
            input = hp_tensor_to_float8_dynamic(
                input_NK, ctx.config.cast_config_input.target_dtype, gemms
            )
            turn = partial(turned, after=gradient, by_compiler=by_compiler)
            right = turn(input).t()
            return (
                torch.mm(of_gate, turned_MK[0]), torch.mm(of_up, turned_MK[1]), None, None,
                torch.mm(turn(of_gate), right), torch.mm(turn(of_up), right),
                torch.mm(turn(gradient), turn(output).t()), *[None] * 9,
            )  # fmt: skip

    return Gated


def _forward(self: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
    inputs = [x, x]
    if torch.is_autocast_enabled():  # as torchao does: the GPU's autocast, whatever device
        inputs = [x.to(torch.get_autocast_gpu_dtype()) for _ in range(2)]
    layers = [getattr(self, name) for name in _LAYERS]
    sources = (getattr(layer, "gradient_of", None) for layer in layers)
    weights = [
        layer.weight if source is None else source
        for layer, source in zip(layers, sources, strict=True)
    ]
    names = ("fp8_rows_MK", "fp8_columns_KM", "fp8_scale")
    kept = [getattr(layer, name, None) for layer in layers for name in names]
    flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
    output_NK: torch.Tensor = function.apply(
        *flat, layers[0].linear_mm_config, layers[0].config, *weights, *kept
    )
    return output_NK.reshape(*x.shape[:-1], output_NK.shape[-1])


class WritesFp8:
    """An MLP whose SwiGLU writes FP8."""


@cache
def _class_of(mlp: Any, by_compiler: bool) -> Any:
    function = _function(by_compiler)
    methods = {"forward": lambda self, x: _forward(self, x, function)}
    return type(f"Gated{mlp.__name__}", (mlp, WritesFp8), methods)


def write_fp8_between(model: torch.nn.Module, config: ResolvedConfig) -> None:
    """Let the MLPs of a converted model do their SwiGLU as a run asks for, in place.

    Only those whose three layers are in FP8 and have no bias; the others stay the compiler's.
    """
    if asks_for_kernels(config):
        for module in model.modules():
            if _is_swiglu(module):
                kind: Any = type(module)
                module.__class__ = _class_of(kind, config.kernel_launch == "by_compiler")


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
