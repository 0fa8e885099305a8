"""How every table is shown: one heading and format for each column, and each table's columns.

Units stand in the headings. A column that is empty throughout is left out when it is shown.
"""

from __future__ import annotations

from fp8study.report.table import IF_ANY, Layout

#: Column → heading, and format; a column without a format is text. A text column whose heading is
#: its name is left out.
_COLUMNS: dict[str, tuple[str, str]] = {
    # What was run.
    "arm": ("precision", ""),
    "seed": ("seed", "d"),
    "num_gpus": ("GPUs", "d"),
    "num_runs": ("runs", "d"),
    "num_pairs": ("pairs", "d"),
    "num_tokens": ("tokens", ",.0f"),
    "num_warned": ("runs with a warning", IF_ANY),
    # Speed, memory, start-up.
    "tokens_per_second_per_gpu": ("tokens/s per GPU", ",.0f"),
    "speedup_pct": ("v BF16, %", "+.1f"),
    "tflops_per_gpu": ("TFLOP/s per GPU", ".0f"),
    "mfu_bf16_peak_pct": ("MFU (BF16 peak), %", ".1f"),
    "memory_peak_gib": ("peak memory, GiB", ".1f"),
    "memory_change_pct": ("v BF16, %", "+.1f"),
    "startup_launch_seconds": ("process, s", ".1f"),
    "startup_imports_seconds": ("imports, s", ".1f"),
    "startup_device_seconds": ("device, s", ".1f"),
    "startup_model_seconds": ("model, s", ".1f"),
    "startup_sharding_seconds": ("sharding, s", ".1f"),
    "startup_rest_seconds": ("rest, s", ".1f"),
    "startup_seconds": ("start-up in all, s", ".1f"),
    "first_step_seconds": ("first step, s", ".1f"),
    "compile_seconds": ("compilation, s", ".1f"),
    "peer_tokens_per_second_per_gpu": ("peer", ",.0f"),
    "peer_range": ("range", ""),
    "ratio": ("ours ÷ peer", ".3f"),
    "ratio_interval": ("95 % CI", ""),
    "reserved_gib": ("GiB", ".1f"),
    "peer_reserved_gib": ("peer", ".1f"),
    # Decisions and leads.
    "micro_batch_size": ("batch", "d"),
    "sequence_length": ("tokens", ",d"),
    "lead_pct": ("FP8's lead, %", "+.1f"),
    "lead_range": ("all pairs", ""),
    "ci": ("95 % CI", ""),
    "by_session": ("lead by session", ""),
    "action": ("what to do", ""),
    "energy_change_pct": ("v BF16, %", "+.1f"),
    "loss": ("FP8's loss", ""),
    "form": ("path", ""),
    "num_sessions": ("sessions", "d"),
    "lead_pct_other": ("there, %", "+.1f"),
    "ci_other": ("95 % CI", ""),
    "action_other": ("what to do there", ""),
    "tokens_per_second_per_gpu_bf16": ("BF16 tokens/s per GPU", ",.0f"),
    "tflops_per_gpu_bf16": ("BF16 TFLOP/s per GPU", ".0f"),
    "peer_lead_pct": ("peer's", "+.1f"),
    # What others said.
    "tflops_stated": ("stated TFLOP/s", ".0f"),
    "mfu_stated_pct": ("stated MFU, %", ".1f"),
    "tflops": ("restated TFLOP/s", ".0f"),
    "mfu_pct": ("restated MFU, %", ".1f"),
    # Losses.
    "epochs": ("passes", ".1f"),
    "passes": ("passes", ".1f"),
    "loss_bf16": ("BF16 loss", ".3f"),
    "gap_pct": ("gap, %", "+.2f"),
    "gap": ("gap, nats", "+.4f"),
    "interval": ("its CI, %", ""),
    "detectable_pct": ("detectable, %", ".2f"),
    "p_holm": ("p, Holm", ".1g"),
    "judged": ("verdict", ""),
    "loss_start": ("loss, first step", ".2f"),
    "loss_last20_mean": ("loss, last 20 steps", ".3f"),
    "parameters_outside_optimizer_pct": ("parameters outside the optimizer, %", ".1f"),
    "mean_pct": ("% of BF16 loss", "+.2f"),
    "share_pct": ("share of the gap, %", ".1f"),
    "effective_batch": ("effective batch", ".0f"),
    "way": ("reached by", ""),
    "corpus_sha": ("SHA-256", ""),
    "vocab_size": ("vocabulary", ",d"),
    "num_train_tokens": ("tokens", ",d"),
    "tokens_seen_max": ("most seen in a run", ",d"),
    "epochs_max": ("passes", ".2f"),
    "num_seeds": ("seeds", "d"),
    # Noise and precision.
    "what": ("comparison", ""),
    "gemm": ("GEMM", ""),
    "step": ("steps", "d"),
    "ratio_pct": ("of sampling error, %", ".1f"),
    "ratio_range": ("95 % CI", ""),
    "systematic_pct": ("systematic, %", ".0f"),
    "crossing_batch": ("equal at batch", ",.0f"),
    "crossing_range": ("95 % CI", ""),
    "noise_scale": ("noise scale, sequences", ".2g"),
    "noise_scale_range": ("95 % CI", ""),
    "noise_scale_tokens": ("tokens", ",.0f"),
    "relative_pct": ("relative error, %", ".2f"),
    "fp32_pct": ("v FP32, %", ".1f"),
    "cosine": ("cosine", ".4f"),
    "sqnr_db": ("SQNR, dB", ".1f"),
    "middle_pct": ("median sequence, %", ".1f"),
    "worst_pct": ("worst, %", ".1f"),
    "loss_change": ("loss, nats", "+.4f"),
    "underflow_pct": ("underflow, %", ".3f"),
    "saturated_pct": ("saturated, %", ".3f"),
    # Instruments.
    "share": ("FP8, % of GEMM FLOPs", ""),
    "expected": ("expected, %", ""),
    "time": ("FP8, % of GEMM time", ""),
    "converted": ("layers in FP8", ""),
    "matmul_dtypes": ("dtypes of GEMMs", ""),
    "moved_pct": ("weights moved by the first step, %", ".0f"),
    "mfu_mixed_peak_pct": ("% of mixed peak", ".1f"),
    "mixed_peak_tflops": ("that peak", ".0f"),
    "mfu_achievable_pct": ("% of GEMM peak", ".1f"),
    "achievable_tflops": ("that peak", ".0f"),
    "gemm_pct": ("GEMMs alone, % of it", ".0f"),
    "bf16_tflops": ("BF16", ",.4g"),
    "fp8_tflops": ("FP8", ",.4g"),
    "fp8_tensorwise_tflops": ("FP8 tensorwise", ",.0f"),
    "fp8_rowwise_tflops": ("FP8 rowwise", ",.0f"),
    "spread_pct": ("spread of BF16, %", ".1f"),
    "copy_tb_per_s": ("copy, TB/s", ".2f"),
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
    "cache": ("compile cache", ""),
    "warm_up_seconds_bf16": ("BF16 warm-up, s", ".1f"),
    "warm_up_seconds": ("FP8 warm-up, s", ".1f"),
    "step_time_ms_bf16": ("BF16 step, ms", ".0f"),
    "step_time_ms": ("FP8 step, ms", ".0f"),
    "break_even_steps": ("paid for after, steps", ",.0f"),
    "all_gather_gib": ("all-gather, GiB", ".2f"),
    "all_gather_dtypes": ("dtypes, GiB", ""),
    "all_gather_change_pct": ("v BF16, %", "+.0f"),
    "reduce_scatter_gib": ("reduce-scatter, GiB", ".2f"),
    "reduce_scatter_dtypes": ("dtype", ""),
    "parameters_gib": ("weights", ".1f"),
    "optimizer_gib": ("optim.", ".1f"),
    "working_gib": ("working", ".1f"),
    "steady_allocated_gib": ("steady peak", ".1f"),
    "gradients_gib": ("grads, in full", ".1f"),
    "first_step_allocated_gib": ("first step", ".1f"),
    "steady_reserved_gib": ("reserved", ".1f"),
    "num_allocator_events": ("events", IF_ANY),
    "joule_per_token": ("J per token", ".4f"),
    "change_pct": ("v BF16, %", "+.1f"),
    "watts_mean": ("W per GPU", ".0f"),
    "clock_sm_mhz_median": ("SM clock, MHz", ",.0f"),
    "clock_sm_mhz_min": ("lowest", ",.0f"),
    "power_cap_pct": ("at the power cap, % of samples", ".0f"),
    # Methods.
    "name_part": ("GPU", ""),
    "memory_tb_per_s": ("memory, TB/s", "g"),
    "version_torch": ("torch", ""),
    "version_torchao": ("torchao", ""),
    "version_transformers": ("transformers", ""),
    "warning": ("what the runs say", ""),
    "gpu_hours": ("GPU-hours", ".2f"),
    "first_run": ("first run", ""),
    "last_run": ("last run", ""),
    "steps_completed": ("steps", "d"),
    "status_detail": ("what it says", ""),
}


def _layout(columns: str, group: str = "", **headings: str) -> Layout:
    """Name a table's columns in order; `headings` replace the usual ones."""
    names = {name: _COLUMNS.get(name, (name, "")) for name in columns.split()}
    return Layout({n: (headings.get(n, usual), form) for n, (usual, form) in names.items()}, group)


_GROUP = "{model}, {study} on {machine}: {setting}"
_MARGIN = "; margin ±{margin_pct} %"
#: For tables that have no room for a column of GPUs.
_BY_GPUS = "{model} on {num_gpus} × {gpu_name}, {study} on {machine}: {setting}"
_POINT = "after {step} steps: {model} on {machine}, n = {num_seeds}"
_CIS = {"ratio_range": "95 % CIs", "crossing_range": "95 % CIs", "noise_scale_range": "95 % CIs"}

QUESTIONS = _layout("study question answer", "{machine}")
DECISIONS = _layout(
    "num_gpus micro_batch_size action lead_pct ci memory_change_pct energy_change_pct loss form "
    "num_sessions",
    "{model} on {machine}",
    lead_pct="FP8, %",
    memory_change_pct="memory, %",
    energy_change_pct="J per token, %",
)
BESIDE = _layout(
    "num_gpus micro_batch_size action lead_pct ci action_other lead_pct_other ci_other differs",
    "{model}: local ({gpus}), then {machine_other}",
)
LEADS = _layout(
    "num_gpus micro_batch_size sequence_length arm lead_pct lead_range ci num_pairs num_sessions "
    "by_session "
    "tokens_per_second_per_gpu_bf16 tokens_per_second_per_gpu tflops_per_gpu_bf16 tflops_per_gpu "
    "memory_peak_gib memory_change_pct energy_change_pct",
    "{model} on {machine}: {weights}",
    tokens_per_second_per_gpu="FP8",
    tflops_per_gpu="FP8",
    memory_peak_gib="FP8 memory, GiB",
    memory_change_pct="v BF16, %",
    energy_change_pct="energy per token, %",
)
THROUGHPUT = _layout(
    "num_gpus arm num_runs tokens_per_second_per_gpu speedup_pct tflops_per_gpu mfu_bf16_peak_pct "
    "memory_peak_gib memory_change_pct note num_warned",
    _GROUP,
)
STARTUP = _layout(
    "num_gpus arm num_runs startup_launch_seconds startup_imports_seconds startup_device_seconds "
    "startup_model_seconds startup_sharding_seconds startup_rest_seconds startup_seconds "
    "first_step_seconds compile_seconds",
    _GROUP,
)
PEERS = _layout(
    "arm num_runs tokens_per_second_per_gpu range peer_tokens_per_second_per_gpu peer_range ratio "
    "ratio_interval lead_pct peer_lead_pct reserved_gib peer_reserved_gib",
    "{model}, GPUs: {num_gpus}, {study} on {machine}; ours: {setting}; peer: {peer}, "
    "{num_peer_runs} runs",
)
RESTATED = _layout(
    "setting precision tflops_stated mfu_stated_pct tflops mfu_pct lead_pct", "{document}"
)
LOSS_GAP = _layout(
    "arm judged gap_pct gap interval pairs epochs loss_bf16 detectable_pct p_holm num_warned",
    _GROUP + ", GPUs: {num_gpus}" + _MARGIN,
)
PASSES = _layout("arm num_pairs passes", _GROUP)
DATA = _layout(
    "study corpus corpus_sha vocab_size num_train_tokens tokens_seen_max epochs_max num_seeds",
    "{machine}",
)
DOCUMENT_A = _layout(
    "arm num_runs parameters_outside_optimizer_pct loss_start loss_last20_mean "
    "tokens_per_second_per_gpu speedup_pct memory_peak_gib memory_change_pct",
    "{model} on {machine}, {masters} master weights",
)
EFFECTS = _layout(
    "part mean_pct verdict interval share_pct num_pairs p_holm detectable_pct",
    "{model}, {study} on {machine}: {setting}; {masters} master weights" + _MARGIN,
    verdict="at the margin",
    interval="95 % CI, %",
)
EFFECTIVE_BATCH = _layout(
    "effective_batch way gap_pct verdict interval num_pairs loss_bf16 detectable_pct",
    "{arm}, {model}, {study} on {machine}" + _MARGIN,
)
CROSSING = _layout(
    "what ratio_pct ratio_range systematic_pct crossing_batch crossing_range", _POINT, **_CIS
)
SCALE = _layout(
    "step noise_scale noise_scale_range noise_scale_tokens",
    "{model} on {machine}, n = {num_seeds}",
    **_CIS,
)
GRADIENT = _layout(
    "what relative_pct fp32_pct cosine sqnr_db middle_pct worst_pct loss_change", _POINT
)
GEMM_ERROR = _layout(
    "what gemm relative_pct sqnr_db underflow_pct saturated_pct", _POINT, what="recipe"
)
SHARES = _layout("arm num_runs share expected time", "{study} on {machine}")
AUDIT = _layout("num_gpus arm num_runs converted matmul_dtypes moved_pct", _GROUP)
UTILISATION = _layout(
    "num_gpus arm tflops_per_gpu mfu_bf16_peak_pct mfu_mixed_peak_pct mixed_peak_tflops "
    "mfu_achievable_pct achievable_tflops gemm_pct",
    _GROUP,
    mfu_bf16_peak_pct="% of dense BF16 peak",
)
CEILINGS = _layout(
    "model num_tokens num_runs bf16_tflops fp8_tensorwise_tflops fp8_rowwise_tflops spread_pct "
    "copy_tb_per_s",
    "{machine}, {gpu_name}",
)
KERNELS = _layout(
    "arm gemm_fp8 gemm_bf16 attention fused copy optimizer loss_and_other communication "
    "not_computing_ms step_time_ms_median",
    _BY_GPUS,
)
BREAK_EVEN = _layout(
    "num_gpus arm cache warm_up_seconds_bf16 warm_up_seconds step_time_ms_bf16 step_time_ms "
    "break_even_steps",
    _GROUP,
)
COMMUNICATION = _layout(
    "num_gpus arm all_gather_gib all_gather_dtypes all_gather_change_pct reduce_scatter_gib "
    "reduce_scatter_dtypes",
    _GROUP,
)
MEMORY_SPLIT = _layout(
    "arm parameters_gib optimizer_gib working_gib steady_allocated_gib gradients_gib "
    "first_step_allocated_gib steady_reserved_gib num_allocator_events",
    _BY_GPUS,
)
ENERGY = _layout(
    "num_gpus arm joule_per_token change_pct watts_mean clock_sm_mhz_median clock_sm_mhz_min "
    "power_cap_pct",
    _GROUP,
)
PEAKS = _layout("name_part bf16_tflops fp8_tflops memory_tb_per_s source")
PROVENANCE = _layout(
    "hardware driver version_torch version_torchao version_transformers commit",
    "{study} on {machine}, {first_run} to {last_run}: {statuses}",
)
COSTS = _layout("study num_runs gpu_hours first_run last_run", "{machine}")
WARNINGS = _layout("warning num_runs studies", "{machine}")
FAILURES = _layout(
    "model num_gpus arm seed status steps_completed status_detail", "{study} on {machine}"
)
