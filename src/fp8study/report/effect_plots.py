"""The figures of noise and effect: the ladder, the gap along a run, the gap by batch.

As in `fp8study.report.plots`, colour names the precision and nothing touches pyplot's state.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fp8study.analysis.floors import AGAIN, FAULT, SEED
from fp8study.report.plotstyle import (
    GREY,
    add_legend,
    colour,
    list_arms,
    message_figure,
    panels,
    set_title,
)

_MARKS = {"one sequence": "o", "GPUs": "s", "accumulation": "^", "micro-batch": "D"}
_LINES = ("-", (0, (3.5, 2)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (7, 2)))


def ladder_figure(table: pd.DataFrame, empty: str = "No repeated arms yet") -> Figure:
    """Draw how far apart two runs end, one rung for each thing that may tell them apart.

    Args:
        table: From `fp8study.analysis.floors.ladder_table`.
        empty: What to say if there is none.
    """
    if table.empty:
        return message_figure(empty)
    groups = list(table.groupby(["machine", "study", "model"], sort=False))
    height = 0.8 + 0.27 * max(group["rung"].nunique() for _, group in groups)
    figure, axes = panels(len(groups), height=height, columns=1)
    positive = table.loc[table["difference_pct"] > 0, "difference_pct"]
    floor = positive.min() / 3 if len(positive) else 1e-4
    for axis, ((machine, study, model), group) in zip(axes, groups, strict=True):
        _ladder_panel(axis, group, floor)
        axis.set_xlim(floor, 2 * max(table["difference_pct"].max(), 3 * floor))
        set_title(axis, f"{model}: {study} on {machine}")
        axis.set_xlabel("difference in final loss, %")
    return figure


def _ladder_panel(axis: Axes, group: pd.DataFrame, floor: float) -> None:
    """Draw one panel; what is exactly equal lies on the left edge, hollow."""
    first = {AGAIN: 0, SEED: 1, FAULT: 3}
    rungs = sorted(group["rung"].unique(), key=lambda rung: (first.get(rung, 2), rung))
    for place, rung in enumerate(rungs):
        rows = group[group["rung"] == rung]
        shade = GREY if rung in (AGAIN, SEED) else colour(rows["precision"].iloc[0])
        values = rows["difference_pct"]
        shown = values.clip(lower=floor)
        for equal, face in ((values == 0, "white"), (values > 0, shade)):
            if not equal.any():
                continue  # unclipped and empty, it would confuse the layout
            axis.plot(
                shown[equal], [place] * int(equal.sum()), "o", color=shade, markerfacecolor=face,
                alpha=0.55, markersize=6, clip_on=False,
            )  # fmt: skip
        axis.plot([shown.median()] * 2, [place - 0.28, place + 0.28], color=shade, linewidth=2.2)
    axis.set_xscale("log")
    axis.set_yticks(range(len(rungs)), rungs)
    axis.set_ylim(-0.6, len(rungs) - 0.4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def gap_step_figure(
    gaps: pd.DataFrame, spread: pd.DataFrame, empty: str = "No pairs with curves yet"
) -> Figure:
    """Draw the healthy loss gap against the step, over the spread of BF16 seeds.

    Args:
        gaps: From `gaps.gap_by_step`. Settings without a spread are left out: there a gap
            has nothing to be compared with.
        spread: From `fp8study.analysis.losses.seed_spread`.
        empty: What to say if nothing is left.
    """
    place = ["machine", "study", "model", "num_gpus", "setting"]
    bands = dict(iter(spread.groupby(place, sort=False)))
    groups = [(key, rows) for key, rows in gaps.groupby(place, sort=False) if key in bands]
    if not groups:
        return message_figure(empty)
    figure, axes = panels(len(groups), height=2.6)
    arms = [(arm, precision) for arm, precision, _ in list_arms(gaps.assign(stale=False))]
    styles: dict[str, Any] = {
        arm: _LINES[number % len(_LINES)] for number, (arm, _) in enumerate(arms)
    }
    for axis, (key, rows) in zip(axes, groups, strict=True):
        band = bands[key].groupby("step")["spread_pct"].mean()
        axis.fill_between(band.index.astype(float), -band, band, color="#dddddd", linewidth=0)
        for (arm, precision), arm_rows in rows.groupby(["arm", "precision"], sort=False):
            shade, line = colour(str(precision)), styles[str(arm)]
            for _, seed in arm_rows.groupby("seed"):
                axis.plot(seed["step"], seed["gap_pct"], color=shade, alpha=0.2, linewidth=0.7)
            mean = arm_rows.groupby("step")["gap_pct"].mean()
            axis.plot(mean.index, mean, color=shade, linewidth=1.8, linestyle=line)
        axis.axhline(0, color=GREY, linewidth=0.8)
        # Linear about zero, logarithmic beyond: seeds differ by many times what precisions do.
        axis.set_yscale("symlog", linthresh=0.1)
        axis.yaxis.set_major_formatter(_signed)
        machine, study, model, num_gpus, setting = key
        where = f"{num_gpus} GPU{'' if num_gpus == 1 else 's'}"
        set_title(
            axis, f"{model}, {where}: {study} on {machine}\n{textwrap.fill(str(setting), 44)}"
        )
        axis.set_xlabel("step")
        axis.set_ylabel("loss gap to BF16, %")
    shown = set(pd.concat([rows for _, rows in groups])["arm"])
    handles: list[Line2D | Patch] = [
        Line2D([], [], label=arm, color=colour(precision), linestyle=styles[arm])
        for arm, precision in arms
        if arm in shown
    ]
    handles.append(Patch(label="spread of BF16 seeds (± 1 SD)", facecolor="#dddddd"))
    add_legend(figure, handles)
    return figure


def _signed(value: float, _: object) -> str:
    return f"{value:+g}".replace("-", "\u2212") if value else "0"


def effective_batch_figure(table: pd.DataFrame, empty: str = "No records yet") -> Figure:
    """Draw the healthy loss gap against the effective batch, by the way that it was reached.

    Args:
        table: From `fp8study.analysis.losses.effective_batch_table`.
        empty: What to say if there is none.
    """
    table = table[table["device"] == "cuda"]
    if table.empty:
        return message_figure(empty)
    groups = list(table.groupby(["machine", "model"], sort=False))
    figure, axes = panels(len(groups), height=3.2, columns=1)
    ways = [way for way in _MARKS if way in set(table["way"])]
    ways += sorted(set(table["way"]) - set(ways))
    recipes = list(table["precision"].unique())
    for axis, ((machine, model), group) in zip(axes, groups, strict=True):
        for _, row in group.iterrows():
            way, recipe = ways.index(row["way"]), recipes.index(row["precision"])
            alone = row["effective_batch"] == 1
            shift = 0.0 if alone else 0.09 * (way - len(ways) / 2)
            shift += 0.03 * recipe
            place, shade = math.log2(row["effective_batch"]) + shift, colour(row["precision"])
            if pd.notna(row["gap_pct_low_95"]):
                axis.plot([place] * 2, [row["gap_pct_low_95"], row["gap_pct_high_95"]], color=shade)
            axis.plot(place, row["gap_pct"], _MARKS.get(row["way"], "v"), color=shade, markersize=7)
        margin = float(group["margin_pct"].max())
        for edge in (-margin, margin):
            axis.axhline(edge, color=GREY, linewidth=1, linestyle=(0, (5, 3)))
        axis.axhline(0, color=GREY, linewidth=0.8)
        sizes = sorted(group["effective_batch"].unique())
        axis.set_xlim(math.log2(sizes[0]) - 0.4, math.log2(sizes[-1]) + 0.4)
        axis.set_xticks([math.log2(size) for size in sizes], [f"{size:g}" for size in sizes])
        axis.set_xlabel("effective batch, sequences per optimizer step")
        axis.set_ylabel("loss gap to BF16, %")
        axis.yaxis.set_major_formatter(_signed)
        set_title(axis, f"{model} on {machine}; dashed: margin of ±{margin:g} %")
    add_legend(
        figure,
        [
            Line2D([], [], label=way, marker=_MARKS.get(way, "v"), linestyle="", color="#444444")
            for way in ways
        ],
    )
    return figure
