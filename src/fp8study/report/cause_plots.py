"""The figures of noise and effect: the ladder, and the gap by batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from textwrap import fill

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from fp8study.analysis.floors import AGAIN, FAULT, SEED
from fp8study.report.plotstyle import (
    DASHED,
    GREY,
    add_heading,
    add_legend,
    colour,
    message_figure,
    panels,
    signed_ticks,
)
from fp8study.report.words import machine_name

_MARKS = {"one sequence": "o", "GPUs": "s", "accumulation": "^", "micro-batch": "D"}
_GAP = "loss gap to BF16, %"


def ladder_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw how far apart two runs end, one rung for each thing that may tell them apart.

    What is equal to the last digit lies on the left edge, hollow, and the legend says so.
    """
    if table.empty:
        return message_figure(empty)
    lines = list(_rungs(table))
    label = ("difference in final loss, %", "")
    height = 0.24 * len(lines)
    figure, [(axis, _, _)] = panels(table[:1], ["model"], lambda _: "", label, height)
    equal = table["difference_pct"] == 0
    floor = 1e-4 if equal.all() else table.loc[~equal, "difference_pct"].min() / 3
    for place, (name, rows) in enumerate(lines):
        if rows is None:
            add_heading(axis, place, name)
            continue
        shade = GREY if name in (AGAIN, SEED) else colour(rows["precision"].iloc[0])
        shown = rows["difference_pct"].clip(lower=floor)
        for exact, dots in shown.groupby(equal[rows.index]):
            axis.plot(
                dots, [place] * len(dots), "o", color=shade,
                markerfacecolor="white" if exact else shade, alpha=0.55, markersize=6,
                clip_on=False,
            )  # fmt: skip
        axis.plot([shown.median()] * 2, [place - 0.3, place + 0.3], color=shade, lw=2.2)
        median = f"{rows['difference_pct'].median():.2g} %"
        axis.text(1.01, place, median, transform=axis.get_yaxis_transform(), va="center")
    axis.set_xscale("log")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(floor, 2 * max(table["difference_pct"].max(), 3 * floor))
    named = {place: name for place, (name, rows) in enumerate(lines) if rows is not None}
    axis.set_yticks([*named], [fill(name, 20) for name in named.values()], fontsize=9)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.grid(False, axis="y")
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if equal.any():
        add_legend(figure, [_mark("equal to the last digit", "o", "white")])
    return figure


def _rungs(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame | None]]:
    """Yield the figure's lines from above: a setting's name without rows, then its rungs."""
    last = {FAULT: 0, SEED: 2, AGAIN: 3}
    for (model, study, machine), group in table.groupby(["model", "study", "machine"], sort=False):
        yield f"{model}: {study} on {machine_name(machine)}", None
        for rung in sorted(group["rung"].unique(), key=lambda rung: (last.get(rung, 1), rung)):
            yield str(rung), group[group["rung"] == rung]


def effective_batch_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw the healthy loss gap against the effective batch, by the way that it was reached."""
    table = table[table["device"] == "cuda"]
    if table.empty:
        return message_figure(empty)
    figure, drawn = panels(
        table, ["model", "machine", "margin_pct"],
        lambda model, machine, margin: (
            f"{model} on {machine_name(machine)}; dashed: margin of ±{margin:g} %"
        ),
        ("effective batch, sequences per optimizer step", _GAP), 3.2,
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
