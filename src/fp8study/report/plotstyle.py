"""What all figures share: colours, line styles, panels with their titles, legends.

One colour belongs to one precision in every figure: Okabe and Ito's hues, safe for colour-blind
readers, dark enough for text on white (4.5 to 1). Figures never touch pyplot's state, so that
they can be made in any order and in tests.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from fp8study.report.figures import WIDTH_INCHES
from fp8study.report.words import in_words, number

PALETTE = {
    "bf16": "#0072B2",
    "fp16": "#6A5ACD",
    "fp8_tensorwise": "#B84E00",
    "fp8_rowwise": "#007D5B",
    "fp8_rowwise_gw_hp": "#A94F80",
}
_MARKS = {
    "bf16": "s",
    "fp16": "P",
    "fp8_tensorwise": "o",
    "fp8_rowwise": "^",
    "fp8_rowwise_gw_hp": "D",
}
GREY = "#6B6B6B"
BAND = "#dddddd"
DASHED = (0, (5, 3))
#: What a panel of arms is about.
SETTING = ["machine", "study", "model", "num_gpus", "setting"]
_LINE_INCHES = 0.18
_DOTS = ((3.5, 2), (1, 1), (5, 1.5, 1, 1.5), (7, 2), (5, 1.5, 1, 1.5, 1, 1.5), (9, 1.5))
STYLE: dict[str, Any] = {
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
    return PALETTE.get(precision, "#555555")


def mark(precision: str) -> str:
    """Return the shape that stands for a precision where points are drawn."""
    return _MARKS.get(precision, "X")


def line_styles(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return how each arm's line is drawn; no two arms are drawn alike.

    BF16 is wide and solid, so that an FP8 curve on top of it leaves it visible. The arms of one
    precision share its colour and differ in their dashes, BF16 first and stale ones last.
    """
    seen = table[["arm", "precision", "stale"]].drop_duplicates()
    rows = [(str(a), str(p), bool(s)) for a, p, s in seen.itertuples(index=False)]
    styles: dict[str, dict[str, Any]] = {}
    for arm, precision, _ in sorted(rows, key=lambda row: (row[2], row[1] != "bf16", row[0])):
        same = sum(style["color"] == colour(precision) for style in styles.values())
        dots = _DOTS[same % len(_DOTS)]
        dashes = tuple(length * (1 + same // len(_DOTS)) for length in dots)
        is_bf16 = precision == "bf16" and not same
        styles[arm] = {"color": colour(precision), "linewidth": 3.4 if is_bf16 else 1.8}
        styles[arm]["linestyle"] = "-" if is_bf16 else (0, dashes)
    return styles


def message_figure(message: str) -> Figure:
    """Say in place of a figure why there is none."""
    figure = Figure(figsize=(WIDTH_INCHES, 1.2), layout="constrained", label=message)
    # Notebooks do not show a figure without axes.
    figure.add_subplot().set_axis_off()
    figure.text(0.5, 0.5, message, ha="center", va="center", fontsize=11, color=GREY, wrap=True)
    return figure


def canvas(height: float, rows: int = 1, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Make an empty figure of our style, so many inches high, its axes below one another."""
    with sns.axes_style("ticks", STYLE), sns.plotting_context("paper", rc=STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes = list(figure.subplots(rows, 1, squeeze=False, **shared).flat)
    for axis in axes:
        sns.despine(ax=axis)
        axis.tick_params(length=0)
    return figure, axes


def panels(
    table: pd.DataFrame,
    keys: Sequence[str],
    title: Callable[..., str],
    labels: tuple[str, str],
    height: float,
) -> tuple[Figure, list[tuple[Axes, Any, pd.DataFrame]]]:
    """Make one panel for each group of a table that has rows: the figure, then axes, key, rows.

    The `title` is made from the values of `keys`; `labels` are of the horizontal and the vertical
    axis; the `height` of a panel is in inches. One below the other they fit a phone.
    """
    groups = list(table.groupby(list(keys), sort=False))
    figure, axes = canvas(height * len(groups) + 0.4, len(groups))
    for axis, (key, _) in zip(axes, groups, strict=True):
        text = textwrap.fill(in_words(title(*key)), round(12 * WIDTH_INCHES))
        axis.set_title(text, loc="left", fontsize=9.5)
        axis.set_ylabel(labels[1])
    axes[-1].set_xlabel(labels[0])
    return figure, [(axis, *group) for axis, group in zip(axes, groups, strict=True)]


def add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Put one legend above all panels, on a figure as much higher; long names get a row each."""
    letters = round(12 * figure.get_figwidth())
    for handle in handles:
        handle.set_label(textwrap.fill(str(handle.get_label()), letters - 8))
    longest = max((len(handle.get_label()) for handle in handles), default=0)
    columns = 1 if longest > letters / 2 else min(len(handles), max(1, letters // (longest + 8)))
    lines = sum(handle.get_label().count("\n") + 1 for handle in handles) / columns
    figure.set_figheight(figure.get_figheight() + _LINE_INCHES * math.ceil(lines))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=10
    )


def add_heading(axis: Axes, place: float, text: str) -> None:
    """Write a line in bold over rows of an axis, from the left edge of the figure on."""
    across = blended_transform_factory(axis.figure.transFigure, axis.transData)
    line = axis.text(0.01, place, text, transform=across, va="center", fontweight="bold")
    line.set(fontsize=9, in_layout=False)


def signed_ticks(value: float, _: object) -> str:
    """Write a tick with its sign."""
    return number(value, "+g") if value else "0"
