"""Sizes that nobody here has run: the two answers as a table, and how far to trust them."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.laws.communication import GPUS_PER_NODE, NETWORK
from fp8study.analysis.laws.scale import check_means
from fp8study.report import figures
from fp8study.report.table import Layout
from fp8study.report.words import number, span

SCALE = Layout(
    {
        "label": ("precision", ""), "recomputed": ("layers recomputed", ""),
        "micro_batch_size": ("batch", ".0f"), "memory_gib": ("GiB", ".0f"),
        "tokens_per_second_per_gpu": ("tokens/s a GPU", ",.0f"),
        "lead_pct": ("over BF16, %", "+.0f"), "within_points": ("± points", ".0f"),
        "exposed_pct": ("waits for communication, %", ".1f"),
        "efficiency_pct": ("of one node's tokens/s, %", ".0f"),
    },
    group="{model}, {num_gpus} × NVIDIA H200 on {num_nodes} nodes: modelled",
)  # fmt: skip


def scale_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return what fits of `scale_table` as it is shown."""
    if table.empty:
        return table
    recomputed = table["activation_checkpointing"].map({True: "yes", False: "no"})
    return table.assign(recomputed=recomputed)[table["fits"]]


def scale_words(check: pd.DataFrame, published: pd.DataFrame) -> str:
    """Say what `scale_table` rests on, and what `check_table` and `published_table` show of it."""
    assumed = (
        f"Assumed: {GPUS_PER_NODE} GPUs a node; between nodes {NETWORK.gb_per_s:g} GB/s for each "
        f"GPU (400 Gb/s, four fifths used) and a latency of {NETWORK.hop_us:g} µs."
    )
    if check.empty:
        return f"{assumed} No records of several GPUs hold it to account here."
    means = check_means(check)
    off = [f"{number(row['step_error_pct'], '.1f')} % on {n:.0f}" for n, row in means.iterrows()]
    wide = means.iloc[-1]
    hopeful = published["predicted_pct"] - published["published_pct"]
    measured, law = (number(wide[f"exposed_{side}_pct"], ".1f") for side in ("measured", "law"))
    return (
        f"{assumed} The laws are fitted within one node. There, the time of a step is off by "
        f"{', '.join(off)} GPUs; on {means.index[-1]:.0f} GPUs a step waits for communication for "
        f"{measured} % of its time, by the law for {law} % "
        f"({figures.download(check, 'at-scale-check', 'by model')}). Of the speed that others kept "
        f"on up to 128 GPUs the law promises {span(hopeful, '.1f')} points too much "
        f"({figures.download(published, 'at-scale-published', 'figures and sources')})."
    )
