"""The memory law: what fills one GPU at the fullest moment of a training step, GiB.

Tensors are counted, not fitted: weights, optimizer states, gradients, what each decoder layer keeps
for its backward pass, the loss head's logits, gathered and cast copies of weights. A step is
fullest either at the loss, when all layers' activations are there, or at the update, when all
gradients are; the larger of the two counts. What is not counted are a few constants,
fitted to records (`MemoryConstants`).

h: hidden size, f: intermediate size, q: queries, kv: keys (each heads × head_dim), V: vocabulary,
T: tokens of one micro batch on one GPU, n: GPUs that share the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8study.analysis.laws.cells import Cell
from fp8study.analysis.laws.communication import gathers_again
from fp8study.analysis.laws.frozen import constants_of, fit_with_errors
from fp8study.analysis.laws.layer import (
    computes_in_autocast,
    has_fp8_head,
    kept_narrow,
    layer_bytes,
    narrow_gradients,
    num_converted_weights,
    turned_bytes,
    writes_fp8_between,
)
from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig, RunConfig
from fp8study.core.path.choices import is_sharded
from fp8study.core.recipes import CHUNK, GROUP

GIB = 2**30


@dataclass(frozen=True)
class MemoryConstants:
    """What is fitted to records; `constants.json` holds values, errors and where they are from."""

    logit_bytes: float = 12.0
    """The plain loss head, bytes a logit: BF16, FP32, log-softmax and gradients."""
    hidden_bytes: float = 10.0
    """At the loss, bytes a token and hidden feature: the last states and their gradients."""
    workspace_gib: float = 0.065
    """GEMM workspaces and the like."""


@dataclass(frozen=True)
class Parts:
    """A whole that is counted part by part."""

    BESIDE: ClassVar[tuple[str, ...]] = ()
    """Fields that are no part of the whole."""

    def parts(self) -> dict[str, float]:
        """Return the parts of the whole by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                if f.name not in self.BESIDE}  # fmt: skip


@dataclass(frozen=True)
class MemoryParts(Parts):
    """One GPU's memory at the fullest moment of a step, GiB."""

    BESIDE = ("moment", "building", "graph")

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    loss_head: float
    """Logits, their gradient, and the loss head's weight and gradient in other dtypes."""
    gathered: float
    """Weights of decoder layers that FSDP2 has gathered and not yet freed."""
    copies: float
    """Weights of decoder layers in BF16 or FP8, kept for the backward pass or between updates."""
    workspace: float
    """GEMMs', and with ``collectives=copy_engines`` what other GPUs read."""
    moment: str
    """``loss`` or ``update``: when the step is fullest."""
    building: float
    """The whole model, which each GPU holds alone before it is shared out; no part of the total."""
    graph: float = 0.0
    """What a CUDA graph's memory holds besides, and never gives back; no part of the total."""

    @property
    def total(self) -> float:
        """The peak of what tensors take: a record's ``memory_peak_gib``."""
        return sum(self.parts().values())

    @property
    def held(self) -> float:
        """What a GPU must have in a step."""
        return self.total + self.graph

    @property
    def needed(self) -> float:
        """What a GPU must have: in a step, or for the whole model before it."""
        return max(self.held, self.building)


def predicted_memory(
    config: RunConfig, shape: ModelShape, constants: MemoryConstants | None = None
) -> MemoryParts:
    """Return what one GPU holds at the fullest moment of a step; `constants`: the frozen ones.

    What no record has tested: activation checkpointing, DDP, and mixtures, whose tokens are taken
    to spread evenly over the experts.
    """
    constants = constants or constants_of(MemoryConstants, "memory")
    config = config if isinstance(config, ResolvedConfig) else config.resolved()
    sharded = config.num_shards
    weight_bytes = 4 if config.master_dtype == "fp32" else 2
    stale = _untrained(config, shape)
    parameters = weight_bytes * shape.num_parameters / sharded
    optimizer = 2 * state_bytes(config) * (shape.num_parameters - stale) / sharded
    kept = _gradients_kept(config, shape, weight_bytes, stale) / sharded
    at_loss = {
        "gradients": kept,
        "activations": _activations(config, shape),
        "loss_head": _loss_head(config, shape, constants),
        "gathered": _gathered(config, shape),
        "copies": _copies(config, shape) + _kept_casts(config, shape),
    }
    at_update = {"gradients": _gradients_at_update(config, shape, weight_bytes) / sharded,
                 "loss_head": _head_gradients(config, shape),
                 "copies": _kept_casts(config, shape) * (not config.frees_casts)}  # fmt: skip
    if config.optimizer_step == "in_backward" or not config.moves_weights:  # else gradients' place
        at_update["copies"] += 2.0 * kept_narrow(config, shape)
    moments = {"loss": at_loss, "update": at_update}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    gib = dict.fromkeys(("activations", "gathered", "copies"), 0.0)
    gib |= {"parameters": parameters, "optimizer": optimizer} | moments[moment]
    gib = {name: value / GIB for name, value in gib.items()}
    gib["workspace"] = constants.workspace_gib + _read_by_others(config, shape) / GIB
    # Reduced gradients, as large as the shards: of one stream's memory another cannot have any.
    is_twice = config.step_launch == "as_graph" and sharded > 1 and config.gradient_pool == "own"
    return MemoryParts(
        **gib,
        moment=moment,
        building=weight_bytes * shape.num_parameters / GIB,
        graph=gib["parameters"] * is_twice,
    )


def fit_memory(cells: Sequence[Cell]) -> dict[str, Any]:
    """Fit `MemoryConstants` to the cells with a peak, as `fit_with_errors`."""

    def miss(values: Mapping[str, float], cell: Cell) -> list[float]:
        law = predicted_memory(cell.config, cell.shape, MemoryConstants(**values))
        return [law.total / (cell.peak_gib or 1) - 1]

    start = dataclasses.asdict(MemoryConstants())
    return fit_with_errors(miss, start, [cell for cell in cells if cell.peak_gib], usual=0.002)


def state_bytes(config: ResolvedConfig) -> float:
    """Return what one of AdamW's averages takes, bytes a weight; FP8 has a scale for each 256."""
    widths = {"fp32": 4 if config.master_dtype == "fp32" else 2, "bf16": 2, "fp8": 1 + 4 / 256}
    return widths[config.optimizer_state]


def _activations(config: ResolvedConfig, shape: ModelShape) -> float:
    a_layer = layer_bytes(config, shape) + turned_bytes(config, shape)
    if config.activation_checkpointing:  # each layer's input, and one layer made again
        width = 4 if computes_in_autocast(config) else 2
        return config.tokens_per_pass * (shape.num_layers * width * shape.hidden_size + a_layer)
    return config.tokens_per_pass * shape.num_layers * a_layer


def _loss_head(config: ResolvedConfig, shape: ModelShape, constants: MemoryConstants) -> float:
    """Return the bytes of the loss head at its fullest."""
    tokens, vocabulary, head = config.tokens_per_pass, shape.vocab_size, shape.head_parameters
    hidden = constants.hidden_bytes * tokens * shape.hidden_size
    by_fsdp2 = config.strategy == "fsdp2"
    # Its weight in BF16: cast by autocast, gathered by FSDP2, or the weight itself.
    weight = 2 * head if by_fsdp2 or computes_in_autocast(config) else 0
    if config.loss_head == "plain":
        return weight + constants.logit_bytes * tokens * vocabulary + hidden
    if config.loss_head == "compiled":
        return weight + 4 * tokens * vocabulary + hidden
    # Chunked; FSDP2 has the embedding gathered too.
    chunk = min(CHUNK, tokens)
    if has_fp8_head(config):  # its gradient in FP8, and a chunk's logits or the weight's in BF16
        hidden += 2 * tokens * shape.hidden_size  # in FP8, in both layouts
        gradient = min(GROUP, tokens) * vocabulary + 4 * head * (tokens > GROUP)
        total = head * by_fsdp2 + gradient + max(3 * chunk * vocabulary, 2 * head) + hidden
    else:  # the weight's gradient is summed in FP32
        total = weight + 4 * head + 4 * chunk * vocabulary + hidden
    if by_fsdp2:
        total += 2 * (shape.root_parameters - head)
        if config.num_gpus > 1 and config.reshard_after_forward is False:
            total += 2 * head
    return total


def _gathered(config: ResolvedConfig, shape: ModelShape) -> float:
    if config.strategy != "fsdp2":
        return 0.0
    saved = shape.convertible_parameters if config.fp8_all_gather else 0
    return (1 - gathers_again(config)) * shape.num_layers * (2 * shape.layer_parameters - saved)


def _copies(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return casts of weights that the backward pass uses again.

    Autocast keeps a BF16 copy of FP32 weights. Of weights that were gathered in FP8 the compiled
    backward pass keeps the MLP's, unless kernels do its SwiGLU, and one of the small projections',
    whatever FSDP2 frees.
    """
    if config.strategy == "fsdp2":
        if not (config.fp8_all_gather and config.num_gpus > 1):
            return 0.0
        mlp = [wide * high for name, (wide, high) in shape.convertible.items() if "mlp" in name]
        layers = 1 if config.activation_checkpointing else shape.num_layers
        of_mlp = 0 if writes_fp8_between(config, shape) else sum(mlp)
        return float(layers * (of_mlp + shape.hidden_size * shape.kv_size))
    if config.master_dtype == "bf16":
        return 0.0
    return 2.0 * (shape.num_layers * shape.layer_parameters - num_converted_weights(config, shape))


def _kept_casts(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return FP8 weights kept between updates: whole ones in both layouts, or shards."""
    if config.weight_cast != "each_update":
        return 0.0
    width = 2.0 if config.strategy == "none" else 1 / config.num_shards
    head = shape.head_parameters * has_fp8_head(config)
    return width * (num_converted_weights(config, shape) + head)


def _read_by_others(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return what copy engines read: the largest unit's own shard, and its whole gradient, BF16.

    Within 0.01 % what three models took on two GPUs with the chunked loss head (docs/log.md, 70).
    """
    if config.collectives != "copy_engines":
        return 0.0
    apart = config.loss_head == "chunked"
    largest = max(shape.head_parameters if apart else shape.root_parameters, shape.layer_parameters)
    return 2 * largest * (1 + 1 / config.num_shards)


def _untrained(config: ResolvedConfig, shape: ModelShape) -> int:
    """Return the weights that a planted fault or a stale optimizer leaves out."""
    is_stale = (
        config.optimizer_binding == "before_conversion"
        and config.fp8_all_gather
        and config.strategy != "fsdp2"
    )
    if is_stale:
        return shape.num_layers * shape.layer_parameters - shape.matched(config.left_out)
    return shape.matched(config.untrained)


def _gradients_kept(
    config: ResolvedConfig, shape: ModelShape, weight_bytes: int, untrained: int
) -> float:
    """Return bytes of gradients that are there during the forward pass, over all ranks.

    Those that no optimizer frees; with accumulation all, which FSDP2 keeps whole, in FP32, until
    they are reduced after the last pass.
    """
    if config.gradient_accumulation_steps == 1:
        return weight_bytes * untrained
    whole = is_sharded(config) and config.gradient_reduction == "last_pass"
    return (4 * config.num_shards if whole else weight_bytes) * shape.num_parameters


def _gradients_at_update(config: ResolvedConfig, shape: ModelShape, weight_bytes: int) -> float:
    if config.optimizer_step == "in_backward" and config.gradient_accumulation_steps == 1:
        of_layer = weight_bytes * shape.layer_parameters - 2 * narrow_gradients(config, shape)
        return max(of_layer, weight_bytes * shape.root_parameters)
    buckets = 2 if config.strategy == "ddp" else 1
    narrow = shape.num_layers * narrow_gradients(config, shape)
    return buckets * weight_bytes * shape.num_parameters - 2 * narrow


def _head_gradients(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return what the last gradients of a backward pass, the embedding's, take on their way.

    FSDP2 copies them from BF16 to FP32 to reduce them; one GPU with FP32 weights needs no copy.
    """
    if config.strategy == "fsdp2":
        reduces = config.num_gpus > 1 or config.master_dtype == "bf16"
        return (6 if reduces else 2) * shape.root_parameters
    return 4 * shape.head_parameters if shape.is_tied else 0.0
