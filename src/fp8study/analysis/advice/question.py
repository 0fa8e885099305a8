"""Advice for the GPUs at hand, or for a kind of GPU that is named."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fp8study.analysis.advice.advise import Advisor, usual_tokens
from fp8study.analysis.advice.answer import Advice
from fp8study.analysis.advice.asked import Question
from fp8study.analysis.advice.evidence import CLIPPED, Decisions
from fp8study.analysis.advice.steps import Steps
from fp8study.analysis.laws.cells import read_runs
from fp8study.analysis.laws.communication import network_at, num_nodes_for
from fp8study.analysis.laws.here import find
from fp8study.analysis.laws.nearby import (
    FORM,
    SAVERS,
    as_fp8,
    changed,
    fits_before_alone,
)
from fp8study.analysis.laws.shape import ModelShape, shape_of
from fp8study.analysis.peers import peer_table
from fp8study.analysis.runs.naming import BEFORE
from fp8study.analysis.small_steps import for_small_steps, rests_on_the_path
from fp8study.core.config import make_config
from fp8study.core.errors import UserError, nearest, together
from fp8study.core.files import kept, own_results, results_dir
from fp8study.core.hardware import GpuPeak, find_peak, named_gpu, no_fp8, slugs_with_fp8
from fp8study.core.presets import PRESETS, needs_plain_head
from fp8study.core.records import StoredRun

#: Further fields that the laws know, and by which the report tells settings apart.
_OTHERS = (*SAVERS, *sorted(FORM), "gradient_accumulation_steps", "max_grad_norm",
           "learning_rate")  # fmt: skip
#: What the command line takes to be asked, unless something else is: pre-training clips.
AS_TRAINED = {"max_grad_norm": CLIPPED}
#: Those that have an option of their own.
_OWN = ("model", "num_gpus", "sequence_length", "micro_batch_size", "global_batch_size", "network",
        "gpus_per_node", "links")  # fmt: skip
#: Those that no answer is about otherwise.
_FIXED = ("path", "strategy", "sharding", "compile")
#: The most GPUs that are spoken of.
_MOST_GPUS = 1024
#: Tokens to train on: fewer are no pre-training, and more were never written.
_TOKENS = (1e6, 1e15)
#: GB/s between GPUs of a box: less than PCIe 3 has, and more than NVLink.
_LINKS = (1, 2000)
#: Fewer steps are no training: somebody gave tokens for sequences.
_FEWEST_STEPS = 100


def question_for(
    gpus: Sequence[tuple[str, float | None]],
    model: str,
    num_gpus: int | None,
    sequence_length: int,
    micro_batch_size: int | None,
    gpu: str | None,
    others: Mapping[str, Any] | None = None,
    tokens: float | None = None,
    global_batch_size: int | None = None,
    network: float | None = None,
    gpus_per_node: int | None = None,
    links: float | None = None,
) -> Question:
    """Ask about a model on a number of GPUs, by default all that are here.

    Args:
        gpus: Driver's name and memory in GiB of each GPU here.
        model: A preset, a folder or a hub id.
        num_gpus: 1 to 1,024; more than a node has fill whole nodes.
        sequence_length: Tokens a sequence.
        micro_batch_size: Sequences a GPU; None: the largest that fits, at need with layers
            gathered twice or recomputed.
        gpu: A `GpuPeak.slug`, in place of those here.
        others: Further fields of a run.
        tokens: As `Advice.tokens`.
        global_batch_size: Sequences a step on all GPUs, in as many passes as they then take.
        network: Gb/s that each GPU has from other nodes; None: as is assumed.
        gpus_per_node: A power of two up to 16; None: as that GPU is sold.
        links: GB/s that a GPU without NVLink receives from others of its box; None: as `on_gpu`.

    Raises:
        UserError: No GPU is here and none is named, the GPU is unknown or has no FP8, the model is
            of an unknown kind, or a number or another field cannot be that.
    """
    shape, (peak, capacity), number, *_, joins, _ = together(
        lambda: shape_of(model),
        lambda: _gpu(gpus, gpu),
        lambda: _checked_number((1 if gpu else len(gpus) or 1) if num_gpus is None else num_gpus),
        lambda: _check_tokens(tokens),
        lambda: _check_names(others or {}),
        lambda: network_at(network),
        lambda: _check_links(links),
    )
    if preset := _preset_like(shape):
        warnings.warn(
            f"--model: '{model}' has the shape of {preset}, and is answered as that", stacklevel=2
        )
        model, shape = preset, shape_of(preset)
    joins = replace(joins.of(peak, gpus_per_node), link_gb_per_s=links)
    values = {
        "model": model, "num_gpus": number,
        "num_nodes": num_nodes_for(number, joins.gpus_per_node),
        "sequence_length": sequence_length,
        "micro_batch_size": 1 if micro_batch_size is None else micro_batch_size,
        "path": "tuned",
    }  # fmt: skip
    values |= others or {}
    if needs_plain_head(model):
        values["loss_head"] = "plain"
    if global_batch_size is not None:
        _check_steps(global_batch_size, sequence_length, tokens or usual_tokens(shape))
    steps = Steps(shape, peak, capacity, joins, micro_batch_size, global_batch_size)
    values = steps.sized(values, others or {})
    config = make_config(values, "advise")
    changes = for_small_steps(config, peak)
    if "update_kernel" not in values and not rests_on_the_path(config):
        before = fits_before_alone(as_fp8(config, "fp8_tensorwise"), shape, capacity)
        changes = BEFORE if before else changes
    config = changed(config.resolved(), changes | dict(others or {}))  # what was asked for wins
    name, as_asked = None if gpu else gpus[0][0], bool({*FORM} & values.keys())
    rate = config.learning_rate if "learning_rate" in values else None
    if network and joins.num_parts(config) == 1:
        what = "of one node" if config.num_nodes == 1 else "joined by NVLink"
        raise UserError(f"--network: {number} GPUs are {what}; leave it out")
    if links and config.gpus_per_node == 1:
        raise UserError("--links: one GPU a box has none; leave it out")
    if links and peak.has_nvlink:
        raise UserError(
            f"--links: NVLink joins {peak.name_part}s, as it was measured; leave it out"
        )
    keeps_step = global_batch_size is not None
    return Question(
        config.resolved(), peak, name, capacity, tokens, as_asked, keeps_step, rate, joins
    )


def _preset_like(shape: ModelShape) -> str | None:
    """Return the preset that another model equals in all that the laws and the records know.

    Unless it was run here under a name of its own, which its runs answer then.
    """
    name = shape.name.rstrip("/").rpartition("/")[2]
    if shape.name in PRESETS or any(own_results().glob(f"*/{glob.escape(name)}-*/run.json")):
        return None
    presets = (preset for preset in PRESETS if replace(shape, name=preset) == shape_of(preset))
    return next(presets, None)


def _checked_number(num_gpus: int) -> int:
    if not 1 <= num_gpus <= _MOST_GPUS:
        nearest = min(max(num_gpus, 1), _MOST_GPUS)
        raise UserError(f"--num-gpus: {num_gpus} is outside 1 to {_MOST_GPUS}; try {nearest}")
    return num_gpus


def _check_links(rate: float | None) -> None:
    least, most = _LINKS
    if rate is not None and not least <= rate <= most:  # nor what is no number
        raise UserError(
            f"--links: {rate:g} is outside {least} to {most}; give the GB/s that a GPU receives "
            "from others of its box, as the busbw of nccl-tests' all_gather_perf"
        )


def _check_tokens(tokens: float | None) -> None:
    least, most = _TOKENS
    if tokens is not None and not least <= tokens <= most:  # nor what is no number
        raise UserError(
            f"--tokens: {tokens:g} is outside {least:.0e} to {most:.0e}; give a number, as 160B"
        )


def _check_steps(sequences: int, length: int, tokens: float) -> None:
    most = int(tokens / _FEWEST_STEPS / max(length, 1))
    if sequences > most:
        raise UserError(
            f"--global-batch-size: {sequences:,} sequences of {length:,} tokens leave fewer than "
            f"{_FEWEST_STEPS} steps of {tokens:.3g} tokens; give sequences, not "
            f"tokens, at most {most:,}"
        )


def _check_names(others: Mapping[str, Any]) -> None:
    known = f"no field that can be asked about; give one of {', '.join(_OTHERS)}"
    told = (
        {name: f"an option of its own; give --{name.replace('_', '-')}" for name in _OWN}
        | {"init_from": "no matter of speed; leave it out: an answer tells of 'trained weights'"}
        | dict.fromkeys(
            _FIXED,
            "fixed: the laws are of FSDP2, fully sharded, compiled, on the tuned path; of another, "
            "time both: `fp8study run --set precision=bf16` with it, then precision=fp8_tensorwise",
        )
    )
    names = (*_OTHERS, *_OWN)
    wrong = [
        f"--set: '{name}' is {told[name]}" if name in told
        else f"--set: '{name}'{nearest(name, names)} is {known}, or an option of advise (--help)"
        for name in others if name not in _OTHERS
    ]  # fmt: skip
    if wrong:
        raise UserError("\n".join(wrong))


def answer(asked: Question, results: Path | None = None) -> Advice:
    """Answer a question from the records and, if it was measured, from the GPU that is here.

    Raises:
        UserError: There are no records, or what was measured here is damaged.
    """
    results = results or results_dir()
    here = asked.gpu_name
    measured = find(asked.config, here, results) if here else None
    return _advisor(results).advise(asked, measured)


@cache  # a process reads the records once
def _advisor(results: Path) -> Advisor:
    runs = read_runs(results)
    own = read_runs(results, "local", but_for=runs)
    if not runs:
        raise UserError(
            f"results: '{results}' holds no committed records, which advice rests on; run it in a "
            "checkout of fp8study"
        )
    files = [results / "reference" / name for name, _ in runs]
    committed = [
        StoredRun(record, folder, name.partition("/")[0])
        for folder, (name, record) in zip(files, runs, strict=True)
    ]
    files += [results / name for name, _ in own]
    decisions, peers = kept(
        "decisions",
        [*(folder / "run.json" for folder in files), *results.glob("reference/*/*/peer/**/*.json")],
        lambda: (Decisions([*runs, *own]), peer_table(committed).dropna(subset="peer_lead_pct")),
    )
    return Advisor(runs, decisions, peers)


def _gpu(gpus: Sequence[tuple[str, float | None]], slug: str | None) -> tuple[GpuPeak, float]:
    """Return a GPU's datasheet and its memory, GiB."""
    if slug is None:
        names = slugs_with_fp8()
        if not gpus:
            raise UserError(f"--gpu: no NVIDIA GPU is visible here; name one of {names}")
        found = find_peak(gpus[0][0])
        if found is None:
            raise UserError(f"--gpu: '{gpus[0][0]}' is in no table here; name one of {names}")
        sizes = [size or found.memory_gib or 0.0 for _, size in gpus]
        capacity = min(sizes)
    else:
        found = named_gpu(slug)
        capacity = found.memory_gib or 0.0
    if found.fp8_tflops is None:
        raise no_fp8(found.name_part)
    return found, capacity
