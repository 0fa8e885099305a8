"""What the tests of real runs share: a machine without GPU and a run of seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8study.core.records import RunRecord
from fp8study.run.machine import Machine

CPU = Machine(gpus=(), num_cpus=max(2, os.cpu_count() or 1))
TINY: dict[str, Any] = {
    "model": "tiny-llama", "sequence_length": 64, "micro_batch_size": 2, "num_steps": 8,
    "num_warmup_steps": 2, "learning_rate": 3e-3, "compile": False,
}  # fmt: skip

#: Trains `TINY` with some fields changed; returns the record and the run's folder.
Run = Callable[..., tuple[RunRecord, Path]]
