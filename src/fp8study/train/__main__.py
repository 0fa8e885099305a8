"""The training process: one per GPU, started by `fp8study.run.launch` through torchrun.

    python -m fp8study.train RUN_DIR

It reads ``config.yaml`` and ``job.json``, appends to ``metrics.jsonl`` and leaves an
``outcome.json``; the launcher turns that into the run's record.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

from fp8study.core.config import load_config
from fp8study.core.errors import UserError, first_line
from fp8study.measure.memory import num_retries
from fp8study.model.build import import_model_code
from fp8study.run.children import follow_parent
from fp8study.run.gpu_lease import claim_gpus, held_by_others
from fp8study.run.job import Job, Outcome, StartupClock
from fp8study.train.checkpoint import Checkpoints, Interrupted
from fp8study.train.closer_look import look_closer
from fp8study.train.progress import open_metrics
from fp8study.train.trainer import Diverged, Trainer

#: Never freed: taking a process group apart can wait for a thread of its own that waits for
#: Python's lock, for ever. What a run has to say is on disk by then; see `leave`.
_kept: list[Trainer] = []


def leave(status: int) -> None:
    """End the process without taking anything apart."""
    with suppress(OSError):  # nobody may be there to read
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def run(run_dir: Path) -> None:
    """Train as ``config.yaml`` and ``job.json`` say and leave an ``outcome.json``."""
    config, job = load_config(run_dir / "config.yaml"), Job.load(run_dir)
    startup = StartupClock(job.launched_at)
    job = claim_gpus(config, job, run_dir)
    startup.end("gpu_wait")
    import_model_code(config.model)  # looks for GPUs, so not earlier
    trainer = Trainer(config, job, startup)
    _kept.append(trainer)
    checkpoints = Checkpoints(trainer, run_dir)
    is_main = trainer.state.is_main_process
    path = run_dir / "metrics.jsonl"
    status, detail = "completed", None
    with open_metrics(path, checkpoints.wait) if is_main else nullcontext() as metrics:
        try:
            with checkpoints.listening():
                trainer.train(metrics, checkpoints)
        except Diverged as error:  # on every rank at the same step: the loss is the same number
            status, detail = "diverged", str(error)
        except Interrupted as error:
            status, detail = "interrupted", str(error)
    checkpoints.wait()
    trainer.found |= {"checkpoints": facts} if (facts := checkpoints.facts()) else {}
    trainer.notes += checkpoints.warnings
    if status == "completed" and (config.is_timed or config.validation_sequences):
        # Kept in case that what follows fails, or runs out of memory: the run itself is done.
        finished = trainer.outcome(status, detail)
        if is_main:
            finished.save(run_dir)
        trainer.state.wait_for_everyone()
        trainer.validate_if_due(config.num_steps)
        if config.is_timed:
            look_closer(trainer, run_dir)
    outcome = trainer.outcome(status, detail)
    if is_main:
        outcome.save(run_dir, replace=True)
    trainer.state.wait_for_everyone()
    trainer.launch_by_kernel()
    trainer.state.destroy_process_group()


def explain(error: Exception, run_dir: Path) -> Outcome:
    """Return what a failure means for the run; of one that was trained to its end, all stays."""
    reason = first_line(error)
    if isinstance(error, UserError):
        failed = Outcome("failed", str(error))
    elif isinstance(error, torch.OutOfMemoryError):
        detail = (
            f"{reason}; lower micro_batch_size or sequence_length, or set "
            "activation_checkpointing=true or more num_gpus"
        )
        # Beside other runs it says nothing of this one.
        if load_config(run_dir / "config.yaml").runs_per_gpu > 1:
            failed = Outcome("failed", f"{detail}, or runs_per_gpu=1")
        elif others := held_by_others(run_dir):
            failed = Outcome("failed", f"{reason}; {'; '.join(others)}: end them first")
        else:
            failed = Outcome("out_of_memory", detail)
    else:
        told = f"{type(error).__name__}: {reason}"
        # Out of memory, torch unmaps what it keeps, and waits for one stream alone: FSDP2's
        # all-gathers have another. Seen twice on an H200, once as an illegal memory access, once
        # as a RuntimeError of cuDNN's attention (results/reference/h200x2/near-full.txt).
        was_full = isinstance(error, RuntimeError) and num_retries() > 0
        if was_full and load_config(run_dir / "config.yaml").allocator == "expandable":
            told += ", after the GPU's memory had been full, which may be why; set "
            told += "allocator=default, with which such runs went on, or lower micro_batch_size"
        failed = Outcome("failed", told)
    finished = Outcome.load(run_dir)
    if finished is None or finished.status != "completed":
        return failed
    note = "the measurements after training did not finish"
    if not any(line.startswith(note) for line in finished.warnings):  # the first rank's reason
        finished.warnings.append(f"{note}: {failed.status_detail}")
    return finished


def main() -> int:
    """Train the run in the folder named on the command line; return the exit status."""
    run_dir = Path(sys.argv[1])
    follow_parent()
    try:
        run(run_dir)
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        outcome = explain(error, run_dir)
        outcome.save(run_dir, replace=outcome.status == "completed")
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
