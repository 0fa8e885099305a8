"""The figures of noise and effect: the ladder, and the gap by batch."""

from __future__ import annotations

import math
import textwrap

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from fp8study.analysis.floors import AGAIN, FAULT, SEED
from fp8study.report.plotstyle import (
    DASHED,
    GREY,
    add_legend,
    colour,
    message_figure,
    panels,
    signed_ticks,
)

_MARKS = {"one sequence": "o", "GPUs": "s", "accumulation": "^", "micro-batch": "D"}
_GAP = "loss gap to BF16, %"


def ladder_figure(table: pd.DataFrame, empty: str = "No repeated arms yet") -> Figure:
    """Draw how far apart two runs end, one rung for each thing that may tell them apart.

    What is equal to the last digit lies on the left edge, hollow, and the legend says so.
    """
    if table.empty:
        return message_figure(empty)
    keys = ["model", "study", "machine"]
    height = 0.5 + 0.22 * table.groupby(keys)["rung"].nunique().max()
    figure, axes = panels(table, keys, "{}: {} on {}".format, ("", ""), height, columns=1)
    axes[-1][0].set_xlabel("difference in final loss, %")
    equal = table["difference_pct"] == 0
    floor = 1e-4 if equal.all() else table.loc[~equal, "difference_pct"].min() / 3
    first = {AGAIN: 0, SEED: 1, FAULT: 3}
    for axis, _, group in axes:
        rungs = sorted(group["rung"].unique(), key=lambda rung: (first.get(rung, 2), rung))
        for place, rung in enumerate(rungs):
            rows = group[group["rung"] == rung]
            shade = GREY if rung in (AGAIN, SEED) else colour(rows["precision"].iloc[0])
            shown = rows["difference_pct"].clip(lower=floor)
            for exact, dots in shown.groupby(equal[rows.index]):
                axis.plot(
                    dots, [place] * len(dots), "o", color=shade,
                    markerfacecolor="white" if exact else shade, alpha=0.55, markersize=6,
                    clip_on=False,
                )  # fmt: skip
            axis.plot([shown.median()] * 2, [place - 0.28, place + 0.28], color=shade, lw=2.2)
            median = f"{rows['difference_pct'].median():.2g} %"
            axis.text(1.01, place, median, transform=axis.get_yaxis_transform(), va="center")
        axis.set_xscale("log")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlim(floor, 2 * max(table["difference_pct"].max(), 3 * floor))
        axis.set_yticks(range(len(rungs)), [textwrap.fill(rung, 18) for rung in rungs], fontsize=8)
        axis.set_ylim(-0.6, len(rungs) - 0.4)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if equal.any():
        add_legend(figure, [_mark("equal to the last digit", "o", "white")])
    return figure


def effective_batch_figure(table: pd.DataFrame, empty: str = "No records yet") -> Figure:
    """Draw the healthy loss gap against the effective batch, by the way that it was reached."""
    table = table[table["device"] == "cuda"]
    if table.empty:
        return message_figure(empty)
    figure, drawn = panels(
        table, ["model", "machine", "margin_pct"], "{} on {}; dashed: margin of ±{:g} %".format,
        ("effective batch, sequences per optimizer step", _GAP), 3.2, columns=1,
    )  # fmt: skip
    ways = sorted(table["way"].unique(), key=[*_MARKS, *table["way"]].index)
    recipes = list(table["precision"].unique())
    for axis, (_, _, margin), group in drawn:
        for _, row in group.iterrows():
            shift = 0.03 * recipes.index(row["precision"])
            if row["effective_batch"] != 1:
                shift += 0.09 * (ways.index(row["way"]) - len(ways) / 2)
            place, shade = math.log2(row["effective_batch"]) + shift, colour(row["precision"])
            # Without an interval nothing is drawn of it.
            axis.plot([place] * 2, [row["gap_pct_low_95"], row["gap_pct_high_95"]], color=shade)
            axis.plot(place, row["gap_pct"], _MARKS.get(row["way"], "v"), color=shade, markersize=7)
        for edge in (-margin, margin):
            axis.axhline(edge, color=GREY, linewidth=1, linestyle=DASHED)
        axis.axhline(0, color=GREY, linewidth=0.8)
        sizes = sorted(group["effective_batch"].unique())
        axis.set_xlim(math.log2(sizes[0]) - 0.4, math.log2(sizes[-1]) + 0.4)
        axis.set_xticks([math.log2(size) for size in sizes], [f"{size:g}" for size in sizes])
        axis.yaxis.set_major_formatter(signed_ticks)
    add_legend(figure, [_mark(way, _MARKS.get(way, "v"), GREY) for way in ways])
    return figure


def _mark(label: str, marker: str, face: str) -> Line2D:
    return Line2D([], [], label=label, marker=marker, ls="", color=GREY, markerfacecolor=face)
