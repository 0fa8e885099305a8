"""The figures about noise and precision, from the frames of `fp8study.analysis.noise.tables`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fp8study.analysis.runs.pairing import in_fp8
from fp8study.report.plotstyle import (
    BAND,
    GREY,
    add_legend,
    colour,
    mark,
    message_figure,
    panels,
)
from fp8study.report.words import recipe

_EQUAL = "#F6E3A1"


def budget_figure(table: pd.DataFrame, empty: str, crossings: pd.DataFrame) -> Figure:
    """Draw sampling and precision error of all parameters by effective batch, a panel a step.

    Solid where measured, dotted where extrapolated; the mean over the runs, with their range. The
    `crossings` say where the two errors are equal.
    """
    if table.empty:
        return message_figure(empty)
    whole = table[table["scope"] == "all"].sort_values("step", kind="stable")
    labels = ("effective batch, sequences", "error / true gradient")
    figure, drawn = panels(whole, ["step"], "after {} steps".format, labels, 2.3)
    names = table[["precision", "reference"]].drop_duplicates().to_numpy().tolist()
    for axis, (step,), group in drawn:
        one = (group[["precision", "reference"]] == names[0]).all(axis=1)
        _line(axis, group[one], "sampling_error", "black", "")  # the same beside every comparison
        for precision, rows in group.groupby("precision", sort=False):
            _line(axis, rows, "precision_error", colour(str(precision)), mark(str(precision)))
        axis.set(xscale="log", yscale="log")
        axis.minorticks_off()
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter(lambda tick, _: f"{tick:,g}")
        here = (crossings["step"] == step) & (crossings["scope"] == "all")
        found = crossings.loc[here & in_fp8(crossings), "crossing_batch"]
        _mark_crossings(axis, found, float(table["batch"].max()))
    handles: list[Artist] = [Line2D([], [], color="black", label="sampling error, √(tr Σ / B)")]
    handles += [
        Line2D([], [], color=colour(p), marker=mark(p), label=f"{recipe(p)} against {recipe(r)}")
        for p, r in names
    ]
    handles.append(Patch(color=_EQUAL, label="FP8 and sampling error are equal, over seeds"))
    handles.append(Patch(color=BAND, label="document A's transition"))
    add_legend(figure, handles)
    return figure


def _mark_crossings(axis: Axes, found: pd.Series, largest: float) -> None:
    axis.axvspan(1, 2, color=BAND, linewidth=0, zorder=0)
    low, high = found.min(), min(found.max(), largest)
    if 0 < low < largest:
        axis.axvspan(low, high, color=_EQUAL, linewidth=0, zorder=0)
        axis.text(
            high, 0.96, f" {low:.0f} to {found.max():.0f}", transform=axis.get_xaxis_transform(),
            va="top", fontsize=9,
        )  # fmt: skip


def _line(axis: Axes, rows: pd.DataFrame, column: str, shade: str, shape: str) -> None:
    over = rows.groupby("batch")[column]
    mean, low, high = over.mean(), over.min(), over.max()
    measured = rows.groupby("batch")["measured"].all()
    axis.plot(mean.index, mean, color=shade, linestyle=":", linewidth=1.2)
    axis.plot(mean.index[measured], mean[measured], color=shade, marker=shape, markersize=4)
    axis.fill_between(mean.index, low, high, color=shade, alpha=0.15, linewidth=0)


def layer_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw each layer's gradient SQNR, dB: FP8 against BF16 at the same weights, a panel a step.

    Points are the layer's FP8 weights (its parameters that are no matrices of FP8 layers are
    left out), lines the median over them and over runs.
    """
    if table.empty:
        return message_figure(empty)
    table = table[table["is_fp8"] & (table["reference"] == "bf16") & (table["layer"] >= 0)]
    labels = ("decoder layer", "gradient SQNR, dB")
    figure, drawn = panels(table, ["step"], "after {} steps".format, labels, 1.8)
    precisions = [str(p) for p in table["precision"].unique()]
    for axis, _, group in drawn:
        for place, precision in enumerate(precisions):
            rows = group[(group["precision"] == precision) & np.isfinite(group["sqnr_db"])]
            shift, shade = 0.15 * (place - (len(precisions) - 1) / 2), colour(precision)
            axis.scatter(rows["layer"] + shift, rows["sqnr_db"], s=7, alpha=0.5, lw=0, color=shade,
                         marker=mark(precision), rasterized=True)  # fmt: skip
            median = rows.groupby("layer")["sqnr_db"].median()
            axis.plot(
                median.index, median, color=shade, linewidth=1.4, marker=mark(precision), ms=4
            )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.axhline(0, color=GREY, linewidth=0.6)
    add_legend(figure, [Line2D([], [], color=colour(p), marker=mark(p), label=recipe(p))
                        for p in precisions])  # fmt: skip
    return figure
