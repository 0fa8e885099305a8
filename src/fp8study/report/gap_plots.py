"""The figures of loss gaps: every judged pair of arms on one axis, and each study's curves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fp8study.analysis.losses import gap_curves, seed_spread
from fp8study.analysis.runs.pairing import FAILURE_STUDIES, healthy, newest_per_seed
from fp8study.report.page import Report
from fp8study.report.plots import curve_table, smooth, thin
from fp8study.report.plotstyle import (
    BAND,
    GREY,
    SETTING,
    add_heading,
    add_legend,
    colour,
    line_styles,
    message_figure,
    panels,
    signed_ticks,
)
from fp8study.report.rows import judged, usual, with_labels, without
from fp8study.report.words import escape, number

#: Their losses are on the page Document A's failure.
ELSEWHERE = (*FAILURE_STUDIES, "effective-batch")
#: Characters of a row's label, and of the line over a study's rows.
_LABEL_WIDTH, _TITLE_WIDTH = 22, 58
_ROW_INCHES = 0.175


def forest_figure(training: pd.DataFrame, validation: pd.DataFrame, empty: str) -> Figure:
    """Draw the paired loss gap of every judged arm with its 95 % interval and the margin, in %.

    Both are tables of `fp8study.analysis.losses.loss_gap_table`; nats and verdicts of the training
    loss stand beside.
    """
    training = judged(training)
    if training.empty:
        return message_figure(empty)
    unseen = judged(validation).set_index("arm_key")
    rows = list(_lines(training))
    # One panel of the shared style, as high as its rows.
    lines = [max(text.count("\n") + 1, 1 if row is None else 2) for text, row in rows]
    height = _ROW_INCHES * (sum(lines) + 3)
    labels = ("FP8 − BF16, % of the BF16 loss", "")
    figure, [(axis, _, _)] = panels(training[:1], ["device"], lambda _: "", labels, height)
    labelled, place = {}, 0.0
    for (text, row), num in zip(rows, lines, strict=True):
        place -= num / 2
        if row is None:
            add_heading(axis, place, text)
        else:
            labelled[place] = text
            _draw_row(axis, place, row, unseen)
        place -= num / 2
    axis.set_yticks([*labelled], [*labelled.values()], fontsize=9)
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.locator_params(axis="x", nbins=6)
    axis.set_ylim(place - 0.5, 0.5)
    axis.xaxis.set_major_formatter(signed_ticks)
    handles = [
        Line2D([], [], color=GREY, marker="o", label="training loss, 95 % CI"),
        Line2D([], [], color=GREY, marker="D", mfc="white", label="text never trained on"),
        Patch(facecolor=BAND, label="the study's margin"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw_row(axis: Axes, place: float, row: pd.Series, unseen: pd.DataFrame) -> None:
    shade, margin = colour(row["precision"]), row["margin_pct"]
    axis.fill_between([-margin, margin], place - 1, place + 1, color=BAND, linewidth=0)
    axis.plot([0, 0], [place - 1, place + 1], color=GREY, linewidth=0.8)
    found = [(row, place + 0.25, "o", shade)]
    if row["arm_key"] in unseen.index:
        found.append((unseen.loc[row["arm_key"]], place - 0.4, "D", "white"))
    for gap, height, mark, face in found:
        ends = [gap["gap_pct_low_95"], gap["gap_pct_high_95"]]
        axis.plot(ends, [height] * 2, color=shade, linewidth=1.5)
        axis.plot(gap["gap_pct"], height, mark, color=shade, markerfacecolor=face, markersize=4.5)
    said = (
        f"{number(row['gap_pct'], '+.2f')} %, {row['verdict']}\n{number(row['gap'], '+.4f')} nats"
    )
    axis.text(1.01, place, said, transform=axis.get_yaxis_transform(), va="center", fontsize=9)


def _lines(table: pd.DataFrame) -> Iterator[tuple[str, pd.Series | None]]:
    """Yield the rows' labels from above, each study's own line first, without a row."""
    said = usual(table)
    for title, rows in with_labels(table).groupby("title", sort=False):
        yield textwrap.fill(without(str(title), said), _TITLE_WIDTH), None
        for _, row in rows.iterrows():
            yield textwrap.fill(row["label"], _LABEL_WIDTH), row


def forest_settings(gaps: pd.DataFrame) -> str:
    """Say once, for the caption, what the lines of `forest_figure` leave out."""
    said = ", ".join(map(escape, usual(judged(gaps))))
    return f"Unless a line says otherwise: {said}." if said else ""


def study_curves(report: Report) -> Iterator[tuple[pd.DataFrame, Figure, pd.DataFrame]]:
    """Yield the judged gaps of every study whose losses are asked about, its curves, their data.

    Of each setting: the training loss, and below it the gap with the spread of BF16's seeds.
    """
    table = judged(report.loss_gaps)
    table = table[~table["study"].str.startswith(ELSEWHERE)]
    for _, rows in table.groupby(["machine", "study"], sort=False):
        asked = report.runs.merge(rows[SETTING].drop_duplicates(), on=SETTING)
        wanted = report.runs[report.runs["partner_key"].isin(asked["partner_key"])]
        done = healthy(wanted[wanted["status"] == "completed"])
        runs = _beside_partners(newest_per_seed(done))
        yield rows, _curves_figure(report.metrics, runs), curve_table(report.metrics, runs)


def _beside_partners(runs: pd.DataFrame) -> pd.DataFrame:
    """Give FP8 arms the setting of their BF16 partners; switches that these lack name the arm."""
    bf16 = runs[runs["precision"] == "bf16"].drop_duplicates("partner_key")
    theirs = runs["partner_key"].map(bf16.set_index("partner_key")["setting"])
    theirs = theirs.fillna(runs["setting"])
    own = [
        [part for part in of_run.split(", ") if part not in of_partner.split(", ")]
        for of_run, of_partner in zip(runs["setting"], theirs, strict=True)
    ]
    arm = [", ".join([name, *parts]) for name, parts in zip(runs["arm"], own, strict=True)]
    return runs.assign(setting=theirs, arm=arm)


def _curves_figure(metrics: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    gaps, spread = gap_curves(metrics, runs), seed_spread(metrics, runs)
    curves = runs.merge(metrics, on=["machine", "study", "run_id"])
    both = pd.concat([curves.assign(of="loss"), gaps.assign(of="gap")])
    figure, drawn = panels(
        both.sort_values(SETTING, kind="stable"), [*SETTING, "of"],
        lambda *key: key[-2] if key[-1] == "loss" else "", ("step", ""),
        1.7,
    )  # fmt: skip
    styles = line_styles(runs)
    for axis, key, rows in drawn:
        for arm, own in rows.groupby("arm", sort=False):
            mean = own.groupby("step")["loss" if key[-1] == "loss" else "gap_pct"].mean()
            axis.plot(thin(smooth(mean) if key[-1] == "loss" else mean), **styles[str(arm)])
        if key[-1] == "loss":
            axis.set_ylabel("training loss, nats")
            continue
        seeds = spread.merge(rows[SETTING].drop_duplicates(), on=SETTING)
        band = thin(seeds.groupby("step")["spread_pct"].mean())
        axis.fill_between(band.index.astype(float), -band, band, color=BAND, linewidth=0)
        axis.axhline(0, color=GREY, linewidth=0.8)
        # Linear about zero, logarithmic beyond: seeds differ by many times what precisions do.
        axis.set_yscale("symlog", linthresh=0.1)
        axis.yaxis.set_major_formatter(signed_ticks)
        axis.set_ylabel("gap to BF16, %")
    lines = [Line2D([], [], label=arm, **style) for arm, style in styles.items()]
    add_legend(figure, [*lines, Patch(label="BF16 seeds, ± 1 SD", facecolor=BAND)])
    return figure
