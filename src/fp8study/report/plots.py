"""The figures of the report, from the frames of `analysis.frames` and tables of them.

Each function returns a matplotlib `Figure` for a page about 800 pixels wide. Colour names the
precision; a second mark (line style, hatching, hollow points) repeats what matters, above all a
stale optimizer.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fp8study.analysis.pairing import PRECISION_LABELS, newest_per_seed
from fp8study.analysis.speed import MEMORY_FULL
from fp8study.report.plotstyle import (
    GREY,
    add_legend,
    colour,
    list_arms,
    message_figure,
    panels,
    set_title,
)

#: Steps in the running mean of a loss curve.
SMOOTHING_STEPS = 20


def throughput_figure(table: pd.DataFrame, empty: str = "No GPU records yet") -> Figure:
    """Draw tokens/s per GPU against the number of GPUs, with each arm's lead over BF16.

    Args:
        table: From `tables.throughput_table`. CPU rows are left out: they emulate FP8.
        empty: What to say if nothing is left.
    """
    table = table[(table["device"] != "cpu") & table["tokens_per_second_per_gpu"].notna()]
    table = _without_shares(table)
    if table.empty:
        return message_figure(empty)
    contexts = ["machine", "study", "model", "setting"]
    groups = list(table.groupby(contexts, sort=False))
    figure, axes = panels(len(groups), height=2.7)
    names = list_arms(table)
    for axis, (context, group) in zip(axes, groups, strict=True):
        _throughput_panel(axis, group, [arm for arm, _, _ in names if arm in set(group["arm"])])
        machine, study, model, setting = context
        set_title(axis, f"{model}: {study} on {machine}\n{setting}")
        axis.set_ylabel("tokens/s per GPU")
        axis.set_xlabel("GPUs")
    add_legend(figure, [_swatch(*name) for name in names])
    return figure


def _without_shares(table: pd.DataFrame) -> pd.DataFrame:
    """Give one name to the faults of several models, which differ in the share not trained."""
    share = r" \(\d+\.\d % of parameters not trained\)"
    if table["arm"].str.extract(f"({share})", expand=False).nunique() <= 1:
        return table
    return table.assign(arm=table["arm"].str.replace(share, "", regex=True))


def _swatch(arm: str, precision: str, stale: bool) -> Patch:
    return Patch(label=arm, **_bar_style(arm, precision, stale))


def _bar_style(arm: str, precision: str, stale: bool) -> dict[str, Any]:
    shade = colour(precision)
    if stale:
        return {"facecolor": "white", "edgecolor": shade, "hatch": "////", "linewidth": 1.0}
    is_usual = arm == PRECISION_LABELS.get(precision, precision)
    return {"facecolor": shade, "edgecolor": shade, "alpha": 1.0 if is_usual else 0.55}


def _throughput_panel(axis: Axes, group: pd.DataFrame, arms: list[str]) -> None:
    counts = sorted(group["num_gpus"].dropna().unique())
    width = 0.84 / len(arms)
    for _, row in group.iterrows():
        place = (
            counts.index(row["num_gpus"]) + (arms.index(row["arm"]) - (len(arms) - 1) / 2) * width
        )
        height = row["tokens_per_second_per_gpu"]
        stale = bool(row["stale"])
        axis.bar(place, height, width * 0.94, **_bar_style(row["arm"], row["precision"], stale))
        text = _bar_text(row, stale)
        axis.text(place, height, text, ha="center", va="bottom", fontsize=9, linespacing=1.05)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlim(-0.6, len(counts) - 0.4)
    axis.grid(False, axis="x")
    axis.set_ylim(0, 1.22 * group["tokens_per_second_per_gpu"].max())
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _bar_text(row: pd.Series, stale: bool) -> str:
    """Say over an FP8 bar how far ahead it is, or why that is not said."""
    if row["precision"] == "bf16":
        return ""
    if MEMORY_FULL in row["note"]:
        return "memory\nfull"
    if pd.isna(row["speedup_pct"]):
        return ""
    return f"{row['speedup_pct']:+.0f} %".replace("-", "\u2212") + ("\nstale" if stale else "")


def memory_figure(table: pd.DataFrame, empty: str = "No GPU records yet") -> Figure:
    """Draw peak memory per GPU, GiB, one line of dots per arm; arguments as above."""
    table = table[(table["device"] != "cpu") & table["memory_peak_gib"].notna()]
    table = _without_shares(table)
    if table.empty:
        return message_figure(empty)
    groups = list(table.groupby(["machine", "study", "model", "setting"], sort=False))
    figure, axes = panels(len(groups), height=2.5)
    names = list_arms(table)
    for axis, (context, group) in zip(axes, groups, strict=True):
        counts = sorted(group["num_gpus"].dropna().unique())
        for number, (arm, precision, stale) in enumerate(names):
            rows = group[group["arm"] == arm].sort_values("num_gpus")
            shift = (number - (len(names) - 1) / 2) * 0.09
            places = [counts.index(count) + shift for count in rows["num_gpus"]]
            face = "white" if stale else colour(precision)
            marks: dict[str, Any] = {
                "marker": "oDs^v"[number % 5],
                "markerfacecolor": face,
                "markersize": 7,
            }
            axis.plot(places, rows["memory_peak_gib"], color=colour(precision), **marks)
        axis.set_xticks(range(len(counts)), [str(count) for count in counts])
        axis.set_xlim(-0.6, len(counts) - 0.4)
        axis.set_ylim(0, 1.15 * group["memory_peak_gib"].max())
        machine, study, model, setting = context
        set_title(axis, f"{model}: {study} on {machine}\n{setting}")
        axis.set_ylabel("peak memory, GiB")
        axis.set_xlabel("GPUs")
    handles = [
        Line2D([], [], label=arm, color=colour(precision), marker="oDs^v"[number % 5],
               markerfacecolor="white" if stale else colour(precision))
        for number, (arm, precision, stale) in enumerate(names)
    ]  # fmt: skip
    add_legend(figure, handles)
    return figure


def _curves(metrics: pd.DataFrame, runs: pd.DataFrame) -> Iterator[tuple[pd.Series, pd.DataFrame]]:
    """Yield every run of `runs` that logged a loss, with its steps in order."""
    by_run = dict(iter(metrics.groupby(["machine", "study", "run_id"], sort=False)))
    for _, run in runs.iterrows():
        curve = by_run.get((run["machine"], run["study"], run["run_id"]))
        if curve is not None and curve["loss"].notna().any():
            yield run, curve.sort_values("step")


def _smooth(loss: pd.Series, num_steps: int) -> pd.Series:
    """Return the running mean; its window opens slowly, so that the steep start stays in place."""
    half = min(SMOOTHING_STEPS, num_steps // 8) // 2
    means = [
        loss.iloc[max(0, i - min(i, half)) : i + min(i, half) + 1].mean() for i in range(len(loss))
    ]
    return pd.Series(means, index=loss.index)


def loss_curves_figure(
    metrics: pd.DataFrame, runs: pd.DataFrame, empty: str = "No loss records yet"
) -> Figure:
    """Draw the training loss of every run: faint as logged, strong as a running mean.

    Args:
        metrics: From `metrics_frame`.
        runs: The rows of `runs_frame` to draw; one panel per machine, study, model, number of
            GPUs and setting.
        empty: What to say if no run logged a loss.
    """
    contexts = ["machine", "study", "model", "num_gpus", "setting"]
    runs = _without_shares(runs)
    grouped: dict[tuple[Any, ...], list[tuple[pd.Series, pd.DataFrame]]] = {}
    for run, curve in _curves(metrics, runs):
        grouped.setdefault(tuple(run[name] for name in contexts), []).append((run, curve))
    if not grouped:
        return message_figure(empty)
    figure, axes = panels(len(grouped), height=2.6)
    shown: dict[str, Line2D] = {}
    for axis, (context, curves) in zip(axes, sorted(grouped.items(), key=str), strict=True):
        machine, study, model, num_gpus, setting = context
        for run, curve in curves:
            style = _line_style(run)
            smooth = _smooth(curve["loss"], len(curve))
            axis.plot(curve["step"], curve["loss"], color=style["color"], alpha=0.18, linewidth=0.8)
            axis.plot(curve["step"], smooth, **style)
            shown.setdefault(run["arm"], Line2D([], [], label=run["arm"], **style))
        unit = "process" if curves[0][0]["device"] == "cpu" else "GPU"
        plural = "" if num_gpus == 1 else "es" if unit == "process" else "s"
        set_title(axis, f"{model}, {num_gpus} {unit}{plural}: {study} on {machine}\n{setting}")
        axis.set_xlabel("step")
        axis.set_ylabel("training loss, nats/token")
    order = [arm for arm, _, _ in list_arms(runs) if arm in shown]
    add_legend(figure, [shown[arm] for arm in order])
    return figure


def _line_style(run: pd.Series) -> dict[str, Any]:
    """BF16 is wide and solid so that an FP8 curve on top of it leaves it visible."""
    shade = colour(run["precision"])
    if run["stale"]:
        return {"color": shade, "linewidth": 2.0, "linestyle": (0, (1, 1))}
    if run["precision"] == "bf16":
        return {"color": shade, "linewidth": 3.4, "linestyle": "-"}
    return {"color": shade, "linewidth": 1.7, "linestyle": (0, (3.5, 2.5))}


def document_a_figure(
    metrics: pd.DataFrame, runs: pd.DataFrame, empty: str = "No records of document A's arms yet"
) -> Figure:
    """Draw document A's single-GPU failure, with and without the stale optimizer, in one panel.

    Args:
        metrics: From `metrics_frame`.
        runs: Rows of `runs_frame`: the arms of one machine and model. Every seed is drawn
            faintly, their mean strongly; the label carries the mean of the records' final losses.
        empty: What to say if none of them logged a loss.
    """
    runs = newest_per_seed(runs)
    curves = list(_curves(metrics, runs[runs["status"].isin(["completed", "diverged"])]))
    if not curves:
        return message_figure(empty)
    figure, (axis,) = panels(1, height=4.3)
    arms: dict[tuple[str, str], list[tuple[pd.Series, pd.DataFrame]]] = {}
    last_step = max(int(curve["step"].max()) for _, curve in curves)
    for run, curve in curves:
        shade = colour(run["precision"])
        axis.plot(curve["step"], curve["loss"], color=shade, alpha=0.13, linewidth=0.6)
        arms.setdefault((str(run["arm"]), str(run["master_dtype"])), []).append((run, curve))
    labels = []
    # BF16 first, so that a dashed FP8 curve on top leaves it visible.
    for (name, master), seeds in sorted(
        arms.items(), key=lambda arm: not arm[0][0].startswith("BF16")
    ):
        style = _line_style(seeds[0][0])
        logged = pd.concat([curve.set_index("step")["loss"] for _, curve in seeds], axis=1)
        axis.plot(logged.index, _smooth(logged.mean(axis=1), len(logged)), **style)
        # The record's own mean is over steps; the curve holds logged rows only.
        end = pd.Series([run["loss_last20_mean"] for run, _ in seeds], dtype=float).mean()
        number = "diverged" if pd.isna(end) else f"{end:.2f}"
        place = logged.stack().iloc[-1] if pd.isna(end) else end
        text = textwrap.fill(f"{name}, {master.upper()} masters: {number}", 34)
        labels.append((float(place), text, style["color"]))
    guess = _uniform_guess(runs)
    if guess:
        axis.axhline(guess[0], color=GREY, linewidth=1, linestyle=(0, (6, 4)))
        labels.append((*guess, GREY))
    axis.set_xlim(0, last_step)
    low = min(value for value, _, _ in labels)
    high = max(max(value for value, _, _ in labels), _highest(curves))
    axis.set_ylim(low - 0.12 * (high - low), high + 0.04 * (high - low))
    _label_ends(axis, labels, last_step)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, nats/token")
    return figure


def _uniform_guess(runs: pd.DataFrame) -> tuple[float, str] | None:
    """Return the loss of a uniform guess and its label, if the records agree on a vocabulary.

    The model's vocabulary, where recorded, is where an untrained model starts; the tokenizer's
    may be smaller, and is what is left once the model knows which tokens occur.
    """
    for column, words in (("model_vocab_size", "the model's"), ("vocab_size", "the tokenizer's")):
        sizes = runs[column].dropna().unique()
        if len(sizes) == 1:
            loss = math.log(float(sizes[0]))
            text = f"uniform guess over {words} {int(sizes[0]):,} tokens: {loss:.2f}"
            return loss, textwrap.fill(text, 34)
    return None


def _highest(curves: Sequence[tuple[pd.Series, pd.DataFrame]]) -> float:
    """Return the largest finite loss of any curve."""
    return max(float(curve["loss"].max()) for _, curve in curves)


def _label_ends(axis: Axes, labels: list[tuple[float, str, str]], last_step: int) -> None:
    """Write each label to the right of its curve, moved apart where two would overlap.

    The labels keep the order of the curves; a thin line joins a moved label to its curve.
    """
    low, high = axis.get_ylim()
    line_height = (high - low) * 0.048
    placed: list[tuple[float, float, str, str]] = []
    floor = low
    for value, text, shade in sorted(labels):
        half = line_height * (text.count("\n") + 1.35) / 2
        centre = max(value, floor + half)
        placed.append((value, centre, text, shade))
        floor = centre + half
    # What grew past the top is pushed back down, label by label.
    ceiling = high + line_height
    for number in range(len(placed) - 1, -1, -1):
        value, centre, text, shade = placed[number]
        half = line_height * (text.count("\n") + 1.35) / 2
        centre = min(centre, ceiling - half)
        ceiling = centre - half
        placed[number] = (value, centre, text, shade)
    for value, centre, text, shade in placed:
        axis.annotate(
            text,
            xy=(last_step, value),
            xytext=(1.03 * last_step, centre),
            va="center",
            fontsize=10,
            color=shade,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": shade,
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )
