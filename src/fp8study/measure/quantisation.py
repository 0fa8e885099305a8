"""What FP8 does to each GEMM of a linear layer, one GEMM at a time.

A linear layer multiplies three times:

    output       =  input        @ weight^T       (forward)
    grad_input   =  grad_output  @ weight         (backward)
    grad_weight  =  grad_output^T @ input         (backward)

For each recipe we take the operands that the BF16 model has at that moment, cast them as torchao
would, multiply them with the recipe's own kernel, and compare with the FP32 GEMM of the
uncast operands. So an error here is that of one GEMM; how the errors of all GEMMs add up
in a gradient is `fp8study.measure.gradient_noise`'s subject.

Which format an operand is cast to, along which axis its scales run and whether it is cast at all
is read off the recipe's `Float8LinearConfig`, and torchao does the cast. Its default for gradients
of the output is E5M2; its rowwise recipes use E4M3 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fp8study.core.recipes import GEMMS
from fp8study.model.float8 import is_converted

if TYPE_CHECKING:
    from torchao.float8.config import CastConfig
    from torchao.float8.float8_linear import Float8Linear

#: What is measured of each GEMM, in this order. ``error``: relative L2 norm; ``underflow``:
#: share of all elements that are not zero but are cast to zero; ``saturated``: share cut off at
#: the format's largest number. The share counts elements, so 0 to 1.
STATISTICS = (
    "error",
    "first_error", "first_underflow", "first_saturated",
    "second_error", "second_underflow", "second_saturated",
)  # fmt: skip


def measure_products(
    model: torch.nn.Module, converted: Mapping[Any, torch.nn.Module], ids_T: torch.Tensor
) -> dict[str, Any]:
    """Measure every GEMM of every converted layer in one forward and backward pass.

    The measuring happens inside the backward pass, layer by layer, where the operands are in
    memory anyway; nothing waits for the device until the end.

    Args:
        model: The BF16 model, which supplies the operands.
        converted: Recipe to the same model after conversion; its `Float8Linear` layers say
            what is cast and how.
        ids_T: int64[T] token ids of one sequence, on the model's device.

    Returns:
        ``statistics`` (`STATISTICS`), ``layers`` (L names) and ``values``: recipe to GEMM to
        a list of L rows with one number per statistic. The recipe ``bf16`` stands for the plain
        BF16 GEMM, whose operands are exact.
    """
    recipes: dict[str, dict[str, Any]] = {
        name: {layer: module for layer, module in shadow.named_modules() if is_converted(module)}
        for name, shadow in converted.items()
    }
    watched = sorted({layer for layers in recipes.values() for layer in layers})
    found: dict[str, torch.Tensor] = {}

    def watch(name: str, module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        def measure(grad_output: torch.Tensor) -> None:
            layers = [layers.get(name) for layers in recipes.values()]
            found[name] = _layer(layers, inputs[0].detach(), module.weight.detach(), grad_output)

        output.register_hook(measure)

    handles = [model.get_submodule(n).register_forward_hook(partial(watch, n)) for n in watched]
    try:
        loss = model(input_ids=ids_T[None], labels=ids_T[None]).loss
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        return {"statistics": list(STATISTICS), "layers": [], "values": {}}
    numbers = torch.stack([found[name] for name in watched]).cpu()  # [L, recipes, GEMMs, S]
    values = {
        recipe: {gemm: short_numbers(numbers[:, r, g], 3) for g, gemm in enumerate(GEMMS)}
        for r, recipe in enumerate(("bf16", *recipes))
    }
    return {"statistics": list(STATISTICS), "layers": watched, "values": values}


def short_numbers(tensor: torch.Tensor, digits: int) -> Any:
    """Return nested lists of floats with as many significant digits as are worth storing."""

    def shortened(value: Any) -> Any:
        is_list = isinstance(value, list)
        return [shortened(v) for v in value] if is_list else float(f"{value:.{digits}g}")

    return shortened(tensor.tolist())


@torch.no_grad()
def _layer(
    layers: list[Float8Linear | None],
    input_: torch.Tensor,
    weight_NK: torch.Tensor,
    grad_output: torch.Tensor,
) -> torch.Tensor:
    """Return float64[1 + recipes, GEMMs, statistics]; M: tokens, K: inputs, N: outputs."""
    input_MK = input_.reshape(-1, input_.shape[-1])
    grad_output_MN = grad_output.reshape(-1, grad_output.shape[-1])
    products = []
    exact_operands = {
        "output": (input_MK, weight_NK.t()),
        "grad_input": (grad_output_MN, weight_NK),
        "grad_weight": (grad_output_MN.t(), input_MK),
    }
    for product in GEMMS:
        first, second = exact_operands[product]
        exact = first.float() @ second.float()
        plain = torch.stack([relative_error(first @ second, exact), *[exact.new_zeros(())] * 6])
        rows = [plain]
        for layer in layers:
            if layer is None:
                rows.append(torch.full_like(plain, torch.nan))
                continue
            cast = cast_operands(layer, product, input_MK, weight_NK, grad_output_MN)
            result = relative_error(torch.mm(*cast), exact)
            parts = (*operand_error(first, cast[0]), *operand_error(second, cast[1]))
            rows.append(torch.stack([result, *parts]))
        products.append(torch.stack(rows))
    return torch.stack(products, dim=1)


def cast_operands(
    layer: Float8Linear,
    product: str,
    input_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    grad_output_MN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two matrices of one GEMM as the layer's recipe casts them.

    Scales run along the axis that the GEMM sums over, which is why a matrix is cast anew for
    each GEMM of a rowwise recipe. `test_quantisation` holds this equal to `Float8Linear`, bit
    for bit.
    """
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_scaling_utils import (
        get_maybe_axiswise_dim,
        hp_tensor_to_float8_dynamic,
    )
    from torchao.float8.float8_training_tensor import GemmInputRole as Role

    def cast(matrix: torch.Tensor, how: CastConfig, role: Role, axis: int) -> torch.Tensor:
        if how.scaling_type is ScalingType.DISABLED:
            return matrix
        return hp_tensor_to_float8_dynamic(
            matrix,
            how.target_dtype,
            layer.linear_mm_config,
            gemm_input_role=role,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(axis, how.scaling_granularity),
            round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
        )

    c, weight_KN = layer.config, weight_NK.t()
    if product == "output":
        first = cast(input_MK, c.cast_config_input, Role.INPUT, -1)
        return first, cast(weight_KN, c.cast_config_weight, Role.WEIGHT, 0)
    if product == "grad_input":
        first = cast(grad_output_MN, c.cast_config_grad_output, Role.GRAD_OUTPUT, -1)
        return first, cast(weight_KN, c.cast_config_weight_for_grad_input, Role.WEIGHT, -1).t()
    first = cast(grad_output_MN, c.cast_config_grad_output_for_grad_weight, Role.GRAD_OUTPUT, 0)
    return first.t(), cast(input_MK, c.cast_config_input_for_grad_weight, Role.INPUT, 0)


def relative_error(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return |approximate - exact| / |exact| (L2), a scalar; NaN where the exact one is zero."""
    difference = torch.linalg.vector_norm(approximate.float() - exact)
    return difference / torch.linalg.vector_norm(exact)


def operand_error(
    exact: torch.Tensor, cast: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an operand's relative error, share underflowed and share saturated, as scalars.

    An element counts as saturated if its scaled value lies more than half a spacing beyond the
    format's largest number: nearer ones would round to that number anyway. `cast` is torchao's
    `Float8TrainingTensor`, or the same tensor if it was not cast.
    """
    exact = exact.float()
    if not hasattr(cast, "_scale"):  # left in high precision
        return (exact.new_zeros(()),) * 3
    data, scale = cast._data, cast._scale
    underflow = ((exact != 0) & (data.float() == 0)).float().mean()
    saturated = ((exact * scale).abs() > largest_rounded(data.dtype)).float().mean()
    return relative_error(data.float() / scale, exact), underflow, saturated


def largest_rounded(dtype: torch.dtype) -> float:
    """Return the largest number that rounding, rather than cutting off, takes to the maximum."""
    limits = torch.finfo(dtype)
    spacing = limits.eps * 2.0 ** int(torch.tensor(limits.max).log2().floor())
    return limits.max + spacing / 2
