"""The page of predictions: how far the laws are off, in words, in tables and in one figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fp8study.analysis.laws.account import (
    CLEAR_PCT,
    HOST_PCT,
    KEPT_OUT,
    LEFT_OUT,
    MEAN_POINTS,
    MEMORY_PCT,
    MOST_POINTS,
    OTHER_GPU,
)
from fp8study.analysis.laws.cells import Cell, cells_of
from fp8study.analysis.laws.frozen import Runs
from fp8study.core.records import StoredRun
from fp8study.report.plotstyle import GREY, add_legend, colour, message_figure, panels
from fp8study.report.table import Layout
from fp8study.report.words import count, how_to_get, in_words, number, recipe

#: How each test is introduced; the words follow "Predicted …".
TESTS = {
    LEFT_OUT: "by the cells of all other models",
    KEPT_OUT: "by constants that were frozen without it",
    OTHER_GPU: "from the cells of another kind of GPU",
}
_MARKERS = {LEFT_OUT: "o", KEPT_OUT: "D", OTHER_GPU: "s"}
_GROUP = "{model}, {num_gpus} × {gpu_name}: {test}"
LEADS = Layout(
    {
        "label": ("precision", ""), "setting": ("setting", ""),
        "measured_pct": ("measured, %", "+.1f"), "predicted_pct": ("predicted, %", "+.1f"),
        "error_points": ("off by, points", "+.1f"), "fitted_pct": ("by the newest fit, %", "+.1f"),
        "step_error_pct": ("FP8 step off by, %", "+.1f"), "host_pct": ("host, % of GPU", ".0f"),
    },
    group=_GROUP,
)  # fmt: skip
MEMORY = Layout(
    {
        "label": ("precision", ""), "setting": ("setting", ""),
        "measured_gib": ("measured, GiB", ".2f"), "predicted_gib": ("predicted, GiB", ".2f"),
        "error_pct": ("off by, %", "+.1f"),
    },
    group=_GROUP,
)  # fmt: skip
FREEZES = Layout({
    "freeze": ("freeze", ".0f"), "state": ("state", ""), "num_records": ("records", ".0f"),
    "num_known": ("first cells", ".0f"), "known_points": ("off by, points", ".1f"),
    "num_later": ("later cells", ".0f"), "later_points": ("off by, points", ".1f"),
})  # fmt: skip
CONSTANTS = Layout({
    "law": ("law", ""), "constant": ("constant", ""), "value": ("value", ".4g"),
    "error": ("± without one model", ".2g"),
})  # fmt: skip


def cells(stored: Sequence[StoredRun]) -> list[Cell]:
    """Return the measured cells of the report's records."""
    return cells_of(named(stored))


def named(stored: Sequence[StoredRun]) -> Runs:
    """Return records with their names, as the laws take them."""
    return [
        (f"{run.machine_label}/{run.record.study}/{run.record.run_id}", run.record)
        for run in stored
    ]


def lead_words(verdicts: pd.DataFrame) -> str:
    """Say how far FP8's predicted lead is off, test by test, and whether that meets the goals."""
    if verdicts.empty:
        return f"**FP8's lead: no GPU records yet:** {how_to_get()}."
    return "\n\n".join(_lead_line(row) for _, row in verdicts.iterrows())


def _lead_line(row: pd.Series) -> str:
    side = f"the side of zero is right in all {count(row['num_clear'], 'cell')}"
    if row["num_wrong_side"]:
        side = f"the side of zero is wrong in {row['num_wrong_side']} of {row['num_clear']} cells"
    mean, most = (number(row[name], ".1f") for name in ("mean_points", "most_points"))
    return (
        f"{_opening(row)}: off by {mean} points on average (goal {MEAN_POINTS:g}), and by up to "
        f"{most} in nine of ten (goal {MOST_POINTS:g}). Where the lead is beyond "
        f"±{CLEAR_PCT:g} %, {side}. Worst: {in_words(row['worst'])}, "
        f"{number(row['worst_points'], '+.1f')} points.{_where(row)}{_host(row)}"
    )


def _where(row: pd.Series) -> str:
    """Say of which models the cells are that are off by more than the goal, and how small."""
    models = Counter(row["off_models"])
    if not models:
        return ""
    named = ", ".join(f"{number} of {model}" for model, number in models.most_common())
    return (
        f" Off by more than {MOST_POINTS:g}: {count(models.total(), 'cell')}, {named}; none has "
        f"more than {row['off_tokens']:,.0f} tokens a GPU and pass."
    )


def _host(row: pd.Series) -> str:
    """Say how much worse it is where the host's launches count."""
    if not 0 < row["num_host"] < row["num_cells"]:
        return ""
    host, gpu = (number(row[name], ".1f") for name in ("host_points", "gpu_points"))
    return (
        f" In the {count(row['num_host'], 'cell')} where the host is busy for more than "
        f"{HOST_PCT:g} % of the GPU's time by the law: {host} points on average, elsewhere {gpu}."
    )


def memory_words(verdicts: pd.DataFrame) -> str:
    """Say how far predicted memory is off, test by test, and whether that meets the goal."""
    if verdicts.empty:
        return f"**Memory: no GPU records yet:** {how_to_get()}."
    return "\n\n".join(_memory_line(row) for _, row in verdicts.iterrows())


def _memory_line(row: pd.Series) -> str:
    return (
        f"{_opening(row)}: off by {number(row['mean_pct'], '.1f')} % on average, and by more than "
        f"{MEMORY_PCT:g} % in {row['num_missed'] or 'none'}. Worst: {in_words(row['worst'])}, "
        f"{number(row['worst_pct'], '+.1f')} %."
    )


def _opening(row: pd.Series) -> str:
    badge = "✓ Met" if row["is_met"] else "✗ Missed"
    return f"**{badge}.** {count(int(row['num_cells']), 'cell')}, predicted {TESTS[row['test']]}"


def session_words(sessions: pd.DataFrame) -> str:
    """Say how far one setting's lead moves by itself, from study to study on one kind of GPU."""
    if sessions.empty:
        return "**Why:** no setting was run in several studies yet."
    busy = sessions["host_pct"] > HOST_PCT
    parts = [
        f"{number(group.mean(), '.1f')} points on average {where} (up to "
        f"{number(group.max(), '.1f')}; {count(len(group), 'setting')})"
        for where, group in (
            (f"where the host is busy for more than {HOST_PCT:g} % of the GPU's time",
             sessions.loc[busy, "spread_points"]),
            ("elsewhere", sessions.loc[~busy, "spread_points"]),
        ) if len(group)
    ]  # fmt: skip
    return (
        f"**Why.** From study to study, on one kind of GPU and at one setting, FP8's measured lead "
        f"moved by {', and by '.join(parts)}. There the "
        "host's launches decide, and how fast a host launches is in no record: "
        "`fp8study advise --measure` times it."
    )


def freeze_words(freezes: pd.DataFrame) -> str:
    """Say which freeze is in use, and how far each is off over the same cells."""
    used, earlier = freezes.iloc[-1], freezes.iloc[:-1]
    sentences = [
        f"off by {number(used[column], '.1f')} points on average in the "
        f"{count(int(used[cells]), 'cell')} {what} ({_compared(earlier, column)})"
        for column, cells, what in (
            ("known_points", "num_known",
             "that the first freeze knew, each predicted without its model"),
            ("later_points", "num_later", "that came later"),
        ) if used[cells]
    ]  # fmt: skip
    if not sentences:
        return f"No GPU records to hold the freezes to yet: {how_to_get()}."
    rule = ""
    if used["num_known"]:
        is_best = freezes["known_points"].min() == used["known_points"]
        state = "it is the best of them" if is_best else "**an earlier one has to come back**"
        rule = f" A freeze that makes the first cells worse is withdrawn; by that, {state}."
    return (
        f"Freeze {used['freeze']} is in use: {', and '.join(sentences)}.{rule} The law's form was "
        "chosen with the records of all these freezes at hand, so that only later runs test that "
        "choice."
    )


def _compared(freezes: pd.DataFrame, column: str) -> str:
    return "; ".join(
        f"freeze {row['freeze']}{', withdrawn' * (row['state'] == 'withdrawn')}: "
        f"{number(row[column], '.1f')}"
        for _, row in freezes.iterrows()
    )


def figure(leads: pd.DataFrame, memory: pd.DataFrame, empty: str) -> Figure:
    """Draw predicted against measured: FP8's lead with its goal as a band, and memory."""
    names = {"lead": "FP8's lead over BF16, %", "memory": "Peak memory per GPU, GiB"}
    parts = [
        table.assign(what=what, x=table[x], y=table[y])
        for what, table, x, y in (("lead", leads, "measured_pct", "predicted_pct"),
                                  ("memory", memory, "measured_gib", "predicted_gib"))
        if len(table)
    ]  # fmt: skip
    if not parts:
        return message_figure(empty)
    points = pd.concat(parts)
    drawing, drawn = panels(
        points, ["what"], lambda what: names[what], ("measured", "predicted"), height=3.6
    )
    for axis, _, group in drawn:
        ends = [min(group["x"].min(), group["y"].min()), max(group["x"].max(), group["y"].max())]
        axis.plot(ends, ends, color=GREY, lw=1)
        if group["what"].iloc[0] == "lead":
            low, high = ([end + side for end in ends] for side in (-MOST_POINTS, MOST_POINTS))
            axis.fill_between(ends, low, high, color=GREY, alpha=0.15, lw=0)
        for (test, precision), dots in group.groupby(["test", "precision"]):
            marker, shade = _MARKERS[str(test)], colour(str(precision))
            axis.plot(dots["x"], dots["y"], marker, color=shade, ms=5, alpha=0.7, mec="white",
                      mew=0.4)  # fmt: skip
    shown = [
        Line2D([], [], marker="o", ls="", color=colour(name), label=recipe(name))
        for name in points["precision"].unique()
    ]
    shown += [
        Line2D([], [], marker=_MARKERS[test], ls="", color=GREY, label=test)
        for test in points["test"].unique()
    ]
    add_legend(drawing, shown)
    return drawing
