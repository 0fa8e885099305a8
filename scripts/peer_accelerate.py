"""Accelerate, as its documentation shows it, as a trainer to be timed beside ours."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

from peer_runs import Cell, PeerTrainer, Repeat, RepeatFailed

_SCRIPT = Path(__file__).with_name("train_with_accelerate.py")


def command_of(cell: Cell, precision: str, dump: Path, seed: int) -> list[str]:
    options = {
        "model": cell.model, "precision": precision, "gpus": cell.num_gpus,
        "batch": cell.micro_batch_size, "sequence-length": cell.sequence_length,
        "steps": cell.num_steps, "warmup-steps": cell.num_warmup_steps,
        "log-every": cell.log_every,
    }  # fmt: skip
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={cell.num_gpus}", str(_SCRIPT),
        *(f"--{name}={value}" for name, value in options.items()),
    ]  # fmt: skip


def read(text: str, cell: Cell, precision: str) -> Repeat:
    """Read its last line.

    Raises:
        RepeatFailed: It is not there, weights are not trained, or the loss is no number.
    """
    lines = [line for line in text.splitlines() if line.startswith('{"windows"')]
    if not lines:
        raise RepeatFailed("failed", "the log has no last line")
    found = json.loads(lines[-1])
    if found["untrained_pct"] > 0:
        raise RepeatFailed(
            "failed", f"{found['untrained_pct']:.1f} % of the weights are not trained"
        )
    if not found["loss"] < float("inf"):
        raise RepeatFailed("diverged", f"the loss is {found['loss']}")
    return Repeat(found["windows"], None, found["memory_peak_gib"], found["num_parameters"])


ACCELERATE = PeerTrainer("accelerate", metadata.version("accelerate"), None, command_of, read, {})
