"""The figures about noise and precision, from the frames of `fp8study.analysis.noise_tables`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fp8study.analysis.pairing import PRECISION_LABELS
from fp8study.report.plotstyle import GREY, add_legend, colour, message_figure, panels, set_title

_PRODUCTS = {"output": "forward", "grad_input": "input gradient", "grad_weight": "weight gradient"}


def budget_figure(
    table: pd.DataFrame,
    empty: str = "No noise was measured",
    crossings: pd.DataFrame | None = None,
) -> Figure:
    """Draw sampling and precision error against the effective batch, a panel a step and scope.

    Solid where measured, dotted where extrapolated; the mean over the runs, with their range.

    Args:
        table: From `noise_tables.budget_table`, of one model; several runs may be below
            each other.
        empty: What to say if there is nothing to draw.
        crossings: From `crossing_table`, of the same runs: marks where FP8's error and sampling
            error are equal, and the batches where document A has them meet.
    """
    if table.empty:
        return message_figure(empty)
    groups = list(table.groupby(["step", "scope"], sort=True))
    figure, axes = panels(len(groups), height=2.6)
    for axis, ((step, scope), group) in zip(axes, groups, strict=True):
        first = group[["precision", "reference"]].drop_duplicates().iloc[0]
        same = (group["precision"] == first["precision"]) & (
            group["reference"] == first["reference"]
        )
        _line(axis, group[same], "sampling_error", "black")  # the same beside every comparison
        for precision, rows in group.groupby("precision", sort=False):
            _line(axis, rows, "precision_error", colour(str(precision)))
        axis.set(xscale="log", yscale="log", xlabel="effective batch, sequences")
        if crossings is not None:
            _mark_crossings(axis, crossings, step, scope, float(table["batch"].max()))
        axis.set_ylabel("error / true gradient")
        set_title(axis, f"after {step} steps, {_SCOPES[str(scope)]}")
    names = table[["precision", "reference"]].drop_duplicates().itertuples(index=False)
    handles: list[Artist] = [Line2D([], [], color="black", label="sampling error, √(tr Σ / B)")]
    handles += [
        Line2D([], [], color=colour(p), label=f"{_label(p)} against {_label(r)}") for p, r in names
    ]
    if crossings is not None:
        handles.append(Patch(color=_EQUAL, label="FP8 and sampling error are equal, over seeds"))
        handles.append(Patch(color=_CLAIMED, label="document A's transition"))
    add_legend(figure, handles)
    return figure


_EQUAL, _CLAIMED = "#F6E3A1", "#DDDDDD"


def _mark_crossings(
    axis: Axes, crossings: pd.DataFrame, step: object, scope: object, largest: float
) -> None:
    axis.axvspan(1, 2, color=_CLAIMED, linewidth=0, zorder=0)
    here = (crossings["step"] == step) & (crossings["scope"] == scope)
    found = crossings[here & (crossings["precision"] != "bf16")]["crossing_batch"]
    low, high = found.min(), min(found.max(), largest)
    if 0 < low < largest:
        axis.axvspan(low, high, color=_EQUAL, linewidth=0, zorder=0)
        axis.text(
            high, 0.96, f" {low:.0f} to {found.max():.0f}", transform=axis.get_xaxis_transform(),
            va="top", fontsize=9,
        )  # fmt: skip


_SCOPES = {"all": "all parameters", "fp8_layers": "weights of FP8 layers"}


def _label(precision: str) -> str:
    return PRECISION_LABELS.get(precision, precision.upper())


def _line(axis: Axes, rows: pd.DataFrame, column: str, shade: str) -> None:
    over = rows.groupby("batch")[column]
    mean, low, high = over.mean(), over.min(), over.max()
    measured = rows.groupby("batch")["measured"].all()
    axis.plot(mean.index, mean, color=shade, linestyle=":", linewidth=1.2)
    axis.plot(mean.index[measured], mean[measured], color=shade, marker="o", markersize=3.5)
    axis.fill_between(mean.index, low, high, color=shade, alpha=0.15, linewidth=0)


def layer_figure(table: pd.DataFrame, empty: str = "No noise was measured") -> Figure:
    """Draw each layer's gradient SQNR, dB: FP8 against BF16 at the same weights, a panel a step.

    Points are the layer's FP8 weights (its parameters that are no matrices of FP8 layers are
    left out), lines the median over them and over runs.

    Args:
        table: From `fp8study.analysis.noise_tables.parameter_table`.
        empty: What to say if there is nothing to draw.
    """
    if not table.empty:
        table = table[table["is_fp8"] & (table["reference"] == "bf16") & (table["layer"] >= 0)]
    if table.empty:
        return message_figure(empty)
    return _by_layer(table, list(table.groupby("step")), "after {} steps", "gradient SQNR, dB")


def product_figure(
    table: pd.DataFrame, step: int | None = None, empty: str = "No noise was measured"
) -> Figure:
    """Draw the SQNR of single FP8 products by layer, dB, a panel for each of the three products.

    Args:
        table: From `fp8study.analysis.noise_tables.product_table`.
        step: The point; by default the last.
        empty: What to say if there is nothing to draw.
    """
    if not table.empty:
        table = table[table["step"] == (table["step"].max() if step is None else step)]
    if table.empty:
        return message_figure(empty)
    groups = [(_PRODUCTS[str(p)], rows) for p, rows in table.groupby("product", sort=False)]
    return _by_layer(table, groups, "{}", "product SQNR, dB")


def _by_layer(
    table: pd.DataFrame, groups: Sequence[tuple[object, pd.DataFrame]], title: str, label: str
) -> Figure:
    figure, axes = panels(len(groups), height=2.6)
    precisions = [str(p) for p in table["precision"].unique()]
    for axis, (what, group) in zip(axes, groups, strict=True):
        for number, precision in enumerate(precisions):
            rows = group[(group["precision"] == precision) & np.isfinite(group["sqnr_db"])]
            shift = 0.15 * (number - (len(precisions) - 1) / 2)
            axis.scatter(
                rows["layer"] + shift, rows["sqnr_db"], s=7, alpha=0.5, linewidths=0,
                color=colour(precision),
            )  # fmt: skip
            median = rows.groupby("layer")["sqnr_db"].median()
            axis.plot(median.index, median, color=colour(precision), linewidth=1.4)
        set_title(axis, title.format(what))
        axis.set_xlabel("decoder layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(label)
        axis.axhline(0, color=GREY, linewidth=0.6)
    add_legend(figure, [Patch(color=colour(p), label=_label(p)) for p in precisions])
    return figure
