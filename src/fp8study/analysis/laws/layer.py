"""A decoder layer: what computes in FP8 and in BF16, and what it keeps for its backward pass.

Letters as in `fp8study.analysis.laws.memory`.
"""

from __future__ import annotations

import fnmatch

from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig
from fp8study.core.recipes import RECIPES, is_aligned

#: What a kept score of attention takes: capped, as a share in FP32, and that in BF16.
_SCORE_BYTES = 8


def computes_in_autocast(config: ResolvedConfig) -> bool:
    """Whether FP32 weights are cast by autocast, which keeps the residual stream in FP32."""
    return config.strategy != "fsdp2" and config.master_dtype == "fp32"


def _is_left_out(config: ResolvedConfig, layer: str) -> bool:
    return any(fnmatch.fnmatchcase(layer, each) for each in config.left_out)


def _is_fp8(config: ResolvedConfig, shape: ModelShape, *parts: str) -> bool:
    """Whether all the linear layers of these names are FP8 in a layer of the middle; no expert."""
    return config.is_fp8 and all(
        part in shape.convertible and not _is_left_out(config, f"model.layers.1.{part}")
        for part in parts
    )


def unaligned(shape: ModelShape) -> dict[int, tuple[str, ...]]:
    """Return the sides that FP8's GEMMs do not take, and the linear layers that have them.

    But for those of a mixture's experts, which stay in BF16 whatever their sides.
    """
    every = shape.linears | {"lm_head": (shape.hidden_size, shape.vocab_size)}
    if shape.num_experts > 1:
        every = {name: size for name, size in every.items() if not name.startswith("mlp")}
    sides = sorted({side for size in every.values() for side in size if not is_aligned(side)})
    return {side: tuple(name for name, size in every.items() if side in size) for side in sides}


def num_converted_weights(config: ResolvedConfig, shape: ModelShape) -> int:
    """Return the weights that compute in FP8, of all layers."""
    every = shape.num_layers * shape.convertible_parameters
    return max(0, every - shape.matched(config.left_out)) if config.is_fp8 else 0


def has_fp8_head(config: ResolvedConfig) -> bool:
    """Whether the loss head is that of `fp8study.model.fp8_head`, as it was timed.

    With weights that are kept in FP8; without them it was another before (docs/log.md, 83).
    """
    is_timed = config.loss_head == "chunked" and config.weight_cast == "each_update"
    return config.is_fp8 and is_timed and not _is_left_out(config, "lm_head")


def layer_bytes(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return what a decoder layer keeps for its backward pass, bytes a token.

    Compiled: the residual stream, the output of attention's projection, queries, keys, values,
    attention's output and its softmax sums, and the MLP's two halves; where a layer, or its
    weight's gradient alone, computes in BF16 also its input. FP8 layers make theirs again, from the
    norm or product before it, but for `turned_bytes`. Of a model that is not compiled, every norm
    and activation keeps its own, FP8 or not.
    """
    narrow = config.compile and "grad_weight" in RECIPES[config.precision].fp8_gemms
    h, f, q, kv = shape.hidden_size, shape.intermediate_size, shape.query_size, shape.kv_size
    f = f * shape.num_active_experts + shape.shared_size
    in_autocast = computes_in_autocast(config)
    kept = (4 if in_autocast else 2) * h + 2 * h + 2 * (q + 2 * kv) + 2 * q + 4 * f
    kept += 4 * shape.num_heads + (2 * (q + kv) if shape.has_qk_norm else 0)
    if shape.keeps_scores:
        kept += _SCORE_BYTES * shape.num_heads * config.sequence_length
    queries = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if not (narrow and _is_fp8(config, shape, *queries)):
        kept += 2 * h
    if not (narrow and _is_fp8(config, shape, "mlp.gate_proj", "mlp.up_proj")):
        kept += 2 * h
    if not (narrow and _is_fp8(config, shape, "mlp.down_proj")):
        kept += 2 * f
    if not config.compile:
        kept += 8 * h + 2 * f + (8 * h if in_autocast else 0)
    if writes_fp8_between(config, shape):
        kept += h  # the MLP's input, in BF16 where the compiler keeps FP8
    return kept


def turned_bytes(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return what a layer keeps in FP8, bytes a token, as kernels of their own transpose it."""
    if config.transposes != "separate":
        return 0.0
    h, f = shape.hidden_size, shape.intermediate_size
    f = f * shape.num_active_experts + shape.shared_size
    return h + shape.query_size + (0 if writes_fp8_between(config, shape) else h + f)


def writes_fp8_between(config: ResolvedConfig, shape: ModelShape) -> bool:
    """Return whether SwiGLU's kernels do the MLPs."""
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return shape.is_swiglu and config.swiglu == "kernels" and _is_fp8(config, shape, *mlp)


def narrow_gradients(config: ResolvedConfig, shape: ModelShape) -> int:
    """Return the weights of a decoder layer whose gradients stay in BF16, but for experts'."""
    if config.gradient_dtype != "compute":
        return 0
    return shape.convertible_parameters if shape.num_experts > 1 else shape.layer_parameters


def kept_narrow(config: ResolvedConfig, shape: ModelShape) -> int:
    """Return those of all layers that are not FP8, which are kept in BF16 between updates."""
    narrow = shape.num_layers * narrow_gradients(config, shape)
    return narrow and narrow - num_converted_weights(config, shape)


def converted_share(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return the share of weights that torchao can convert and that compute in FP8, 0 to 1."""
    if not config.is_fp8:
        return 0.0
    return num_converted_weights(config, shape) / (shape.num_layers * shape.convertible_parameters)


def num_converted(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return how many linear layers compute in FP8."""
    return converted_share(config, shape) * shape.num_layers * len(shape.convertible)
