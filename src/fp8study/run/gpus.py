"""Which GPUs there are, as the driver's management library describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def unsupported_gpu() -> str | None:
    """Return one line about an AMD GPU that ROCm could use, if there is one and no NVIDIA GPU."""
    if not Path("/dev/kfd").exists() or visible_gpus():
        return None
    return "AMD GPUs are not supported: runs here use the CPU, with FP8 emulated"


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
