"""Machines for tests, with GPUs that are not there."""

from __future__ import annotations

from fp8study.run.machine import Gpu, Machine

H100, H200 = ("NVIDIA H100 80GB HBM3", 79.6, (9, 0)), ("NVIDIA H200", 139.8, (9, 0))
RTX_4090 = ("NVIDIA GeForce RTX 4090", 23.99, (8, 9))
A100 = ("NVIDIA A100-SXM4-80GB", 79.6, (8, 0))
B200 = ("NVIDIA B200", 179.0, (10, 0))
UNKNOWN = ("NVIDIA Something New", 47.5, (12, 0))


def machine(*kinds: tuple[str, float, tuple[int, int]]) -> Machine:
    """Return a machine with GPUs of these names, GiB and compute capabilities."""
    gpus = (
        Gpu(index, f"GPU-{index}", name, gib, capability, 700.0, 1980, 2619)
        for index, (name, gib, capability) in enumerate(kinds)
    )
    return Machine(tuple(gpus), 16)
