"""What the tests of real runs share: a machine without GPU and a run of seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fp8study.core.checkpoints import place_of
from fp8study.core.config import make_config
from fp8study.core.records import RunRecord
from fp8study.run import launch as launcher
from fp8study.run.machine import Machine

CPU = Machine(gpus=(), num_cpus=max(2, os.cpu_count() or 1))
TINY: dict[str, Any] = {
    "model": "tiny-llama", "sequence_length": 64, "micro_batch_size": 2, "num_steps": 8,
    "num_warmup_steps": 2, "learning_rate": 3e-3, "compile": False,
}  # fmt: skip
#: A run that saves its state, and a machine for four processes of it.
SAVING = TINY | {"checkpoint_every": 3, "profile": False}
FOUR = Machine(gpus=(), num_cpus=4)

#: As `launch_tiny`, once for all tests that ask for the same; returns the run's folder too.
Run = Callable[..., tuple[RunRecord, Path]]
#: Trains `SAVING` in a folder with some fields changed, and with a trouble of `trouble_worker`.
Train = Callable[..., RunRecord]


def tensors(run_dir: Path, step: int) -> dict[str, Any]:
    """Return what a checkpoint holds, flat by name."""
    file, flat = run_dir / "whole.pt", {}
    dcp_to_torch_save(place_of(run_dir, step), file)
    stack = [("", torch.load(file))]
    while stack:
        prefix, found = stack.pop()
        if isinstance(found, dict):
            stack += [(f"{prefix}/{name}", value) for name, value in found.items()]
        else:
            flat[prefix] = found
    return flat


def launch_tiny(run_dir: Path, **values: Any) -> RunRecord:
    """Train `TINY` with some fields changed."""
    return launcher.launch(make_config(TINY | values), run_dir, show=str, machine=CPU)


def started_as(worker: Path) -> Callable[..., list[str]]:
    """Return the command that trains, but for a script in place of ``-m fp8study.train``."""
    command = launcher.training_command

    def changed(*arguments: Any) -> list[str]:
        usual = command(*arguments)
        place = usual.index("fp8study.train")
        return [*usual[: place - 1], str(worker), *usual[place + 1 :]]

    return changed
