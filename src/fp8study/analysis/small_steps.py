"""Steps that end before the host has launched them, and what the tuned path does about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from fp8study.analysis.laws import speed
from fp8study.analysis.laws.nearby import as_fp8, as_reduced, as_run_on, changed
from fp8study.analysis.laws.room import fits
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.runs.naming import (
    BEFORE,
    COPY_ENGINES,
    GRAPH,
    IN_ONE_PASS,
    NORMS,
    SHARED_POOL,
)
from fp8study.core.config import ResolvedConfig, RunConfig, make_config, set_by_hand
from fp8study.core.errors import UserError
from fp8study.core.fields import DEFAULTS, varying
from fp8study.core.hardware import GpuPeak, find_peak

#: How much shorter a step with BF16 all-gather must be by the law, a margin: where the host is busy
#: the law is off by as much and more. Of an 8B at batch 1 it says 2 %, and FP8 all-gather leads by
#: 31 % (docs/log.md, 77); of a 1B and a 3B at 1 39 and 29 %, and its sign is right.
_MARGIN = 0.1
#: Switches that are refused with torch's AdamW, or with NCCL.
_RESTING = {
    "transposes": {"separate"}, "cast_kernels": {"both_layouts"},
    "gradient_copy": {"reduce_stream"}, "step_launch": {"as_graph"},
    "gradient_norm": {"by_kernel", "as_summed"},
}  # fmt: skip
#: One launch for all kernels of a step.
AS_GRAPH = {"step_launch": "as_graph"}
#: Words of a setting in which the tuned path does not update in one pass.
_NEVER = ("checkpointing", "states", "sharded within", "DDP")


class Form(NamedTuple):
    """What tells the tuned path's forms apart, from the earliest on."""

    one_pass: bool
    copy_engines: bool
    norm: bool
    """A kernel of its own finds the norm of the gradients."""
    graph: bool = False
    shared: bool = False
    """A graph's reduced gradients lie where activations lay."""


def rests_on_the_path(config: RunConfig) -> bool:
    """Return whether a run sets a switch that goes with the path's own update or collectives alone.

    Such a run keeps what the path would leave out for small steps, or for room.
    """
    values = config.to_dict()
    return any(set_by_hand(values, name) in refused for name, refused in _RESTING.items())


def are_small(config: RunConfig, gpu: GpuPeak | None) -> bool:
    """Whether a run's steps are too small for what the tuned path chooses itself.

    On several GPUs they are where FP8 tensorwise weights are gathered faster in BF16, by `_MARGIN`
    by the speed law: FP8 halves what is sent, but costs the host a millisecond a layer
    (docs/log.md). On one they are where the host may show in FP8's. On what the FP8 runs of a
    setting may differ in, and on how a run's steps are launched, the answer does not depend.

    Raises:
        UserError: No law is known of such a model.
    """
    fp8, bf16 = _in_fp8(config, gpu)
    if config.num_gpus == 1:
        return fp8.host_shows
    return (1 + _MARGIN) * bf16.total < fp8.total


def for_small_steps(config: RunConfig, gpu: GpuPeak | None) -> dict[str, Any]:
    """Return what the tuned path sets where a run's steps are small, in both precisions.

    On one GPU, two or four `AS_GRAPH`, by which a 1B's FP8 step took a third of its time by kernel
    (docs/log.md, 80, 81 and 90), where a graph can be made, which a `precision_schedule` rules out,
    and has room. Elsewhere on several `BEFORE`, whose update launches fewer kernels, and with it
    NCCL: there copy engines gain and lose by turns (docs/log.md, 70). Nothing where steps are not
    small, or where a run `rests_on_the_path` or fits with what the path has alone.

    Raises:
        UserError: No law is known of such a model.
    """
    if not are_small(config, gpu):
        return {}
    if may_be_recorded(config, gpu):
        return dict(AS_GRAPH)
    if config.num_gpus == 1 or rests_on_the_path(config):
        return {}
    usual = config.resolved()
    alone_fits = _fits(usual, gpu) and not _fits(changed(usual, BEFORE), gpu)
    return {} if alone_fits else dict(BEFORE)


def decided_anew(config: ResolvedConfig, gpu: GpuPeak | None) -> ResolvedConfig:
    """Return a run with another batch or length, with what the tuned path does about small steps.

    Raises:
        UserError: No law is known of such a model.
    """
    if config.path != "tuned":
        return config
    usual = changed(config, as_reduced(config, {"update_kernel": None, "step_launch": None}))
    small = for_small_steps(launch_open(usual), gpu)
    is_as_it_was = not small and config.step_launch == "by_kernel"
    return config if is_as_it_was else changed(usual, as_reduced(config, dict(small)))


def is_by_kernel_alone(config: ResolvedConfig, gpu: GpuPeak | None) -> bool:
    """Whether a run must say that its steps are launched by kernel, or would be one graph."""
    by_kernel = config.path == "tuned" and config.step_launch == "by_kernel" and config.compile
    return by_kernel and for_small_steps(launch_open(config), gpu) == AS_GRAPH


def launch_open(config: RunConfig) -> RunConfig:
    """Return a run on whose launches nothing was said."""
    return RunConfig(**{**config.to_dict(), "step_launch": None})


def may_be_recorded(config: RunConfig, gpu: GpuPeak | None) -> bool:
    """Whether the steps of a run that does not say how they are launched can be one graph."""
    shape = shape_of(config.model)
    makes_masks = shape.window is not None and shape.window < config.sequence_length
    if config.step_launch == "by_kernel" or shape.asks_gpu or makes_masks:
        return False
    with suppress(UserError):
        graph = as_run_on(changed(config.resolved(), AS_GRAPH), gpu)
        with_nccl = config.num_gpus > 1 and graph.collectives != "copy_engines"
        if with_nccl and (config.num_gpus, config.num_nodes) != (4, 1):  # as four were timed
            return False
        return _fits(as_fp8(graph, "bf16"), gpu)  # which holds more than FP8
    return False


def _fits(config: ResolvedConfig, gpu: GpuPeak | None) -> bool:
    """Whether a run fits a GPU by its datasheet; one of unknown size is taken to be large."""
    if gpu is None or gpu.memory_gib is None:
        return True
    return fits(config, shape_of(config.model), gpu.memory_gib)


def _in_fp8(config: RunConfig, gpu: GpuPeak | None) -> Iterator[speed.StepParts]:
    """Yield the steps of FP8 tensorwise that gathers its weights in FP8, and in BF16."""
    free = {*varying("pair"), "update_kernel", "collectives", "step_launch"}
    open_ = {name: value for name, value in DEFAULTS.items() if name in free}
    shape, alike = shape_of(config.model), RunConfig(**{**config.to_dict(), **open_}).resolved()
    for gathers in (True, False):
        way = as_run_on(as_fp8(alike, "fp8_tensorwise", gathers), gpu)
        yield speed.predicted_step(way, shape, gpu)


def form_of(setting: str) -> Form:
    """Return the form that a setting says."""
    return Form(
        IN_ONE_PASS in setting, COPY_ENGINES in setting, any(words in setting for words in NORMS),
        GRAPH in setting, SHARED_POOL in setting,
    )  # fmt: skip


def todays_form(row: pd.Series) -> Form:
    """Return the form that the path of a row has in its setting today, on its GPU or an H200."""
    setting, earliest = row["setting"], Form(False, False, False)
    is_alike = {"FP32 masters", "tuned"} <= {*setting.split(", ")}
    if not is_alike or any(word in setting for word in _NEVER):
        return earliest
    clips, alone = "gradients clipped" in setting, "not sharded" in setting
    with suppress(UserError, ValueError):  # no law is known of such a model, or no FP8 of the GPU
        config, small = _in_todays_form(row)
        is_today = alone or (config.num_gpus > 1 and small != BEFORE)
        copies = config.resolved().collectives == "copy_engines" and is_today
        graph, keeps = small == AS_GRAPH, clips and not alone  # unclipped, none waits for others
        norm = clips and (alone or copies) and config.gradient_accumulation_steps == 1
        return Form(is_today, copies, norm, graph, graph and keeps and copies)
    return Form(alone, False, alone and clips and "accumulation" not in setting)


def is_by_kernel_no_more(row: pd.Series) -> bool:
    """Return whether the tuned path launches as one graph what a row timed by kernel.

    Of a row of the plain path, whether it does in the same setting if nothing is set.
    """
    if row["path"] == "tuned":
        return todays_form(row).graph and not form_of(row["setting"]).graph
    if any(word in row["setting"] for word in _NEVER):
        return False
    with suppress(UserError, ValueError):  # as in `todays_form`
        return _in_todays_form(row)[1] == AS_GRAPH
    return False


def puts_head_in_fp8(row: pd.Series) -> bool:
    """Return whether the tuned path has the loss head of a row's model in FP8 by itself there."""
    with suppress(UserError, ValueError):
        config, small = _in_todays_form(row)
        return not replace(config, precision="fp8_tensorwise", **small).resolved().skip
    return False


def _in_todays_form(row: pd.Series) -> tuple[RunConfig, dict[str, Any]]:
    """Return a run of a row's setting on the tuned path, and what is chosen for small steps.

    Raises:
        UserError: No law is known of the model.
        ValueError: Its GPU has no FP8.
    """
    setting = row["setting"]
    tokens, batch = re.findall(r"(\d+) tokens, batch (\d+)", setting)[0]
    passes, spread = (re.search(rf"(\d+) {of}", setting) for of in ("accumulation", "nodes"))
    config = make_config(
        {"model": row["model"], "num_gpus": int(row["num_gpus"]), "path": "tuned",
         "num_nodes": int(spread[1]) if spread else 1,
         "strategy": "none" if "not sharded" in setting else "fsdp2",
         "sequence_length": int(tokens), "micro_batch_size": int(batch),
         "gradient_accumulation_steps": int(passes[1]) if passes else 1}
    )  # fmt: skip
    peak = find_peak(row["gpu_name"]) if isinstance(row.get("gpu_name"), str) else None
    return config, for_small_steps(config, peak)
