"""How a run of an advice is asked for on a command line."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd
import yaml

from fp8study.analysis.advice.answer import LossCheck, Seeds
from fp8study.analysis.advice.loss_evidence import scatter_near
from fp8study.analysis.laws.memory import predicted_memory
from fp8study.analysis.laws.nearby import FORM, SAVERS, changed, written
from fp8study.analysis.laws.room import ROOMIER, fits
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.small_steps import is_by_kernel_alone
from fp8study.core.config import ResolvedConfig, RunConfig, set_by_hand
from fp8study.core.hardware import GpuPeak
from fp8study.core.presets import PRESETS, SWEPT, near_settings
from fp8study.core.studies import load_study

#: The study of any setting's losses.
CHECK_LOSS = "check-loss"
#: That of a training that goes on from given weights.
CONTINUE = "continue-in-fp8"
#: The study that checks an advice on several nodes, and what all of its runs share.
STUDY = "advised"
ALIKE = ("model", "path", "strategy", "num_gpus", "num_nodes", "sequence_length",
         "micro_batch_size", "reshard_after_forward", "activation_checkpointing",
         "master_dtype", "loss_head", "gradient_accumulation_steps", "max_grad_norm")  # fmt: skip

#: Its runs: steps before the timed ones, the time of these, s, but so many at least.
_WARM_UP, _TIMED_SECONDS, _FEWEST_TIMED = 5, 60, 10
#: A job's start, compilation among it, minutes; and how much longer than by the law steps may take.
_START_MINUTES, _SLOWER = 5, 1.5
#: A run on one node does fewer steps than by default where those take longer.
_LONG_SECONDS = 600


def smaller_like(config: ResolvedConfig, capacity: float) -> str:
    """Return the largest preset of a model's kind that a GPU of so many GiB can build; or none."""
    for name in _like(config.model):
        if predicted_memory(config, shape_of(name)).building <= capacity:
            return name
    return ""


def largest_like(config: ResolvedConfig, capacity: float) -> str:
    """Return the largest preset of a model's kind that these GPUs have room for; or none.

    At batch 1, at need with layers gathered twice and recomputed. None, too, where the model itself
    has room so: then it is the batch that is too large.
    """
    for name in (config.model, *_like(config.model)):
        way = changed(config, {"model": name, "micro_batch_size": 1})
        if any(fits(changed(way, more), shape_of(name), capacity) for more in ROOMIER):
            return "" if name == config.model else name
    return ""


def _like(model: str) -> list[str]:
    """Return the presets of a model's kind, the largest first."""
    kind = near_settings(model).get("model_type")
    alike = [n for n, shape in PRESETS.items() if shape["model_type"] == kind and n not in SWEPT]
    return sorted(alike, key=lambda name: -shape_of(name).num_parameters)


def to_check(
    runs: Sequence[ResolvedConfig], gpu: GpuPeak | None, slowest: float
) -> tuple[tuple[str, ...], str]:
    """Return the commands that measure these runs, and the study's file that they need.

    On one node each run is a command; on several `STUDY` is one, of jobs on a cluster. On `gpu`
    depends what a run chooses itself, on the `slowest` rate, tokens/s a GPU, how many steps it does
    and how long a job may take.
    """
    if not runs:
        return (), ""
    step_seconds = runs[0].tokens_per_step / runs[0].num_gpus / slowest
    steps = {"num_warmup_steps": _WARM_UP}
    steps |= {"num_steps": _WARM_UP + max(_FEWEST_TIMED, round(_TIMED_SECONDS / step_seconds))}
    if runs[0].num_nodes == 1:
        is_long = RunConfig().num_steps * step_seconds > _LONG_SECONDS
        return tuple(command(run, gpu, steps if is_long else {}) for run in runs), ""
    asked = [_said(run, gpu) for run in runs]
    base = {name: value for name, value in asked[0].items() if name in ALIKE} | steps
    minutes = _START_MINUTES + _SLOWER * base["num_steps"] * step_seconds / 60
    content = {
        "question": f"Does FP8 pay for {runs[0].model} on {runs[0].num_gpus} GPUs?",
        "base": base, "arms": [{n: v for n, v in each.items() if n not in base} for each in asked],
        "seeds": [0, 1, 2], "minutes_per_run": math.ceil(minutes), "speed_only": True,
    }  # fmt: skip
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=64)
    return (f"make reproduce STUDY={STUDY} PROFILE=slurm",), text


def command(
    config: ResolvedConfig, gpu: GpuPeak | None, steps: Mapping[str, int] = MappingProxyType({})
) -> str:
    """Write a command that measures a configuration, in so many steps or as many as by default."""
    return _command("fp8study run", _said(config, gpu) | dict(steps))


def _command(words: str, fields: Mapping[str, Any]) -> str:
    return " --set ".join([words, *map(shlex.quote, written(fields))])


def check_of_loss(
    fp8: ResolvedConfig,
    gpu: GpuPeak | None,
    rates: Sequence[float],
    learning_rate: float | None,
    known: pd.DataFrame,
) -> LossCheck | None:
    """Say how an FP8 run's losses are compared with BF16's; None for other recipes.

    At a learning rate, or at that of `CHECK_LOSS`; `rates` are both precisions' tokens/s a GPU, and
    from the `known` runs is how many seeds may be wanted.
    """
    if fp8.precision != "fp8_tensorwise":
        return None
    runs = load_study(CHECK_LOSS).runs
    tokens = runs[0].config.num_steps * fp8.tokens_per_step
    seconds = len(runs) / len(rates) * sum(tokens / rate for rate in rates)
    rate = learning_rate or runs[0].config.learning_rate
    near = scatter_near(known, shape_of(fp8.model), rate)
    seeds = None if near.empty else Seeds(
        len({run.config.seed for run in runs}), ", ".join(dict.fromkeys(near["model"])),
        float(near["learning_rate"].iloc[0]), int(near["num_to_decide"].min()),
        int(near["num_to_decide"].max()),
    )  # fmt: skip
    return LossCheck(
        _command_for_loss(fp8, gpu, learning_rate), len(runs), rate, fp8.micro_batch_size, tokens,
        seconds / 3600, seeds,
    )  # fmt: skip


def _command_for_loss(fp8: ResolvedConfig, gpu: GpuPeak | None, learning_rate: float | None) -> str:
    told = ("precision", "path", *["fp8_all_gather"] * bool(fp8.fp8_all_gather))
    said = {name: value for name, value in _said(fp8, gpu).items() if name not in told}
    cluster = " --profile slurm" * (fp8.num_nodes > 1)
    said |= {"max_grad_norm": fp8.max_grad_norm}  # the study clips
    said |= {"learning_rate": learning_rate} if learning_rate else {}
    fields = said | {"corpus": "text:my.txt"}
    return _command(f"fp8study reproduce {CHECK_LOSS}{cluster}", fields)


def _said(config: ResolvedConfig, gpu: GpuPeak | None) -> dict[str, Any]:
    """Return the fields that tell a run of an advice from others."""
    names = ["model", "precision", "path", "strategy", "num_gpus", "sequence_length",
             "micro_batch_size"]  # fmt: skip
    names += ["num_nodes"] * (config.num_nodes > 1)
    names += ["fp8_all_gather"] * (config.is_fp8 and config.num_gpus > 1)
    names += ["gradient_accumulation_steps"] * (config.gradient_accumulation_steps > 1)
    names += ["max_grad_norm"] * (config.max_grad_norm is not None)
    names += settings(config, gpu)
    return {name: getattr(config, name) for name in names}


def settings(config: ResolvedConfig, gpu: GpuPeak | None) -> dict[str, Any]:
    """Return what was set so that a run fits, or so that the tuned path takes its model."""
    found = {name: value for name, value in SAVERS.items() if getattr(config, name) == value}
    if config.optimizer_state != "fp32":
        found["optimizer_state"] = config.optimizer_state
    if config.strategy != "fsdp2":
        found.pop("reshard_after_forward", None)
    if config.path == "tuned" and config.loss_head == "plain":
        found["loss_head"] = "plain"
    by_hand = {name: set_by_hand(config.to_dict(), name) for name in FORM}
    by_hand |= {"step_launch": "by_kernel"} if is_by_kernel_alone(config, gpu) else {}
    return found | {name: value for name, value in by_hand.items() if value is not None}
