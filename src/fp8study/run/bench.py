"""Measure this machine's throughput as ratios, beside a baseline.

The study ``bench`` (on a machine without GPU, ``bench-cpu``) is measured anew every time: a
finished earlier session is put aside first, so that all arms of a comparison come from one. On GPUs
it is done in blocks: a repeat of a model's arms, one after the other on the same GPUs, in an order
drawn at random.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8study.analysis.arms import arm_config, group_arms, read_folder
from fp8study.analysis.compare import Comparison, compare_relative
from fp8study.analysis.runs.frames import key_of
from fp8study.core.errors import UserError
from fp8study.core.files import own_results, results_dir
from fp8study.core.studies import PlannedRun, Study, load_study
from fp8study.run.machine import Machine
from fp8study.run.pipeline import check_results, run_study
from fp8study.run.terminal import complain


def bench_for(machine: Machine) -> str:
    """Return the study that ``make bench`` measures."""
    return "bench" if machine.gpus else "bench-cpu"


def find_baseline(study: str, machine: Machine) -> Path | None:
    """Return a study's committed results on such hardware: GPUs of the same name, or none.

    A folder one of whose records cannot be read is named and left out: to measure needs none.
    """
    folders = [results_dir() / "baseline" / study]
    folders += sorted((results_dir() / "reference").glob(f"*/{study}"))
    ours = machine.gpus[0].name if machine.gpus else None
    for folder in folders:
        if not any(folder.rglob("run.json")):
            continue
        try:
            record, *_ = read_folder(folder, "BASELINE")
        except UserError as error:
            complain(f"left out: {error}")
            continue
        if record.machine.get("gpu_name") == ours:
            return folder
    return None


def in_blocks(study: Study, num_gpus: int) -> Study:
    """Give the runs of each block the same GPUs, blocks by turns to all, and order them in it."""

    def block_of(run: PlannedRun) -> tuple[int, str, int, int]:
        config = run.config
        return config.num_gpus, config.model, config.micro_batch_size, config.repeat

    runs: list[PlannedRun] = []
    # Wide ones first, as the pipeline does them.
    ordered = sorted(study.runs, key=block_of, reverse=True)
    for number, ((width, *_), block) in enumerate(itertools.groupby(ordered, key=block_of)):
        num_groups = num_gpus // width  # none: such a run cannot be done here
        first = width * (number % num_groups) if num_groups else 0
        gpus = tuple(range(first, first + width)) if num_groups else ()
        arms = [dataclasses.replace(run, gpus=gpus) for run in block]
        runs += random.Random(number).sample(arms, len(arms))
    return dataclasses.replace(study, runs=tuple(runs))


def run_bench(machine: Machine, overrides: Mapping[str, Any], baseline: Path | None) -> Comparison:
    """Measure the bench study of this machine and compare it with a baseline.

    Args:
        machine: Where we are.
        overrides: Fields set in every run.
        baseline: A folder of results; None for the committed one, if there is one.

    Raises:
        UserError: No run is possible, one has no result, or the named baseline has none of the
            arms.
    """
    study = load_study(bench_for(machine), overrides)
    matches = {study.reference.items() <= run.config.to_dict().items() for run in study.runs}
    if len(matches) == 1:  # before anything is measured
        raise UserError(
            f"--set: with {', '.join(overrides)} '{study.name}' has no arms to compare, which "
            f"differ in {', '.join(study.reference)}; leave out what sets one of these"
        )
    if baseline is not None:  # before anything is measured
        theirs = group_arms(read_folder(baseline, "BASELINE"))
        if not any(key_of(arm_config(run.config.to_dict())) in theirs for run in study.runs):
            raise UserError(
                f"BASELINE: '{baseline}' has no arm of the study '{study.name}' as it is to be "
                "run; give the folder of an earlier make bench, or none"
            )
    if machine.gpus:
        study = in_blocks(study, len(machine.gpus))
    # Without GPUs nothing but the order keeps two runs off each other's cores.
    done = run_study(study, machine, overrides, one_at_a_time=not machine.gpus, anew=True)
    check_results(done, "bench")
    chosen = baseline or find_baseline(study.name, machine)
    return compare_relative(chosen, own_results() / study.name, study.reference)
