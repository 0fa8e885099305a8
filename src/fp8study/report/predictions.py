"""The page of predictions: how far the laws are off, in words, in tables and in one figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fp8study.analysis.laws.account import (
    CLEAR_PCT,
    KEPT_OUT,
    LEFT_OUT,
    MEAN_POINTS,
    MEMORY_PCT,
    MOST_POINTS,
    OTHER_GPU,
)
from fp8study.analysis.laws.cells import Cell, cells_of
from fp8study.analysis.laws.communication import NETWORK
from fp8study.analysis.laws.speed import HOST_PCT
from fp8study.analysis.runs.frames import run_path
from fp8study.analysis.runs.pairing import together
from fp8study.analysis.scale import check_means
from fp8study.core.hardware import GPUS_PER_NODE
from fp8study.core.records import StoredRun
from fp8study.report import figures
from fp8study.report.plotstyle import GREY, add_legend, colour, mark, message_figure, panels
from fp8study.report.table import Layout
from fp8study.report.words import count, how_to_get, number, recipe, span

#: By what each test predicts.
TESTS = {
    LEFT_OUT: "the other models' cells",
    KEPT_OUT: "earlier runs' cells",
    OTHER_GPU: "other models' cells, of an H200 and this GPU",
}
_FILLS: dict[str, Literal["full", "none", "left"]] = {
    LEFT_OUT: "none", KEPT_OUT: "full", OTHER_GPU: "left",
}  # fmt: skip
_GOALS = {"goal": ("goal", ""), "of": ("predicted by", ""), "num_cells": ("cells", "d")}
LEAD_GOALS = Layout(_GOALS | {
    "mean_points": (f"off on average (goal: {MEAN_POINTS:g})", ".1f"),
    "host_points": ("host busy", ".1f"), "gpu_points": ("elsewhere", ".1f"),
    "most_points": (f"nine of ten within (goal: {MOST_POINTS:g})", ".1f"),
    "missed": ("beyond that goal", ""), "worst": ("worst", ""),
    "sides": (f"wrong sign beyond ±{CLEAR_PCT:g} %", ""),
})  # fmt: skip
MEMORY_GOALS = Layout(_GOALS | {
    "mean_pct": ("off on average, %", ".1f"),
    "num_missed": (f"by more than {MEMORY_PCT:g} % (goal: none)", "d"),
    "worst": ("worst", ""), "worst_pct": ("off by, %", "+.1f"),
})  # fmt: skip
#: The law over links that are slower than those it was fitted over.
LINKS = Layout(
    {
        "model": ("model", ""),
        "num_gpus": ("GPUs", "d"),
        "path": ("path", ""),
        "micro_batch_size": ("batch", "d"),
        "measured_pct": ("FP8's lead, measured, %", "+.1f"),
        "predicted_pct": ("by the law", "+.1f"),
        "bf16_error_pct": ("BF16's step, off by %", "+.1f"),
        "fp8_error_pct": ("FP8's step, off by %", "+.1f"),
    }
)
#: Sizes that nobody here has run.
SCALE = Layout(
    {
        "label": ("precision", ""), "recomputed": ("layers recomputed", ""),
        "micro_batch_size": ("batch", ".0f"), "memory_gib": ("GiB", ".0f"),
        "tokens_per_second_per_gpu": ("tokens/s a GPU, at most", ",.0f"),
        "lead_pct": ("over BF16, %", "+.0f"), "within_points": ("± points", ".0f"),
        "exposed_pct": ("waits for communication, %", ".0f"),
        "efficiency_pct": ("of one node's tokens/s, %", ".0f"),
    },
    group="{model}, {num_gpus} × NVIDIA H200 on {num_nodes} nodes: modelled",
)  # fmt: skip


def cells(stored: Sequence[StoredRun]) -> list[Cell]:
    """Return the measured cells of the report's records."""
    return cells_of([(run_path(run), run.record) for run in stored])


def lead_goals(leads: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return how far FP8's predicted lead is off, test by test, in the words of `LEAD_GOALS`.

    `leads` and `verdicts` are from `account.lead_table` and `account.lead_verdicts`.
    """
    if verdicts.empty:
        return verdicts
    goals = _goals(leads, verdicts)
    return goals.assign(
        worst=[
            f"{row['worst']}: {number(row['worst_points'], '+.1f')}" for _, row in goals.iterrows()
        ],
        sides=[f"{row['num_wrong_side']} of {row['num_clear']}" for _, row in verdicts.iterrows()],
        missed=[_missed(row) for _, row in verdicts.iterrows()],
        host_points=verdicts["host_points"].where(verdicts["num_host"] > 0),
        gpu_points=verdicts["gpu_points"].where(verdicts["num_host"] < verdicts["num_cells"]),
    )


def memory_goals(memory: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return the same of memory, in the words of `MEMORY_GOALS`."""
    return verdicts if verdicts.empty else _goals(memory, verdicts)


def _goals(table: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    runs = table.groupby("test")["run_ids"].agg(together)
    return verdicts.assign(
        goal=verdicts["is_met"].map({True: "✓\u00a0met", False: "✗\u00a0missed"}),
        of=verdicts["test"].map(TESTS),
        worst=[text.partition(", ")[0] for text in verdicts["worst"]],
        run_ids=verdicts["test"].map(runs),
    )


def _missed(row: pd.Series) -> str:
    """Say of which models the cells are that are off by more than the goal, and how small."""
    models = Counter(row["off_models"])
    if not models:
        return "0"
    named = ", ".join(f"{number} {model}" for model, number in models.most_common())
    return f"{named}; up to {row['off_tokens']:,.0f} tokens"


def session_words(sessions: pd.DataFrame) -> str:
    """Say how far one setting's lead moves by itself, from study to study on one kind of GPU."""
    if sessions.empty:
        return "**Why:** no setting was run in several studies yet."
    busy = sessions["host_pct"] > HOST_PCT
    parts = [
        f"{number(group.mean(), '.1f')} {where} (up to "
        f"{number(group.max(), '.1f')}; {count(len(group), 'setting')})"
        for where, group in (
            (f"where launching kernels takes more than {HOST_PCT:g} % of the GPU's time",
             sessions.loc[busy, "spread_points"]),
            ("elsewhere", sessions.loc[~busy, "spread_points"]),
        ) if len(group)
    ]  # fmt: skip
    return (
        "**Why.** In one setting, on one kind of GPU, the measured lead itself moved from study to "
        f"study, in points on average: {', '.join(parts)}. The laws take every host for equally "
        "fast at launching kernels; `fp8study advise --measure` times this one."
    )


def beyond_words(found: pd.DataFrame) -> str:
    """Say how many leads beyond the law's cells their intervals hold, from `beyond_table`.

    Empty where there are none.
    """
    far = found[found["num_beyond"] > 0] if len(found) else found
    if far.empty:
        return ""
    total, within, unwidened = far[["num_leads", "num_within", "num_unwidened"]].sum()
    off = (far["num_leads"] * far["mean_points"]).sum() / total
    return (
        "**Beyond.** A lead that is beyond the law's cells in *n* things, as another GPU or a "
        "larger batch, has an interval √(1 + *n*) times as wide, as if each added an independent "
        f"error. Made of the errors of all other leads, such intervals hold {within} of {total} "
        f"leads, in up to {count(far['num_beyond'].max(), 'thing')}, and {unwidened} if they were "
        f"no wider; these are off by {number(off, '.1f')} points on average."
    )


def freeze_words(freezes: pd.DataFrame) -> str:
    """Say which freeze is in use, and whether that is right."""
    used = freezes.iloc[-1]
    num_leads = used["num_known"] + used["num_later"]
    if not num_leads:
        return f"No GPU records to hold the freezes to yet: {how_to_get()}."
    rule = ""
    if used["num_known"]:  # else one's own few leads would choose among the freezes
        off = [freezes[f"num_{part}"] * freezes[f"{part}_points"].fillna(0.0)
               for part in ("known", "later")]  # fmt: skip
        points = off[0] + off[1]
        earlier = "**an earlier one was better: bring it back**"
        state = "none was better" if points.iloc[-1] == points.min() else earlier
        rule = f": over all {num_leads} leads, {state}"
    return (
        f"The constants' set {used['freeze']} is in use{rule}. The form of the laws was chosen "
        "with the records of all sets at hand: only later runs test it."
    )


def links_words(table: pd.DataFrame) -> str:
    """Say what `scale.links_table` is of."""
    if table.empty:
        return "No run here was over other links than the GPUs have."
    rate = number(table["link_gb_per_s"].iloc[0], ".1f")
    return (
        "H200s that leave NVLink unused stand in for GPUs joined by PCIe: NCCL goes through the "
        f"host's memory, at {rate} GB/s. The law was fitted to none of these runs and is given "
        "that rate alone."
    )


def scale_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return what fits of `scale_table` as it is shown."""
    if table.empty:
        return table
    recomputed = table["activation_checkpointing"].map({True: "yes", False: "no"})
    return table.assign(recomputed=recomputed)[table["fits"]]


def scale_words(check: pd.DataFrame, published: pd.DataFrame) -> str:
    """Say what `scale_table` rests on, and what `check_table` and `published_table` show of it."""
    assumed = (
        "**Beyond what was measured: take speeds as upper bounds.** Assumed: "
        f"{GPUS_PER_NODE} GPUs a node; between nodes {NETWORK.gb_per_s:g} GB/s for each "
        f"GPU (400 Gb/s, four fifths used) and a latency of {NETWORK.hop_us:g} µs."
    )
    if check.empty:
        return f"{assumed} No records of several GPUs hold it to account here."
    means = check_means(check)
    off = [f"{number(row['step_error_pct'], '.0f')} % on {n:.0f}" for n, row in means.iterrows()]
    wide = means.iloc[-1]
    hopeful = published["predicted_pct"] - published["published_pct"]
    measured, law = (number(wide[f"exposed_{side}_pct"], ".0f") for side in ("measured", "law"))
    return (
        f"{assumed} The laws are fitted within one node, where the time of a step is off by "
        f"{', '.join(off)} GPUs; on {means.index[-1]:.0f} GPUs a step waits for communication for "
        f"{measured} % of its time, predicted: {law} % "
        f"({figures.download(check, 'at-scale-check', 'by model')}). Of the speed that others kept "
        f"on up to 128 GPUs the law promises {span(hopeful, '.0f')} points too much "
        f"({figures.download(published, 'at-scale-published', 'figures and sources')})."
    )


def figure(leads: pd.DataFrame, memory: pd.DataFrame, empty: str) -> Figure:
    """Draw predicted against measured: FP8's lead with its goal as a band, and memory."""
    names = {"lead": "FP8's lead over BF16, %", "memory": "Peak memory per GPU, GiB"}
    parts = [
        table.assign(what=what, x=table[x], y=table[y])
        for what, table, x, y in (("lead", leads, "measured_pct", "predicted_pct"),
                                  ("memory", memory, "measured_gib", "predicted_gib"))
        if len(table)
    ]  # fmt: skip
    if not parts:
        return message_figure(empty)
    points = pd.concat(parts)
    drawing, drawn = panels(
        points, ["what"], lambda what: names[what], ("measured", "predicted"), height=3.2
    )
    for axis, _, group in drawn:
        ends = [min(group["x"].min(), group["y"].min()), max(group["x"].max(), group["y"].max())]
        axis.plot(ends, ends, color=GREY, lw=1)
        if group["what"].iloc[0] == "lead":
            low, high = ([end + side for end in ends] for side in (-MOST_POINTS, MOST_POINTS))
            axis.fill_between(ends, low, high, color=GREY, alpha=0.15, lw=0)
        for (test, precision), dots in group.groupby(["test", "precision"]):
            shade = colour(str(precision))
            axis.plot(dots["x"], dots["y"], mark(str(precision)), color=shade, ms=5, alpha=0.7,
                      mec=shade, mew=0.8, fillstyle=_FILLS[str(test)])  # fmt: skip
    shown = [
        Line2D([], [], marker=mark(name), ls="", color=colour(name), label=recipe(name))
        for name in points["precision"].unique()
    ]
    shown += [
        Line2D([], [], marker="o", ls="", color=GREY, fillstyle=_FILLS[t], label=f"by {TESTS[t]}")
        for t in points["test"].unique()
    ]
    add_legend(drawing, shown)
    return drawing
