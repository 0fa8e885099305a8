"""What the paired losses allow one to say."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.stability import listed
from fp8study.analysis.decision import CONCLUSIVE
from fp8study.analysis.losses import LEAST_LEARNT_PCT, comparisons, says_nothing, unswept
from fp8study.analysis.runs.naming import FAST_ACCUMULATION
from fp8study.analysis.runs.pairing import DIVERGED, FAILURE_STUDIES, healthy
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL
from fp8study.report import figures
from fp8study.report.page import Report
from fp8study.report.words import (
    by_machine,
    count,
    each_machine,
    escape,
    how_to_get,
    interval,
    number,
    recipe,
    span,
)


def answer(report: Report) -> str:
    """Say what decided studies found on text kept out."""
    gaps = healthy(comparisons(report.validation_gaps))
    gaps = gaps[gaps["device"] == "cuda"]
    decided = gaps[gaps["verdict"].isin([*CONCLUSIVE, DIVERGED])]
    lost = decided["verdict"].eq(DIVERGED) | (
        decided["verdict"].eq("different") & (decided["gap_pct"] > 0)
    )
    margins = " or ".join(f"{margin:g} %" for margin in sorted(set(decided["margin_pct"])))
    rest = gaps.drop(decided.index)
    of_few = int((rest["num_pairs"] < MIN_PAIRS_FOR_INTERVAL).sum())
    open_ = len(rest) - of_few
    few = f", {of_few} with too few seeds to say" * bool(of_few)
    found = (
        f"on text kept out of training FP8 is worse in {int(lost.sum()) or 'none'} of "
        f"{count(len(decided), 'decided comparison')}, at a margin of {margins} "
        f"({open_} more undecided{few})"
        if len(decided) else "on text kept out of training nothing is decided"
    )  # fmt: skip
    where = (
        " Where training loss is shown equal: [Answer](index.qmd#tbl-settled); on text kept out, "
        "by several machines: [below](#sec-pooled)."
    ) * (not shown_equal(report).empty)
    return f"**{found[0].upper()}{found[1:]}.**{where}"


def shown_equal(report: Report) -> pd.DataFrame:
    """Return the comparisons of a training loss on GPUs that are equivalent, of usual recipes."""
    gaps = healthy(comparisons(report.loss_gaps))
    usual = ~gaps["arm"].str.contains(FAST_ACCUMULATION)
    return gaps[usual & (gaps["device"] == "cuda") & (gaps["verdict"] == "equivalent")]


def notes(report: Report) -> str:
    """Say what the table of verdicts cannot: what diverged, text seen again, what is missing."""
    gaps, unseen = healthy(report.loss_gaps), healthy(report.validation_gaps)
    if gaps.empty:
        return f"**Loss: no answer yet.** No FP8 run has a BF16 partner: {how_to_get()}."
    parts = [] if (gaps["device"] == "cuda").any() else ["**Loss:** no pair on GPUs yet."]
    parts += filter(None, [_left_out(gaps)])
    for machine, rows in by_machine(comparisons(gaps)):
        if found := " ".join(filter(None, (diverged(rows), _failures(rows), _repeated(rows)))):
            parts.append(f"**Training loss on {machine}.** {found}")
    unseen = comparisons(unseen[unseen["device"] == "cuda"])
    if unseen.empty:
        parts.append(
            "**Loss on unseen text: no answer yet.** No pair on a GPU kept text out of its "
            f"training: {how_to_get('loss-parity')}."
        )
    known = report.loss_gaps.set_index("arm_key")
    for machine, rows in by_machine(unseen):
        if found := " ".join(filter(None, (diverged(rows), _apart(rows, known)))):
            parts.append(f"**Loss on unseen text, {machine}.** {found}")
    return "\n\n".join(parts)


def _left_out(gaps: pd.DataFrame) -> str:
    """Name the studies with comparisons that count nowhere, as there was nothing to spoil."""
    gaps = unswept(gaps[says_nothing(gaps)])
    if gaps.empty:
        return ""
    studies = escape(", ".join(sorted(gaps["study"].unique())))
    return (
        f"**Left out: {count(len(gaps), 'comparison')} of training losses**, none different "
        f"({studies}). BF16's own loss ended less than {LEAST_LEARNT_PCT:g} % below what token "
        "frequencies alone give: there is nothing that FP8 could have spoiled."
    )


def diverged(gaps: pd.DataFrame) -> str:
    """Name the comparisons in which FP8 alone diverged; empty where there is none."""
    gaps = gaps[gaps["verdict"] == DIVERGED]
    if gaps.empty:
        return ""
    arms = "; ".join(f"{row['model']}, {row['arm']}: {row['judged']}" for _, row in gaps.iterrows())
    return (
        f"**In {count(len(gaps), 'comparison')} FP8 diverged in a seed in which BF16 did not** "
        f"({escape(arms)})."
    )


def _failures(gaps: pd.DataFrame) -> str:
    """Say so if all that is judged failed to learn in BF16, too."""
    judged = gaps.loc[gaps["gap_pct_low_90"].notna() & (gaps["verdict"] != DIVERGED), "study"]
    if judged.empty or not judged.str.startswith(FAILURE_STUDIES).all():
        return ""
    return "All are from studies of document A's failure, at its very small learning rate."


def _repeated(gaps: pd.DataFrame) -> str:
    """Say so if every difference is of a run that saw its text again."""
    passed = gaps.loc[gaps["verdict"] == "different", "epochs"]
    if passed.empty or not (passed >= 2).all():
        return ""
    return (
        f"Every different gap is of a run that read its text {span(passed, '.1f')} times over "
        "([passes](quality.qmd#sec-passes))."
    )


def _apart(gaps: pd.DataFrame, training: pd.DataFrame) -> str:
    """Say where only the training loss tells FP8 from BF16, on text seen before."""
    # In a first pass there is nothing to remember.
    unseen = gaps[~gaps["verdict"].isin(["different", DIVERGED]) & (gaps["epochs"] > 1)]
    seen = training.reindex(unseen["arm_key"])
    apart = (seen["verdict"] == "different").to_numpy()
    if not apart.any():
        return ""
    verdicts = unseen.loc[apart, "verdict"].value_counts()
    each = ", ".join(f"{verdict} in {times}" for verdict, times in verdicts.items())
    return (
        f"In {count(int(apart.sum()), 'comparison')} the training loss is different "
        f"({span(seen.loc[apart, 'gap_pct'], '+.2f', ' %')}) after "
        f"{span(unseen.loc[apart, 'epochs'], '.1f')} passes; this one is {each} "
        f"({span(unseen.loc[apart, 'gap_pct'], '+.2f', ' %')})."
    )


@each_machine("\n\n")
def equal_time(rows: pd.DataFrame) -> str:
    """Say what share of BF16's time to one loss FP8 saves, from `matched.equal_time_table`."""
    arms = "; ".join(_saved(row) for _, row in rows.iterrows())
    return (
        f"To the same loss on text kept out of training, {arms}. Only steps count: no start-up, "
        "compilation or scoring."
    )


def _saved(row: pd.Series) -> str:
    share = number(row["saved_pct"], ".1f")
    ends = interval(row["low_95"], row["high_95"], ".1f")
    ci = f"95 % CI {ends}, " if ends else ""
    longer = ", so it takes longer" if row["saved_pct"] < 0 else ""
    return (
        f"{escape(row['arm'])} saves {share} % of BF16's time{longer} ({escape(row['model'])}, "
        f"{count(row['num_gpus'], 'GPU')}, {row['loss']:.2f} nats; {ci}n = {row['num_pairs']})"
    )


@each_machine("\n\n")
def matched(rows: pd.DataFrame) -> str:
    """Say whether FP8's gap grows with the batch, from `matched.matched_loss_table`."""
    arms = "; ".join(_grows(arm) for _, arm in rows.groupby(["study", "model", "arm"], sort=False))
    return f"Where BF16 has come down to one loss with every batch, {arms}."


def _grows(arm: pd.DataFrame) -> str:
    row = arm.iloc[0]
    gaps = ", ".join(
        f"{number(gap, '+.2f')} % at {count(int(batch), 'sequence')}"
        for batch, gap in zip(arm["effective_batch"], arm["gap_pct"], strict=True)
    )
    text = f"{escape(row['arm'])} is off by {gaps} ({escape(row['model'])}, {row['loss']:.2f} nats)"
    ends = interval(row["slope_low_95"], row["slope_high_95"], "+.3f")
    if not ends:
        return text
    return (
        f"{text}: {number(row['slope_points'], '+.3f')} points with each doubling (95 % CI {ends}, "
        f"n = {arm['num_pairs'].min()})"
    )


@each_machine("\n\n")
def formats(rows: pd.DataFrame) -> str:
    """Say what narrower states and FP16 cost, from `losses.formats_table`."""
    arms = "; ".join(_format(row) for _, row in rows.iterrows())
    return f"Against BF16 with FP32 optimizer states: {arms}."


def _format(row: pd.Series) -> str:
    name = f"{recipe(row['precision'])} with {recipe(row['optimizer_state'])} states"
    if row["verdict"] == DIVERGED:
        return f"{name} diverged in {count(row['num_diverged'], 'seed')}"
    ends = interval(row["low_95"], row["high_95"], "+.2f")
    ci = f" (95 % CI {ends})" if ends else ""
    memory = row["memory_change_pct"]
    peak = f", peak memory {number(memory, '+.0f')} %" if pd.notna(memory) else ""
    return (
        f"{name} {number(row['gap_pct'], '+.2f')} % of the loss{ci}, {row['verdict']} at "
        f"±{row['margin_pct']:g} %{peak}"
    )


@each_machine("\n\n")
def stable(rates: pd.DataFrame) -> str:
    """Say up to which learning rate each arm trained, sweep by sweep."""
    return " ".join(
        f"{escape(own['model'].iloc[0])}, {count(int(own['num_seeds'].min()), 'seed')} at each "
        f"rate: {listed(own)}."
        for _, own in rates.groupby("sweep", sort=False)
    )


#: What else pairs of losses tell → the study that makes its records, its download, how it is said.
_FURTHER = {
    "Time to the same loss": ("equal-time", "equal-time", equal_time),
    "Batches at one loss": ("batch-growth", "matched-loss", matched),
    "Optimizer states and FP16": ("optimizer-states", "formats", formats),
    "The highest learning rate that trains": ("stability", "stable-rates", stable),
}


def further(*tables: pd.DataFrame) -> str:
    """Say what the tables of `_FURTHER` tell, in its order, and in one line which have no rows."""
    said, open_ = [], []
    for (name, (study, file, say)), table in zip(_FURTHER.items(), tables, strict=True):
        if len(table):
            said.append(f"**{name}.** {say(table)} {figures.download(table, file)}")
        else:
            open_.append(f"{name.lower().replace('fp', 'FP')} (`STUDY={study}`)")
    if open_:
        said.append(f"No records yet: {', '.join(open_)}; {how_to_get()}.")
    return "\n\n".join(said)
