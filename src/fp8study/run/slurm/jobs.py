"""What SLURM knows of the jobs of a study's runs, and the record of a run that a job lost.

A run's job is found by its comment, which Snakemake's plug-in sets, and by its folder: so a driver
that was killed and started again finds the jobs of the one before it.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import time
from dataclasses import dataclass

from fp8study.core.files import project_root
from fp8study.core.records import RunRecord, last_logged_step, utc_now, write_record
from fp8study.core.studies import PlannedRun, judgement_of
from fp8study.run.machine import git_state, versions

#: States of a job that has ended, by what a record says of it; in all others it lives.
_ENDED = {
    "CANCELLED": ("interrupted", "was cancelled"),
    "PREEMPTED": ("interrupted", "was pre-empted"),
    "TIMEOUT": (
        "failed", "reached its time limit; raise time_factor in the profile, or minutes_per_run in "
        "the study",
    ),
    "DEADLINE": ("failed", "reached its deadline"),
    "NODE_FAIL": ("failed", "lost its node"),
    "BOOT_FAIL": ("failed", "lost its node, which did not start"),
    "OUT_OF_MEMORY": (
        "failed", "was killed for want of host memory; raise mem_mb in the profile's set-resources"
    ),
    "COMPLETED": ("failed", "ended without a record: {why}"),
    "FAILED": ("failed", "ended without a record: {why}"),
}  # fmt: skip


@dataclass(frozen=True)
class SlurmJob:
    job_id: str
    state: str
    """As squeue names it: ``RUNNING``, ``NODE_FAIL`` …"""
    nodes: str

    @property
    def is_alive(self) -> bool:
        return self.state not in _ENDED


def comment_of(study: str, run_id: str) -> str:
    """Return the comment of a run's job: two studies may have the same run."""
    return f"rule_run_wildcards_{study}_{run_id}"


def find_jobs(study: str) -> dict[str, SlurmJob]:
    """Return the newest job of each run of a study here, by run id; SLURM forgets after minutes.

    Empty where SLURM does not answer.
    """
    lines = ask("squeue", "--user", getpass.getuser(), "--states=all", "--format=%i|%T|%N|%Z|%k")
    rows = (line.split("|", 4) for line in lines)
    here = str(project_root())
    before_id = comment_of(study, "")
    ours = [row for row in rows if row[3] == here and row[4].startswith(before_id)]
    ours.sort(key=lambda row: int(row[0]))  # others' may be arrays, whose ids are no numbers
    return {comment.removeprefix(before_id): SlurmJob(*facts) for *facts, _, comment in ours}


def wait_for_ending_jobs(study: str) -> None:
    """Wait while a job is between its end and its last word, as all are after a Ctrl-C."""
    while any(job.state == "COMPLETING" for job in find_jobs(study).values()):
        time.sleep(1)


def ask(command: str, *arguments: str) -> list[str]:
    """Return what one of SLURM's commands says, line by line; nothing if it does not answer."""
    try:
        done = subprocess.run(
            [command, "--noheader", *arguments], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def record_loss(run: PlannedRun, study: str, job: SlurmJob, why: str) -> RunRecord:
    """Write the record of a run whose job ended before it could, by what SLURM says of the job.

    `why`: what the run's notebook said last, for a job of which SLURM knows no more.
    """
    status, what = _ENDED[job.state]
    on = f" on {job.nodes}" if job.nodes else ", which never started,"
    now = utc_now()
    record = RunRecord(
        run_id=run.run_id,
        study=study,
        status=status,
        status_detail=f"SLURM job {job.job_id}{on} {what.format(why=why)}",
        config=run.config.to_dict(),
        started_at=now,
        ended_at=now,
        versions=versions(),
        git=git_state(project_root()),
        results={"steps_completed": last_logged_step(run.run_dir)},
        judgement=judgement_of(study),
    )
    run.run_dir.mkdir(parents=True, exist_ok=True)
    write_record(record, run.run_dir)
    return record


def why_stopped() -> str:
    """Return, in a job that is told to end, its number and whether its time is over."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return ""
    left, limit = (ask("squeue", "--job", job_id, "--format=%L|%l") or ["?|?"])[0].split("|")
    is_over = left in ("0:00", "INVALID")
    what = f"reached its time limit of {limit}" if is_over else "was told to end"
    return f": SLURM job {job_id} {what}"
