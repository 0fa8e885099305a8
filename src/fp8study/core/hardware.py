"""What a GPU could do at most, by its datasheet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fp8study.core.errors import NoFp8, UserError, nearest

#: As in an HGX or DGX box.
GPUS_PER_NODE = 8
#: What 16 lanes of PCIe 5 bring one way, GB/s: links that bring more are NVLink.
_PCIE = 64


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
    """Size of its memory as sold; None: sold with several sizes."""
    link_gb_per_s: float
    """What its datasheet lets it receive from the others of its box: by NVLink, or by PCIe where
    that does not join them all, since bridges join two or four and a ring is as fast as its slowest
    link."""
    source: str
    gpus_per_node: int = GPUS_PER_NODE
    """In one server, as most are sold."""
    nvlink_gpus: int = 0
    """Of several servers, that NVLink joins as it joins those of one; 0: none."""
    ecc_takes: float = 0.0
    """Of its memory, as error correction is on as sold and has no chips of its own."""

    @property
    def slug(self) -> str:
        """Its name on a command line, as ``h100-80gb``."""
        size = f"-{self.memory_gb:g}gb" if self.memory_gb else ""
        return self.part.removesuffix(size.removesuffix("b")) + size  # some names have it in part

    @property
    def memory_gib(self) -> float | None:
        """As its driver reports it, within a per cent; None: sold with several sizes."""
        return self.memory_gb and self.memory_gb * (1 - self.ecc_takes)

    @property
    def has_nvlink(self) -> bool:
        """Whether NVLink joins all GPUs of its box."""
        return self.link_gb_per_s > _PCIE

    @property
    def architecture(self) -> str:
        """The generation of its tensor cores, as ``Hopper``."""
        return next(name for part, name in _PARTS.items() if self.name_part.startswith(part))

    @property
    def part(self) -> str:
        """As `slug`, without its memory."""
        return self.name_part.lower().replace(" ", "-")


#: What the name of a GPU begins with, and its architecture.
_PARTS = {"GB": "Blackwell", "B": "Blackwell", "RTX 50": "Blackwell", "RTX PRO": "Blackwell",
          "GH": "Hopper", "H": "Hopper", "L4": "Ada", "RTX 40": "Ada", "RTX 6000 Ada": "Ada",
          "A100": "Ampere"}  # fmt: skip
#: Ordered: the first part found in a GPU's name wins.
GPU_PEAKS = (
    GpuPeak(
        "GB200", 2500, 5000, 8, 186, 900, "NVIDIA GB200 NVL72 datasheet, per GPU, sparsity removed",
        gpus_per_node=4, nvlink_gpus=72,
    ),
    GpuPeak(
        "GB300", 2500, 5000, 8, 279, 900, "NVIDIA GB300 NVL72 datasheet, per GPU, sparsity removed",
        gpus_per_node=4, nvlink_gpus=72,
    ),
    GpuPeak("B300", 2250, 4500, 8, 270, 900, "NVIDIA HGX B300 datasheet, sparsity removed"),
    GpuPeak("B200", 2250, 4500, 8, 180, 900, "NVIDIA HGX B200 datasheet, sparsity removed"),
    GpuPeak(
        "GH200 144G", 989, 1979, 4.9, 144, 450, "NVIDIA GH200 datasheet, HBM3e, sparsity removed",
        gpus_per_node=4,
    ),
    GpuPeak(  # four, as in the nodes of Alps (docs.cscs.ch/alps/hardware); some servers have one
        "GH200", 989, 1979, 4.0, 96, 450, "NVIDIA GH200 datasheet, HBM3, sparsity removed",
        gpus_per_node=4,
    ),
    GpuPeak("H200 NVL", 835.5, 1671, 4.8, 141, 64, "NVIDIA H200 NVL datasheet, sparsity removed"),
    GpuPeak("H200", 989, 1979, 4.8, 141, 450, "NVIDIA H200 SXM datasheet, sparsity removed"),
    GpuPeak("H100 PCIe", 756, 1513, 2.0, 80, 64, "NVIDIA H100 PCIe datasheet, sparsity removed"),
    GpuPeak("H100 NVL", 835.5, 1671, 3.9, 94, 64, "NVIDIA H100 NVL datasheet, sparsity removed"),
    GpuPeak("H100", 989, 1979, 3.35, 80, 450, "NVIDIA H100 SXM datasheet, sparsity removed"),
    GpuPeak("H800 PCIe", 756, 1513, 2.0, 80, 64, "as an H100 PCIe, of which bridges differ"),
    GpuPeak("H800", 989, 1979, 3.35, 80, 200, "an H100 SXM's, with NVLink of 400 GB/s both ways"),
    GpuPeak("H20", 148, 296, 4.0, 96, 450, "as sellers publish it, no sparsity"),
    GpuPeak("A100", 312, None, None, None, 300, "NVIDIA A100 datasheet"),
    GpuPeak(
        "L40S", 362, 733, 0.864, 48, 32, "NVIDIA L40S datasheet, sparsity removed", ecc_takes=1 / 16
    ),
    GpuPeak(
        "L40", 181, 362, 0.864, 48, 32, "NVIDIA L40 datasheet, sparsity removed", ecc_takes=1 / 16
    ),
    GpuPeak(
        "L4", 121, 242.5, 0.3, 24, 32, "NVIDIA L4 datasheet, sparsity removed", ecc_takes=1 / 16
    ),
    GpuPeak(
        "RTX 6000 Ada", 364.25, 728.5, 0.96, 48, 32, "NVIDIA RTX 6000 Ada datasheet, no sparsity"
    ),
    GpuPeak("RTX PRO 6000", 500, 1000, 1.792, 96, 64,
            "NVIDIA's 4,000 sparse TOPS in FP4: an eighth dense in BF16, a quarter in FP8"),
    GpuPeak(
        "RTX 5090", 209.5, 419, 1.792, 32, 64, "NVIDIA Blackwell whitepaper, FP32 accumulation"
    ),
    GpuPeak("RTX 4090", 165.2, 330.3, 1.008, 24, 32, "NVIDIA Ada whitepaper, FP32 accumulation"),
)  # fmt: skip


#: What a driver puts before and behind the names in the table, in lower case with hyphens.
_BEFORE = re.compile(r"^(?:(?:nvidia|tesla|geforce)-)+")
_BEHIND = (
    r"(?:-(?:[0-9]+gb|sxm[0-9]*|pcie|hbm[0-9]e?|ac|generation|blackwell|server|workstation"
    r"|edition))*"
)
#: The size in a driver's name of what holds a GPU's CPU, too.
_WITH_HOST = {"GH200": 480}
#: GPUs of others, and what is no GPU.
_NO_NVIDIA = re.compile(r"^(?:amd|instinct|radeon|mi[0-9]{2,}|intel|gaudi|google|tpu|trainium)")
#: NVIDIA's without FP8 that are not in the table; the first ones have no BF16 either.
_OLDER = re.compile(
    r"^(?:(?:quadro-)?(v100s?|p100|t4|rtx-20[0-9]0)|(a10g?|a16|a30|a40|rtx-a[0-9]000|rtx-30[0-9]0))\b"
)


def named_gpu(slug: str) -> GpuPeak:
    """Return a GPU by its `GpuPeak.slug`, by that without its memory, or by its driver's name.

    Of one that is sold with several memories, any size is that GPU.

    Raises:
        UserError: There is none of that name, there are several, or it has no FP8 and no peaks.
    """
    asked = re.sub(r"[\s_-]+", "-", slug.strip().lower())
    wanted = re.sub(r"^(?:rtx)?(?=[0-9]{4}\b)", "rtx-", _BEFORE.sub("", asked))
    others = ", ".join(peak.slug for peak in GPU_PEAKS if not peak.fp8_tflops)
    names = f"{slugs_with_fp8()}; without FP8: {others}"  # which a cluster may have
    if _NO_NVIDIA.match(wanted):
        raise UserError(
            f"--gpu: '{slug}': NVIDIA GPUs only: nothing else was tried; name one of "
            f"{slugs_with_fp8()}"
        )
    if older := _OLDER.match(wanted):
        raise no_fp8(older[0].upper().replace("-", " "), "FP16" if older[1] else "BF16")
    sizes = {float(size) for size in re.findall(r"\b([0-9]+)gb\b", wanted)}
    alike = {peak.slug: peak for peak in GPU_PEAKS
             if re.fullmatch(peak.part + _BEHIND, wanted) or wanted == peak.slug}  # fmt: skip
    fitting = [peak for peak in alike.values() if peak.memory_gb is None
               or sizes <= {peak.memory_gb, _WITH_HOST.get(peak.name_part)}]  # fmt: skip
    if fitting and asked != wanted == fitting[0].part:
        kinds = [peak for peak in GPU_PEAKS if f"{peak.part}-".startswith(f"{wanted}-")]
        if len({peak.memory_gb for peak in kinds}) > 1:
            raise UserError(
                f"--gpu: '{slug}' is sold with several sizes of memory; name one of "
                f"{', '.join(peak.slug for peak in kinds)}"
            )
    if not fitting:
        # Of another size, that of the same name.
        known = (*alike, *(peak.slug for peak in GPU_PEAKS), *(peak.part for peak in GPU_PEAKS))
        number = "".join(re.findall(r"[0-9]+", wanted)[:1])
        same = [name for name in known if re.search(rf"(?<![0-9]){number}(?![0-9])", name)]
        close = nearest(next(iter(alike), wanted), same, 0.8)
        raise UserError(
            f"--gpu: '{slug}' is not known{close}; name one of {names}; for any other GPU run "
            "`make reproduce` on it"
        )
    return fitting[0]


def no_fp8(name: str, instead: str = "BF16") -> NoFp8:
    """Return what a GPU without FP8 is refused with, and answered."""
    why = f"{name} has no FP8 tensor cores, which came with Ada (compute capability 8.9)"
    return NoFp8(
        f"--gpu: {why}; train in {instead} there, or name one of {slugs_with_fp8()}",
        f"{instead}. {why}.",
    )


def slugs_with_fp8() -> str:
    """List the GPUs that have FP8, as a command line takes them."""
    return ", ".join(peak.slug for peak in GPU_PEAKS if peak.fp8_tflops)


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
