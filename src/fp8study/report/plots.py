"""Figures of speed, memory and loss, for a page about 800 pixels wide.

Colour names the precision; a second mark (line style, hatching) repeats what matters, above all a
stale optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fp8study.analysis.pairing import newest_per_seed
from fp8study.analysis.speed import MEMORY_FULL
from fp8study.report.plotstyle import (
    GREY,
    add_legend,
    colour,
    line_styles,
    list_arms,
    message_figure,
    panels,
)
from fp8study.report.words import number, recipe

#: Steps in the running mean of a loss curve.
SMOOTHING_STEPS = 20
_CONTEXT = ["model", "study", "machine", "setting"]
_LOSS_AXES = ("step", "training loss, nats/token")


def throughput_figure(table: pd.DataFrame, empty: str = "No GPU records yet") -> Figure:
    """Draw tokens/s per GPU against the number of GPUs, with each arm's lead over BF16."""
    return _bars(table, "tokens_per_second_per_gpu", "tokens/s per GPU", _lead, empty)


def memory_figure(table: pd.DataFrame, empty: str = "No GPU records yet") -> Figure:
    """Draw peak memory per GPU, GiB, with each arm's difference from BF16; arguments as above."""
    return _bars(table, "memory_peak_gib", "peak memory, GiB", _change("memory_change_pct"), empty)


def _bars(
    table: pd.DataFrame, value: str, label: str, text: Callable[[pd.Series], str], empty: str
) -> Figure:
    table = _without_shares(table[(table["device"] != "cpu") & table[value].notna()])
    if table.empty:
        return message_figure(empty)
    labels = ("GPUs", label)
    figure, drawn = panels(table, _CONTEXT, "{}: {} on {}\n{}".format, labels, 2.7)
    names = list_arms(table)
    for axis, _, group in drawn:
        counts = sorted(group["num_gpus"].dropna().unique())
        arms = [arm for arm, _, _ in names if arm in set(group["arm"])]
        width = 0.84 / len(arms)
        for _, row in group.iterrows():
            shift = (arms.index(row["arm"]) - (len(arms) - 1) / 2) * width
            place = counts.index(row["num_gpus"]) + shift
            style = _bar_style(row["arm"], row["precision"], bool(row["stale"]))
            axis.bar(place, row[value], width * 0.94, **style)
            axis.text(place, row[value], text(row), ha="center", va="bottom", fontsize=9)
        axis.set_xticks(range(len(counts)), [str(count) for count in counts])
        axis.set_xlim(-0.6, len(counts) - 0.4)
        axis.set_ylim(0, 1.22 * group[value].max())
        axis.grid(False, axis="x")
        axis.yaxis.set_major_formatter(lambda tick, _: f"{tick:,.0f}")
    add_legend(figure, [Patch(label=name[0], **_bar_style(*name)) for name in names])
    return figure


def _without_shares(table: pd.DataFrame) -> pd.DataFrame:
    """Give one name to the faults of several models, which differ in the share not trained."""
    share = r" \(\d+\.\d % of parameters not trained\)"
    if table["arm"].str.extract(f"({share})", expand=False).nunique() <= 1:
        return table
    return table.assign(arm=table["arm"].str.replace(share, "", regex=True))


def _bar_style(arm: str, precision: str, stale: bool) -> dict[str, Any]:
    shade = colour(precision)
    if stale:
        return {"facecolor": "white", "edgecolor": shade, "hatch": "////", "linewidth": 1.0}
    is_usual = arm == recipe(precision)
    return {"facecolor": shade, "edgecolor": shade, "alpha": 1.0 if is_usual else 0.55}


def _change(column: str) -> Callable[[pd.Series], str]:
    def text(row: pd.Series) -> str:
        if row["precision"] == "bf16" or pd.isna(row[column]):
            return ""
        return f"{number(row[column], '+.0f')} %" + ("\nstale" if row["stale"] else "")

    return text


def _lead(row: pd.Series) -> str:
    """Say over an FP8 bar how far ahead it is, or why that is not said."""
    if row["precision"] != "bf16" and MEMORY_FULL in row["note"]:
        return "memory\nfull"
    return _change("speedup_pct")(row)


def _curves(metrics: pd.DataFrame, runs: pd.DataFrame) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Yield every run of `runs` that logged a loss, with its losses by step."""
    by_run = dict(iter(metrics.groupby(["machine", "study", "run_id"], sort=False)))
    for _, run in runs.iterrows():
        curve = by_run.get((run["machine"], run["study"], run["run_id"]))
        if curve is not None and curve["loss"].notna().any():
            yield run, curve.sort_values("step").set_index("step")["loss"]


def smooth(loss: pd.Series) -> pd.Series:
    """Return the running mean; its window opens slowly, so that the steep start stays in place."""
    half = min(SMOOTHING_STEPS, len(loss) // 8) // 2
    means = [
        loss.iloc[max(0, i - min(i, half)) : i + min(i, half) + 1].mean() for i in range(len(loss))
    ]
    return pd.Series(means, index=loss.index)


def document_a_figure(
    metrics: pd.DataFrame, runs: pd.DataFrame, empty: str = "No records of document A's arms yet"
) -> Figure:
    """Draw document A's single-GPU failure, with and without the stale optimizer, in one panel.

    `runs` are the arms of one machine and model. Every seed is drawn faintly, their mean strongly;
    the legend has the mean of the records' final losses.
    """
    runs = newest_per_seed(runs)
    curves = list(_curves(metrics, runs[runs["status"].isin(["completed", "diverged"])]))
    if not curves:
        return message_figure(empty)
    figure, [(axis, _, _)] = panels(runs[:1], ["model"], lambda _: "", _LOSS_AXES, 4.3, 1)
    arms: dict[tuple[str, str], list[tuple[pd.Series, pd.Series]]] = {}
    for run, loss in curves:
        arms.setdefault((str(run["arm"]), str(run["master_dtype"])), []).append((run, loss))
    styles, handles = line_styles(runs), []
    for (arm, master), seeds in sorted(arms.items()):
        # The paler of two lines in one style has the finer master weights.
        style = styles[arm] | {"alpha": 0.5 if master == "fp32" else 1.0}
        logged = pd.concat([loss for _, loss in seeds], axis=1)
        axis.plot(logged, color=style["color"], alpha=0.13, linewidth=0.6)
        axis.plot(logged.index, smooth(logged.mean(axis=1)), **style)
        # The record's own mean is over steps; the curve holds logged rows only.
        end = pd.Series([run["loss_last20_mean"] for run, _ in seeds], dtype=float).mean()
        final = "diverged" if pd.isna(end) else f"{end:.2f}"
        handles.append(
            Line2D([], [], label=f"{arm}, {master.upper()} master weights: {final}", **style)
        )
    if guess := _uniform_guess(runs):
        line: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": (0, (6, 4))}
        axis.axhline(guess[0], **line)
        handles.append(Line2D([], [], label=guess[1], **line))
    axis.set_xlim(left=0)
    add_legend(figure, handles)
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
            return loss, f"uniform guess over {words} {int(sizes[0]):,} tokens: {loss:.2f}"
    return None
