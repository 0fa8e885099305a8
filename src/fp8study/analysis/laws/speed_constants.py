"""What the speed law takes of an H200, and what it takes of another GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fp8study.analysis.laws.communication import THROUGH_HOST
from fp8study.core.hardware import GpuPeak, find_peak

#: The GPU that the constants are of.
FITTED_GPU = "NVIDIA H200"
#: Constants that go with the matrix units' speed, and those that go with memory's.
BY_MATRIX_UNITS = ("query_ps", "softmax_ps")
CASTS = ("cast_ps", "weight_cast_ps")
BY_MEMORY = (
    "elementwise_ps", *CASTS, "autocast_ps", "plain_logit_ps", "logit_ps", "update_ps",
    "update_weight_ps", "clip_ps", "shard_ps",
)  # fmt: skip


@dataclass(frozen=True)
class SpeedConstants:
    """What is fitted or read from records, as it is on an H200; ps are 10⁻¹² s."""

    bf16_tflops: float = 760.0
    """GEMMs in BF16, large."""
    fp8_tflops: float = 1460.0
    """GEMMs in FP8, large."""
    kernel_us: float = 5.0
    """Any kernel's time beside what grows with its size, and the gap before the next."""
    query_ps: float = 25.0
    """Attention, a token and query feature."""
    softmax_ps: float = 1.0
    """Attention, a token, head and token of the sequence."""
    attention_tflops: float = 560.0
    """Attention's GEMMs, causal, where heads are so wide that these take longer than that; 1e9
    in freezes without such a limit."""
    elementwise_ps: float = 1.0
    """Norms, activations and residuals: a byte that a layer keeps."""
    cast_ps: float = 2.0
    """FP8 tensorwise: an element of a converted layer's input or output, once a pass."""
    weight_cast_ps: float = 2.0
    """The same of its weight."""
    rowwise: float = 2.4
    """What FP8 rowwise casts take, over tensorwise."""
    both_layouts: float = 0.85
    """What casts of inputs and outputs take where kernels of ours write both layouts; 1 in freezes
    without it."""
    one_way: float = 0.5
    """What casts take where the weight's gradient is computed in BF16, so that inputs and gradients
    are cast along one dimension, over those along both: half by bytes; 1 in freezes without it."""
    autocast_ps: float = 2.0
    """A weight of a layer that autocast makes BF16 from FP32."""
    plain_logit_ps: float = 20.0
    """The plain loss head, a logit, beside its GEMMs."""
    logit_ps: float = 5.0
    """The other loss heads, the same."""
    update_ps: float = 0.2
    """AdamW: a byte of weights, gradients and states, read or written."""
    update_weight_ps: float = 2.0
    """AdamW: a weight, whatever its bytes."""
    one_pass: float = 0.85
    """What ``update_kernel=one_pass`` takes of that."""
    clip_ps: float = 0.3
    """Clipping: a byte of gradients; half of it where they are read for their norm alone."""
    shard_ps: float = 3.0
    """FSDP2: a weight's copies and casts around one gathering or reducing."""
    by_copies: float = 0.8
    """What is left of that where copy engines communicate, which send gradients in BF16; 1 in
    freezes without it."""
    contention: float = 0.08
    """What GEMMs and attention take longer beside communication, over what they take alone."""
    launch_us: float = 20.0
    """The host, a kernel."""
    gather_us: float = 500.0
    """The host, a converted layer whose weight FSDP2 gathers in FP8."""
    shard_layer_us: float = 3000.0
    """The host, a decoder layer that FSDP2 gathers and reduces; 0 in freezes without it."""
    phases: float = 2.0
    """Not fitted: 2 where host and GPU begin each forward pass together, see `StepParts.total`."""
    link_gb_per_s: float = 270.0
    """Read from profiled steps: what a GPU receives from the others of its box."""
    copy_tb_per_s: float = 4.2
    """Read from runs' own copies, read and written; other GPUs' memory is scaled by it."""
    memory_power: float = 1.0
    """Fitted to other GPUs of an H200's architecture: what goes with memory's speed does so to this
    power of the datasheets' ratio; 1 in freezes without it."""
    cast_power: float = 1.0
    """The same of FP8's casts."""


def on_gpu(c: SpeedConstants, gpu: GpuPeak) -> SpeedConstants:
    """Scale an H200's constants to another GPU, by both datasheets.

    Links are NVLink, of which each brings an H200's share, or PCIe, through the host's memory, as
    two H200 did. Within an architecture, of which GPUs were measured, by powers of their ratio; but
    casts by no less than the matrix units, on whose multiprocessors they run: no record tests that.
    """
    own = find_peak(FITTED_GPU)
    assert own is not None and own.fp8_tflops and own.memory_tb_per_s
    known = gpu.memory_tb_per_s or own.memory_tb_per_s
    units, memory = own.bf16_tflops / gpu.bf16_tflops, own.memory_tb_per_s / known
    is_kin = gpu.architecture == own.architecture
    powers = (c.memory_power, c.cast_power) if is_kin else (1.0, 1.0)
    by_memory, by_cast = (memory**power for power in powers)
    link = THROUGH_HOST * gpu.link_gb_per_s
    if gpu.has_nvlink:
        link = c.link_gb_per_s * gpu.link_gb_per_s / own.link_gb_per_s
    slower = {**dict.fromkeys(BY_MATRIX_UNITS, units), **dict.fromkeys(BY_MEMORY, by_memory),
              **dict.fromkeys(CASTS, max(by_cast, units) if is_kin else by_cast)}  # fmt: skip
    return dataclasses.replace(
        c,
        bf16_tflops=c.bf16_tflops * gpu.bf16_tflops / own.bf16_tflops,
        attention_tflops=c.attention_tflops * gpu.bf16_tflops / own.bf16_tflops,
        fp8_tflops=c.fp8_tflops * (gpu.fp8_tflops or 0.0) / own.fp8_tflops,
        copy_tb_per_s=c.copy_tb_per_s * known / own.memory_tb_per_s,
        link_gb_per_s=link,
        **{name: factor * getattr(c, name) for name, factor in slower.items()},
    )
