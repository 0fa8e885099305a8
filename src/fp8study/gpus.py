"""Which GPUs there are, and which of them a run may use.

Snakemake counts GPUs but does not say which; two runs that each want one would both take the
first. So a run leases its GPUs with lock files, held open by its training processes: the operating
system gives the GPU back when the last of them is gone, however they ended.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8study.errors import UserError
from fp8study.locks import locked, open_lock, try_lock


@dataclass(frozen=True)
class Gpu:
    """One visible GPU, as the driver's management library describes it."""

    index: int
    """Its number on the machine, as CUDA_VISIBLE_DEVICES takes it."""
    uuid: str
    name: str
    memory_gib: float | None
    """None where it shares the machine's memory."""
    compute_capability: tuple[int, int]
    power_limit_watts: float | None
    clock_sm_max_mhz: int | None
    clock_memory_max_mhz: int | None


def visible_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible, without importing torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []  # no driver: a machine without GPU
    try:
        gpus = [_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    visible: list[Gpu] = []
    for key in map(str.strip, chosen.split(",")):
        matches = [g for g in gpus if key == str(g.index) or _is_uuid_start(key, g.uuid)]
        if len(matches) != 1 or matches[0] in visible:
            break  # as CUDA does, hide this one and all that follow
        visible += matches
    return visible


def _is_uuid_start(key: str, uuid: str) -> bool:
    return key.startswith("GPU-") and uuid.startswith(key)


def _describe(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: int) -> Any:
        """Ask what some drivers and virtual machines do not answer."""
        try:
            return getattr(pynvml, function)(handle, *arguments)
        except pynvml.NVMLError:
            return None

    power = ask("nvmlDeviceGetPowerManagementLimit")
    capability = ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)
    memory = ask("nvmlDeviceGetMemoryInfo")
    return Gpu(
        index=index,
        uuid=ask("nvmlDeviceGetUUID") or "",
        name=ask("nvmlDeviceGetName") or "unknown",
        memory_gib=memory.total / 2**30 if memory else None,
        compute_capability=(capability[0], capability[1]),
        power_limit_watts=power / 1000 if power else None,
        clock_sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        clock_memory_max_mhz=ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
    )


#: A GPU is leased in this many places: a run takes all of them, or its part where it shares.
PLACES = 8


@dataclass(frozen=True)
class Lease:
    """GPUs held for one run."""

    indices: tuple[int, ...]
    file_descriptors: tuple[int, ...]
    """Hand these down to the training processes: they keep the lease alive."""


def lock_dir() -> Path:
    """Return the folder of the lock files: ``$FP8STUDY_LOCKS``, or one shared by the machine."""
    chosen = os.environ.get("FP8STUDY_LOCKS")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"fp8study-{os.getuid()}"


@contextmanager
def lease(
    num_gpus: int, indices: list[int], runs_per_gpu: int = 1, poll_seconds: float = 1.0
) -> Iterator[Lease]:
    """Hold `num_gpus` of the given GPUs, waiting until that many are free.

    All or none are taken, under one machine-wide lock, so two waiting runs cannot each hold
    half of what the other needs.

    Args:
        num_gpus: How many to hold.
        indices: GPUs to choose from, in order of preference; of shared ones, the emptiest first.
        runs_per_gpu: With how many runs each may be shared, ourselves included. A run that wants
            a GPU for itself never shares one.
        poll_seconds: How often to look again.

    Raises:
        UserError: More are asked for than there are.
    """
    if num_gpus > len(indices):
        raise UserError(
            f"num_gpus: {num_gpus} is more than the {len(indices)} visible GPUs; lower it or "
            "widen CUDA_VISIBLE_DEVICES"
        )
    folder = lock_dir()
    while (held := _try_lease(num_gpus, indices, runs_per_gpu, folder)) is None:
        time.sleep(poll_seconds)
    try:
        yield held
    finally:
        for descriptor in held.file_descriptors:
            os.close(descriptor)


def _try_lease(num_gpus: int, indices: list[int], runs_per_gpu: int, folder: Path) -> Lease | None:
    wanted = PLACES // runs_per_gpu
    with locked(folder / "all.lock", "FP8STUDY_LOCKS"):
        free = {index: _free_places(index, folder) for index in indices}
        emptiest = sorted(indices, key=lambda index: -len(free[index]))
        taken = [index for index in emptiest if len(free[index]) >= wanted][:num_gpus]
        if len(taken) < num_gpus:
            taken = []
        kept = [place for index in taken for place in free[index][:wanted]]
        for descriptor in {place for places in free.values() for place in places} - set(kept):
            os.close(descriptor)
    return Lease(tuple(taken), tuple(kept)) if taken else None


def _free_places(index: int, folder: Path) -> list[int]:
    """Take all free places of a GPU; return what holds them."""
    held = []
    for place in range(PLACES):
        descriptor = open_lock(folder / f"gpu-{index}.{place}.lock", "FP8STUDY_LOCKS")
        if try_lock(descriptor):
            held.append(descriptor)
        else:
            os.close(descriptor)
    return held
