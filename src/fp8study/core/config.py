"""One run, described completely: the frozen, strict `RunConfig`.

Two runs with equal configurations are the same experiment. Everything that is decided by the
machine (the device, whether FP8 is emulated) is resolved by `fp8study.machine` before training
and stored in the record, so that a configuration file means the same everywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fp8study.core.errors import UserError, nearest, one_line
from fp8study.core.field_types import check_type, coerce
from fp8study.core.switches import PLAIN, check_switches, switches_of

Precision = Literal["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"]
Strategy = Literal["fsdp2", "ddp", "none"]
Schedule = Literal["constant", "linear", "cosine"]
MasterDtype = Literal["fp32", "bf16"]
CompileCache = Literal["shared", "fresh"]
OptimizerBinding = Literal["after_conversion", "before_conversion"]
TrainingPath = Literal["plain", "tuned"]
LossHead = Literal["plain", "compiled", "chunked"]
OptimizerStep = Literal["after_backward", "in_backward"]
Attention = Literal["default", "flash", "cudnn"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
GatherCast = Literal["eager", "compiled"]
Allocator = Literal["default", "expandable"]
Recompute = Literal["default", "elementwise"]
Clipping = Literal["separate", "in_update"]
GradientPool = Literal["own", "shared"]
GradientCopy = Literal["chunk_cat", "foreach"]
AttentionMask = Literal["checked", "causal"]

#: What other trainers offer and this one refuses, with the reason; switched off, it is no error.
REFUSED = {
    "tensor_parallel_size": "FP8 with tensor parallelism is not supported: FP8 layers are "
    "sharded by FSDP2 alone; use strategy=fsdp2 with more num_gpus",
    "pipeline_parallel_size": "pipeline parallelism is not supported; use strategy=fsdp2",
    "cpu_ram_efficient_loading": "RAM-efficient loading broadcasts plain tensors, which torchao's "
    "FP8 weights are not; weights are random here, so leave it out",
}  # fmt: skip

PRECISION_ALIASES = {"fp8": "fp8_tensorwise"}


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a training run.

    Raises:
        UserError: A value has the wrong type or range, or two values exclude each other.
    """

    model: str = "llama-3.2-1b"
    """A preset of `fp8study.model.build.PRESETS`, or a Hugging Face model id or folder whose
    configuration is used (weights are always random)."""
    precision: Precision = "bf16"
    """Arithmetic of the linear layers; ``fp8`` is an alias of ``fp8_tensorwise``."""
    num_gpus: int = 1
    """Number of processes, one per GPU; on a machine without GPU, CPU processes stand in."""
    strategy: Strategy = "fsdp2"
    """How the processes share the model: fully sharded, replicated, or one plain process."""
    sequence_length: int = 4096
    """Tokens per packed sequence."""
    micro_batch_size: int = 1
    """Sequences per GPU and forward pass."""
    gradient_accumulation_steps: int = 1
    """Forward and backward passes per optimizer step."""
    num_steps: int = 100
    """Optimizer steps."""
    num_warmup_steps: int = 10
    """First steps left out of every timing (compilation, allocator, clocks)."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW."""
    lr_schedule: Schedule = "constant"
    """After its warm-up the rate stays, or falls to a tenth of its peak at the last step."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay (torch's default)."""
    adam_beta2: float = 0.999
    """AdamW's second-moment decay (torch's default); beta1 is 0.9."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this; none: neither clipped nor computed."""
    seed: int = 0
    """Seeds the initial weights and the order of the data."""
    compile: bool = True
    """Compile each decoder layer with torch.compile."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass."""
    master_dtype: MasterDtype = "fp32"
    """Dtype of the parameters that the optimizer updates; compute is always bf16."""
    optimizer_binding: OptimizerBinding = "after_conversion"
    """``after_conversion``: the optimizer is made last, over the parameters that are trained.
    ``before_conversion``: it is made first and Accelerate converts and wraps afterwards, as
    document A does; on one process with FP8 all-gather this leaves most weights untrained."""
    fp8_all_gather: bool | None = None
    """Gather weights in FP8 (tensorwise only). None: on for tensorwise under FSDP2 on two or
    more GPUs, else off."""
    fp8_emulate: bool | None = None
    """Compute FP8 matmuls by casting and multiplying in high precision. None: only where there
    is no GPU."""
    skip: tuple[str, ...] = ("lm_head",)
    """Shell-style patterns of module names kept out of FP8; each must match a linear layer."""
    untrained: tuple[str, ...] = ()
    """Planted fault: shell-style patterns of linear layers whose weights are left out of the
    optimizer on purpose; each must match one. Shows in BF16 what a stale optimizer does."""
    repeat: int = 0
    """Number of this repetition: it changes nothing but the identity of the run."""
    corpus: str = "synthetic"
    """``tinystories``, ``text:PATH`` or ``synthetic``."""
    tokenizer: str = "auto"
    """``auto``: the model's own where it can be had, else ``bpe``, trained on the corpus;
    otherwise a Hugging Face tokenizer id or folder."""
    log_every: int = 1
    """Write every this many steps to ``metrics.jsonl``."""
    compile_cache: CompileCache = "shared"
    """``shared``: compiled code is kept between runs on a machine, as torch does by default.
    ``fresh``: the run starts from an empty cache of its own, to time a cold start."""
    profile: bool = True
    """Record one further step after the timed window: its products, communication and idle time."""
    measure_overhead: bool = False
    """After the timed window, time steps with and without the instruments in turns."""
    noise_at_steps: tuple[int, ...] = ()
    """Numbers of optimizer steps after which training pauses and `fp8study.measure.gradient_noise`
    measures; 0 is before the first. Such a run has no timings: the pauses are in them."""
    noise_samples: int = 16
    """Sequences measured at each of these points, taken from text that training never sees."""
    validation_sequences: int = 0
    """Sequences at the corpus's end that are kept out of training. After the last step their loss
    is scored by `fp8study.train.validation`, in BF16 whatever the run trained in."""
    validation_points: int = 1
    """At how many points of the run, evenly spaced, the validation sequences are scored; the last
    is after the last step. Each pauses training, so a run with more than one has no timings."""
    runs_per_gpu: int = 1
    """Runs that may share a GPU at one time: 1, 2, 4 or 8. Small runs leave a GPU idle while they
    start and between kernels, and sharing fills that; but such runs have no timings."""
    path: TrainingPath = "plain"
    """``plain`` trains as the documents do; ``tuned`` only changes what the fields below are where
    they are None: see `fp8study.core.switches`."""
    loss_head: LossHead | None = None
    """``plain``: transformers' own loss. ``compiled``: loss head and cross-entropy are compiled
    together. ``chunked``: a few tokens at a time, so that the logits are never whole."""
    optimizer_step: OptimizerStep | None = None
    """``in_backward``: a decoder layer is updated, and its gradients freed, as soon as they are
    complete. Not with DDP or max_grad_norm; tuned runs with either update after the backward."""
    attention: Attention | None = None
    """The fused attention kernel that is preferred on a GPU; ``default``: torch's own choice."""
    reshard_after_forward: bool | Literal["half"] | None = None
    """FSDP2 frees a layer's gathered weights after the forward pass and gathers them again in the
    backward pass. ``half``: in the first half of the layers; the backward pass begins with the
    others. None: true; for tuned runs under FSDP2 half, and false on one GPU."""
    compile_mode: CompileMode | None = None
    """torch.compile's mode for the decoder layers."""
    gather_cast: GatherCast | None = None
    """How weights become FP8 before FP8 all-gather: by torchao's own three kernels, or by one.
    None: eager, for compiled tuned runs that gather in FP8 compiled."""
    allocator: Allocator | None = None
    """``expandable``: torch's GPU memory is kept in segments that grow, so that less of it is
    reserved in pieces that fit nothing. None: default, for tuned runs expandable."""
    recompute: Recompute | None = None
    """``elementwise``: a compiled layer keeps nothing that is made elementwise of products alone
    (SwiGLU's gated activation), but computes it again in the backward pass. ``default``: what
    torch's compiler chooses, and what None means: no GPU has shown the other's gain yet."""
    clipping: Clipping | None = None
    """``in_update``: with max_grad_norm, AdamW's own kernel scales the gradients as it reads them.
    ``separate``: they are scaled by a pass of their own before. None: separate, for tuned runs
    that clip in_update."""
    gradient_pool: GradientPool | None = None
    """``shared``: FSDP2's reduced gradients take the memory that the activations leave. ``own``:
    they have memory of their own, as in torch. None: own, for tuned runs under FSDP2 on several
    GPUs that train all weights and keep their gradients until after the backward pass, in FP32,
    shared."""
    gradient_copy: GradientCopy | None = None
    """By what FSDP2 copies gradients together to reduce them: by torch's kernel for that, or by its
    ``foreach`` kernels. Layers with a weight whose rows do not divide by the number of GPUs keep
    chunk_cat. None: chunk_cat, for tuned runs under FSDP2 on several GPUs foreach."""
    attention_mask: AttentionMask | None = None
    """``causal``: transformers does not look for packed sequences in each forward pass, for which
    it would wait for the GPU; ours are one a row. A model that attends to less than all earlier
    tokens keeps its masks, and the record warns of it. None: checked, for tuned runs causal."""

    def __post_init__(self) -> None:
        if isinstance(self.precision, str):
            precision = PRECISION_ALIASES.get(self.precision, self.precision)
            object.__setattr__(self, "precision", precision)
        _check_types(self)
        object.__setattr__(self, "noise_at_steps", tuple(sorted(set(self.noise_at_steps))))
        _check_ranges(self)
        if self.fp8_all_gather is None:
            is_sharded = self.strategy == "fsdp2" and self.num_gpus > 1
            on = self.precision == "fp8_tensorwise" and is_sharded
            object.__setattr__(self, "fp8_all_gather", on)
        for name, value in switches_of(self).items():
            object.__setattr__(self, name, value)
        _check_pairs(self)
        check_switches(self)
        _check_noise(self)

    @property
    def is_fp8(self) -> bool:
        """Whether any linear layer computes in FP8."""
        return self.precision != "bf16"

    @property
    def is_timed(self) -> bool:
        """Whether the steps' times say anything: nothing else ran on the GPU between them."""
        pauses = self.noise_at_steps or self.validation_points > 1
        return not pauses and self.runs_per_gpu == 1

    @property
    def validation_steps(self) -> tuple[int, ...]:
        """Numbers of completed optimizer steps after which validation text is scored."""
        if not self.validation_sequences:
            return ()
        points = range(1, self.validation_points + 1)
        return tuple(round(self.num_steps * i / self.validation_points) for i in points)

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step, over all GPUs: the effective batch."""
        return self.num_gpus * self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all GPUs."""
        return self.sequences_per_step * self.sequence_length

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain YAML and JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    def digest(self) -> str:
        """Return eight hexadecimal digits that change with any field.

        Fields at their default are left out, so that a field that a later version adds does not
        rename the runs of an earlier one.
        """
        defaults = RunConfig().to_dict()
        chosen = {k: v for k, v in self.to_dict().items() if v != defaults[k]}
        text = json.dumps(chosen, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


FIELD_NAMES = tuple(f.name for f in dataclasses.fields(RunConfig))


def make_config(values: Mapping[str, Any], source: str = "parameters") -> RunConfig:
    """Build a `RunConfig` from untyped values, as a notebook, YAML or a command line gives them.

    Args:
        values: Field names to values. Whole floats count as integers, integers as floats, and a
            comma-separated text as a list, since papermill can pass nothing else.
        source: Where the values come from, for the message.

    Raises:
        UserError: An unknown name, a wrong type, or whatever `RunConfig` refuses.
    """
    check_names(values, source)
    hints = typing.get_type_hints(RunConfig)
    known = {name: value for name, value in values.items() if name not in REFUSED}
    return RunConfig(**{name: coerce(value, hints[name]) for name, value in known.items()})


def check_names(values: Mapping[str, Any], source: str) -> None:
    """Refuse names that are no field, and what is known but not supported.

    Args:
        values: As `make_config`.
        source: As `make_config`.

    Raises:
        UserError: With the nearest field, or the reason.
    """
    for name, value in values.items():
        if name in REFUSED:
            if value is True or value not in (None, False, 0, 1):
                raise UserError(f"{source}: {name}: {value!r}: {REFUSED[name]}")
        elif name not in FIELD_NAMES:
            raise UserError(
                f"{source}: unknown parameter '{name}'{nearest(str(name), FIELD_NAMES)}; "
                f"known: {', '.join(FIELD_NAMES)}"
            )


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the fields that came after it, as they were then.

    Args:
        values: From a run's record. Fields that are unknown here are kept; a configuration that
            would be refused today is returned as it is.
    """
    known = {name: value for name, value in values.items() if name in FIELD_NAMES}
    # A switch that was not there yet was not set, whatever its path would choose today.
    known = {**PLAIN, **known}
    try:
        return {**values, **make_config(known).to_dict()}
    except UserError:
        return dict(values)


def load_config(path: Path) -> RunConfig:
    """Read a configuration written by `save_config`.

    Raises:
        UserError: The file cannot be read or holds no valid configuration.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot read the configuration ({one_line(error)})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of field names to values")
    return make_config(values, source=str(path))


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, the whole file or none, unless it is there."""
    text = yaml.safe_dump(config.to_dict(), sort_keys=False)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _check_types(config: RunConfig) -> None:
    for name, hint in typing.get_type_hints(RunConfig).items():
        check_type(name, getattr(config, name), hint)


def _check_ranges(config: RunConfig) -> None:
    positive = (
        "num_gpus", "sequence_length", "micro_batch_size", "gradient_accumulation_steps",
        "num_steps", "log_every", "learning_rate", "validation_points",
    )  # fmt: skip
    for name in positive:
        if getattr(config, name) <= 0:
            raise UserError(
                f"{name}: {getattr(config, name)} is not positive; give at least 1"
                if name != "learning_rate"
                else f"{name}: {config.learning_rate} is not positive; try 3e-4"
            )
    not_negative = (
        "num_warmup_steps", "lr_warmup_steps", "seed", "repeat", "weight_decay",
        "validation_sequences",
    )  # fmt: skip
    for name in not_negative:
        if getattr(config, name) < 0:
            raise UserError(f"{name}: {getattr(config, name)} is negative; give 0 or more")
    if config.runs_per_gpu not in (1, 2, 4, 8):
        raise UserError(
            f"runs_per_gpu: {config.runs_per_gpu} is none of 1, 2, 4 and 8; give 1 for timings"
        )
    if config.seed >= 2**32:
        raise UserError(f"seed: {config.seed} is too large; give less than {2**32}")
    if config.max_grad_norm is not None and config.max_grad_norm <= 0:
        raise UserError(
            f"max_grad_norm: {config.max_grad_norm} is not positive; give none for no clipping"
        )
    if not 0 <= config.adam_beta2 < 1:
        raise UserError(f"adam_beta2: {config.adam_beta2} is outside [0, 1); try 0.999")


def _check_pairs(config: RunConfig) -> None:
    if config.num_warmup_steps >= config.num_steps:
        raise UserError(
            f"num_warmup_steps: {config.num_warmup_steps} leaves none of num_steps="
            f"{config.num_steps} to time; lower the one or raise the other"
        )
    if config.strategy == "none" and config.num_gpus > 1:
        raise UserError(
            f"strategy: 'none' is one process but num_gpus={config.num_gpus}; "
            "use strategy=fsdp2 or strategy=ddp, or num_gpus=1"
        )
    if config.fp8_all_gather and config.precision != "fp8_tensorwise":
        raise UserError(
            f"fp8_all_gather: true needs precision=fp8_tensorwise, not {config.precision} "
            "(torchao gathers only tensorwise-scaled weights in FP8); set fp8_all_gather=false"
        )
    if config.fp8_all_gather and config.strategy == "ddp":
        raise UserError(
            "fp8_all_gather: true has nothing to gather under strategy=ddp; set it false"
        )
    if config.precision == "fp8_rowwise_gw_hp" and config.strategy != "fsdp2":
        raise UserError(
            f"precision: 'fp8_rowwise_gw_hp' fails in torchao under strategy={config.strategy} "
            "(its high-precision product mixes fp32 weights with bf16 activations); "
            "use strategy=fsdp2"
        )
    if config.validation_points > 1 and not config.validation_sequences:
        raise UserError(
            f"validation_points: {config.validation_points} says nothing without "
            "validation_sequences; leave it out, or set validation_sequences=16"
        )
    if config.validation_points > config.num_steps:
        raise UserError(
            f"validation_points: {config.validation_points} is more than num_steps="
            f"{config.num_steps}; lower it"
        )
    if config.untrained and config.optimizer_binding == "before_conversion":
        raise UserError(
            f"untrained: {', '.join(config.untrained)} cannot be told from what "
            "optimizer_binding=before_conversion loses by itself; use after_conversion"
        )
    if (
        config.master_dtype == "bf16"
        and config.strategy == "fsdp2"
        and config.optimizer_binding == "before_conversion"
    ):
        raise UserError(
            "master_dtype: 'bf16' cannot be kept under strategy=fsdp2 with "
            "optimizer_binding=before_conversion (Accelerate upcasts to fp32 there); "
            "use master_dtype=fp32"
        )


def _check_noise(config: RunConfig) -> None:
    """Refuse noise measurements where they would measure something else, or nothing."""
    if not 4 <= config.noise_samples <= 64:
        raise UserError(
            f"noise_samples: {config.noise_samples} is outside 4 to 64; try 16 (an interval needs "
            "four, and the record holds their number squared)"
        )
    if not config.noise_at_steps:
        return
    for step in config.noise_at_steps:
        if not 0 <= step <= config.num_steps:
            raise UserError(
                f"noise_at_steps: {step} is outside 0 to num_steps={config.num_steps}; give "
                "numbers of completed optimizer steps"
            )
    needed = {"num_gpus": 1, "master_dtype": "fp32", "optimizer_binding": "after_conversion"}
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise UserError(
                f"noise_at_steps: noise is measured with {name}={value}, not "
                f"{getattr(config, name)}; set {name}={value} or noise_at_steps=[]"
            )
