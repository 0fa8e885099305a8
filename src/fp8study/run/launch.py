"""Start a run as a child process, follow it, and write its record whatever its end.

The launcher imports no torch: it runs inside a notebook's kernel, where a crash, an exhausted
GPU or a hanging collective of the training must not reach.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fp8study.core import checkpoints
from fp8study.core.config import ResolvedConfig, RunConfig, save_config
from fp8study.core.errors import StoppedByUser, UserError, one_line
from fp8study.core.files import check_writable, locked, writing
from fp8study.core.presets import check_model, model_vocab_size
from fp8study.core.records import (
    RESULTS,
    RunRecord,
    last_logged_step,
    set_aside,
    utc_now,
    write_record,
)
from fp8study.core.studies import judgement_of
from fp8study.data import tokens
from fp8study.data.corpus import check_corpus
from fp8study.run.children import end, ending_after, killed, stoppable, telling_line
from fp8study.run.gpu_lease import CLAIM, claimed, held_by_others
from fp8study.run.job import PROGRESS, Job, Outcome
from fp8study.run.machine import (
    Gpu,
    Machine,
    git_state,
    machine_facts,
    this_machine,
    unsupported_gpu,
    versions,
)
from fp8study.run.processes import training_command, training_environment
from fp8study.run.slurm.jobs import why_stopped
from fp8study.run.slurm.restarts import why_not_again

Show = Callable[[str], None]

#: What goes from the training's outcome into the record as it is.
_TOLD = ("status", "status_detail", "model", "audit", "instruments", "noise", "warnings")

#: How long an interrupted run may take to save its state.
_SAVING_SECONDS = 600.0

#: Lines of a failing child that are shown and kept.
TAIL_LINES = 30


class RunFailed(Exception):
    """A run ended without a result; its record says so and its last lines are in the message."""


def check_possible(config: RunConfig, machine: Machine) -> None:
    """Refuse, in a moment and without side effects, what cannot run here.

    Raises:
        UserError: The model's name or the corpus is wrong, or the machine cannot do it.
    """
    check_model(config)
    check_corpus(config.corpus, config.tokens_per_step)
    machine.check(config)


def launch(
    config: RunConfig,
    run_dir: Path,
    study: str = "adhoc",
    show: Show = print,
    machine: Machine | None = None,
) -> RunRecord:
    """Train one run in child processes and return its record, also written to ``run.json``.

    Args:
        config: The run.
        run_dir: Its folder; made if missing. Its last part is the run's id.
        study: The study it belongs to.
        show: Receives each progress line.
        machine: Where to run; by default the machine we are on.

    Returns:
        Its status may be ``diverged`` or ``out_of_memory``: those are results.

    Raises:
        UserError: The run is impossible here; nothing was started.
        RunFailed: Training failed for another reason; the record says so.
        KeyboardInterrupt: The run was interrupted; the record says so.
    """
    machine = machine or this_machine()
    check_possible(config, machine)
    gpus = {gpu.index: gpu.name for gpu in _allowed(machine)}
    check_writable(run_dir, "run_dir")  # tokenising takes minutes
    config = config.resolved(on_gpu=bool(machine.gpus))
    prepared = tokens.prepare(config, model_vocab_size(config.model), show)
    if note := unsupported_gpu():
        show(note)
        prepared.warnings.append(note)
    judgement = judgement_of(study)
    if config.timed_seconds:  # as many steps as fitted: no two such losses can be compared
        judgement["speed_only"] = True
    with ExitStack() as held:
        busy = f"run_dir: '{run_dir}' is being written by another run; wait for it or stop it"
        lock = held.enter_context(locked(run_dir / ".lock", "run_dir", busy))
        environment = training_environment(config, machine)
        if config.compile_cache == "fresh":
            cache = held.enter_context(TemporaryDirectory(prefix="fp8study-compile-"))
            environment["TORCHINDUCTOR_CACHE_DIR"] = cache
            environment["TRITON_CACHE_DIR"] = f"{cache}/triton"
        started_at = utc_now()
        _begin(config, run_dir, prepared, gpus, started_at, show)
        parts: dict[str, Any] = {
            "run_id": run_dir.name,
            "study": study,
            "config": config.to_dict(),
            "started_at": started_at,
            "git": git_state(Path(__file__).parent),
            "data": {k: v for k, v in asdict(prepared).items() if k != "folder"},
            "judgement": judgement,
        }
        finish = functools.partial(_finish, run_dir, config, machine, parts)
        if reason := why_not_again(run_dir):
            finish(Outcome("failed", reason))
            raise RunFailed(f"run {run_dir.name} failed: {reason}")
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        try:
            saves = config.checkpoint_every > 0
            with stoppable(by_warning=saves):
                command = training_command(config, run_dir)
                code = _follow(command, environment, lock, run_dir, show, tail, saves)
        except KeyboardInterrupt as error:
            told = Outcome.load(run_dir)
            saved = told if told and told.status == "interrupted" else None
            reason = (str(error) or "stopped by the user") + why_stopped()
            finish(saved or Outcome("interrupted", reason))
            raise
        except Exception as error:
            reason = f"the launcher failed: {type(error).__name__}: {one_line(error)}"
            finish(Outcome("failed", reason))
            raise
        record = finish(_explained(code, tail, Outcome.load(run_dir)))
    if record.status not in RESULTS:
        last = "\n".join(tail)
        raise RunFailed(f"{last}\nrun {record.run_id} {record.status}: {record.status_detail}")
    return record


def _begin(
    config: ResolvedConfig,
    run_dir: Path,
    prepared: tokens.PreparedData,
    gpus: dict[int, str],
    started_at: str,
    show: Show,
) -> None:
    """Leave in the run's folder what its processes read, and set an earlier record aside."""
    checkpoint = checkpoints.go_on_from(run_dir, config, asdict(prepared))
    _remove_messages(run_dir)
    start_from = checkpoint.path if checkpoint else None
    if config.init_from and checkpoint is None:
        start_from = checkpoints.weights_to_start_from(config.init_from, prepared.tokenizer_sha256)
    first_step = checkpoint.step if checkpoint else 0
    if checkpoint:  # before anything is moved: what an unfinished try did after it goes
        with writing("run_dir", run_dir):
            checkpoints.cut_metrics(run_dir, first_step, config.log_every)
    if (run_dir / "run.json").exists():
        kept_as = set_aside(run_dir / "run.json", "earlier")
        for name in ("metrics.jsonl", "step-trace.json.gz"):
            if checkpoint is None and (run_dir / name).exists():
                set_aside(run_dir / name, "earlier")
        show(f"an earlier record in this folder is kept as {kept_as.name}")
    with writing("run_dir", run_dir):
        save_config(config, run_dir / "config.yaml")
        if not checkpoint:
            checkpoints.cut_metrics(run_dir, 0)
        job = Job(prepared, gpus, time.time(), first_step, str(start_from) if start_from else None)
        job.save(run_dir)
        if checkpoint:
            show(f"going on after step {first_step}")
            checkpoints.note_resumed(
                run_dir, from_step=first_step, num_gpus=config.num_gpus, at=started_at
            )


def stopped(config: RunConfig, run_dir: Path, assignments: Sequence[str]) -> StoppedByUser:
    """Return what Ctrl-C leaves of a run with these --set `assignments`, and how to go on."""
    reached = f"stopped at step {last_logged_step(run_dir)}"
    if last := checkpoints.last_checkpoint(run_dir):
        fields = [word for assignment in assignments for word in ("--set", assignment)]
        command = shlex.join(["fp8study", "run", *fields, "--out", str(run_dir)])
        return StoppedByUser(
            f"{reached}; to go on from the checkpoint of step {last.step}: {command}"
        )
    remedy = "" if config.checkpoint_every else ": set checkpoint_every"
    return StoppedByUser(f"{reached}; no checkpoint was written, so it begins anew{remedy}")


def _allowed(machine: Machine) -> list[Gpu]:
    """Return the GPUs that the run may take: those in ``$FP8STUDY_GPUS``, by number, or all.

    Raises:
        UserError: It names one that is not here.
    """
    words = os.environ.get("FP8STUDY_GPUS", "").split(",")
    chosen = {word.strip() for word in words} - {""}
    if unknown := chosen - {str(gpu.index) for gpu in machine.gpus}:
        there = ", ".join(str(gpu.index) for gpu in machine.gpus) or "no GPU"
        raise UserError(
            f"FP8STUDY_GPUS: {min(unknown)!r} is no number of a GPU here; this machine has "
            f"{there}; name those, as FP8STUDY_GPUS=0,1"
        )
    return [gpu for gpu in machine.gpus if not chosen or str(gpu.index) in chosen]


def _follow(
    command: list[str],
    environment: dict[str, str],
    lock: int,
    run_dir: Path,
    show: Show,
    tail: deque[str],
    saves: bool,
) -> int:
    """Run a child and return its exit status; show its progress, keep the rest of what it prints.

    The child keeps the lock's descriptor and our end of its standard input: if we vanish, it stops
    by itself and the lock goes with it. If we are interrupted, we end it; one that `saves` first
    gets time to.
    """
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=environment, pass_fds=(lock,), start_new_session=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None

    def read(log: FileIO) -> None:
        for line in child.stdout or ():
            if line.startswith(PROGRESS):
                show(line.removeprefix(PROGRESS).rstrip("\n"))
            else:
                tail.append(line.rstrip("\n"))
                with suppress(OSError):  # a full disk shall not end the run for a line of its log
                    log.write(line.encode())

    try:
        with (run_dir / "train.log").open("wb", buffering=0) as log:
            try:
                read(log)
            except KeyboardInterrupt:
                if saves:
                    child.stdin.close()  # to every rank the sign to save and end
                    with ending_after(_SAVING_SECONDS, child):
                        read(log)
                raise
        return child.wait()
    finally:
        end(child)


def _explained(code: int, tail: Collection[str], outcome: Outcome | None) -> Outcome:
    """Return what training said of its end, unless one of its processes was killed.

    What the other ranks say then, that they have lost a peer, is not the cause.
    """
    how = killed(code, tail)
    if outcome is not None and outcome.status != "failed":
        if not how or outcome.status != "completed":
            return outcome  # ranks that wait for one that is out of memory are killed, too
        late = f"{how} after its last step: what is measured after it is missing"
        return replace(outcome, warnings=[*outcome.warnings, late])
    if how:
        return Outcome("failed", f"{how}; its last output is in train.log")
    last = telling_line(tail) or "no output"
    return outcome or Outcome("failed", f"exit status {code}: {last}")


def _finish(
    run_dir: Path, config: RunConfig, machine: Machine, parts: dict[str, Any], outcome: Outcome
) -> RunRecord:
    """Write the record and remove the files that only served the run."""
    ours, others = claimed(run_dir) or [], held_by_others(run_dir)
    first = sorted(machine.gpus, key=lambda gpu: gpu.index not in ours)  # the record describes it
    steps = outcome.results.get("steps_completed")
    if steps is None:
        steps = last_logged_step(run_dir)
    times = checkpoints.times_resumed(run_dir)
    resumed = {"resumed": times} if times else {}
    record = RunRecord(
        **parts,
        machine=machine_facts(replace(machine, gpus=tuple(first)), ours) | outcome.machine,
        ended_at=utc_now(),
        versions=versions() | outcome.versions,
        results={"steps_completed": steps} | outcome.results | resumed,
        **{name: getattr(outcome, name) for name in _TOLD},
    )
    data = parts["data"]
    data["num_tokens_seen"] = steps * config.tokens_per_step
    data["epochs"] = tokens.BlockOrder(config, data["num_train_tokens"]).epochs(steps)
    record.warnings.extend(data.pop("warnings"))
    record.warnings.extend(f"{note}: if they compute, timings suffer" for note in others)
    if times:
        after = ", ".join(f"{t['from_step']} (num_gpus={t['num_gpus']})" for t in times)
        record.warnings.append(
            f"resumed after step {after}: timings, memory and energy are of the steps since the "
            "last time, without its start and warm-up"
        )
    ended = f"{record.status}, {record.status_detail or 'no defect'}"
    remedy = f"free some space and run again (the run itself: {ended})"
    with writing("run_dir", run_dir / "run.json", remedy):
        write_record(record, run_dir)
    _remove_messages(run_dir)
    return record


def _remove_messages(run_dir: Path) -> None:
    # They only serve a running run.
    for path in (run_dir / "job.json", run_dir / "outcome.json", *run_dir.glob(CLAIM.format("*"))):
        path.unlink(missing_ok=True)
