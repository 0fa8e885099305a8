"""What a run's arm and setting are called in every table, by what its record says.

A run that trains part of its model keeps the words "stale optimizer (x % of parameters not
trained)" in its ``arm``, so that it never passes for an FP8 speed-up or loss gap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fp8study.core.config import completed
from fp8study.core.fields import FIELDS, PLAIN, PLAIN_TODAY
from fp8study.core.path.choices import HEAD
from fp8study.core.path.switches import RETIRED
from fp8study.core.recipes import GATHERED_IN_FP8, RECIPES, SIXTEEN_BIT
from fp8study.core.record_shape import as_run
from fp8study.core.records import RunRecord

#: What an FP8 run leaves in BF16 unless it says otherwise; an arm that differs is named so.
DEFAULT_SKIP = list(HEAD)

PRECISION_LABELS: dict[str, str] = {name: recipe.label for name, recipe in RECIPES.items()}
#: What the report says of a switch that is true or false.
_SAID = {True: "on", False: "off"}
#: What the setting of a record says whose path has got switches since.
EARLIER_FORM = "earlier form"
#: What the tuned path set before it updated in one pass; what its other switches did followed.
BEFORE = {"update_kernel": "torch"}
#: What a setting of today's tuned path says where that differs from the path `BEFORE`.
IN_ONE_PASS = "updated in one pass"
#: Switches that it set later still, as it was before: a setting names what differs.
_LATER = {
    name: PLAIN[name]
    for name in ("collectives", "gradient_norm", "transposes", "cast_kernels", "step_launch")
}
#: What a setting says of runs that had torch's compile cache empty on purpose.
COLD_CACHE = "cold cache"
#: What it says of runs that go on from weights which another training left.
FROM_WEIGHTS = "from trained weights"
#: What an arm says that converts to FP8 and gathers BF16 weights.
BF16_GATHERED = "BF16 all-gather"
#: What an arm says of FP8 alone, so that it is no part of a setting, which BF16 has too: that its
#: SwiGLU writes FP8, as on the tuned path since entry 69 of docs/log.md, that kernels of ours write
#: both layouts of FP8, since entry 78, that its loss head is FP8 with them, since 83, or how it
#: adds up.
KERNELS = SWIGLU_KERNELS, BOTH_LAYOUTS, FP8_HEAD = "SwiGLU kernels", "both layouts", "FP8 loss head"
FAST_ACCUMULATION = "fast accumulation"
#: What an arm says, before its schedule, that trains some of its steps in BF16.
SCHEDULED = "schedule"
#: The switches that `BOTH_LAYOUTS` says; the last one where copy engines read what is copied.
_BOTH = {"transposes": "separate", "cast_kernels": "both_layouts", "gradient_copy": "reduce_stream"}
#: What a setting says of two GPUs without NCCL, as the tuned path has them since entry 70.
COPY_ENGINES = "collectives by copy engines"
#: And what it says of the kernel that found the norm, on one GPU and on two, since entry 72.
NORMS = NORM_BY_KERNEL, NORM_AS_SUMMED = "gradients' norm by kernel", "gradients' norm as summed"
#: What it says of GPUs whose links NCCL leaves alone.
UNUSED_LINKS = "unused GPU links"
#: And of steps launched as one CUDA graph, as small ones of up to two GPUs since 81, four since 90.
GRAPH = "steps launched as graph"
#: And of such steps on two GPUs whose reduced gradients lie with the activations, since 89.
SHARED_POOL = "gradients' memory shared"


def fp8_part(config: Mapping[str, Any]) -> str:
    """Write which layers and steps of an FP8 run are in FP8, and how it adds up."""
    fields = ("skip", "precision_schedule", "fast_accumulation")
    return json.dumps([config.get(name) for name in fields])


def with_fp8_head(part: str) -> str:
    """Write a `fp8_part` that leaves no layer out but the loss head with that in FP8, too."""
    skip, *others = json.loads(part)
    return json.dumps([[] if skip == DEFAULT_SKIP else skip, *others])


def arm_label(record: RunRecord) -> str:
    """Name the precision of a run, and say so if part of its model was not trained."""
    config = record.config
    precision = str(config.get("precision", "unknown precision"))
    parts = [PRECISION_LABELS.get(precision, precision)]
    if precision not in SIXTEEN_BIT:
        gathers = config.get("strategy") == "fsdp2" and (config.get("num_gpus") or 0) > 1
        if precision in GATHERED_IN_FP8 and gathers and config.get("fp8_all_gather") is False:
            parts.append(BF16_GATHERED)
        if schedule := config.get("precision_schedule"):
            parts.append(f"{SCHEDULED} {' '.join(schedule).replace(precision, 'fp8')}")
        had = as_run(config, record.warnings)
        writes_both = config.get("path") == "tuned" and _writes_both(had)
        skip = config.get("skip")
        keeps = config.get("path") == "tuned" and had.get("weight_cast") == "each_update"
        has_head = keeps and had.get("loss_head") == "chunked" and skip == []
        if skip is not None and list(skip) != DEFAULT_SKIP and not has_head:
            parts.append(f"skips {' '.join(skip) or 'nothing'}")
        asks_for_kernels = config.get("path") == "tuned" and config.get("swiglu") == "kernels"
        if asks_for_kernels and not any(each.startswith("swiglu: ") for each in record.warnings):
            parts.append(SWIGLU_KERNELS)
        parts += [BOTH_LAYOUTS] * writes_both + [FP8_HEAD] * has_head
        parts += [FAST_ACCUMULATION] * (config.get("fast_accumulation") == "all")
    note = stale_note(record)
    if note:
        parts.append(note)
    elif config.get("optimizer_binding") == "before_conversion":
        parts.append("optimizer made before conversion")
    return ", ".join(parts)


def num_kernels(arm: str) -> int:
    """Return how many of `KERNELS` an arm has; of two that differ so the path's has more today."""
    return sum(words in arm for words in KERNELS)


def written_out(words: str, setting: str) -> str:
    """Name the switches that `KERNELS` say of an arm, in a setting of their own."""
    if words == SWIGLU_KERNELS:
        return FIELDS["swiglu"].words.format("kernels")
    if words == FP8_HEAD:
        return "loss head in FP8"
    both = _both(COPY_ENGINES in setting).items()
    return ", ".join(FIELDS[name].words.format(value.replace("_", " ")) for name, value in both)


def _writes_both(config: Mapping[str, Any]) -> bool:
    """Return whether a run has all that `BOTH_LAYOUTS` says, which its arm names then."""
    return _both(config.get("collectives") == "copy_engines").items() <= config.items()


def _both(by_copies: bool) -> dict[str, str]:
    return {name: _BOTH[name] for name in _BOTH if by_copies or name != "gradient_copy"}


def setting_label(config: dict[str, Any], says_clipping: bool = True) -> str:
    """Say in a few words what two compared runs have in common, besides model and GPUs."""
    strategy = config.get("strategy")
    parts = ["not sharded" if strategy == "none" else str(strategy).upper()] if strategy else []
    if (config.get("num_nodes") or 1) > 1:
        hybrid = ", sharded within each" if config.get("sharding") == "hybrid" else ""
        parts.append(f"{config['num_nodes']} nodes{hybrid}")
    if config.get("sequence_length"):
        parts.append(f"{config['sequence_length']} tokens")
    if config.get("micro_batch_size"):
        parts.append(f"batch {config['micro_batch_size']}")
    if (config.get("gradient_accumulation_steps") or 1) > 1:
        parts.append(f"{config['gradient_accumulation_steps']} accumulation steps")
    if config.get("compile") is not None:
        parts.append("compiled" if config["compile"] else "eager")
    if config.get("compile_cache") == "fresh":
        parts.append(COLD_CACHE)
    if config.get("init_from"):
        parts.append(FROM_WEIGHTS)
    if config.get("activation_checkpointing"):
        parts.append("activation checkpointing")
    if config.get("master_dtype"):
        parts.append(f"{config['master_dtype'].upper()} masters")
    if (config.get("optimizer_state") or "fp32") != "fp32":
        parts.append(f"{config['optimizer_state'].upper()} optimizer states")
    if says_clipping and config.get("max_grad_norm") is not None:
        parts.append(f"gradients clipped at {config['max_grad_norm']:g}")
    if config.get("path") == "tuned":
        parts.append("tuned")
    return ", ".join(parts + unusual_switches(config))


def stale_note(record: RunRecord) -> str | None:
    """The words that go with every number of a run that trains only part of its model."""
    share = record.model.get("parameters_outside_optimizer_pct")
    planted = bool(record.config.get("untrained"))
    if isinstance(share, int | float) and share > 0:
        fault = "planted" if planted else "stale optimizer"
        return f"{fault} ({share:.1f} % of parameters not trained)"
    if share is None and planted:
        return "planted (share of parameters not trained unknown)"
    asked_for = record.config.get("optimizer_binding") == "before_conversion"
    if share is None and asked_for and record.config.get("precision") not in SIXTEEN_BIT:
        return "stale optimizer (share of parameters not trained unknown)"
    return None


def unusual_switches(config: dict[str, Any]) -> list[str]:
    """Name, in words, the switches of a recorded run that its path would have set otherwise.

    Held to the tuned path as it was `BEFORE`, or to today's, which `IN_ONE_PASS` says, where that
    leaves a part of these switches. A switch that came later was not set; if the path sets it
    today, the record is of an earlier form of the path. An arm says what made its SwiGLU;
    what came later is named though the path sets it (`_LATER`).
    """
    before = set_besides(config, BEFORE)
    if not before:
        return before
    besides = set_besides(config, {})
    return [IN_ONE_PASS, *besides] if {*besides} < {*before} else before


def has_usual_path(config: dict[str, Any]) -> bool:
    """Return whether a run sets no switch of its own: of today's tuned path, or an earlier one."""
    by_gpus = {1: [NORM_BY_KERNEL], 2: [COPY_ENGINES, NORM_AS_SUMMED]}
    num_gpus = 0 if config.get("num_nodes", 1) > 1 else config.get("num_gpus", 0)
    later = by_gpus.get(num_gpus, [])
    forms = [{IN_ONE_PASS, *later[:number]} for number in range(len(later) + 1)]
    graphs = [form | {GRAPH} for form in forms if num_gpus in (1, 4) or COPY_ENGINES in form]
    shared = [form | {SHARED_POOL} for form in graphs if COPY_ENGINES in form]
    return {*unusual_switches(config)} in (set(), *forms, *graphs, *shared)


def set_besides(config: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Name the switches that differ from what the path decides with some `given`."""
    switches = {name: (FIELDS | RETIRED)[name].words for name in PLAIN}
    others = {name: value for name, value in config.items() if name not in PLAIN}
    # Of a configuration that is refused today, nothing is known to be usual.
    undecided = dict.fromkeys(PLAIN_TODAY)
    if not given:  # torch's update refuses a graph, from which follows what others are
        undecided["step_launch"] = config.get("step_launch")
    usual = completed(others | undecided | dict(given)) | _LATER
    if config.get("step_launch") == "as_graph":  # steps by kernel shared it from the first
        usual["gradient_pool"] = PLAIN["gradient_pool"]
    if usual["gradient_copy"] == _BOTH["gradient_copy"]:
        usual["gradient_copy"] = "foreach"
    values = PLAIN | config
    unusual = {n for n in PLAIN if values[n] is not None and values[n] != usual.get(n, values[n])}
    unusual -= {name for name in PLAIN if usual.get(name) is None}
    if config.get("path") == "tuned":
        unusual -= {"swiglu", *_BOTH} if _writes_both(config) else {"swiglu"}
    texts = [
        switches[name].format(_SAID.get(value, str(value).replace("_", " ")))
        for name, value in config.items()
        if name in unusual
    ]
    return texts if unusual <= config.keys() else [*texts, EARLIER_FORM]
