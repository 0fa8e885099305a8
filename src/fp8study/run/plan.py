"""What a study would do on this machine: its runs, what they share, and what cannot be done."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8study.analysis.laws.nearby import changed
from fp8study.core.checkpoints import last_checkpoint, weights_to_start_from
from fp8study.core.config import ResolvedConfig, RunConfig
from fp8study.core.errors import UserError, nearest
from fp8study.core.field_types import shown
from fp8study.core.fields import PLAIN, varying
from fp8study.core.files import project_root, studies_dir
from fp8study.core.presets import check_model, is_reachable
from fp8study.core.records import RunRecord, read_record
from fp8study.core.studies import PlannedRun, Study, estimated_minutes, load_study, study_names
from fp8study.core.words import count
from fp8study.data.corpus import REMEMBERS, SEEN_AGAIN, check_corpus, fewest_tokens
from fp8study.run.blocks import gpus_to_have
from fp8study.run.chosen.estimates import check_memory, minutes_on_cpu, needed_gib
from fp8study.run.chosen.notes import done_before, no_reference
from fp8study.run.chosen.study import too_few_pairs
from fp8study.run.defaults import better_than_asked
from fp8study.run.machine import Machine, unsupported_gpu
from fp8study.run.slurm.profile import Profile
from fp8study.run.terminal import fit, using_model

#: Always told, whatever they are; any other field is where it differs from its default.
_MAIN = (
    "model", "precision", "num_gpus", "strategy", "sequence_length", "micro_batch_size",
    "num_steps", "learning_rate", "corpus",
)  # fmt: skip
#: Told of each run where its study says what it is there for.
_WITH_REASON = ("model", "precision", "num_gpus", "micro_batch_size")
#: Their value follows from other fields unless someone chooses it.
_DERIVED = {"fp8_all_gather", "fp8_emulate", *PLAIN}
#: What `better_than_asked` names.
_FASTER = {
    "fp8_all_gather": "BF16 all-gather is faster here",
    "step_launch": "steps are small here, and faster as one CUDA graph,",
}
#: A value that says by itself what it is.
_PLAIN_VALUES = ("model", "precision", "strategy")


def list_studies(say: Callable[[str], object]) -> None:
    """Say of each study what it asks.

    Raises:
        UserError: There are none, or some are invalid; the others were told before.
    """
    if not (names := study_names()):
        raise UserError(f"studies: there are none in '{studies_dir()}'; run in a checkout")
    width, wrong = max(map(len, names)), []
    say("machine, the default with GPUs, is chosen for those that are there. The others:")
    for name in names:
        try:
            study = load_study(name)
        except UserError as error:
            wrong.append(str(error))
        else:
            say(f"{name:<{width}}  {len(study.runs):>3} runs: {study.question}")
    if wrong:
        raise UserError("\n".join(wrong))


def impossible_runs(
    study: Study, machine: Machine, cluster: Profile | None = None
) -> dict[PlannedRun, str]:
    """Return the runs that this machine, or a node of this cluster, cannot do, with the reason.

    Raises:
        UserError: A run is wrong whatever the machine.
    """
    _check_claims(study)
    reasons, pending = {}, set(study.pending())
    for run in study.runs:
        _check_places(run, study.name)
        check_corpus(run.config.corpus, run.config.tokens_per_step)
        with using_model(run.config.model):
            check_model(run.config)
        try:
            machine.check(run.config)
            if machine.gpus and max(run.gpus, default=0) >= len(machine.gpus):
                raise UserError(
                    f"gpus: {[*run.gpus]} are not all among the {len(machine.gpus)} visible GPUs, "
                    "counted from 0; name others, or leave gpus out"
                )
            if run in pending and run.config.init_from and not last_checkpoint(run.run_dir):
                weights_to_start_from(run.config.init_from)
            # A result needs no permission; of a cluster's hosts the memory here says nothing.
            if run in pending and (machine.gpus or not cluster):
                check_memory(run.config, machine)
        except UserError as error:
            reasons[run] = str(error)
    return reasons


def _check_claims(study: Study) -> None:
    """Refuse to speak to a claim that no document makes."""
    if not study.claims:
        return
    from fp8study.analysis.claims.ledger import all_claims  # half a second

    known = [claim.id for claim in all_claims()]
    for name in study.claims:
        if name not in known:
            raise UserError(
                f"{studies_dir() / study.name}.yaml: claims: '{name}' is no claim"
                f"{nearest(name, known)}; give ids that `fp8study claims` lists, or leave it out"
            )


def _check_places(run: PlannedRun, study: str) -> None:
    """Refuse named GPUs that are not as many, each once, as a run has on a machine."""
    number = run.config.gpus_per_node
    if run.gpus and not (len(run.gpus) == len({*run.gpus}) == number and min(run.gpus) >= 0):
        raise UserError(
            f"{study}: gpus: {[*run.gpus]} are not the {number} of num_gpus={run.config.num_gpus}; "
            f"count them from 0, each once, as {[*range(number)]}"
        )


def plan_text(study: Study, machine: Machine, cluster: Profile | None = None) -> str:
    """Return what a study would do here: its question, its runs, their GPUs and rough time.

    On a `cluster`, of which `machine` is a node, it starts with the jobs.
    """
    impossible = impossible_runs(study, machine, cluster)
    pending = [run for run in study.pending() if run not in impossible]
    num_done = len(study.runs) - len(pending) - len(impossible)
    done = _records(study, pending)
    possible = tuple(run for run in study.runs if run not in impossible)
    minutes = _minutes(pending, dataclasses.replace(study, runs=possible), machine)
    where = machine.gpus_in_words or f"{machine.num_cpus} CPU cores, FP8 emulated"
    judged = f"Losses are judged at ±{study.margin_pct:g} % of BF16's"
    if study.speed_only:
        judged = "Speed alone is asked for: losses are not judged"
    chosen = [_chosen(run.config) for run in study.runs]
    shared, varied = _fields(chosen)
    if all(run.why for run in study.runs):  # which says the rest
        varied = [name for name in varied if name in _WITH_REASON]
    lines = [
        *([cluster.summary(pending)] if cluster else []),
        f"Study {study.name}: {study.question}",
        f"On {where}. {count(len(study.runs), 'run')}, {num_done} done, "
        f"{len(pending)} to do"
        + ("." if cluster or not pending else f", about {max(1, round(minutes)):,} min.")
        + (" None of them can be run here: see below." if not pending and impossible else ""),
        f"{judged}." + f" Expected: {study.expectation}" * bool(study.expectation),
        f"Every run: {', '.join(_cell(name, chosen[0]) for name in shared)}",
    ]
    with_losses = [r.config for r in study.runs if not (study.speed_only or r.config.timed_seconds)]
    if any(config.corpus == "synthetic" for config in with_losses):
        lines += [
            "Synthetic text is easier than real text: judge losses on SET='corpus=text:my.txt'."
        ]
    lines += _repeated(with_losses)
    compares = len({config.is_fp8 for config in with_losses}) == 2
    rows = [[_cell(name, values) for name in varied] for values in chosen]
    if machine.gpus:
        rows = [[*row, *_costs(run)] for run, row in zip(study.runs, rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for run, row in zip(study.runs, rows, strict=True):
        state = "to do" if run in pending else "cannot" if run in impossible else "done"
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {state:<7} {run.config.digest()}  {cells}".rstrip())
    notes = (
        None if cluster else unsupported_gpu(),
        *dict.fromkeys((*study.notes, *(too_few_pairs(study) if compares else ()))),
        no_reference(study),
        _other_margin(study, done),
        *_written_since(done),
        *done_before(study, pending),
        _without_hub(pending),
        _unpaired(pending, impossible),
        *_faster_ways(study, pending, machine),
    )
    lines += [f"  {note}" for note in notes if note]
    for reason in dict.fromkeys(impossible.values()):
        which = [run.config.digest() for run, why in impossible.items() if why == reason]
        of = f" ({', '.join(which)})" if len(which) < len(impossible) else ""
        lines.append(f"  cannot be run here{of}: {reason}")
    folder = study.runs[0].run_dir.parent.relative_to(project_root())
    lines.append(f"Records go to {folder}/, into folders that end in the eight digits above.")
    return fit("\n".join(lines))


def _records(study: Study, pending: list[PlannedRun]) -> list[RunRecord]:
    """Return the records of runs that are done."""
    records = []
    for run in study.runs:
        with suppress(UserError):  # no record, or one that another line is about
            if run not in pending:
                records.append(read_record(run.run_dir / "run.json"))
    return records


def _other_margin(study: Study, done: list[RunRecord]) -> str | None:
    """Say that runs are done that will be judged by another margin than the study's file has."""
    stated = {record.judgement.get("margin_pct", study.margin_pct) for record in done}
    if not (others := sorted(stated - {study.margin_pct})):
        return None
    return (
        f"margin_pct: done runs state ±{others[0]:g} %, and are judged by that; set it back, or "
        f"move '{study.runs[0].run_dir.parent}' away"
    )


def _written_since(done: list[RunRecord]) -> list[str]:
    """Name texts and shapes of models whose file was written after runs with them had begun."""
    later: Counter[tuple[str, str]] = Counter()
    for record in done:
        text, model = (str(record.config.get(name)) for name in ("corpus", "model"))
        files = {"model": f"{model}/config.json"}
        if text.startswith("text:"):
            files["corpus"] = text.removeprefix("text:")
        began = datetime.fromisoformat(record.started_at).timestamp()
        for name, file in files.items():
            if Path(file).is_file() and Path(file).stat().st_mtime > began:
                later[name, file] += 1
    return [
        f"{name}: '{file}' was written after {count(number, 'done run')} with it began, which will "
        "not run again; if it says something else now, give it another name"
        for (name, file), number in later.items()
    ]


def _repeated(configs: list[ResolvedConfig]) -> list[str]:
    """Name the texts that are too short for their runs, with how often those would read them."""
    often: dict[str, float] = {}
    for config in configs:
        if config.corpus.startswith("text:"):
            passes = config.num_steps * config.tokens_per_step / fewest_tokens(config.corpus)
            often[config.corpus] = max(passes, often.get(config.corpus, 0.0))
    return [
        f"A run reads {corpus} up to {passes:,.{int(passes < 10)}f} times: {REMEMBERS}."
        for corpus, passes in often.items()
        if passes > SEEN_AGAIN
    ]


def _minutes(pending: list[PlannedRun], study: Study, machine: Machine) -> float:
    """Return roughly how long runs take here; all of the study's are possible.

    Studies say it of the GPUs that they are for.
    """
    gpus = gpus_to_have(machine, study)
    queued = [dataclasses.replace(run, gpus=tuple(gpus[run.run_id])) for run in pending]
    minutes = estimated_minutes(queued, machine.num_slots)
    if machine.gpus:
        return minutes
    return max(minutes, sum(minutes_on_cpu(run.config, machine) for run in pending))


def _without_hub(pending: list[PlannedRun]) -> str | None:
    """Name the corpus that cannot be had without the hub, where that does not answer."""
    if all(run.config.corpus != "tinystories" for run in pending) or is_reachable():
        return None
    return (
        "corpus=tinystories: the data hub cannot be reached, so it must be in the cache of "
        "datasets; or SET='corpus=text:my.txt'"
    )


def _unpaired(pending: list[PlannedRun], impossible: Mapping[PlannedRun, str]) -> str | None:
    """Name the FP8 runs that would have a BF16 run beside them if that were possible here."""

    def shared(run: PlannedRun) -> dict[str, Any]:
        values = run.config.to_dict()
        return {name: values[name] for name in values.keys() - {*varying("pair")}}

    left_out = [shared(run) for run in impossible if run.config.precision == "bf16"]
    alone = [run for run in pending if run.config.is_fp8 and shared(run) in left_out]
    names = ", ".join(run.config.digest() for run in alone)
    return f"without the BF16 run beside it, which is impossible here: {names}" if alone else None


def _faster_ways(study: Study, pending: list[PlannedRun], machine: Machine) -> list[str]:
    """Name runs that one field would make faster, if their study does not ask for that, too.

    A study says what its runs are, on any machine: unlike `fp8study run`, it does not choose.
    """
    configs = [run.config.resolved() for run in pending]
    cells: dict[tuple[str, Any], dict[str, int]] = {}
    for config in configs:
        place = f"{config.model} at batch {config.micro_batch_size} on "
        place += count(config.num_gpus, "GPU")
        for name, value in better_than_asked(config, machine).items():
            alike = (c for c in configs if c.precision == config.precision)
            if all(getattr(c, name) != value for c in alike) and _all_take(study, name, value):
                cells.setdefault((name, value), {})[place] = 1
    return [
        f"by the law of speed {_FASTER[name]} for {', '.join(places)}: SET='{name}={shown(value)}'"
        for (name, value), places in cells.items()
    ]


def _all_take(study: Study, name: str, value: Any) -> bool:
    """Whether no run of a study refuses a field, which is set in all of them."""
    try:
        for run in study.runs:
            changed(run.config.resolved(), {name: value})
    except UserError:
        return False
    return True


def _costs(run: PlannedRun) -> list[str]:
    """Return a run's memory where a law knows it, its minutes, and what it is there for."""
    try:
        memory = f"{needed_gib(run.config):.0f} GiB"
    except UserError:
        memory = "? GiB"
    return [memory, f"{run.minutes:.1f} min", run.why]


def _fields(chosen: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the fields to tell once for all runs, and those to tell for each."""
    default = vars(RunConfig().resolved())
    differing = [name for name in default if len({repr(c.get(name)) for c in chosen}) > 1]
    told = {n for n in default if n in _MAIN or chosen[0].get(n, default[n]) != default[n]}
    return [name for name in default if name in told.difference(differing)], differing


def _chosen(config: RunConfig) -> dict[str, Any]:
    """Return the fields whose values do not follow from the others'."""
    own = {name: value for name, value in vars(config).items() if name not in _DERIVED}
    follows = vars(RunConfig(**own).resolved())
    decided = vars(config.resolved()).items()
    return own | {n: v for n, v in decided if n in _DERIVED and v != follows[n]}


def _cell(name: str, chosen: dict[str, Any]) -> str:
    if name not in chosen:
        return ""
    value = chosen[name]
    if isinstance(value, tuple):
        value = ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        value = str(value).lower()
    return str(value) if name in _PLAIN_VALUES and value != "none" else f"{name}={value}"
