"""Figures of speed: leads, rates, steps taken apart, scaling, and others beside us.

They are made for a phone first: one column, text that stays legible at 390 pixels. On the answer's
picture a colour is a model; elsewhere it is a precision, as on every page. What a colour says a
shape says too, for who prints in black and white.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MultipleLocator, NullLocator

from fp8study.report.instrument_plots import TIME, bars
from fp8study.report.plotstyle import (
    GREY,
    STYLE,
    add_legend,
    canvas,
    colour,
    mark,
    message_figure,
    signed_ticks,
)
from fp8study.report.speed_rows import setting_name
from fp8study.report.words import count, machine_name, number, recipe

#: One colour per model, the most timed first, and one for all others; Okabe and Ito's, no yellow.
_MODELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_SHAPES = dict(zip(_MODELS, ("o", "s", "^", "D", "v", "P"), strict=True))
_OTHERS = "#000000"
#: GPUs → how much of a mark is filled.
_FILLS: dict[int, Literal["full", "left", "none", "top"]] = {
    1: "full", 2: "left", 4: "none", 8: "top",
}  # fmt: skip
#: Kind of a lead → its mark, and whether it is filled.
_KINDS: dict[str, tuple[str, Literal["full", "none"]]] = {
    "ours": ("o", "full"), "beside ours": ("x", "full"), "published": ("D", "none"),
}  # fmt: skip
_ROW_INCHES = 0.3
#: Between two ticks of a lead, %.
_TICK_PCT = 20
#: How much of a panel of leads lies below zero at least, %: room for the name of its machine.
_BELOW_PCT = 24


def lead_figure(leads: pd.DataFrame, peers: pd.DataFrame, empty: str) -> Figure:
    """Draw FP8's lead over the tokens of a GPU and step, with the range of its pairs.

    `leads` are of one recipe per setting; another trainer's own leads, of `peers`, are crosses. A
    panel is a machine, and a per cent as high in every panel.
    """
    leads = leads.dropna(subset="lead_pct")
    if leads.empty:
        return message_figure(empty)
    machines, models = list(dict.fromkeys(leads["machine"])), list(dict.fromkeys(leads["model"]))
    shades = _shades(leads["model"])
    shifts = dict(zip(models, np.linspace(-0.22, 0.22, len(models)), strict=True))
    ends = [_percents(leads[leads["machine"] == machine]) for machine in machines]
    heights = [high - low for low, high in ends]
    # Low, so that the table below it begins on the first screen, also of a phone.
    figure, axes = canvas(
        1.0 + 1.1 * sum(heights) / max(heights), len(machines), sharex=True,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, machine, percents in zip(axes, machines, ends, strict=True):
        for _, row in leads[leads["machine"] == machine].iterrows():
            aside = shifts[row["model"]] + 0.02 * (int(row["num_gpus"]) - 2)
            away = [[row["lead_pct"] - row["lead_low_pct"]],
                    [row["lead_high_pct"] - row["lead_pct"]]]  # fmt: skip
            shade = shades.get(row["model"], _OTHERS)
            axis.errorbar(
                row["tokens_per_gpu"] * 2.0**aside, row["lead_pct"], np.abs(away), lw=1.5,
                **_mark(shade, int(row["num_gpus"])),
            )  # fmt: skip
        for _, row in peers[peers["machine"] == machine].iterrows():
            place = row["tokens_per_gpu"] * 2.0 ** (shifts.get(row["model"], 0) + 0.09)
            axis.plot(
                place, row["peer_lead_pct"], "x", color=shades.get(row["model"], _OTHERS), mew=2
            )
        axis.axhline(0, color=GREY, lw=1)
        axis.set_ylim(*percents)
        axis.yaxis.set_major_locator(MultipleLocator(_TICK_PCT))
        axis.yaxis.set_major_formatter(signed_ticks)
        if len(machines) > 1:  # leads grow to the right, so that this corner is free
            axis.text(1.0, 0.04, machine_name(machine), transform=axis.transAxes, ha="right",
                      va="bottom", bbox={"fc": "white", "ec": "none", "pad": 0.5})  # fmt: skip
    sizes = sorted(set(leads["tokens_per_gpu"]))
    first, last = math.floor(math.log2(sizes[0])), math.ceil(math.log2(sizes[-1]))
    powers = [2**n for n in range(first, last + 1)]
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_xticks(powers, [f"{size:,}" for size in powers])
    axes[-1].xaxis.set_minor_locator(NullLocator())
    axes[-1].set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    axes[-1].set_xlabel("tokens per GPU and step")
    figure.supylabel("FP8's lead, %", fontsize=STYLE["axes.labelsize"])
    counts = sorted({int(n) for n in leads["num_gpus"]})
    named = shades | ({"other models": _OTHERS} if len(models) > len(shades) else {})
    handles = [Line2D([], [], lw=0, label=name, **_mark(c, 1)) for name, c in named.items()]
    handles += [Line2D([], [], lw=0, label=count(n, "GPU"), **_mark(GREY, n)) for n in counts]
    if len(peers):
        names = sorted({peer.split()[0] for peer in peers["peer"]})
        whose = "other trainers' own" if len(names) > 1 else f"{names[0]}'s own"
        handles.append(Line2D([], [], marker="x", lw=0, mew=2, color=GREY, label=whose))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=9,
                  handletextpad=0.1, columnspacing=0.6, labelspacing=0.2, borderpad=0)  # fmt: skip
    return figure


def _mark(shade: str, num_gpus: int) -> dict[str, Any]:
    """Return how a lead is drawn: a shape for the colour, filled by the number of GPUs."""
    fill = _FILLS.get(num_gpus, "bottom")
    edge = {"mec": "white", "mew": 0.6} if fill == "full" else {"mec": shade, "mew": 1.2}
    return {"marker": _SHAPES.get(shade, "o"), "fillstyle": fill, "ms": 6, "color": shade,
            "markerfacecoloralt": "white"} | edge  # fmt: skip


def _shades(names: pd.Series) -> dict[str, str]:
    """Give a colour to each model, or, of too many, to those with more leads than the rest."""
    counts = names.value_counts()
    rest = counts.iloc[len(_MODELS)] if len(counts) > len(_MODELS) else 0
    chosen = set(counts.index[counts > rest]) or set(counts.index[: len(_MODELS)])
    return dict(zip([name for name in names.unique() if name in chosen], _MODELS, strict=False))


def _percents(rows: pd.DataFrame) -> tuple[float, float]:
    """Return between what to draw the leads of a machine, with zero and a tick above it, %."""
    low, high = rows["lead_low_pct"].min() - 8, rows["lead_high_pct"].max() + 8
    return min(low, -_BELOW_PCT), max(high, 22)


def _rows(num: int, names: Sequence[str], label: str) -> tuple[Figure, Axes]:
    """Make a figure whose rows are named on the left, the first at the top."""
    figure, [axis] = canvas(1.1 + _ROW_INCHES * num)
    axis.set_yticks(range(num), names)
    axis.set_ylim(num - 0.4, -0.6)
    axis.set_xlabel(label)
    return figure, axis


def _rows_by_model(
    table: pd.DataFrame, names: Sequence[str], label: str
) -> tuple[Figure, Axes, list[int]]:
    """Make a figure with a row for each row of a table, under its model and machine.

    These stand inside the axes, which would else be as narrow as their names are long.

    Returns:
        The figure, its axes, and where the rows lie.
    """
    lines: list[str] = []
    places, heads = [], {}
    groups = list(zip(table["model"], table["machine"], strict=True))
    for before, group, name in zip([None, *groups], groups, names, strict=False):
        if group != before:
            heads[len(lines)] = f"{group[0]}, {machine_name(group[1])}"
            lines.append("")
        places.append(len(lines))
        lines.append(name)
    figure, axis = _rows(len(lines), lines, label)
    for place, head in heads.items():
        axis.text(0.01, place + 0.1, head, fontsize=9, weight="bold", va="center",
                  transform=axis.get_yaxis_transform(),
                  bbox={"fc": "white", "ec": "none", "pad": 1.5})  # fmt: skip
    return figure, axis, places


def _dots(table: pd.DataFrame, column: str, change: str, label: str, empty: str) -> Figure:
    """Draw a quantity of both precisions, one row per setting; equal ratios are equally far.

    At the end of each row stands its `change`, FP8 against BF16, %: the dots differ by millimetres.
    """
    table = table.dropna(subset=[column, f"{column}_bf16"])
    if table.empty:
        return message_figure(empty)
    names = [setting_name(row) for _, row in table.iterrows()]
    figure, axis, places = _rows_by_model(table, names, label)
    for place, (_, row) in zip(places, table.iterrows(), strict=True):
        for name, precision in ((f"{column}_bf16", "bf16"), (column, row["precision"])):
            low, high = row.get(f"{name}_low", row[name]), row.get(f"{name}_high", row[name])
            axis.plot([low, high], [place] * 2, color=colour(precision), lw=5, alpha=0.35)
            axis.plot(row[name], place, mark(precision), color=colour(precision), ms=6,
                      mec="white", mew=0.6)  # fmt: skip
        if pd.notna(row[change]):
            axis.text(1.01, place, f"{number(row[change], '+.1f')} %", fontsize=9, va="center",
                      transform=axis.get_yaxis_transform())  # fmt: skip
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 20 * low else (1,)))
    axis.xaxis.set_major_formatter(
        lambda tick, _: f"{tick / 1e3:g}k" if tick >= 1e3 else f"{tick:g}"
    )
    axis.xaxis.set_minor_locator(NullLocator())
    add_legend(figure, _precisions(["bf16", *table["precision"]]))
    return figure


def _precisions(names: Sequence[str]) -> list[Line2D]:
    return [Line2D([], [], marker=mark(name), lw=0, color=colour(name), label=recipe(name))
            for name in dict.fromkeys(names)]  # fmt: skip


def rate_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw tokens/s per GPU in both precisions, with the range over runs."""
    return _dots(table, "tokens_per_second_per_gpu", "lead_pct", "tokens/s per GPU", empty)


def memory_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw peak memory per GPU in both precisions, with the range over runs."""
    return _dots(table, "memory_peak_gib", "memory_change_pct", "peak memory, GiB", empty)


def step_figure(kernels: pd.DataFrame, empty: str) -> Figure:
    """Draw where a step's time goes, % of the BF16 step of the same setting.

    `kernels`: rows of `fp8study.analysis.instruments.kernels_table`, with ``bf16_step_ms`` and a
    ``name``, BF16 before FP8.
    """
    if kernels.empty:
        return message_figure(empty)
    figure, axis, places = _rows_by_model(kernels, list(kernels["name"]), "% of the BF16 step")
    shares = kernels[[*TIME]].astype(float).mul(100 / kernels["bf16_step_ms"], axis="index")
    handles = bars(axis, places, shares, TIME, 0.72)
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)
    return figure


def scaling_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw tokens/s per GPU over the number of GPUs, % of that on the fewest.

    A panel is a model and batch on a machine, under the setting that it was timed in.

    `table`: from `fp8study.analysis.leads.scaling_table`.
    """
    if table.empty:
        return message_figure(empty)
    groups = list(table.groupby(["machine", "model", "micro_batch_size"], sort=False))
    figure, axes = canvas(0.8 + 1.85 * len(groups), len(groups), sharex=True)
    for axis, (_, rows) in zip(axes, groups, strict=True):
        for precision, line in rows.groupby("precision", sort=False):
            dashes = "-" if precision == "bf16" else "--"
            axis.plot(line["num_gpus"].astype(int), line["kept_pct"], dashes, ms=5,
                      marker=mark(str(precision)), color=colour(str(precision)))  # fmt: skip
        axis.axhline(100, color=GREY, lw=1)
        axis.set_xscale("log", base=2)
        counts = sorted({int(n) for n in table["num_gpus"]})
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(0, max(110, rows["kept_pct"].max() * 1.05))
        axis.set_title(textwrap.fill(_scaled(rows), 60), loc="left", fontsize=9.5)
    figure.supylabel("tokens/s per GPU, % of the fewest GPUs", fontsize=STYLE["axes.labelsize"])
    axes[-1].set_xlabel("GPUs")
    add_legend(figure, _precisions(list(table["precision"])))
    return figure


def _scaled(rows: pd.DataFrame) -> str:
    """Name the setting of rows of `scaling_table`, and what FP8 gathers weights in there."""
    row = rows.iloc[0]
    several = rows[rows["precision"].ne("bf16") & rows["num_gpus"].gt(1)]
    formats = ["FP8" if gathers else "BF16" for gathers in several["fp8_all_gather"]]
    gathered = f", {' or '.join(dict.fromkeys(formats))} all-gather" if formats else ""
    clipped = ", clipped" * pd.notna(row["max_grad_norm"])
    return (
        f"{row['model']} on {machine_name(row['machine'])}: {row['path']}, "
        f"{row['master_dtype'].upper()} master weights, {row['sequence_length']:,} tokens, "
        f"batch {row['micro_batch_size']}{clipped}{gathered}"
    )


def others_figure(table: pd.DataFrame, empty: str) -> Figure:
    """Draw FP8 leads of ours, of a trainer beside ours and of publications, a row each.

    `table`: ``name``, ``kind``, ``precision``, ``lead_pct``, and the ends ``low_pct`` and
    ``high_pct`` where they are known.
    """
    if table.empty:
        return message_figure(empty)
    figure, axis = _rows(len(table), list(table["name"]), "FP8's lead, %")
    for place, (_, row) in enumerate(table.iterrows()):
        shade, (shape, fill) = colour(row["precision"]), _KINDS[row["kind"]]
        axis.plot([row["low_pct"], row["high_pct"]], [place] * 2, color=shade, lw=5, alpha=0.35)
        axis.plot(row["lead_pct"], place, shape, color=shade, ms=6, mew=1.6, fillstyle=fill)
    axis.axvline(0, color=GREY, lw=1)
    axis.xaxis.set_major_formatter(signed_ticks)
    handles: list[Artist] = [
        Patch(color=colour(name), label=recipe(name)) for name in dict.fromkeys(table["precision"])
    ]
    handles += [
        Line2D([], [], marker=shape, lw=0, color=GREY, label=kind, fillstyle=fill)
        for kind, (shape, fill) in _KINDS.items()
        if kind in set(table["kind"])
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)
    return figure
