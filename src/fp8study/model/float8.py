"""FP8 linear layers through torchao: which layers, which recipe, and what was really done."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.path.choices import HEAD
from fp8study.core.presets import check_patterns
from fp8study.core.recipes import ALIGNMENT, RECIPES, is_aligned

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

#: A mixture's router decides by small differences, and its experts' GEMMs are small: both stay
#: out of FP8. These are the names that transformers' models give them.
_ROUTER = r"\.(router|gate|shared_expert_gate)$"
_EXPERT = r"\.(experts|shared_experts?)(\.|$)"


def float8_config(config: ResolvedConfig) -> Float8LinearConfig:
    """Return torchao's configuration of an FP8 run's recipe."""
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(RECIPES[config.precision].torchao_name)
    fast = recipe.gemm_config_output
    assert fast.use_fast_accum
    backward = ("gemm_config_grad_input", "gemm_config_grad_weight")
    return dataclasses.replace(
        recipe,
        **dict.fromkeys(backward if config.fast_accumulation == "all" else (), fast),
        enable_fsdp_float8_all_gather=bool(config.fp8_all_gather),
        emulate=bool(config.fp8_emulate),
    )


def float8_filter(
    config: ResolvedConfig, model: torch.nn.Module
) -> Callable[[torch.nn.Module, str], bool]:
    """Return the predicate that tells torchao which linear layers to convert.

    Raises:
        UserError: A pattern of ``skip`` matches no linear layer: a misspelt pattern would
            otherwise convert what was meant to be kept.
    """
    linears = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if config.left_out == HEAD and not {*HEAD} & {*linears}:  # nobody need have asked for that
        raise UserError(
            f"skip: {config.model} has no linear layer '{HEAD[0]}', which stays in BF16 unless "
            "something else is said; name layers that it has, or use skip=none"
        )
    check_patterns("skip", config.left_out, linears)

    def convert(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and why_skipped(config, name, module) is None

    return convert


def why_skipped(config: ResolvedConfig, name: str, module: torch.nn.Linear) -> str | None:
    """Return why a linear layer stays out of FP8, or None if nothing keeps it out."""
    if not config.is_fp8:
        return f"precision={config.precision}"
    if not is_aligned(module.in_features, module.out_features):
        return f"a dimension does not divide by {ALIGNMENT}"
    if part := part_of_mixture(name):
        return part
    for pattern in config.left_out:
        if fnmatch.fnmatchcase(name, pattern):
            return f"skip pattern '{pattern}'"
    return None


def part_of_mixture(name: str) -> str | None:
    """Name the part of a mixture that a module is and that stays out of FP8; None for others."""
    if re.search(_ROUTER, name):
        return "router of a mixture of experts"
    return "expert of a mixture" if re.search(_EXPERT, name) else None


def is_converted(module: torch.nn.Module) -> bool:
    """Return whether torchao has made a layer compute in FP8. Needs no import of torchao.

    Sharding gives a module a class of its own, derived from what it was.
    """
    return any(ancestor.__name__ == "Float8Linear" for ancestor in type(module).mro())


def as_autocast(numbers: torch.Tensor) -> torch.Tensor:
    """Cast as torchao does before an FP8 layer: by the GPU's autocast, whatever the device."""
    if torch.is_autocast_enabled():
        return numbers.to(torch.get_autocast_gpu_dtype())
    return numbers


def kept_of(layer: Any) -> tuple[Any, ...]:
    """Return the tensor that takes an FP8 layer's gradient, and what is kept of its weight.

    That is, or is None: the weight in both layouts in FP8, and its scale.
    """
    source = getattr(layer, "gradient_of", None)
    kept = (getattr(layer, f"fp8_{name}", None) for name in ("rows_MK", "columns_KM", "scale"))
    return layer.weight if source is None else source, *kept


def to_fp8(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale numbers, cut them off at the format's largest and round them, as torchao does."""
    largest = torch.finfo(dtype).max
    return (numbers.float() * scale).clamp(-largest, largest).to(dtype)


@torch.library.custom_op("fp8study::turned", mutates_args=())
def _turned(fp8_AB: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Transpose FP8 numbers by a kernel of its own.

    A compiler cannot do it before `after` is there: else it would keep a forward pass's for the
    backward pass.
    """
    turned_BA = fp8_AB.new_empty(fp8_AB.shape[::-1])
    if fp8_AB.is_cuda:
        from fp8study.model.kernels import transpose

        transpose(fp8_AB, turned_BA)
    else:
        turned_BA.copy_(fp8_AB.t())
    return turned_BA


@_turned.register_fake
def _(fp8_AB: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return fp8_AB.new_empty(fp8_AB.shape[::-1])


def turned(matrix_AB: Any, after: Any) -> Any:
    """Transpose a matrix of torchao's FP8 tensors, once the scale of `after`, another, is there.

    Not its numbers: a compiler would write them anew for each kernel that waits for them.
    """
    return type(matrix_AB)(
        _turned(matrix_AB._data, after._scale), matrix_AB._scale, matrix_AB._orig_dtype,
        matrix_AB._linear_mm_config, matrix_AB._gemm_input_role,
    )  # fmt: skip


@cache
def fp8_layouts() -> tuple[Any, Any]:
    """Return functions that give a weight as its GEMMs take it: as it is, and transposed.

    Both take the weight, what a layer keeps of it (both layouts in FP8 and the scale, or three
    times None where the weight itself is in FP8, as FSDP2 gathers it), and one of torchao's FP8
    tensors that the GEMM is for.
    """
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    def made(data: torch.Tensor, scale: torch.Tensor, beside: Any) -> Any:
        return Float8TrainingTensor(
            data, scale, beside._orig_dtype, beside._linear_mm_config, GemmInputRole.WEIGHT
        )

    def rows(weight_MK: Any, kept: Any, beside: Any) -> Any:
        rows_MK, _, scale = kept
        return weight_MK if rows_MK is None else made(rows_MK, scale, beside)

    def columns(weight_MK: Any, kept: Any, beside: Any) -> Any:
        _, columns_KM, scale = kept
        if columns_KM is None:
            return turned(weight_MK, beside).t()
        return made(columns_KM.t(), scale, beside)

    return rows, columns


def convert_to_float8(model: torch.nn.Module, config: ResolvedConfig) -> None:
    """Replace the model's linear layers by FP8 ones in place; nothing to do for bf16.

    Raises:
        UserError: A pattern of ``skip`` matches nothing, or FP8 all-gather would give the loss
            head a weight of its own that it shared with the embedding.
    """
    if not config.is_fp8:
        return
    from torchao.float8 import convert_to_float8_training

    chosen, was_tied = float8_filter(config, model), _is_tied(model)
    if config.fp8_all_gather and config.strategy == "fsdp2":
        for name, module in model.named_modules():
            if chosen(module, name):
                _check_even_shards(name, module.weight.shape[0], config.num_shards)
    convert_to_float8_training(model, config=float8_config(config), module_filter_fn=chosen)
    if was_tied and not _is_tied(model):
        raise UserError(
            "skip: the loss head shares its weight with the embedding, and fp8_all_gather=true "
            "would part them; add lm_head to skip, or set fp8_all_gather=false"
        )


def _is_tied(model: torch.nn.Module) -> bool:
    """Return whether embedding and loss head are one weight."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = [getattr(end, "weight", None) for end in ends]
    return weights[0] is not None and weights[0] is weights[1]


def _check_even_shards(name: str, num_rows: int, num_shards: int) -> None:
    """Refuse a number of GPUs that splits a weight's rows unevenly: torchao cannot gather that."""
    if num_rows % num_shards:
        raise UserError(
            f"num_gpus: {num_shards} does not divide the {num_rows} rows of {name}, and FP8 "
            "weights can be gathered from even shards only; set fp8_all_gather=false or choose "
            "another num_gpus"
        )


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
    """Let a model's converted layers change their precision; before it is sharded.

    Weights, optimizer and sharding stay as they are. What was compiled for a precision is kept, so
    that only the first step of a precision compiles.
    """
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
