"""The study ``machine``: what `make reproduce` runs on GPUs, chosen once for what is there.

`fp8study.run.chosen.selection` chooses; here are the facts that it needs, and the file that keeps
what was chosen: ``results/local/machine/study.yaml``, which a later call goes on with. A larger
budget adds to it, and no finished run is done again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fp8study.core.config import check_names
from fp8study.core.errors import UserError
from fp8study.core.presets import is_reachable
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL
from fp8study.core.studies import (
    Study,
    chosen_path,
    continues,
    expanded,
    load_study,
    read_study,
)
from fp8study.data.corpus import fewest_tokens
from fp8study.run.chosen.estimates import compile_minutes, held_minutes
from fp8study.run.chosen.selection import select
from fp8study.run.chosen.timetable import BASE, Chosen
from fp8study.run.defaults import MACHINE_STUDY, study_for
from fp8study.run.machine import Machine

_QUESTION = (
    "Should I pre-train in FP8 on this machine: what does it gain, by model, batch and number of "
    "GPUs, and what does it do to the loss?"
)
_EXPECTATION = (
    "FP8 tensorwise leads by the more, the larger model and batch are, and loses for a 1B at batch "
    "1 on more than four GPUs; rowwise lies between. Losses end within the margin."
)
BUDGET_MINUTES = 20.0
#: The selection decides these itself.
_OURS = ("precision", "num_gpus", "strategy", "micro_batch_size", "num_steps", "seed", "repeat")
#: What decides how long a run takes.
_LENGTHS = ("model", "num_gpus", "sequence_length", "micro_batch_size", "num_steps",
            "gradient_accumulation_steps", "timed_seconds", "runs_per_gpu")  # fmt: skip


def study_here(
    machine: Machine, name: str | None, values: dict[str, Any], budget: float | None
) -> tuple[Study, dict[str, Any]]:
    """Return a study, by default this machine's, and the overrides that its file does not hold.

    Raises:
        UserError: There is no such study, an override is wrong, or its runs are given and have no
            budget.
    """
    name = study_for(machine) if name is None else name
    if name == MACHINE_STUDY:
        check_names(values, "--set")
        return machine_study(machine, values, budget), {}
    if budget is not None:
        raise UserError(
            f"--budget: {budget:g} is for the study machine, and '{name}' names its runs; "
            "leave it out"
        )
    study = load_study(name, values)
    if machine.gpus and not values.keys().isdisjoint(_LENGTHS):
        study = _timed_anew(study, machine)
    if not study.speed_only and not values.keys().isdisjoint(("precision", "seed")):
        study = dataclasses.replace(study, notes=(*study.notes, *too_few_pairs(study)))
    return study, values


def too_few_pairs(study: Study) -> tuple[str, ...]:
    """Say that what is set leaves too little to compare losses."""
    configs = [run.config for run in study.runs]
    fp8, bf16 = ({c.seed for c in configs if c.is_fp8 == is_fp8} for is_fp8 in (True, False))
    if len(fp8 & bf16) >= MIN_PAIRS_FOR_INTERVAL:
        return ()
    pairs = {0: "No pair", 1: "One pair"}.get(len(fp8 & bf16), "Two pairs")
    least = f"{MIN_PAIRS_FOR_INTERVAL} seeds in both precisions"
    return (f"{pairs} of FP8 and BF16: a verdict on losses takes {least}",)


def _timed_anew(study: Study, machine: Machine) -> Study:
    """Estimate the minutes of runs that are not those that the study's file tells of."""
    runs = []
    for run in study.runs:
        with suppress(UserError):  # of such a model nothing is known
            minutes = held_minutes(run.config, machine) + compile_minutes(run.config)
            run = dataclasses.replace(run, minutes=minutes)
        runs.append(run)
    return dataclasses.replace(study, runs=tuple(runs))


def machine_study(
    machine: Machine, overrides: Mapping[str, Any], budget_minutes: float | None = None
) -> Study:
    """Return the study of this machine: the one that was begun here, or else a new one.

    Args:
        machine: It has GPUs.
        overrides: Fields set in every run; ``corpus`` is the text that losses are judged on.
        budget_minutes: From start to end; None: as before, or `BUDGET_MINUTES`.

    Raises:
        UserError: No run fits the GPUs or the budget, or an override leaves nothing to choose.
    """
    if not machine.gpus:
        raise UserError("STUDY: 'machine' is for GPUs, and none is visible here; use smoke")
    if ours := [name for name in _OURS if name in overrides]:
        raise UserError(
            f"--set {ours[0]}: the study 'machine' chooses it; leave it out, or write a study of "
            "your own"
        )
    if budget_minutes is not None and not budget_minutes > 0:
        raise UserError(f"--budget: {budget_minutes:g} is no time; give minutes, as 20")
    path = chosen_path(MACHINE_STUDY)
    before = read_study(path) if path.is_file() else {}
    session = dict(before.get("session", {}))
    fields = {name: value for name, value in overrides.items() if name != "corpus"}
    asked: dict[str, Any] = {
        "gpus": [gpu.name for gpu in machine.gpus],
        "set": fields or session.get("set", {}),
        "corpus": overrides.get("corpus", session.get("corpus")) or _default_corpus(),
        "budget_minutes": budget_minutes or session.get("budget_minutes", BUDGET_MINUTES),
    }
    kept = []
    if continues(before, {"session": asked}):
        kept = [_read_arm(before["base"], arm) for arm in before["arms"]]
        asked["budget_minutes"] = max(asked["budget_minutes"], session["budget_minutes"])
    corpus = asked["corpus"]
    if corpus is None and not machine.has_fp8:
        corpus = "synthetic"  # losses are all that can be asked for
    text = (corpus, fewest_tokens(corpus)) if corpus else None
    chosen = select(machine, asked["budget_minutes"], text, asked["set"], kept)
    if chosen.least_budget:
        raise UserError(
            f"--budget: {asked['budget_minutes']:g} min hold no run here, not even the shortest; "
            f"BUDGET={chosen.least_budget} does"
        )
    if not chosen.runs:
        raise UserError(
            f"STUDY: no run of 'machine' is possible here. {'. '.join(chosen.notes)}. What a run "
            "needs is given as SET='field=value'"
        )
    content = {
        "question": _QUESTION,
        "expectation": _EXPECTATION,
        "session": asked,
        "notes": list(chosen.notes),
        "base": BASE,
        "arms": [_arm(run) for run in chosen.runs],
    }
    return dataclasses.replace(expanded(MACHINE_STUDY, content, MACHINE_STUDY), content=content)


def _default_corpus() -> str | None:
    return "tinystories" if is_reachable() else None


def _arm(run: Chosen) -> dict[str, Any]:
    """Write a chosen run as an arm of a study."""
    fields = {n: v for n, v in run.values.items() if n != "seed" and (n, v) not in BASE.items()}
    seeds = [run.values.get("seed", 0)]
    minutes = round(run.minutes, 2)
    return fields | {"seeds": seeds, "gpus": [*run.gpus], "minutes": minutes, "why": run.why}


def _read_arm(base: Mapping[str, Any], arm: Mapping[str, Any]) -> Chosen:
    told = ("seeds", "gpus", "minutes", "why")
    fields = {name: value for name, value in arm.items() if name not in told}
    values = {**base, **fields} | ({"seed": arm["seeds"][0]} if any(arm["seeds"]) else {})
    return Chosen(values, tuple(arm["gpus"]), arm["minutes"], arm["why"])
