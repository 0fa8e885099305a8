"""The fields of a run's configuration, each declared once; its switches are in `core.path`.

A field is its type, default, group and meaning, and where it has any its range, what it excludes,
what the tuned path makes of it and where it may differ (`fp8study.core.field_types.Field`). Checks,
lists of fields, the notebook's parameters and ``docs/configuration.md`` are derived from here;
after a change `make fields` writes the last two.
"""

# ruff: noqa: RUF009 (`declare` makes an immutable field)
from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal

from fp8study.core.field_types import Comparison, Field, alternatives, declare
from fp8study.core.path.choices import is_sharded
from fp8study.core.path.switches import BOUND_EARLY, LAYERS, RETIRED, Switches
from fp8study.core.recipes import (
    ALIGNMENT,
    RECIPES,
    SCHEDULE_PATTERN,
    Precision,
    is_schedule,
    phases,
)

MANY = 1_000_000_000
#: Of what changes nothing in what a run computes.
_EVERYWHERE = "repeat folder pair effect switch resume"


def _noise_needs(name: str, value: Any) -> tuple[Any, str]:
    words = f"cannot be measured with {name}={{{name}}}; set {name}={value} or noise_at_steps=[]"
    return lambda c: c.noise_at_steps and getattr(c, name) != value, words


# A field reads like an entry of a table.
# fmt: off
@dataclass(frozen=True)
class _Described:
    """What a run is, apart from how a training path makes it."""

    model: str = declare(
        "llama-3.2-1b", "task", "A preset, or a Hugging Face model id or folder whose "
        "configuration is used; the weights are random unless `init_from` says otherwise.")
    init_from: str | None = declare(
        None, "task", "Weights to start from, with a new optimizer: a folder of Hugging Face "
        "safetensors, a run's folder (its last checkpoint), or one checkpoint, of either "
        "precision.", differs="folder")
    precision: Precision = declare(
        "bf16", "float8", "Arithmetic of the linear layers; `fp8` is short for `fp8_tensorwise`. "
        "`fp16` is for all layers, with loss scaling.",
        differs="pair effect", refused=(
            (lambda c: RECIPES[c.precision].scales_loss and c.master_dtype != "fp32",
             "needs FP32 master weights: its gradients are brought back to their size in FP32; use "
             "master_dtype=fp32"),
            (lambda c: RECIPES[c.precision].scales_loss
             and c.optimizer_binding == "before_conversion",
             "needs an optimizer that skips steps; use optimizer_binding=after_conversion"),
            (lambda c: RECIPES[c.precision].needs_fsdp2 and c.strategy != "fsdp2",
             "fails in torchao under strategy={strategy} (its BF16 GEMM would mix FP32 weights "
             "with BF16 activations); use strategy=fsdp2"),))
    num_gpus: int = declare(
        1, "execution", "Number of processes, one per GPU; on a machine without GPU, CPU processes "
        "stand in.", differs="resume", low=1, high=65536)
    num_nodes: int = declare(
        1, "execution", "Machines over which `num_gpus`, the total, is spread evenly; several are "
        "for a cluster.", differs="resume", low=1, high=8192, refused=(
            (lambda c: c.num_gpus % c.num_nodes,
             "does not divide num_gpus={num_gpus}, the total over all nodes; change one of them"),))
    strategy: Literal["fsdp2", "ddp", "none"] | None = declare(
        None, "execution", "How the processes share the model: fully sharded, replicated, or one "
        "plain process. If nothing is said, one GPU has `none`, several have `fsdp2`.",
        differs="resume", decide=lambda c: "none" if c.num_gpus == 1 else "fsdp2", refused=(
            (lambda c: c.strategy == "none" and c.num_gpus > 1,
             "is one process but num_gpus={num_gpus}; use strategy=fsdp2 or strategy=ddp, or "
             "num_gpus=1"),))
    sharding: Literal["full", "hybrid"] = declare(
        "full", "execution", "FSDP2 splits weights over all GPUs, or within each node, with a "
        "replica on every node (`hybrid`).", differs="resume", refused=(
            (lambda c: c.sharding == "hybrid" and (c.strategy != "fsdp2" or c.num_nodes == 1
                                                   or c.num_gpus == c.num_nodes),
             "needs strategy=fsdp2 on several nodes of several GPUs, not strategy={strategy}, "
             "num_nodes={num_nodes} and num_gpus={num_gpus}; use full"),))
    cpu_ram_efficient_loading: bool = declare(
        False, "execution", "Let Accelerate hand rank 0's weights to all ranks once they are "
        "sharded, as it loads large models. With FP8 all-gather it fails.",
        differs="pair effect resume", refused=(
            (lambda c: c.cpu_ram_efficient_loading and c.strategy != "fsdp2",
             "is for strategy=fsdp2, not {strategy}; leave it out, or use strategy=fsdp2"),))
    sequence_length: int = declare(
        # Of one token none is predicted.
        4096, "task", "Tokens per packed sequence.", low=2, high=MANY, refused=(
            (lambda c: c.fp8_emulate is False and c.micro_batch_size * c.sequence_length % ALIGNMENT
             and "grad_weight" in RECIPES[c.precision].fp8_gemms,
             f"makes, with micro_batch_size={{micro_batch_size}}, passes that are no multiple of "
             f"{ALIGNMENT} tokens, as {{precision}} needs for the weight's gradient; use a "
             f"multiple of {ALIGNMENT}"),))
    micro_batch_size: int = declare(
        1, "task", "Sequences per GPU and forward pass.", differs="resume", low=1, high=MANY)
    gradient_accumulation_steps: int = declare(
        1, "task", "Forward and backward passes per optimizer step.", differs="resume", low=1,
        high=MANY)
    num_steps: int = declare(
        100, "task", "Optimizer steps.", low=1, high=MANY)
    num_warmup_steps: int = declare(
        10, "measurement", "First steps, left out of every timing (compilation, allocator, "
        "clocks).", low=0, high=MANY, refused=(
            (lambda c: c.num_warmup_steps >= c.num_steps,
             "leaves none of num_steps={num_steps} to time; lower the one or raise the other"),))
    timed_seconds: float | None = declare(
        None, "measurement", "Time steps for this long, after a warm-up of at least as long that "
        "ends when the step time is steady; `num_steps` is then the most steps. None: `num_steps` "
        "and `num_warmup_steps` decide.", low=0.1, high=3600, refused=(
            (lambda c: c.timed_seconds and not c.is_timed,
             "says nothing in a run without timings; leave it out"),
            (lambda c: c.timed_seconds and (c.validation_sequences or c.lr_schedule != "constant"),
             "leaves open how long the run is, which validation_sequences and lr_schedule ask for; "
             "set validation_sequences=0 and lr_schedule=constant")))
    learning_rate: float = declare(
        3e-4, "task", "Peak learning rate of AdamW.", low=1e-12, high=1000)
    lr_schedule: Literal["constant", "linear", "cosine"] = declare(
        "constant", "task", "After its warm-up the learning rate stays, or falls to a tenth of its "
        "peak at the last step.")
    lr_warmup_steps: int = declare(
        0, "task", "Steps over which the learning rate rises linearly from zero.", low=0,
        high=MANY)
    weight_decay: float = declare(
        0.01, "task", "AdamW's decoupled weight decay; the default is torch's.", low=0, high=1000)
    adam_beta2: float = declare(
        0.999, "task", "AdamW's second-moment decay; the default is torch's, and beta1 is 0.9.",
        low=0, high=0.9999999)
    max_grad_norm: float | None = declare(
        None, "task", "Clip the global gradient norm to this; none: it is neither clipped nor "
        "computed.", low=1e-12, high=1e12)
    seed: int = declare(
        0, "task", "Seeds the initial weights and the order of the data.", low=0, high=2**32 - 1,
        differs="repeat folder effect switch")
    compile: bool = declare(
        True, "execution", "Compile each decoder layer with torch.compile.", differs="resume")
    activation_checkpointing: bool = declare(
        False, "execution", "Recompute each decoder layer in the backward pass.",
        differs="resume")
    master_dtype: Literal["fp32", "bf16"] = declare(
        "fp32", "task", "Dtype of the master weights, which the optimizer updates; the forward "
        "pass always computes in BF16 or FP8.", differs="effect", refused=(
            (lambda c: c.master_dtype == "bf16" and c.strategy == "fsdp2"
             and c.optimizer_binding == "before_conversion",
             "cannot be kept under strategy=fsdp2 with optimizer_binding=before_conversion "
             "(Accelerate upcasts to fp32 there); use master_dtype=fp32"),))
    optimizer_state: Literal["fp32", "bf16", "fp8"] = declare(
        "fp32", "task", "Format of AdamW's two averages, never wider than the master weights; "
        "`fp8` is torchao's, with one scale for each 256 numbers.", refused=(
            (lambda c: c.optimizer_state == "bf16" and c.master_dtype == "bf16",
             "is what master_dtype=bf16 has already; leave it out"),
            (lambda c: c.optimizer_state != "fp32" and c.optimizer_binding == "before_conversion",
             BOUND_EARLY + "fp32"),
            (lambda c: c.optimizer_state == "fp8" and c.checkpoint_every,
             "cannot be saved yet: its blocks fit one number of GPUs; use bf16, or "
             "checkpoint_every=0")))
    optimizer_binding: Literal["after_conversion", "before_conversion"] = declare(
        "after_conversion", "fault", "Whether the optimizer is made last, over the parameters that "
        "are trained, or first, as document A does; with FP8 all-gather on one process the latter "
        "leaves most weights untrained.", differs="pair effect")
    fp8_all_gather: bool | None = declare(
        None, "float8", "Gather weights in FP8. If nothing is said: where FSDP2 shards over "
        "several GPUs and the recipe allows it (tensorwise).", differs="pair effect resume",
        decide=lambda c: RECIPES[c.precision].gathers_in_fp8 and is_sharded(c)
        and not c.precision_schedule, refused=(
            (lambda c: c.fp8_all_gather and not RECIPES[c.precision].gathers_in_fp8,
             "needs precision=fp8_tensorwise, not {precision} (torchao gathers only "
             "tensorwise-scaled weights in FP8); set fp8_all_gather=false"),
            (lambda c: c.fp8_all_gather and c.strategy == "ddp",
             "has nothing to gather under strategy=ddp; set it false")))
    fp8_emulate: bool | None = declare(
        None, "float8", "Compute FP8 GEMMs by rounding to FP8 and multiplying in high precision. "
        "If nothing is said: only where there is no GPU.", differs="pair effect resume")
    fast_accumulation: Literal["forward", "all"] = declare(
        "forward", "float8", "Which FP8 GEMMs use Hopper's fast accumulation, with fewer bits "
        "than FP32: the forward pass's, as in torchao's recipes, or all. Emulated GEMMs add up in "
        "FP32.", differs="pair effect switch")
    precision_schedule: tuple[str, ...] = declare(
        (), "float8", "Parts of the run that compute in BF16: `bf16:100,fp8_tensorwise:-50,bf16` "
        "does in the first 100 steps and the last 50. A number is the step at which a part ends, "
        "from the end if negative. Such a run has no timings.", differs="pair effect",
        pattern=SCHEDULE_PATTERN, example="give bf16:100,fp8_tensorwise, for example", refused=(
            (lambda c: c.precision_schedule and not RECIPES[c.precision].fp8_gemms,
             "needs an FP8 precision to change to, not precision={precision}; use "
             "precision=fp8_tensorwise, or leave it out"),
            (lambda c: any(":" in part and not 0 < after.first_step < c.num_steps for part, after
                           in zip(c.precision_schedule, phases(c)[1:], strict=False)),
             "ends a part outside the run's num_steps={num_steps}; give bf16:1,{precision}, for "
             "example"),
            (lambda c: c.precision_schedule and not is_schedule(c),
             "does not name bf16 and precision={precision} in turns, each to a later step, the "
             "last without one; give bf16:1,{precision}, for example"),
            (lambda c: c.precision_schedule and c.fp8_all_gather,
             "computes in BF16 too, for which fp8_all_gather=true keeps no weights; leave it out"),
            (lambda c: c.precision_schedule and c.optimizer_binding == "before_conversion",
             BOUND_EARLY + "after_conversion")))
    untrained: tuple[str, ...] = declare(
        (), "fault", "Planted fault: patterns of linear layers whose weights are left out of the "
        "optimizer on purpose; shows in BF16 what a stale optimizer does.", differs="effect",
        **LAYERS, refused=(
            (lambda c: c.untrained and c.optimizer_binding == "before_conversion",
             "cannot be told from what optimizer_binding=before_conversion loses by itself; use "
             "after_conversion"),))
    repeat: int = declare(
        0, "measurement", "Number of this repetition; it changes nothing but the run's identity.",
        low=0, high=MANY, differs="repeat folder pair effect switch")
    corpus: str = declare(
        "synthetic", "task", "Text to train on: `tinystories`, `text:PATH` of a UTF-8 file, or "
        "`synthetic`.", differs="folder")
    tokenizer: str = declare(
        "auto", "task", "`auto`: the model's own where it can be had, else `bpe`, trained on the "
        "corpus; otherwise a Hugging Face tokenizer id or folder.", differs="folder",
        pattern=r"[\w.-]{1,96}(/[\w.-]{1,96})?|[/.~].*",
        example="give auto, bpe, or a Hugging Face id (owner/name) or a folder")
    log_every: int = declare(
        1, "measurement", "Write every so many steps to `metrics.jsonl`.", low=1, high=MANY)
    compile_cache: Literal["shared", "fresh"] = declare(
        "shared", "measurement", "`shared`: compiled code is kept between runs on a machine. "
        "`fresh`: the run starts from an empty cache, to time a cold start.")
    profile: bool = declare(
        True, "measurement", "Record one further step after the timed window: its GEMMs, "
        "communication and idle time.")
    measure_overhead: bool = declare(
        False, "measurement", "After the timed window, time steps with and without the instruments "
        "in turns.")
    noise_at_steps: tuple[int, ...] = declare(
        (), "measurement", "Optimizer steps after which training pauses and gradient noise is "
        "measured; 0 is before the first. Such a run has no timings.", refused=(
            (lambda c: not all(0 <= step <= c.num_steps for step in c.noise_at_steps),
             "is outside 0 to num_steps={num_steps}; give numbers of completed optimizer steps"),
            _noise_needs("num_gpus", 1), _noise_needs("master_dtype", "fp32"),
            _noise_needs("optimizer_binding", "after_conversion")))
    noise_samples: int = declare(
        16, "measurement", "Sequences of unseen text that are measured at each of these steps; the "
        "record holds their number squared.", low=4, high=64)
    validation_sequences: int = declare(
        0, "measurement", "Sequences at the corpus's end that are kept out of training and scored "
        "in BF16 after the last step.", low=0, high=MANY)
    validation_points: int = declare(
        1, "measurement", "Points of the run, evenly spaced, at which they are scored; a run "
        "with more than one reports no tokens/s.", low=1, high=MANY, refused=(
            (lambda c: c.validation_points > 1 and not c.validation_sequences,
             "says nothing without validation_sequences; leave it out, or set "
             "validation_sequences=16"),
            (lambda c: c.validation_points > c.num_steps,
             "is more than num_steps={num_steps}; lower it")))
    runs_per_gpu: int = declare(
        1, "execution", "Runs that may share a GPU at one time; runs that share have no timings.",
        differs=_EVERYWHERE, one_of=(1, 2, 4, 8))
    checkpoint_every: int = declare(
        0, "execution", "Save the run's whole state every so many steps, after the last one, and "
        "before it ends on SIGTERM or SIGUSR1; started again in the same folder, it goes on from "
        "there. 0: never.", differs=_EVERYWHERE, low=0, high=MANY, refused=(
            (lambda c: c.checkpoint_every and c.timed_seconds,
             "saves nothing of a run that is there to be timed; leave it or timed_seconds out"),
            (lambda c: c.checkpoint_every and c.noise_at_steps,
             "does not save what noise_at_steps has measured; leave one of them out"),
            (lambda c: c.checkpoint_every and c.optimizer_binding == "before_conversion",
             "cannot save an optimizer that may hold weights which are no longer the model's; use "
             "optimizer_binding=after_conversion")))
    keep_checkpoints: int = declare(
        2, "execution", "Checkpoints that are kept: so many last ones.", differs=_EVERYWHERE,
        low=1, high=MANY)
# fmt: on


@dataclass(frozen=True)
class Fields(Switches, _Described):
    """Every field, in the order of ``config.yaml``: the switches come last."""


#: Each field's declaration, type and default, by name.
FIELDS: dict[str, Field] = {f.name: f.metadata["spec"] for f in dataclasses.fields(Fields)}
TYPES: dict[str, Any] = typing.get_type_hints(Fields)
#: Fields that hold lists.
LISTS = tuple(
    name for name, hint in TYPES.items()
    if any(typing.get_origin(kind) is tuple for kind in alternatives(hint))
)  # fmt: skip
DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Fields)}

#: The switches of a training path, retired ones too, and what the plain path makes of them.
PLAIN: dict[str, Any] = {n: f.plain for n, f in (FIELDS | RETIRED).items() if f.words}
#: The same without the retired ones.
PLAIN_TODAY = {name: value for name, value in PLAIN.items() if name in FIELDS}


#: Switches of a pair that do something in BF16, too: runs may differ in what the path makes of
#: them, not in what was set by hand.
BY_HAND = ("gradient_dtype", "gradient_copy")


def varying(comparison: Comparison) -> tuple[str, ...]:
    """Return the fields, retired ones too, that may differ between the sides of a comparison."""
    return tuple(n for n, field in (FIELDS | RETIRED).items() if comparison in field.differs)
