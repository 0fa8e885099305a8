"""How the tables of `fp8study.analysis.instruments` are shown."""

from __future__ import annotations

from fp8study.report.page import IF_ANY, Layout

_GROUP = "{model}, {study} on {machine}: {setting}"
#: For tables that have no room for a column of GPUs.
_GROUP_BY_GPUS = "{model} on {num_gpus} × {gpu_name}, {study} on {machine}: {setting}"
_ARM = {"num_gpus": ("GPUs", "d"), "arm": ("precision", "")}

UTILISATION = Layout(
    {
        **_ARM,
        "tflops_per_gpu": ("TFLOP/s per GPU", ".0f"),
        "mfu_bf16_peak_pct": ("% of dense BF16 peak", ".1f"),
        "bf16_peak_tflops": ("that peak", ".0f"),
        "mfu_mixed_peak_pct": ("% of mixed peak", ".1f"),
        "mixed_peak_tflops": ("that peak", ".0f"),
        "mfu_achievable_pct": ("% of achievable", ".1f"),
        "achievable_tflops": ("achievable", ".0f"),
    },
    _GROUP,
)
CEILINGS = Layout(
    {
        "model": ("model", ""),
        "num_tokens": ("tokens", ",.0f"),
        "num_runs": ("runs", "d"),
        "bf16_tflops": ("BF16", ",.0f"),
        "fp8_tensorwise_tflops": ("FP8 tensorwise", ",.0f"),
        "fp8_rowwise_tflops": ("FP8 rowwise", ",.0f"),
        "spread_pct": ("spread of BF16, %", ".1f"),
        "copy_tb_per_s": ("copy, TB/s", ".2f"),
    },
    "{machine}, {gpu_name}",
)
KERNELS = Layout(
    {
        "arm": ("precision", ""),
        "gemm_fp8": ("FP8", ".0f"),
        "gemm_bf16": ("BF16", ".0f"),
        "attention": ("attn.", ".0f"),
        "fused": ("casts", ".0f"),
        "copy": ("copy", ".0f"),
        "optimizer": ("optim.", ".0f"),
        "loss_and_other": ("rest", ".0f"),
        "communication": ("NCCL", ".0f"),
        "not_computing_ms": ("waits", ".0f"),
        "step_time_ms_median": ("step", ".0f"),
    },
    _GROUP_BY_GPUS,
)
SHARES = Layout(
    {
        **_ARM,
        "num_runs": ("runs", "d"),
        "fp8_expected_pct": ("% of FLOPs, expected", ".1f"),
        "fp8_gemm_flops_pct": ("seen", ".1f"),
        "fp8_gemm_time_pct": ("% of time", ".1f"),
    },
    _GROUP,
)
PRODUCTS = Layout(
    {
        "dtypes": ("dtypes of the factors", ""),
        "num_runs": ("runs", "d"),
        "kernel": ("kernel that takes longest", ""),
    },
    "{model} on {machine}",
)
MEMORY_SPLIT = Layout(
    {
        "arm": ("precision", ""),
        "parameters_gib": ("weights", ".1f"),
        "optimizer_gib": ("optim.", ".1f"),
        "working_gib": ("working", ".1f"),
        "steady_allocated_gib": ("steady peak", ".1f"),
        "gradients_gib": ("grads, in full", ".1f"),
        "first_step_allocated_gib": ("first step", ".1f"),
        "steady_reserved_gib": ("reserved", ".1f"),
        "num_allocator_events": ("events", IF_ANY),
    },
    _GROUP_BY_GPUS,
)
ENERGY = Layout(
    {
        **_ARM,
        "joule_per_token": ("J per token", ".4f"),
        "change_pct": ("v BF16, %", "+.1f"),
        "watts_mean": ("W per GPU", ".0f"),
        "clock_sm_mhz_median": ("SM clock, MHz", ",.0f"),
        "clock_sm_mhz_min": ("lowest", ",.0f"),
        "power_cap_pct": ("at the power cap, % of samples", ".0f"),
    },
    _GROUP,
)
COMMUNICATION = Layout(
    {
        **_ARM,
        "all_gather_gib": ("all-gather, GiB", ".2f"),
        "all_gather_dtypes": ("dtypes, GiB", ""),
        "all_gather_change_pct": ("v BF16, %", "+.0f"),
        "reduce_scatter_gib": ("reduce-scatter, GiB", ".2f"),
        "reduce_scatter_dtypes": ("dtype", ""),
    },
    _GROUP,
)
BREAK_EVEN = Layout(
    {
        **_ARM,
        "cache": ("compile cache", ""),
        "warm_up_seconds_bf16": ("BF16 warm-up, s", ".1f"),
        "warm_up_seconds": ("FP8 warm-up, s", ".1f"),
        "step_time_ms_bf16": ("BF16 step, ms", ".0f"),
        "step_time_ms": ("FP8 step, ms", ".0f"),
        "steps": ("paid for after", ""),
    },
    _GROUP,
)
AUDIT = Layout(
    {
        **_ARM,
        "num_runs": ("runs", "d"),
        "converted": ("layers in FP8", ""),
        "matmul_dtypes": ("dtypes of matrix products", ""),
        "moved_pct": ("weights moved by the first step, %", ".0f"),
    },
    _GROUP,
)
