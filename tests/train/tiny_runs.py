"""What the tests of real runs share: a machine without GPU and a run of seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fp8study.core.checkpoints import place_of
from fp8study.core.presets import PRESETS
from fp8study.core.records import RunRecord
from fp8study.run.machine import Machine

CPU = Machine(gpus=(), num_cpus=max(2, os.cpu_count() or 1))
TINY: dict[str, Any] = {
    "model": "tiny-llama", "sequence_length": 64, "micro_batch_size": 2, "num_steps": 8,
    "num_warmup_steps": 2, "learning_rate": 3e-3, "compile": False,
}  # fmt: skip
#: A run that saves its state, and a machine for four processes of it.
SAVING = TINY | {"checkpoint_every": 3, "profile": False}
FOUR = Machine(gpus=(), num_cpus=4)

#: Trains `TINY` with some fields changed; returns the record and the run's folder.
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


def folder_of(folder: Path, **settings: Any) -> str:
    """Make a folder with the tiny model's configuration, changed."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["tiny-llama"] | settings))
    return str(folder)
