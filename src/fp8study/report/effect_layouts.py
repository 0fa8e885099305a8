"""How the tables of the page on attribution are shown."""

from __future__ import annotations

from fp8study.report.page import DOCUMENT_A, Layout

EFFECTS = Layout(
    {
        "part": ("part", ""),
        "num_pairs": ("n", "d"),
        "mean_pct": ("% of BF16 loss", "+.2f"),
        "interval": ("95 % interval, %", ""),
        "p_holm": ("p, Holm", ".2g"),
        "verdict": ("at the margin", ""),
        "detectable_pct": ("detectable, %", ".2f"),
    },
    "{model}, {study} on {machine}: {setting}; {masters} masters; margin ±{margin_pct} %",
)
FACTORS = Layout(
    {
        "factor": ("factor", ""),
        "num_runs": ("runs", "d"),
        "between_pct": ("share of the spread, %", ".1f"),
        "spread_within": ("standard deviation left, nats", ".3f"),
        "p_value": ("p", ".2g"),
    },
    "{model}, {study} on {machine}",
)
CORNERS = Layout(
    {
        **DOCUMENT_A.columns,
        "arm": ("arm", ""),
        "memory_change_pct": ("v BF16, %", "+.1f"),
    },
    "{model} on {machine}, {masters} masters",
)
EFFECTIVE_BATCH = Layout(
    {
        "effective_batch": ("effective batch", ".0f"),
        "way": ("reached by", ""),
        "num_pairs": ("n", "d"),
        "loss_bf16": ("BF16 loss", ".3f"),
        "gap_pct": ("gap, %", "+.2f"),
        "interval": ("interval of the gap, %", ""),
        "detectable_pct": ("detectable, %", ".2f"),
        "verdict": ("verdict", ""),
    },
    "{arm}, {model}, {study} on {machine}; margin ±{margin_pct} %",
)
