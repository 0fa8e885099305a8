"""Sizes that nobody here has run: the two answers as a table, and how far to trust them."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.laws.communication import GPUS_PER_NODE, NETWORK
from fp8study.report.table import Layout
from fp8study.report.words import escape, number, recipe, span

SCALE = Layout(
    {
        "label": ("precision", ""), "recomputed": ("layers recomputed", ""),
        "micro_batch_size": ("batch", ".0f"), "memory_gib": ("GiB", ".0f"), "fit": ("fits", ""),
        "tokens_per_second_per_gpu": ("tokens/s a GPU", ",.0f"),
        "lead_pct": ("over BF16, %", "+.0f"), "within_points": ("± points", ".0f"),
        "received_gib": ("receives a step, GiB", ",.0f"),
        "between_gib": ("of it from the network, GiB", ",.0f"),
        "exposed_pct": ("waits for it, %", ".1f"),
        "efficiency_pct": ("of one node's tokens/s, %", ".0f"),
    },
    group="{model}, {num_gpus} × NVIDIA H200 on {num_nodes} nodes: modelled",
)  # fmt: skip


def scale_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return `scale_table` as it is shown."""
    if table.empty:
        return table
    said = {True: "yes", False: "no"}
    recomputed = table["activation_checkpointing"].map(said)
    return table.assign(recomputed=recomputed, fit=table["fits"].map(said))


def scale_words(check: pd.DataFrame, published: pd.DataFrame) -> str:
    """Say what `scale_table` rests on, and what `check_table` and `published_table` show of it."""
    assumed = (
        f"All of it is modelled. Assumed: {GPUS_PER_NODE} GPUs a node; between nodes "
        f"{NETWORK.gb_per_s:g} GB/s for each GPU (400 Gb/s, four fifths used) and "
        f"{NETWORK.hop_us:g} µs from one to the next."
    )
    if check.empty:
        return f"{assumed} No records of several GPUs hold it to account here."
    off = [
        f"{number(_mean(rows, 'step_error_pct', 'num_cells'), '.1f')} % on {num}"
        for num, rows in check.groupby("num_gpus")
    ]
    seen = check[check["num_profiled"] > 0]
    measured, law, moved = (
        number(_mean(seen, name, "num_profiled"), ".1f")
        for name in ("exposed_measured_pct", "exposed_law_pct", "bytes_error_pct")
    )
    profiled = (
        f" Profiled steps of several moved other bytes than the law says by {moved} %, and waited "
        f"for {measured} % of their time where the law says {law} %."
    )
    others = [
        f"{recipe(row['precision'])} from {row['from_gpus']} to {row['to_gpus']} "
        f"{row['gpu_name']}s {number(row['published_pct'], '.1f')} % "
        f"(law: {number(row['predicted_pct'], '.1f')} %; "
        f"[source]({row['source']}))"
        for _, row in published.iterrows()
    ]
    hopeful = published["predicted_pct"] - published["published_pct"]
    return (
        f"{assumed} Calibrated on GPUs of one node, where a step is off by {', '.join(off)}."
        f"{profiled if len(seen) else ''} Of tokens per second and GPU others kept, with "
        f"{escape(published['model'].iloc[0])}: {'; '.join(others)}. So the law is "
        f"{span(hopeful, '.1f')} points too hopeful there."
    )


def _mean(rows: pd.DataFrame, column: str, weights: str) -> float:
    """Return a mean over cells from means over groups of them."""
    return float((rows[column] * rows[weights]).sum() / rows[weights].sum())
