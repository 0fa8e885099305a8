"""What a GPU could do at most, by its datasheet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fp8study.core.errors import UserError, nearest


@dataclass(frozen=True)
class GpuPeak:
    """Dense matrix peaks of one GPU; figures with 2:4 sparsity are twice as high."""

    name_part: str
    """Matched, in order, as whole words of the name that the driver reports."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None: the GPU has no FP8 matrix units."""
    memory_tb_per_s: float | None
    """Bandwidth of its memory; None: sold with several kinds of memory under this name."""
    memory_gb: float | None
    """Size of its memory as sold, of which its driver reports as many GiB within a few per cent;
    None: sold with several sizes."""
    source: str

    @property
    def slug(self) -> str:
        """Its name on a command line, as ``h100-80gb``."""
        name = self.name_part.lower().replace(" ", "-")
        size = f"-{self.memory_gb:g}gb" if self.memory_gb else ""
        return name.removesuffix(size.removesuffix("b")) + size  # some names have it in part


#: Ordered: the first part found in a GPU's name wins.
GPU_PEAKS = (
    GpuPeak("GB200", 2500, 5000, 8, 186, "NVIDIA GB200 NVL72 datasheet, per GPU, sparsity removed"),
    GpuPeak("GB300", 2500, 5000, 8, 279, "NVIDIA GB300 NVL72 datasheet, per GPU, sparsity removed"),
    GpuPeak("B300", 2250, 4500, 8, 270, "NVIDIA HGX B300 datasheet, sparsity removed"),
    GpuPeak("B200", 2250, 4500, 8, 180, "NVIDIA HGX B200 datasheet, sparsity removed"),
    GpuPeak("GH200 144G", 989, 1979, 4.9, 144, "NVIDIA GH200 datasheet, HBM3e, sparsity removed"),
    GpuPeak("GH200", 989, 1979, 4.0, 96, "NVIDIA GH200 datasheet, HBM3, sparsity removed"),
    GpuPeak("H200 NVL", 835.5, 1671, 4.8, 141, "NVIDIA H200 NVL datasheet, sparsity removed"),
    GpuPeak("H200", 989, 1979, 4.8, 141, "NVIDIA H200 SXM datasheet, sparsity removed"),
    GpuPeak("H100 PCIe", 756, 1513, 2.0, 80, "NVIDIA H100 PCIe datasheet, sparsity removed"),
    GpuPeak("H100 NVL", 835.5, 1671, 3.9, 94, "NVIDIA H100 NVL datasheet, sparsity removed"),
    GpuPeak("H100", 989, 1979, 3.35, 80, "NVIDIA H100 SXM datasheet, sparsity removed"),
    GpuPeak("A100", 312, None, None, None, "NVIDIA A100 datasheet"),
    GpuPeak("L40S", 362, 733, 0.864, 48, "NVIDIA L40S datasheet, sparsity removed"),
    GpuPeak("RTX 5090", 209.5, 419, 1.792, 32, "NVIDIA Blackwell whitepaper, FP32 accumulation"),
    GpuPeak("RTX 4090", 165.2, 330.3, 1.008, 24, "NVIDIA Ada whitepaper, FP32 accumulation"),
)


def named_gpu(slug: str) -> GpuPeak:
    """Return a GPU by its `GpuPeak.slug`, or by that without its memory.

    Of one that is sold with several memories, any size is that GPU.

    Raises:
        UserError: There is none of that name.
    """
    wanted = slug.lower().replace(" ", "-")
    known = {peak.slug: peak for peak in GPU_PEAKS}
    known |= {peak.name_part.lower().replace(" ", "-"): peak for peak in GPU_PEAKS}
    name = _MEMORY.sub("", wanted)
    if name in known and known[name].memory_gb is None:
        return known[name]
    if wanted not in known:
        # Of another size, that of the same name; V100 is no H100.
        close = nearest(known[name].slug, known) if name in known else nearest(wanted, known, 0.8)
        raise UserError(
            f"--gpu: '{slug}' is not known{close}; name one of "
            f"{', '.join(peak.slug for peak in GPU_PEAKS)}"
        )
    return known[wanted]


#: A memory's size at the end of a name on the command line.
_MEMORY = re.compile(r"-[0-9]+gb$")

#: Slower than the namesake in the table, and by how much is not published here.
_LESSER = re.compile(r"\b(Laptop|Max-Q|MIG|D)\b", re.IGNORECASE)

#: Below this compute capability there are no FP8 matrix units.
FP8_CAPABILITY = (8, 9)


def find_peak(gpu_name: str | None) -> GpuPeak | None:
    """Return the peaks of a GPU by the name its driver reports, or None where unknown."""
    if not gpu_name or _LESSER.search(gpu_name):
        return None
    parts = ((re.escape(peak.name_part), peak) for peak in GPU_PEAKS)
    return next((p for part, p in parts if re.search(rf"\b{part}\b", gpu_name, re.I)), None)


def bf16_peak_tflops(gpu_name: str | None) -> float | None:
    """Return the dense BF16 peak, the denominator of `mfu_bf16_peak_pct`.

    None where the peak is unknown: a guess would look like a measurement.
    """
    peak = find_peak(gpu_name)
    return float(peak.bf16_tflops) if peak else None


def mixed_peak_tflops(gpu_name: str | None, fp8_share: float) -> float | None:
    """Return the peak of a run of whose FLOPs a share, 0 to 1, is in FP8: `mfu_mixed_peak_pct`'s.

    The time that both parts would take at their own dense peaks, one after the other:
    ``1 / (fp8_share / fp8_peak + (1 - fp8_share) / bf16_peak)``.
    """
    peak = find_peak(gpu_name)
    if peak is None or (fp8_share > 0 and peak.fp8_tflops is None):
        return None
    in_fp8 = fp8_share / peak.fp8_tflops if peak.fp8_tflops else 0.0
    return 1 / (in_fp8 + (1 - fp8_share) / peak.bf16_tflops)
