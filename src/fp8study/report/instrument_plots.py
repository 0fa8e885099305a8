"""Figures of what the instruments saw: where a step's time and a GPU's memory go."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fp8study.report.plotstyle import GREY, add_legend, colour, message_figure, panels
from fp8study.report.words import count

#: Column → label and colour, from the bottom of the bar up.
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
_MEMORY = {
    "parameters_gib": ("parameters", "#0072B2"),
    "optimizer_gib": ("optimizer states", "#009E73"),
    "working_gib": ("activations, gradients, work space", "#E69F00"),
}


def time_figure(table: pd.DataFrame, empty: str = "No profiled step yet") -> Figure:
    """Draw where each arm's step goes, ms."""
    return _stacked(table, TIME, "kernel time, ms", "step_time_ms_median", empty)


def memory_figure(table: pd.DataFrame, empty: str = "No memory split yet") -> Figure:
    """Draw what fills the fullest GPU at its peak, GiB; the line is what torch has reserved."""
    return _stacked(table, _MEMORY, "GiB per GPU", "steady_reserved_gib", empty)


def _stacked(
    table: pd.DataFrame, parts: dict[str, tuple[str, str]], label: str, line: str, empty: str
) -> Figure:
    """One panel per model and number of GPUs, one bar per arm, `line` as a mark across it."""
    if table.empty:
        return message_figure(empty)
    figure, drawn = panels(
        table,
        ["machine", "study", "model", "num_gpus"],
        lambda machine, study, model, n: f"{model}, {count(n, 'GPU')}: {study} on {machine}",
        ("", label),
    )
    for axis, _, group in drawn:
        names = [str(arm).replace(" ", "\n", 1) for arm in group["arm"]]
        bottom = pd.Series(0.0, index=group.index)
        for column, (_, shade) in parts.items():
            height = group[column].astype(float).fillna(0)
            axis.bar(range(len(group)), height, 0.7, bottom, fc=shade, ec="white", lw=0.5)
            bottom += height
        for place, mark in enumerate(group[line]):
            axis.plot([place - 0.42, place + 0.42], [mark] * 2, color="black", lw=1.4)
        axis.set_xticks(range(len(group)), names)
        axis.set_ylim(bottom=0)
        axis.grid(False, axis="x")
    add_legend(figure, [Patch(facecolor=s, edgecolor=GREY, label=n) for n, s in parts.values()])
    return figure
