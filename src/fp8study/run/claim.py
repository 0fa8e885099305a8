"""A training process takes its GPUs as late as it can: after its imports, before it touches CUDA.

What a run does before it needs a GPU (a notebook's kernel, imports, the model's code) takes longer
than many a short run trains. So the pipeline starts more runs than there are GPUs, and each gets
as far as here while others train.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

from fp8study.core.config import RunConfig
from fp8study.core.records import write_json
from fp8study.run.gpu_lease import lease
from fp8study.run.job import Job

#: Where the first of a run's processes says which GPUs it holds.
CLAIM = "gpus.json"
_POLL_SECONDS = 0.05
#: Leases of this process, kept until it ends.
_held = ExitStack()


def claim_gpus(config: RunConfig, job: Job, run_dir: Path) -> Job:
    """Wait for the run's GPUs and make them the only ones that this process will see.

    The first process of a run takes them for all and holds them until it ends; the others read
    which they are. Nothing may have touched CUDA before: it looks at the environment once.

    Args:
        config: Says how many, and with how many runs each is shared.
        job: Names the GPUs to choose from; without any, there is nothing to claim.
        run_dir: The run's folder.

    Returns:
        The job with the GPUs that the run got.
    """
    if not job.gpus:
        return job
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        held = _held.enter_context(lease(config.num_gpus, list(job.gpus), config.runs_per_gpu))
        write_json(run_dir / CLAIM, list(held.indices))
    while (indices := claimed(run_dir)) is None:
        time.sleep(_POLL_SECONDS)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the driver's library counts
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
    return dataclasses.replace(job, gpus={index: job.gpus[index] for index in indices})


def claimed(run_dir: Path) -> list[int] | None:
    """Return the GPUs that a run's processes hold, or None while they hold none."""
    try:
        return [int(index) for index in json.loads((run_dir / CLAIM).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return None
