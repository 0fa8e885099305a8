"""The speed law: how long a training step takes, by what it does, ms on one GPU.

A GPU's share is the sum of its GEMMs (by shape and precision), attention, elementwise work, FP8's
casts, the loss, copies of sharded weights, the update, and what communication slows down. The host
launches kernels meanwhile: the longer one counts. What each part takes is counted and multiplied by
a constant (`SpeedConstants`) that is fitted to committed steps and to profiled steps of H200s, in
`speed_fit`; another GPU's times are scaled by its datasheet, in `speed_constants`, or measured
there, in `here`.

Letters as in `fp8study.analysis.laws.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8study.analysis.laws.communication import NETWORK, Network, exposed_ms, gathers_again
from fp8study.analysis.laws.frozen import constants_of
from fp8study.analysis.laws.layer import (
    converted_share,
    has_fp8_head,
    kept_narrow,
    layer_bytes,
    narrow_gradients,
    num_converted,
    turned_bytes,
    writes_fp8_between,
)
from fp8study.analysis.laws.memory import Parts, state_bytes
from fp8study.analysis.laws.shape import ModelShape
from fp8study.analysis.laws.speed_constants import SpeedConstants, on_gpu
from fp8study.core.config import ResolvedConfig, RunConfig
from fp8study.core.hardware import GpuPeak
from fp8study.core.path.choices import is_sharded
from fp8study.core.recipes import RECIPES

#: How the GPU's and the host's share make a step: ``(gpu⁴ + host⁴)^¼``. Where both are alike, parts
#: of the step wait for the one and parts for the other.
_OVERLAP = 4
#: From here on, % of the GPU's time, the host's launches may show in a step. They are the least
#: certain part: hosts have taken 2.8 times the law's time (docs/log.md, 81).
HOST_PCT = 33.0
#: From here on, %, leads are predicted no better than where the host is late (docs/log.md, 90).
LATE_PCT = 50.0
#: Of the GPU's work on layers and of the host's launches, what the forward pass takes; and of what
#: gathering in FP8 takes of the host: every weight then, every second one in the backward pass.
_FORWARD, _FORWARD_GATHERS = 1 / 3, 2 / 3
#: Kernels as profiles count them: of a decoder layer beside its GEMMs, of a converted linear layer.
OTHER_KERNELS, CAST_KERNELS = 64, 8
#: FLOPs of causal attention for a token, head, feature of a head and token of the sequence: two
#: GEMMs in the forward pass, five in the backward pass, 2 FLOPs an element, half of them masked.
_ATTENTION_FLOPS = 7
#: ``weight_cast=each_update``: bytes of a weight's cast over the 14 of a cast in each pass. It is
#: read for its largest number, which AdamW finds if it reads once, and read again; two are written.
_KEPT_CAST = {"torch": 10 / 14, "one_pass": 6 / 14}
#: ``gradient_dtype=compute``: what one copy that is not made takes of autocast's, so that steps of
#: the 8B of the study narrow-gradients take 12.6 ms less in FP8, whose gradients are not copied,
#: and 16 ms in BF16, whose weights are not either.
_NARROW_COPY = 0.25
#: ``swiglu=kernels``: what it saves of a cast, a token and feature between the layers of an MLP. In
#: the study swiglu-form 2.0 (8B at batch 1), 0.7 (at 2 on two GPUs), 0.4 (1B at 8); geometric mean.
_SWIGLU_SAVES = 0.8

#: A loss head in FP8: what it saves besides its GEMMs' time, ps a logit, whose gradient is made and
#: cast at once, and a weight, which is not cast to BF16. In the study head-form it saved 10.5 and
#: 11.8 ms (8B at batch 1), 21.4 and 19.2 (at 2 on two GPUs), 39.2 and 38.7 (1B at 8); by the law
#: 11.4, 20.5 and 40.6.
_HEAD_SAVES = (1.2, 4.3)


@dataclass(frozen=True)
class StepParts(Parts):
    """One optimizer step, ms: what a GPU does, part by part, and what the host does meanwhile."""

    BESIDE = ("host", "host_forward")

    gemm: float
    attention: float
    elementwise: float
    casts: float
    """To FP8."""
    loss: float
    """The loss head beside its GEMMs."""
    sharding: float
    """Copies of FSDP2, and autocast's casts of weights."""
    update: float
    communication: float
    """What is exposed, and what the rest of the step is slowed down by."""
    host: float
    host_forward: float | None = None
    """Its part until the forward pass is launched; None: host and GPU never wait for each other."""

    @property
    def device(self) -> float:
        return sum(self.parts().values())

    @property
    def total(self) -> float:
        """The longer of the GPU's and the host's share.

        Where masks are checked, the host waits for the GPU before each forward pass and both begin
        anew: then the longer of the two counts in the forward pass, and again in the rest.
        """
        if self.host_forward is None:
            return _longer(self.device, self.host)
        forward = _FORWARD * (self.device - self.update - self.loss)
        rest = (self.device - forward, self.host - self.host_forward)
        return _longer(forward, self.host_forward) + _longer(*rest)

    @property
    def communication_pct(self) -> float:
        """What communication takes of it, %; 0 where the host is the limit."""
        return 0.0 if self.limit == "host" else 100 * self.communication / self.total

    @property
    def host_shows(self) -> bool:
        """Whether the host may make the step longer, on a slow machine if not by the law."""
        return self.host_pct > HOST_PCT

    @property
    def host_pct(self) -> float:
        """What launching kernels takes, % of the GPU's time."""
        return 100 * self.host / self.device

    @property
    def limit(self) -> str:
        """Name what limits the step: ``host``, or the largest part of the GPU's share."""
        if self.host > self.device:
            return "host"
        return max(self.parts(), key=lambda name: self.parts()[name])


def _longer(gpu: float, host: float) -> float:
    longer, shorter = max(gpu, host), min(gpu, host)
    return float(longer * (1 + (shorter / longer) ** _OVERLAP) ** (1 / _OVERLAP))


def predicted_step(
    config: RunConfig,
    shape: ModelShape,
    gpu: GpuPeak | None = None,
    constants: SpeedConstants | None = None,
    network: Network = NETWORK,
) -> StepParts:
    """Return one optimizer step on a GPU, by default an H200; `constants`: the frozen ones.

    `network`: what joins the run's nodes, if it has several, and GPUs of one, if it says so. Only
    compiled models: without compilation every small operation is a kernel of its own.

    Raises:
        ValueError: ``compile=false``, or FP8 on a GPU without it.
    """
    config = config if isinstance(config, ResolvedConfig) else config.resolved()
    if not config.compile:
        raise ValueError("no law of speed for compile=false")
    if gpu is not None and gpu.fp8_tflops is None and config.is_fp8:
        raise ValueError(f"{gpu.name_part} has no FP8")
    c = constants or constants_of(SpeedConstants, "speed")
    c = c if gpu is None else on_gpu(c, gpu)
    micro_steps = config.gradient_accumulation_steps
    tokens = config.tokens_per_pass
    layers = shape.num_layers
    each = {  # of one forward and backward pass
        "gemm": _gemm_ms(config, shape, tokens, c),
        "attention": _attention_ms(config, shape, tokens, c),
        "elementwise": c.elementwise_ps * tokens * layers * _moved_bytes(config, shape) * 1e-9
        + OTHER_KERNELS * layers * c.kernel_us * 1e-3,
        "casts": converted_share(config, shape) * layers
        * sum(_casts_ms(config, size, tokens, c) for size in shape.convertible.values())
        - _SWIGLU_SAVES * c.cast_ps * tokens * layers * shape.intermediate_size * 1e-9
        * writes_fp8_between(config, shape),
        "loss": _loss_ms(config, shape, tokens, c),
        "sharding": _copies_ms(config, shape, c),
    }  # fmt: skip
    parts = {name: micro_steps * ms for name, ms in each.items()} | {"communication": 0.0}
    if config.num_gpus > 1:
        link = network.link_gb_per_s or c.link_gb_per_s
        exposed = exposed_ms(config, shape, sum(each.values()), link, network)
        parts["communication"] = c.contention * (parts["gemm"] + parts["attention"]) + exposed
    parts["update"] = _update_ms(config, shape, c)
    launches, gathers = (micro_steps * ms for ms in _host_ms(config, shape, c))
    if config.step_launch == "as_graph":
        launches = gathers = 0.0  # one launch, beside the step before
    restarts = c.phases > 1 and config.attention_mask == "checked"
    forward = _FORWARD * launches + _FORWARD_GATHERS * gathers if restarts else None
    return StepParts(**parts, host=launches + gathers, host_forward=forward)


def _moved_bytes(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return what a layer writes for its backward pass, bytes a token.

    Without what it keeps to transpose it, where kernels write both layouts: what these gain, all
    in all, `SpeedConstants.both_layouts` says.
    """
    apart = config.cast_kernels != "both_layouts"
    return layer_bytes(config, shape) + turned_bytes(config, shape) * apart


def _casts_ms(
    config: ResolvedConfig, size: tuple[int, int], tokens: int, c: SpeedConstants
) -> float:
    """Return what one converted layer casts to FP8 in a pass, ms: weight, input and output.

    FSDP2's FP8 all-gather casts weights before they are gathered, each rank its share; else
    they are cast as often as they are gathered, or kept.
    """
    times, (wide, high) = 1.0, size
    if config.strategy == "fsdp2":
        times = 1 / config.num_shards if _gathers_fp8(config) else 1 + gathers_again(config)
    if config.weight_cast == "each_update":
        kept = _KEPT_CAST[str(config.update_kernel)] if config.strategy == "none" else 1.0
        times *= kept / config.gradient_accumulation_steps
    both = c.both_layouts if config.cast_kernels == "both_layouts" else 1.0
    elements = c.weight_cast_ps * times * wide * high + both * c.cast_ps * tokens * (wide + high)
    return cast_width(config, c) * (elements * 1e-9 + CAST_KERNELS * c.kernel_us * 1e-3)


def cast_width(config: ResolvedConfig, c: SpeedConstants) -> float:
    """Return what a recipe's casts take, over those of FP8 tensorwise."""
    recipe = RECIPES[config.precision]
    width = c.rowwise if recipe.scaling == "rowwise" else 1.0
    return width if "grad_weight" in recipe.fp8_gemms else width * c.one_way


def _times_computed(config: ResolvedConfig) -> float:
    """Return the arithmetic of layers over that without recomputation."""
    return 4 / 3 if config.activation_checkpointing else 1.0


def saved_ms(config: ResolvedConfig, size: tuple[int, int], c: SpeedConstants) -> float:
    """Return what FP8 saves of the GPU's time in one linear layer and pass, ms; below 0, costs.

    The time of its GEMMs in BF16, less that in FP8 and that of its casts.
    """
    recipe, tokens = RECIPES[config.precision], config.tokens_per_pass
    gflop = 6e-9 * _times_computed(config) * recipe.fp8_share * tokens * size[0] * size[1]
    saved = gflop * (1 / c.bf16_tflops - 1 / c.fp8_tflops)
    return saved - _casts_ms(config, size, tokens, c)


def _gemm_ms(config: ResolvedConfig, shape: ModelShape, tokens: int, c: SpeedConstants) -> float:
    """Return all GEMMs: three a linear layer, and the loss head's."""
    weights = shape.active_parameters
    share = converted_share(config, shape) * shape.convertible_parameters / weights
    share *= RECIPES[config.precision].fp8_share
    tflop = 6e-12 * tokens * weights * shape.num_layers
    head = 6e-12 * tokens * shape.head_parameters
    head /= c.fp8_tflops if has_fp8_head(config) else c.bf16_tflops
    of_layers = (1 - share) / c.bf16_tflops + (share / c.fp8_tflops if share else 0)
    number = 3 * (shape.num_layers * len(shape.linears) + 1)
    seconds = _times_computed(config) * tflop * of_layers + head
    return 1e3 * seconds + 1e-3 * number * c.kernel_us


def _loss_ms(config: ResolvedConfig, shape: ModelShape, tokens: int, c: SpeedConstants) -> float:
    """Return what becomes of the logits, and of the loss head's weight on its way to its GEMMs."""
    logits = tokens * shape.vocab_size
    each = c.plain_logit_ps if config.loss_head == "plain" else c.logit_ps
    saved = _HEAD_SAVES[0] * logits + _HEAD_SAVES[1] * shape.head_parameters
    return (each * logits - has_fp8_head(config) * saved) * 1e-9


def _attention_ms(
    config: ResolvedConfig, shape: ModelShape, tokens: int, c: SpeedConstants
) -> float:
    heads, head_size = shape.num_heads, shape.query_size / shape.num_heads
    gemms_ps = _ATTENTION_FLOPS * head_size / c.attention_tflops
    each = c.query_ps * shape.query_size
    each += max(c.softmax_ps, gemms_ps) * heads * config.sequence_length
    return _times_computed(config) * tokens * shape.num_layers * each * 1e-9


def _copies_ms(config: ResolvedConfig, shape: ModelShape, c: SpeedConstants) -> float:
    every = shape.num_layers * shape.layer_parameters
    if config.strategy == "fsdp2":
        left = c.by_copies if config.collectives == "copy_engines" else 1.0
        return left * c.shard_ps * shape.num_parameters * (2 + gathers_again(config)) * 1e-9
    casts = every if config.master_dtype == "fp32" else 0
    spared = shape.num_layers * narrow_gradients(config, shape) + kept_narrow(config, shape)
    return c.autocast_ps * (casts - _NARROW_COPY * spared) * 1e-9


def _update_ms(config: ResolvedConfig, shape: ModelShape, c: SpeedConstants) -> float:
    """Return AdamW: it reads and writes weights and two states, and reads gradients.

    Weights that are kept in BF16 are written once more.
    """
    width = 4 if config.master_dtype == "fp32" else 2
    own = shape.num_parameters / config.num_shards
    gradients = width * own - 2 * shape.num_layers * narrow_gradients(config, shape)
    clip = gradients * c.clip_ps if config.max_grad_norm is not None else 0.0
    moved = (2 * width + 4 * state_bytes(config)) * own + gradients
    moved += 2 * kept_narrow(config, shape)
    update = moved * c.update_ps + own * c.update_weight_ps
    if config.update_kernel == "one_pass":
        update, clip = c.one_pass * update, clip / 2
    return (update + clip) * 1e-9


def num_kernels(config: ResolvedConfig, shape: ModelShape) -> float:
    """Return how many kernels decoder layers launch in a pass, as profiles count them."""
    a_layer = OTHER_KERNELS + 3 * len(shape.linears)
    return a_layer * shape.num_layers + CAST_KERNELS * num_converted(config, shape)


def _host_ms(config: ResolvedConfig, shape: ModelShape, c: SpeedConstants) -> tuple[float, float]:
    """Return the host's share: launching kernels, and what gathering in FP8 adds."""
    gathered = num_converted(config, shape) if _gathers_fp8(config) else 0
    spread = shape.num_layers if is_sharded(config) else 0
    launches = c.launch_us * num_kernels(config, shape) + c.shard_layer_us * spread
    return launches * 1e-3, c.gather_us * gathered * 1e-3


def _gathers_fp8(config: ResolvedConfig) -> bool:
    return bool(config.fp8_all_gather) and is_sharded(config)


def lead_pct(bf16_ms: float, fp8_ms: float) -> float:
    """Return how much more tokens per second FP8 makes than BF16, %."""
    return 100 * (bf16_ms / fp8_ms - 1)
