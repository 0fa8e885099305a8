"""Run a study: the plan, then Snakemake, then what became of every run."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8study.core.errors import UserError
from fp8study.core.files import locked, project_root, results_dir
from fp8study.core.presets import model_vocab_size
from fp8study.core.records import RESULTS, RunRecord, read_metrics, read_record, write_json
from fp8study.core.studies import PlannedRun, Study
from fp8study.data import tokens
from fp8study.run.children import end, stoppable, telling_line
from fp8study.run.machine import Machine
from fp8study.run.plan import impossible_runs, num_slots, plan_text

#: With less than this, runs fail for want of space, whatever else they say.
_LEAST_FREE_BYTES = 64 * 2**10


def run_study(
    study: Study,
    machine: Machine,
    overrides: Mapping[str, Any],
    one_at_a_time: bool = False,
    anew: bool = False,
) -> list[tuple[PlannedRun, RunRecord | None]]:
    """Do a study's pending runs and return the records of all that are possible here.

    Prints the plan and a line per finished run. A failed run does not stop the others; a run
    that this machine cannot do is left out and named.

    Args:
        study: From `fp8study.core.studies.load_study`.
        machine: Where we are.
        overrides: The ones that `study` was loaded with.
        one_at_a_time: Never two runs side by side.
        anew: Put a finished earlier call aside and measure all runs again.

    Raises:
        UserError: No run is possible here, or another pipeline is at work in this checkout.
    """
    impossible = impossible_runs(study, machine)
    if len(impossible) == len(study.runs):
        raise UserError(next(iter(impossible.values())))
    busy = (
        "reproduce: another pipeline is running in this checkout; wait for it, or clone the "
        "repository a second time"
    )
    with locked(results_dir() / "local" / ".pipeline.lock", "results", busy) as lock:
        possible = [run for run in study.runs if run not in impossible]
        if anew:
            study.put_aside_earlier_call(possible)
        study.make_room()
        print(plan_text(study, machine), flush=True)
        pending = [run for run in study.pending() if run in possible]
        if pending:
            _prepare_data(pending)
            study.write_configs()
            _snakemake(study, machine, overrides, pending, lock, one_at_a_time)
    return [(run, _record(run)) for run in possible]


def _prepare_data(pending: list[PlannedRun]) -> None:
    """Tokenise once for all runs, and meet a missing corpus or hub before any run starts."""
    for config in {(r.config.corpus, r.config.tokenizer, r.config.model,
                    r.config.sequence_length, r.config.sequences_per_step): r.config
                   for r in pending}.values():  # fmt: skip
        tokens.prepare(config, model_vocab_size(config.model), _say)


def _say(line: str) -> None:
    print(line, flush=True)


def _record(run: PlannedRun) -> RunRecord | None:
    return read_record(run.run_dir / "run.json") if _ended(run) else None


def _ended(run: PlannedRun) -> bool:
    return (run.run_dir / "run.json").exists()


def _snakemake(
    study: Study,
    machine: Machine,
    overrides: Mapping[str, Any],
    pending: list[PlannedRun],
    lock: int,
    one_at_a_time: bool,
) -> None:
    root = project_root()
    log_path = results_dir() / "local" / study.name / "snakemake.log"
    plan_path = log_path.with_name("plan.json")
    run_ids = [run.run_id for run in pending]
    for run in pending:
        (run.run_dir / "papermill.log").unlink(missing_ok=True)  # an earlier try's
    shares_per_gpu = max(run.config.runs_per_gpu for run in pending) if machine.gpus else 1
    num_shares = num_slots(machine) * shares_per_gpu
    if machine.gpus:
        num_shares *= 2  # half of the runs get ready and wait: see fp8study.run.gpu_lease
    shares = {
        run.run_id: num_shares if one_at_a_time else _num_shares(run, shares_per_gpu)
        for run in pending
    }
    plan = {"study": study.name, "overrides": dict(overrides), "run_ids": run_ids}
    write_json(plan_path, plan | {"gpu_shares": shares})
    command = [
        sys.executable, "-m", "fp8study.run.children", "snakemake",
        "--snakefile", "pipelines/Snakefile",
        "--cores", str(max(num_slots(machine), machine.num_cpus)),
        "--resources", f"gpu_shares={num_shares}",
        "--keep-going", "--keep-incomplete", "--rerun-incomplete", "--rerun-triggers", "mtime",
        "--nolock",  # ours is released even when we are killed
        "--configfile", str(plan_path),  # on its command line, numbers would become texts
    ]  # fmt: skip
    with log_path.open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
        try:
            with stoppable():
                _follow(child, pending)
        finally:
            end(child)
    if shutil.disk_usage(log_path.parent).free < _LEAST_FREE_BYTES:
        raise UserError(
            f"results: the disk of '{log_path.parent}' is full; free some space and start again: "
            "finished runs are kept, the others start anew"
        )
    if child.returncode < 0:
        how = signal.Signals(-child.returncode).name
        raise UserError(
            f"reproduce: Snakemake, which starts the runs, was killed by {how}; finished runs are "
            f"kept, start again to go on (its log: {log_path})"
        )
    if child.returncode and not any((run.run_dir / "papermill.log").exists() for run in pending):
        tail = "\n".join(log_path.read_text(encoding="utf-8").splitlines()[-15:])
        raise UserError(f"{tail}\nreproduce: the pipeline could not start; see {log_path}")


def _num_shares(run: PlannedRun, shares_per_gpu: int) -> int:
    """Return how many of the shares a run takes; Snakemake counts in whole numbers only."""
    return run.config.num_gpus * max(1, shares_per_gpu // run.config.runs_per_gpu)


def _follow(child: subprocess.Popen[bytes], pending: list[PlannedRun]) -> None:
    """Print a line for each run as it ends, and now and then how far the others are."""
    started = spoken = time.monotonic()
    waiting = list(pending)
    while True:
        alive = child.poll() is None
        for run in [r for r in waiting if _ended(r)]:
            waiting.remove(run)
            spoken = time.monotonic()
            number = len(pending) - len(waiting)
            print(
                f"[{number}/{len(pending)}  {spoken - started:4.0f} s] {_result_line(run)}",
                flush=True,
            )
        if not alive:
            break
        if time.monotonic() - spoken > 30:
            spoken = time.monotonic()
            print(f"[{spoken - started:4.0f} s] {_running_line(waiting)}", flush=True)
        time.sleep(0.5)
    for run in waiting:
        print(f"no record: {run.run_id}: {_why_no_record(run.run_dir)}", flush=True)


def _why_no_record(run_dir: Path) -> str:
    """Return what a run's notebook said of its end, and where to read on."""
    log = run_dir / "papermill.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if any("DeadKernelError" in line for line in lines):
        reason = "the kernel of its notebook was killed"
    elif lines:
        reason = telling_line(lines) or "its notebook was killed"
    else:
        return "it did not start"
    return f"{reason}; see {log}"


def _result_line(run: PlannedRun) -> str:
    record = read_record(run.run_dir / "run.json")
    results = record.results
    rate, loss = results.get("tokens_per_second_per_gpu"), results.get("loss_last20_mean")
    figures = f"{rate:,.0f} tok/s/GPU" if rate else ""
    figures += f"  loss {loss:.4f}" if loss is not None else ""
    detail = f"  {record.status_detail}" if record.status_detail else ""
    return f"{record.status:<10} {run.run_id}  {figures}{detail}"


def _running_line(waiting: list[PlannedRun]) -> str:
    states = []
    for run in waiting:
        rows = read_metrics(run.run_dir)
        if rows:
            states.append(f"{run.run_id} step {rows[-1]['step']}/{run.config.num_steps}")
    return "running: " + ("; ".join(states) if states else "starting …")


def num_without_result(done: list[tuple[PlannedRun, RunRecord | None]]) -> int:
    """Return how many of the runs that `run_study` did have no result."""
    return sum(record is None or record.status not in RESULTS for _, record in done)
