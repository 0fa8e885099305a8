"""What all figures share: colours, fonts, panels, legends.

One colour belongs to one precision in every figure (Okabe and Ito's palette, safe for
colour-blind readers). Figures never touch pyplot's state, so that they can be made in any order
and in tests.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = {
    "bf16": "#0072B2",
    "fp8_tensorwise": "#D55E00",
    "fp8_rowwise": "#009E73",
    "fp8_rowwise_gw_hp": "#CC79A7",
}
OTHER_COLOUR = "#555555"
GREY = "#777777"
WIDTH_INCHES = 8.0

_STYLE: dict[str, Any] = {
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#999999",
    "axes.axisbelow": True,
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
}


def colour(precision: str) -> str:
    """Return the colour that stands for a precision in every figure."""
    return PALETTE.get(precision, OTHER_COLOUR)


def message_figure(message: str) -> Figure:
    """Say in place of a figure why there is none."""
    figure = Figure(figsize=(WIDTH_INCHES, 1.2), layout="constrained")
    # Notebooks do not show a figure without axes.
    figure.add_subplot().set_axis_off()
    figure.text(0.5, 0.5, message, ha="center", va="center", fontsize=11, color=GREY, wrap=True)
    return figure


def panels(count: int, height: float, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """Make a grid of `count` panels, each `height` inches high."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    with sns.axes_style("ticks", _STYLE), sns.plotting_context("paper", rc=_STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, height * rows + 0.7), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_axis_off()
    for axis in axes:
        sns.despine(ax=axis)
        axis.tick_params(length=0, labelsize=10)
    return figure, axes[:count]


def set_title(axis: Axes, text: str) -> None:
    lines = [textwrap.fill(line, 54) for line in text.split("\n")]
    axis.set_title("\n".join(lines), loc="left", fontsize=9.5)


def add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Put one legend above all panels; long names get a row each."""
    longest = max((len(handle.get_label()) for handle in handles), default=0)
    columns = 1 if longest > 48 else min(len(handles), max(1, 96 // (longest + 8)))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=10
    )


def list_arms(table: pd.DataFrame) -> list[tuple[str, str, bool]]:
    """Return the distinct (arm, precision, stale) in a fixed order: BF16 first, stale last."""
    seen = table[["arm", "precision", "stale"]].drop_duplicates()
    rows = [(str(a), str(p), bool(s)) for a, p, s in seen.itertuples(index=False)]
    return sorted(rows, key=lambda row: (row[2], row[1] != "bf16", row[0]))
