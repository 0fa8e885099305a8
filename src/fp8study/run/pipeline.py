"""Run a study: the plan, then Snakemake, then what became of every run."""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8study.core.audit_rules import LOSS_ROSE
from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.core.files import locked, own_results, project_root
from fp8study.core.presets import model_vocab_size
from fp8study.core.records import (
    RESULTS,
    NewerRecord,
    RunRecord,
    read_metrics,
    read_record,
    write_json,
)
from fp8study.core.studies import PlannedRun, Study
from fp8study.data import tokens
from fp8study.run import blocks
from fp8study.run.children import end, end_left, stoppable, telling_line
from fp8study.run.chosen.estimates import host_gib
from fp8study.run.machine import Machine, memory_gib
from fp8study.run.plan import impossible_runs, plan_text
from fp8study.run.slurm.jobs import SlurmJob, find_jobs, record_loss, wait_for_ending_jobs
from fp8study.run.slurm.profile import Profile, check_slurm

say = functools.partial(print, flush=True)

#: With less than this, runs fail for want of space, whatever else they say.
_LEAST_FREE_BYTES = 64 * 2**10
_ASK_SLURM_SECONDS = 10


def run_study(
    study: Study,
    machine: Machine,
    overrides: Mapping[str, Any],
    one_at_a_time: bool = False,
    anew: bool = False,
    cluster: Profile | None = None,
) -> list[tuple[PlannedRun, RunRecord | None]]:
    """Do a study's pending runs and return the records of all that are possible here.

    Prints the plan and a line per finished run. A failed run does not stop the others; a run
    that this machine cannot do is left out and named.

    Args:
        study: As loaded with `overrides`.
        machine: Where we are.
        overrides: Fields set in every run.
        one_at_a_time: Never two runs side by side.
        anew: Put a finished earlier call aside and measure all runs again.
        cluster: Where the runs are jobs of SLURM; `machine` is then one of its nodes.

    Raises:
        UserError: No run is possible here, or another pipeline is at work in this checkout.
    """
    if cluster:
        check_slurm()
        wait_for_ending_jobs(study.name)
    impossible = impossible_runs(study, machine, cluster)
    if len(impossible) == len(study.runs):
        raise UserError(next(iter(impossible.values())))
    busy = (
        "reproduce: another pipeline is running in this checkout; wait for it, or clone the "
        "repository a second time"
    )
    with locked(own_results() / ".pipeline.lock", "results", busy) as lock:
        possible = [run for run in study.runs if run not in impossible]
        if anew:
            study.put_aside_earlier_call(possible)
        study.keep_content()
        study.make_room()
        say(plan_text(study, machine, cluster))
        pending = [run for run in study.pending() if run in possible]
        if pending:
            _prepare_data(pending)
            study.write_configs()
            here = dataclasses.replace(study, runs=tuple(possible))
            _snakemake(here, machine, overrides, pending, lock, one_at_a_time, cluster)
    return list(_with_records(possible))


def _with_records(runs: Iterable[PlannedRun]) -> Iterator[tuple[PlannedRun, RunRecord | None]]:
    """Yield runs with their record, or None without one; not those of another version's."""
    for run in runs:
        try:
            yield run, read_record(run.run_dir / "run.json") if _ended(run) else None
        except NewerRecord as error:
            say(f"left out: {error}")


def _prepare_data(pending: list[PlannedRun]) -> None:
    """Tokenise once for all runs, and meet a missing corpus or hub before any run starts."""
    by_data = {
        (c.corpus, c.tokenizer, c.model, c.sequence_length, c.sequences_per_step): c
        for c in (run.config for run in pending)
    }
    for config in by_data.values():
        tokens.prepare(config, model_vocab_size(config.model), say)


def _ended(run: PlannedRun) -> bool:
    return (run.run_dir / "run.json").exists()


def _stopped(run: PlannedRun) -> bool:
    path = run.run_dir / "run.json"
    try:
        return read_record(path).status == "interrupted"
    except UserError:
        return not path.exists()  # it goes on just now, and has set its record aside


def _snakemake(
    study: Study,
    machine: Machine,
    overrides: Mapping[str, Any],
    pending: list[PlannedRun],
    lock: int,
    one_at_a_time: bool,
    cluster: Profile | None = None,
) -> None:
    log_path = own_results() / study.name / "snakemake.log"
    plan_path = log_path.with_name("plan.json")
    before = find_jobs(study.name) if cluster else {}
    alive = {name for name, job in before.items() if job.is_alive}
    todo = [run for run in blocks.ordered(pending) if run.run_id not in alive]
    if len(todo) < len(pending):
        say(f"{len(pending) - len(todo)} jobs of an earlier call are still there: waiting for them")
    for run in todo:
        (run.run_dir / "papermill.log").unlink(missing_ok=True)  # an earlier try's
    plan = {"study": study.name, "overrides": dict(overrides), "run_ids": [r.run_id for r in todo]}
    if cluster:
        told, options = _as_jobs(cluster, todo, log_path.with_name("slurm"))
        # Its own for each call: jobs of an earlier one may still have to read theirs.
        plan_path = log_path.with_name("slurm") / f"plan-{time.time_ns() // 10**6}.json"
        plan_path.parent.mkdir(exist_ok=True)
    else:
        told, options = _on_this_machine(machine, study, todo, one_at_a_time)
    write_json(plan_path, plan | told)
    command = [
        sys.executable, "-m", "fp8study.run.children", *(["--outright"] if cluster else []),
        "snakemake", "--snakefile", "pipelines/Snakefile", *options,
        "--keep-going", "--keep-incomplete", "--rerun-incomplete", "--rerun-triggers", "mtime",
        "--nolock",  # ours is released even when we are killed
        "--configfile", str(plan_path),  # on its command line, numbers would become texts
    ]  # fmt: skip
    lost: list[PlannedRun] = []
    with log_path.open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            cwd=project_root(), start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
        try:
            with stoppable():
                lost = _follow(child, pending, study.name, cluster, before)
        except OSError as error:  # the record of a run that its job lost
            if error.errno != errno.ENOSPC:
                raise
        finally:
            end(child)
    if child.returncode < 0:
        end_left(child.pid)  # else its runs go on, and hold what a new start needs
    if shutil.disk_usage(log_path.parent).free < _LEAST_FREE_BYTES:
        raise UserError(
            f"results: the disk of '{log_path.parent}' is full; free some space and start again: "
            "finished runs are kept, the others start anew"
        )
    if child.returncode < 0 and not all(map(_ended, pending)):
        how = signal.Signals(-child.returncode).name
        raise UserError(
            f"reproduce: Snakemake, which starts the runs, was killed by {how}; finished runs are "
            f"kept, start again to go on (its log: {log_path})"
        )
    if child.returncode and lost == pending and not any(map(_said, lost)):
        raise UserError(
            f"reproduce: no run could start: {_last_word_of_snakemake(log_path)}; see {log_path}"
        )
    for run in lost:
        say(f"no record: {run.run_id}: {_why_no_record(run.run_dir)}")


def _on_this_machine(
    machine: Machine, study: Study, todo: list[PlannedRun], one_at_a_time: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return what the Snakefile has to know of GPUs, and Snakemake's options."""
    shares_per_gpu = max((r.config.runs_per_gpu for r in todo), default=1) if machine.gpus else 1
    ready = 2 if machine.gpus else 1  # half of the runs get ready and wait: see gpu_lease
    num_shares = machine.num_slots * shares_per_gpu * ready
    every = {} if one_at_a_time else blocks.gpus_to_have(machine, study)
    gpus = {run.run_id: every.get(run.run_id, []) for run in todo}

    def share(config: RunConfig, has_gpus: bool) -> int:
        """Of each GPU that a run has to have, else of all; in whole numbers only."""
        if one_at_a_time:
            return num_shares
        if not machine.gpus:  # runs side by side share the host's memory, too
            of_memory = math.ceil(num_shares * host_gib(config, on_gpu=False) / memory_gib())
            return min(num_shares, max(config.num_gpus, of_memory))
        of_gpu = max(1, shares_per_gpu // config.runs_per_gpu)
        return of_gpu * (1 if has_gpus else config.num_gpus)

    shares = {run.run_id: share(run.config, bool(gpus[run.run_id])) for run in todo}
    queues = [f"gpu_{gpu.index}={shares_per_gpu * ready}" for gpu in machine.gpus]
    cores = str(max(machine.num_slots, machine.num_cpus))
    options = ["--cores", cores, "--resources", f"gpu_shares={num_shares}", *queues]
    return {"gpu_shares": shares, "gpus": gpus}, options


def _as_jobs(
    cluster: Profile, todo: list[PlannedRun], logs: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return what the Snakefile has to know of jobs, and Snakemake's options."""
    asked = {run.run_id: cluster.resources(run) for run in todo}
    return {"resources": asked}, ["--profile", str(cluster.folder), "--slurm-logdir", str(logs)]


def _follow(
    child: subprocess.Popen[bytes],
    pending: list[PlannedRun],
    study: str,
    cluster: Profile | None,
    before: Mapping[str, SlurmJob],
) -> list[PlannedRun]:
    """Print a line for each run as it ends, and now and then how far the others are.

    On a `cluster` a run whose job ended before it could say so gets its record here; jobs that were
    over `before` are not of this call. Returns the runs that are left without a record.
    """
    jobs: dict[str, SlurmJob] = {}
    over = {job.job_id for job in before.values() if not job.is_alive}
    asked = -math.inf
    started = spoken = time.monotonic()
    waiting = list(pending)
    alive = True
    while alive:
        alive = child.poll() is None
        if cluster and (not alive or time.monotonic() - asked > _ASK_SLURM_SECONDS):
            asked = time.monotonic()
            known = find_jobs(study).items()
            jobs |= {run_id: job for run_id, job in known if job.job_id not in over}
            live_jobs = [r for r in pending if r.run_id in jobs and jobs[r.run_id].is_alive]
            if not live_jobs and all(map(_ended, pending)):
                end(child)  # it looks at its jobs every few minutes only
            alive = child.poll() is None or bool(live_jobs)
        # An interrupted run's job may go back into the queue, and the run goes on in it.
        back = {run_id for run_id, job in jobs.items() if job.is_alive}
        for run in [r for r in waiting if _ended(r) and not (r.run_id in back and _stopped(r))]:
            waiting.remove(run)
            spoken = time.monotonic()
            number = len(pending) - len(waiting)
            say(f"[{number}/{len(pending)}  {spoken - started:4.0f} s] {_result_line(run)}")
        if waiting and alive and time.monotonic() - spoken > 30:
            spoken = time.monotonic()
            rows = [(run, read_metrics(run.run_dir)) for run in waiting]
            steps = [
                f"{r.run_id} step {m[-1]['step']}"
                + ("" if r.config.timed_seconds else f"/{r.config.num_steps}")
                for r, m in rows
                if m
            ]
            states = Counter(jobs[r.run_id].state.lower() for r in waiting if r.run_id in jobs)
            queue = ", ".join(f"{number} {state}" for state, number in states.items())
            doing = f"jobs: {queue}" if queue else "running"
            say(f"[{spoken - started:4.0f} s] {doing}: {'; '.join(steps) or 'starting …'}")
        if alive:
            time.sleep(0.5)
    for run in [r for r in waiting if r.run_id in jobs]:
        record_loss(run, study, jobs[run.run_id], _why_no_record(run.run_dir))
        say(_result_line(run))
        waiting.remove(run)
    return waiting


def _said(run: PlannedRun) -> bool:
    """Whether a run's notebook has said anything; Snakemake makes the file."""
    log = run.run_dir / "papermill.log"
    return log.exists() and log.stat().st_size > 0


def _last_word_of_snakemake(log: Path) -> str:
    """Return in a line why it started nothing: what SLURM refused, or its own last error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    refused = [line for line in lines if "sbatch: error: " in line]
    line = refused[-1] if refused else telling_line(lines) or "it said nothing"
    more = lines[lines.index(line) + 1 :][:1] if line.endswith(":") else []
    told = line.partition("sbatch: error: ")[2].rstrip("'.") or line  # quoted there
    silent = ["(SLURM does not answer here: does `sinfo`?)"] * ("failed to fetch config" in told)
    return " ".join([told.rstrip("."), *more, *silent]).rstrip(".")


def _why_no_record(run_dir: Path) -> str:
    """Return what a run's notebook said of its end, and where to read on."""
    log, above = run_dir / "papermill.log", run_dir.parent / "snakemake.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if not lines:
        if logs := sorted(run_dir.parent.glob(f"slurm/*/*_{run_dir.name}/*.log")):
            return f"it did not start; see {logs[-1]}"
        why = f": {_last_word_of_snakemake(above)}; see {above}" if above.exists() else ""
        return f"it did not start{why}"
    reason = telling_line(lines) or "its notebook was killed"
    if any("DeadKernelError" in line for line in lines):
        reason = "the kernel of its notebook was killed"
    return f"{reason}; see {log}"


def _result_line(run: PlannedRun) -> str:
    record = read_record(run.run_dir / "run.json")
    results = record.results
    rate, loss = results.get("tokens_per_second_per_gpu"), results.get("loss_last20_mean")
    figures = f"{rate:,.0f} tok/s/GPU" if rate else ""
    figures += f"  loss {loss:.4f}" if loss is not None else ""
    detail = f"  {record.status_detail}" if record.status_detail else ""
    rises = [warning for warning in record.warnings if warning.startswith(LOSS_ROSE)]
    detail += "".join(f"  {rise.partition(':')[0]}; see fp8study show" for rise in rises)
    return f"{record.status:<10} {run.run_id}  {figures}{detail}"


def check_results(done: list[tuple[PlannedRun, RunRecord | None]], command: str) -> None:
    """Refuse to go on where a run that `run_study` did has no result.

    Raises:
        UserError: It counts them.
    """
    if number := sum(record is None or record.status not in RESULTS for _, record in done):
        raise UserError(
            f"{command}: {number} of {len(done)} runs have no result; their last lines are in the "
            "notebooks beside their records, and starting again repeats only them"
        )
