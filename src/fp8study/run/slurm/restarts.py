"""Jobs that go back into SLURM's queue: when one asks for it, and how often one may come back.

    python -m fp8study.run.slurm.restarts RUN_DIR    in a job, once its run has ended

SLURM itself puts a job back whose node failed or that made room for one of more worth. One that was
warned of its end (``--signal`` in the profile) asks for it here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fp8study.core.checkpoints import last_checkpoint, times_resumed
from fp8study.core.records import read_record
from fp8study.run.slurm.jobs import ask, comment_of

#: So often a job may come back without a further step that was saved.
MOST_IN_VAIN = 3


def put_back(run_dir: Path) -> None:
    """Put our own job back into the queue if its run was interrupted and can go on.

    Not one that is ending already: cancelled, it is to stay so, and of the rest SLURM takes care.
    """
    job_id = os.environ["SLURM_JOB_ID"]
    is_over = read_record(run_dir / "run.json").status != "interrupted"
    if is_over or ask("squeue", "--job", job_id, "--format=%T") != ["RUNNING"]:
        return
    if last := last_checkpoint(run_dir):
        print(f"back into the queue, to go on after step {last.step}", flush=True)
        subprocess.run(["scontrol", "requeue", job_id], check=False)


def why_not_again(run_dir: Path) -> str | None:
    """Return why a run does not begin once more: its job comes back and gets no further."""
    job_id = os.environ.get("SLURM_JOB_ID")
    told = ask("squeue", "--job", job_id, "--Format=RestartCnt:9,Comment:300") if job_id else []
    restarts, comment = told[0].split(maxsplit=1) if told else ("0", "")
    steps = {time["from_step"] for time in times_resumed(run_dir)}
    in_vain = int(restarts) - len(steps)
    if comment.strip() != comment_of(run_dir.parent.name, run_dir.name) or in_vain <= MOST_IN_VAIN:
        return None
    return (
        f"SLURM job {job_id} came back {restarts} times, {in_vain} of them without a further step "
        f"that was saved (the last: {max(steps, default=0)}); lower checkpoint_every, or raise "
        "time_factor in the profile, and start again"
    )


if __name__ == "__main__":
    put_back(Path(sys.argv[1]))
