"""Figures of what the instruments saw: where a step's time and a GPU's memory go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fp8study.report.plotstyle import GREY, add_legend, colour, message_figure, panels
from fp8study.report.words import count, machine_name

#: Column → label and colour, from the left of the bar.
Parts = Mapping[str, tuple[str, str]]
TIME = {
    "gemm_fp8": ("FP8 GEMMs", colour("fp8_tensorwise")),
    "gemm_bf16": ("BF16 GEMMs", colour("bf16")),
    "attention": ("attention", "#56B4E9"),
    "fused": ("casts, scales, norms", "#E69F00"),
    "loss": ("loss", "#F0E442"),
    "optimizer": ("optimizer", "#009E73"),
    "copy": ("copies", "#CC79A7"),
    "other": ("other", "#BBBBBB"),
    "not_computing_ms": ("not computing", "#EEEEEE"),
}
#: What would be as dark as its neighbour without colours.
_HATCHES = {"gemm_fp8": "////", "fused": "...."}
_PANEL = ["machine", "study", "model", "num_gpus"]
_MEMORY = {
    "parameters_gib": ("parameters", "#0072B2"),
    "optimizer_gib": ("optimizer states", "#009E73"),
    "working_gib": ("activations, gradients, work space", "#E69F00"),
}


def time_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw where each arm's step goes, ms."""
    return _stacked(table, TIME, "kernel time, ms", "step_time_ms_median", empty)


def memory_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw what fills the fullest GPU at its peak, GiB; the line is what torch has reserved."""
    return _stacked(table, _MEMORY, "GiB per GPU", "steady_reserved_gib", empty)


def _stacked(table: pd.DataFrame, parts: Parts, label: str, line: str, empty: str) -> Figure:
    """One panel per model and number of GPUs, one bar per arm, `line` as a mark across it."""
    if table.empty:
        return message_figure(empty)
    figure, drawn = panels(
        table,
        _PANEL,
        lambda machine, study, model, n: (
            f"{model}, {count(n, 'GPU')}: {study} on {machine_name(machine)}"
        ),
        (label, ""),
        0.7 + 0.25 * table.groupby(_PANEL).size().max(),
    )
    for axis, _, group in drawn:
        handles = bars(axis, range(len(group)), group, parts, 0.7)
        for place, mark in enumerate(group[line]):
            axis.plot([mark] * 2, [place - 0.42, place + 0.42], color="black", lw=1.4)
        axis.set_yticks(range(len(group)), [str(arm) for arm in group["arm"]])
        axis.invert_yaxis()
        axis.set_xlim(left=0)
    add_legend(figure, handles)
    return figure


def bars(
    axis: Axes, places: Sequence[int], table: pd.DataFrame, parts: Parts, height: float
) -> list[Patch]:
    """Draw a bar of its parts for each row of a table, and return what the legend shows."""
    left = np.zeros(len(table))
    for column, (_, shade) in parts.items():
        width = table[column].astype(float).fillna(0).to_numpy()
        hatch = _HATCHES.get(column)
        axis.barh(places, width, height, left, fc=shade, ec="white", lw=0.5, hatch=hatch)
        left += width
    axis.grid(False, axis="y")
    edges = dict.fromkeys(_HATCHES, "white")  # the hatch has the edge's colour
    return [
        Patch(fc=shade, ec=edges.get(column, GREY), hatch=_HATCHES.get(column), label=name)
        for column, (name, shade) in parts.items()
    ]
