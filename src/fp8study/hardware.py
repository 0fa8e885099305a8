"""What a GPU could do at most, by its datasheet."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuPeak:
    """Dense matrix peaks of one GPU; figures with 2:4 sparsity are twice as high."""

    name_part: str
    """Matched, in order, inside the name that the driver reports."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None: the GPU has no FP8 matrix units."""
    source: str


#: Ordered: the first part found in a GPU's name wins.
GPU_PEAKS = (
    GpuPeak("GB200", 2500, 5000, "NVIDIA GB200 NVL72 datasheet, per GPU, sparsity removed"),
    GpuPeak("GB300", 2500, 5000, "NVIDIA GB300 NVL72 datasheet, per GPU, sparsity removed"),
    GpuPeak("B300", 2250, 4500, "NVIDIA HGX B300 datasheet, sparsity removed"),
    GpuPeak("B200", 2250, 4500, "NVIDIA HGX B200 datasheet, sparsity removed"),
    GpuPeak("GH200", 989, 1979, "NVIDIA GH200 datasheet (Hopper SXM), sparsity removed"),
    GpuPeak("H200 NVL", 835.5, 1671, "NVIDIA H200 NVL datasheet, sparsity removed"),
    GpuPeak("H200", 989, 1979, "NVIDIA H200 SXM datasheet, sparsity removed"),
    GpuPeak("H100 PCIe", 756, 1513, "NVIDIA H100 PCIe datasheet, sparsity removed"),
    GpuPeak("H100 NVL", 835.5, 1671, "NVIDIA H100 NVL datasheet, sparsity removed"),
    GpuPeak("H100", 989, 1979, "NVIDIA H100 SXM datasheet, sparsity removed"),
    GpuPeak("A100", 312, None, "NVIDIA A100 datasheet"),
    GpuPeak("L40S", 362, 733, "NVIDIA L40S datasheet, sparsity removed"),
    GpuPeak("RTX 5090", 209.5, 419, "NVIDIA Blackwell whitepaper, FP32 accumulation"),
    GpuPeak("RTX 4090", 165.2, 330.3, "NVIDIA Ada whitepaper, FP32 accumulation"),
)

#: Slower than the namesake in the table, and by how much is not published here.
_LESSER = re.compile(r"\b(Laptop|Max-Q|MIG|D)\b", re.IGNORECASE)

#: Below this compute capability there are no FP8 matrix units.
FP8_CAPABILITY = (8, 9)


def find_peak(gpu_name: str | None) -> GpuPeak | None:
    """Return the peaks of a GPU by the name its driver reports, or None where unknown."""
    if not gpu_name or _LESSER.search(gpu_name):
        return None
    for peak in GPU_PEAKS:
        if peak.name_part.lower() in gpu_name.lower():
            return peak
    return None


def mfu_bf16_peak_pct(tflops_per_gpu: float, gpu_name: str | None) -> float | None:
    """Return useful TFLOP/s as a percentage of the dense BF16 peak, whatever the precision.

    None where the peak is unknown: a guess would look like a measurement.
    """
    peak = find_peak(gpu_name)
    return 100.0 * tflops_per_gpu / peak.bf16_tflops if peak else None
