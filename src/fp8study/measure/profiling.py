"""Two further steps under the profiler, after the timed window; the second one is kept."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fp8study.core.config import ResolvedConfig
from fp8study.measure.overhead import wait_for
from fp8study.measure.trace import read_trace

#: Stays beside the record, for Perfetto or chrome://tracing.
TRACE_NAME = "step-trace.json.gz"


def profiled_step(
    step: Callable[[], object],
    run_dir: Path,
    is_main: bool,
    device: torch.device,
    config: ResolvedConfig | None = None,
) -> dict[str, Any]:
    """Do two steps, the second one recorded on the main rank, and return what it did.

    The first one pays for the profiler's own start. Every rank must call it: a step communicates.
    `device` is waited for, so that the trace, which `run_dir` receives, holds the whole step;
    `config` as in `read_trace`.

    Returns:
        See `fp8study.measure.trace.read_trace`; empty on other ranks.
    """

    def finished_step() -> None:
        step()
        wait_for(device)

    if not is_main:
        finished_step()
        finished_step()
        return {}
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=0, warmup=1, active=1)
    with profile(activities=activities, record_shapes=True, schedule=plan) as recorded:
        finished_step()
        recorded.step()
        finished_step()
    trace = run_dir / TRACE_NAME
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        # Packed as a whole: torch would do it line by line, which takes longer than the step.
        with plain.open("rb") as unpacked, gzip.open(trace, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(unpacked, packed)
    return read_trace(trace, config)
