"""Figures of loss curves.

Colour names the precision, and the style of a line repeats what matters, above all a stale
optimizer.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fp8study.analysis.losses import SMOOTHING_STEPS
from fp8study.analysis.runs.pairing import newest_per_seed, together
from fp8study.report.plotstyle import (
    GREY,
    SETTING,
    add_legend,
    line_styles,
    message_figure,
    panels,
)

#: A curve is half a page wide, in points; and as many losses of it are in its download.
_MOST_POINTS, _MOST_COLUMNS = 250, 50
PandasObject = TypeVar("PandasObject", pd.Series, pd.DataFrame)
_LOSS_AXES = ("step", "training loss, nats/token")


def thin(curves: PandasObject) -> PandasObject:
    """Leave out steps of curves that have more of them than a picture shows."""
    return curves.iloc[:: math.ceil(len(curves) / _MOST_POINTS) or 1]


def smooth(loss: pd.Series) -> pd.Series:
    """Return the running mean; its window opens slowly, so that the steep start stays in place."""
    half = min(SMOOTHING_STEPS, len(loss) // 8) // 2
    means = [
        loss.iloc[max(0, i - min(i, half)) : i + min(i, half) + 1].mean() for i in range(len(loss))
    ]
    return pd.Series(means, index=loss.index)


def curve_table(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the training loss along the runs of each arm as figures draw it, nats per token.

    A row is an arm of a setting, the columns ``step_N`` its running mean over seeds.
    """
    arms, rows = [*SETTING, "arm", "master_dtype"], []
    for key, own in runs.groupby(arms, sort=False, dropna=False):
        losses = own[["machine", "study", "run_id"]].merge(metrics)
        points = smooth(losses.groupby("step")["loss"].mean())
        chosen = points.iloc[:: math.ceil(len(points) / _MOST_COLUMNS) or 1]
        row = dict(zip(arms, key, strict=True)) | {"run_ids": together(own["run_ids"])}
        rows.append(row | {f"step_{step}": round(loss, 4) for step, loss in chosen.items()})
    return pd.DataFrame(rows)


def document_a_figure(metrics: pd.DataFrame, runs: pd.DataFrame, empty: str) -> Figure:
    """Draw document A's single-GPU failure, with and without the stale optimizer, in one panel.

    `runs` are the arms of one machine and model. Every seed is drawn faintly, their mean strongly;
    the legend has the mean of the records' final losses.
    """
    runs = newest_per_seed(runs)
    logged = runs.merge(metrics.dropna(subset="loss"), on=["machine", "study", "run_id"])
    logged = logged[logged["status"].isin(["completed", "diverged"])]
    if logged.empty:
        return message_figure(empty)
    figure, [(axis, _, _)] = panels(runs[:1], ["model"], lambda _: "", _LOSS_AXES, 4.0)
    styles, handles = line_styles(runs), []
    for (arm, master), rows in logged.groupby(["arm", "master_dtype"]):
        # The paler of two lines in one style has the finer master weights.
        style = styles[str(arm)] | {"alpha": 0.5 if master == "fp32" else 1.0}
        seeds = rows.pivot(index="step", columns="run_id", values="loss")[rows["run_id"].unique()]
        axis.plot(thin(seeds), color=style["color"], alpha=0.13, linewidth=0.6)
        axis.plot(thin(smooth(seeds.mean(axis=1))), **style)
        # The record's own mean is over steps; the curve holds logged rows only.
        end = rows.drop_duplicates("run_id")["loss_last20_mean"].astype(float).mean()
        final = "diverged" if pd.isna(end) else f"{end:.2f}"
        handles.append(
            Line2D([], [], label=f"{arm}, {str(master).upper()} master weights: {final}", **style)
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
