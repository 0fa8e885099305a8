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
    "label": ("arm", ""),
    "seed": ("seed", "d"),
    "num_gpus": ("GPUs", "d"),
    "num_runs": ("runs", "d"),
    "num_pairs": ("pairs", "d"),
    "num_warned": ("runs with a warning", IF_ANY),
    # Speed and memory.
    "tokens_per_second_per_gpu": ("tokens/s per GPU", ",.0f"),
    "speedup_pct": ("v BF16, %", "+.1f"),
    "tflops_per_gpu": ("TFLOP/s per GPU", ".0f"),
    "mfu_bf16_peak_pct": ("MFU (BF16 peak), %", ".1f"),
    "memory_peak_gib": ("peak memory, GiB", ".1f"),
    "memory_change_pct": ("v BF16, %", "+.1f"),
    "peer_tokens_per_second_per_gpu": ("peer", ",.0f"),
    "peer_range": ("range", ""),
    "ratio": ("ours ÷ peer", ".3f"),
    "num_blocks": ("blocks", ",d"),
    "ratio_interval": ("95 % CI", ""),
    "tokens_per_gpu": ("tokens a step", ",.0f"),
    "reserved_gib": ("GiB", ".1f"),
    "peer_reserved_gib": ("peer", ".1f"),
    # Decisions, leads and switches.
    "micro_batch_size": ("batch", "d"),
    "lead_pct": ("FP8's lead, %", "+.1f"),
    "ci": ("95 % CI, %", ""),
    "gain_pct": ("gain in tokens/s, %", "+.1f"),
    "num_sessions": ("sessions", "d"),
    "recipe": ("precision", ""),
    "action": ("what to do", ""),
    "energy_change_pct": ("energy, %", "+.1f"),
    "loss": ("FP8's loss", ""),
    "form": ("path", ""),
    "lead_pct_other": ("there, %", "+.1f"),
    "ci_other": ("95 % CI, %", ""),
    "action_other": ("what to do there", ""),
    "peer_lead_pct": ("peer's", "+.1f"),
    # Losses.
    "epochs": ("passes", ".1f"),
    "passes": ("passes", ".1f"),
    "gap_pct": ("gap, %", "+.2f"),
    "interval": ("90 % CI, %", ""),
    "judged": ("verdict", ""),
    "unseen_judged": ("unseen: verdict", ""),
    "unseen_gap_pct": ("gap, %", "+.2f"),
    "loss_start": ("loss, first step, nats", ".2f"),
    "loss_last20_mean": ("loss, last 20 steps, nats", ".3f"),
    "parameters_outside_optimizer_pct": ("parameters outside the optimizer, %", ".1f"),
    "mean_pct": ("% of BF16 loss", "+.2f"),
    "share_pct": ("share of the gap, %", ".1f"),
    "corpus_sha": ("SHA-256", ""),
    "vocab_size": ("vocabulary", ",d"),
    "num_train_tokens": ("tokens, held-out ones too", ",d"),
    "tokens_seen_max": ("most seen in a run", ",d"),
    "epochs_max": ("passes", ".2f"),
    "num_seeds": ("seeds", "d"),
    "rate": ("learning rate", ""),
    "lr_warmup_steps": ("warm-up, steps", "d"),
    "starts_from": ("first weights", ""),
    "num_arms": ("arms", "d"),
    "scatter_pct": ("scatter, % of loss", ".2f"),
    "size_pct": ("size of one gap, %", ".2f"),
    "num_to_decide": ("seeds to decide", "d"),
    "risen": ("runs with a rise", ""),
    "where": ("loss", ""),
    "num_judged": ("judged", "d"),
    "span": ("gaps, %", ""),
    "detectable": ("detectable, %", ""),
    "num_few": ("too few seeds", IF_ANY),
    # Noise and precision.
    "what": ("comparison", ""),
    "ratio_pct": ("of sampling error, %", ".1f"),
    "ratio_range": ("95 % CIs, %", ""),
    "systematic_pct": ("systematic, %", ".0f"),
    "error_pct_output": ("output, %", ".2f"),
    "error_pct_grad_input": ("gradient of the input, %", ".2f"),
    "error_pct_grad_weight": ("gradient of the weight, %", ".2f"),
    "to_zero_pct": ("cast to zero, at most, %", ".2f"),
    "crossing_batch": ("equal at batch", ",.0f"),
    "crossing_range": ("95 % CIs", ""),
    # Instruments.
    "mfu_mixed_peak_pct": ("% of mixed peak", ".1f"),
    "mfu_achievable_pct": ("% of GEMM peak", ".1f"),
    "achievable_tflops": ("GEMM peak, TFLOP/s", ",.0f"),
    "gemm_pct": ("GEMMs in the step, % of it", ".0f"),
    "bf16_tflops": ("BF16", ",.4g"),
    "fp8_tflops": ("FP8", ",.4g"),
    "joule_per_token": ("J per token", ".4f"),
    "change_pct": ("v BF16, %", "+.1f"),
    "watts_mean": ("W per GPU", ".0f"),
    "clock_sm_mhz_median": ("SM clock, MHz", ",.0f"),
    "power_cap_pct": ("at the power cap, % of samples", ".0f"),
    # Methods.
    "name_part": ("GPU", ""),
    "memory_tb_per_s": ("memory, TB/s", "g"),
    "version_torch": ("torch", ""),
    "version_torchao": ("torchao", ""),
    "version_transformers": ("transformers", ""),
    "warning": ("what the runs say", ""),
    "steps_completed": ("steps", "d"),
    "status_detail": ("what it says", ""),
}


def _layout(columns: str, group: str = "", **headings: str) -> Layout:
    """Name a table's columns in order; `headings` replace the usual ones."""
    names = {name: _COLUMNS.get(name, (name, "")) for name in columns.split()}
    shown = {n: (headings.get(n, usual), form) for n, (usual, form) in names.items()}
    return Layout(shown, group)


_GROUP = "{model}, {study} on {machine}: {setting}"
_MARGIN = "; margin ±{margin_pct} %"

DECISIONS = _layout(
    "num_gpus micro_batch_size action lead_pct ci memory_change_pct energy_change_pct loss form",
    "{model} on {machine}",
    lead_pct="lead, %",
    memory_change_pct="memory, %",
)
BESIDE = _layout(
    "num_gpus micro_batch_size action lead_pct ci action_other lead_pct_other ci_other differs",
    "{model}: your machine ({gpus}), then {machine_other}",
)
SWITCHES = _layout(
    "setting recipe gain_pct ci num_blocks num_sessions",
    "{model} on {machine}, {gpus}, {setting_plain}",
    setting="switch",
)
THROUGHPUT = _layout(
    "num_gpus arm num_runs tokens_per_second_per_gpu speedup_pct tflops_per_gpu mfu_bf16_peak_pct "
    "memory_peak_gib memory_change_pct note num_warned",
    _GROUP,
)
PEERS = _layout(
    "arm num_runs tokens_per_second_per_gpu range peer_tokens_per_second_per_gpu peer_range ratio "
    "ratio_interval lead_pct peer_lead_pct reserved_gib peer_reserved_gib",
    "{model}, GPUs: {num_gpus}, {study} on {machine}; ours: {setting}; peer: {peer}, "
    "{num_peer_runs} runs",
)
#: As `PEERS`, where the ranges are in a download.
PEER_LEADS = _layout(
    "num_gpus tokens_per_gpu arm tokens_per_second_per_gpu peer_tokens_per_second_per_gpu ratio "
    "ratio_interval num_blocks lead_pct peer_lead_pct reserved_gib peer_reserved_gib",
    "{model}, {study} on {machine}, beside {peer}",
    peer_tokens_per_second_per_gpu="theirs",
    peer_lead_pct="their lead, %",
    reserved_gib="reserved, GiB",
    peer_reserved_gib="theirs, GiB",
)
LOSS_GAP = _layout(
    "label judged gap_pct interval pairs epochs unseen_judged unseen_gap_pct",
    "{title}" + _MARGIN,
)
SCATTER = _layout(
    "model rate lr_warmup_steps starts_from num_arms num_pairs scatter_pct num_to_decide risen",
    num_pairs="pairs",
)
POOLED = _layout(
    "what num_runs num_pairs gap_pct interval size_pct verdict machines",
    "{model}, {study}: {num_steps} steps, learning rate {rate}; margin ±{margin_pct} %",
    num_runs="pairs",
    num_pairs="seeds",
)
SETTLED = _layout(
    "model starts_from num_gpus rate num_steps tokens num_pairs gap_pct interval",
    num_steps="steps",
    tokens="million tokens",
    num_pairs="seeds",
)
VERDICTS = _layout("where num_judged span equivalent different undecided detectable num_few")
PASSES = _layout("label num_pairs passes", "{title}")
DATA = _layout(
    "study corpus corpus_sha vocab_size num_train_tokens tokens_seen_max epochs_max num_seeds",
    "{machine}",
)
DOCUMENT_A = _layout(
    "arm num_runs parameters_outside_optimizer_pct loss_start loss_last20_mean",
    "{model} on {machine}, {masters} master weights",
)
EFFECTS = _layout(
    "part mean_pct verdict interval share_pct",
    "{model}, {study} on {machine}: {setting}; {masters} master weights" + _MARGIN,
    interval="95 % CI, %",
)
CROSSING = _layout(
    "what ratio_pct ratio_range systematic_pct crossing_batch crossing_range",
    "after {step} steps: {model} on {corpus}, {machine}, n = {num_seeds}",
)
GEMMS = _layout(
    "what error_pct_output error_pct_grad_input error_pct_grad_weight to_zero_pct",
    "{model} on {corpus}, {machine}",
    what="precision",
)
UTILISATION = _layout(
    "num_gpus arm tflops_per_gpu mfu_bf16_peak_pct mfu_mixed_peak_pct mfu_achievable_pct "
    "achievable_tflops gemm_pct",
    _GROUP,
    mfu_bf16_peak_pct="% of dense BF16 peak",
)
ENERGY = _layout(
    "num_gpus arm joule_per_token change_pct watts_mean clock_sm_mhz_median power_cap_pct",
    _GROUP,
)
PEAKS = _layout("name_part bf16_tflops fp8_tflops memory_tb_per_s source")
PROVENANCE = _layout(
    "hardware driver version_torch version_torchao version_transformers commit",
    "{study} on {machine}, {first_run} to {last_run}: {statuses}",
)
WARNINGS = _layout("warning num_runs studies", "{machine}")
FAILURES = _layout(
    "model num_gpus arm seed status steps_completed status_detail", "{study} on {machine}"
)
