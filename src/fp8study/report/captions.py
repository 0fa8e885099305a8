"""What the figures show, in a sentence of numbers for their captions: plain Markdown.

Each takes the table that its figure draws, and returns nothing where the table is empty.
"""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.instruments import KINDS
from fp8study.analysis.runs.pairing import healthy, in_fp8
from fp8study.core.recipes import FP8_RECIPES
from fp8study.report.words import count, each_machine, escape, number, recipe, span


def _listed(pairs: dict[str, str]) -> str:
    return ", ".join(f"{escape(name)} {figure}" for name, figure in pairs.items())


def ends(table: pd.DataFrame) -> str:
    """Say where the arms of `document_a_table` end, in nats."""
    parts = []
    for masters, rows in table.groupby("masters", sort=False):
        losses = {
            row["arm"].partition(" (")[0]: number(row["loss_last20_mean"], ".2f")
            for _, row in rows.iterrows()
        }
        parts.append(f"with {masters} master weights {_listed(losses)}")
    return f"Final losses, nats: {'; '.join(parts)}." if parts else ""


@each_machine()
def verdict_counts(gaps: pd.DataFrame) -> str:
    """Count the verdicts of a table of loss gaps; stale arms and those without one are left out."""
    judged = healthy(gaps[gaps["gap_pct_low_90"].notna()])
    if judged.empty:
        return ""
    noun = "gap" if len(judged) == 1 else "gaps"
    counts = _counted(judged["verdict"])
    return f"Mean {noun} of {span(judged['gap_pct'], '+.2f', ' %')}: {counts}."


def _counted(verdicts: pd.Series) -> str:
    return ", ".join(f"{n} {verdict}" for verdict, n in verdicts.value_counts().items())


@each_machine()
def batches(table: pd.DataFrame) -> str:
    """Say how large the gaps of `effective_batch_table` are, and what came of them."""
    known = table.dropna(subset=["gap_pct_low_90"])
    if known.empty:
        return ""
    sizes = span(known["effective_batch"], ".0f")
    return (
        f"Gaps of {span(known['gap_pct'], '+.2f', ' %')} in {count(len(known), 'way')} to an "
        f"effective batch of {sizes}: {_counted(known['verdict'])}."
    )


@each_machine()
def rungs(table: pd.DataFrame) -> str:
    """Give the medians of `fp8study.report.rows.rungs`, % of the loss, and read hollow marks."""
    kinds = table["rung"].astype(str).str.replace(r"^FP8\b.*", "FP8", regex=True)
    by_rung = {kind: span(rows["median_pct"], ".2f") for kind, rows in table.groupby(kinds)}
    hollow = " Hollow: equal to the last digit." * bool(table["num_equal"].any())
    return f"Medians: {_listed(by_rung)} %.{hollow}"


@each_machine()
def kernels(table: pd.DataFrame) -> str:
    """Say how much of the kernels' time is GEMMs, by precision, from `kernels_table`."""
    total = table[[*KINDS]].sum(axis=1)
    share = 100 * table[["gemm_fp8", "gemm_bf16"]].sum(axis=1) / total
    by_arm = {recipe(name): span(values.dropna(), ".0f", " %")
              for name, values in share.groupby(table["precision"])}  # fmt: skip
    return f"GEMMs' share of kernel time: {_listed(by_arm)}."


@each_machine()
def memory(table: pd.DataFrame) -> str:
    """Say how much of the peak is kept between steps, from `memory_split_table`."""
    kept = table["parameters_gib"] + table["optimizer_gib"]
    share = (100 * kept / (kept + table["working_gib"])).dropna()
    if share.empty:
        return ""
    return f"Parameters and optimizer states are {span(share, '.0f', ' %')} of the peak."


def crossings(table: pd.DataFrame) -> str:
    """Say at which effective batch FP8's error equals the sampling error."""
    if table.empty:
        return ""
    found = table[table["precision"].isin(FP8_RECIPES) & table["crossing_batch"].gt(0)]
    each = found[found["scope"] == "all"]["crossing_batch"]
    return (
        f"FP8's error equals the sampling error at a batch of {span(each, ',.0f')} sequences, over "
        "all parameters."
    )


def layers(table: pd.DataFrame) -> str:
    """Give each recipe's median over converted weights, the smallest error first."""
    if table.empty:
        return ""
    medians = (
        table[table["is_fp8"] & in_fp8(table) & table["reference"].eq("bf16")]
        .groupby("precision")["sqnr_db"]
        .median()
    )
    if medians.empty:
        return ""
    order = medians.sort_values(ascending=False)
    found = "; ".join(f"{recipe(name)} {value:.0f} dB" for name, value in order.items())
    return f"Medians over all weights in FP8 and all points of training: {found}."


def predictions(leads: pd.DataFrame, memory: pd.DataFrame) -> str:
    """Say how far the laws are off on average, from `lead_verdicts` and `memory_verdicts`."""
    if leads.empty or memory.empty:
        return ""
    return (
        f"By test, predictions are off by {span(leads['mean_points'], '.1f')} points of lead and "
        f"by {span(memory['mean_pct'], '.1f', ' %')} of memory, on average."
    )
