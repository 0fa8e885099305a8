"""What the loss gaps allow one to say, in words; as `fp8study.report.sentences`."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.pairing import DIVERGED, FAILURE_STUDIES
from fp8study.report.page import Report
from fp8study.report.words import count, escape, how_to_get, signed


def loss_summary(report: Report) -> str:
    """Say what the paired losses allow one to say."""
    gaps = report.loss_gaps
    gaps = gaps[~gaps["stale"].fillna(False).astype(bool)]
    gpu, cpu = gaps[gaps["device"] == "cuda"], gaps[gaps["device"] == "cpu"]
    if gaps.empty:
        return f"**Loss: no answer yet.** No FP8 run has a BF16 partner: {how_to_get('quick')}."
    parts = [_loss_sentence(gpu, "on GPUs") if len(gpu) else "**Loss:** no pair on GPUs yet."]
    parts[0] += _repeated_sentence(gpu[gpu["verdict"] == "different"])
    if len(cpu):
        parts.append(_loss_sentence(cpu, "on CPUs with emulated FP8"))
    return "\n\n".join(parts)


def _repeated_sentence(different: pd.DataFrame) -> str:
    """Say so if every difference is of a run that saw its text again."""
    passes = different["epochs"]
    if different.empty or not (passes >= 2).all():
        return ""
    return (
        f" Every one that is different trained on its text {_plain_range(passes)} times over, "
        "where a training loss is also a matter of what the model remembers: see "
        "[text seen again](quality.qmd#sec-passes)."
    )


def _plain_range(values: pd.Series) -> str:
    low, high = f"{values.min():.1f}", f"{values.max():.1f}"
    return low if low == high else f"{low} to {high}"


def validation_summary(report: Report) -> str:
    """Say what the paired validation losses allow one to say, and where training ones disagree."""
    gaps = report.validation_gaps
    gaps = gaps[~gaps["stale"].fillna(False).astype(bool) & (gaps["device"] == "cuda")]
    if gaps.empty:
        return (
            "**Validation loss: no answer yet.** No pair on a GPU kept text out of its training: "
            f"{how_to_get('loss-parity')}."
        )
    text = _loss_sentence(gaps, "on text kept out of training, scored in BF16")
    training = report.loss_gaps.set_index("arm_key")
    apart = [
        (row, training.loc[row["arm_key"]])
        for _, row in gaps.iterrows()
        if row["arm_key"] in training.index
        and training.loc[row["arm_key"], "verdict"] == "different"
        and row["verdict"] not in ("different", DIVERGED)
        and row["epochs"] > 1  # in a first pass there is nothing to remember
    ]
    if apart:
        here = pd.Series([float(row["gap_pct"]) for row, _ in apart])
        there = pd.Series([float(other["gap_pct"]) for _, other in apart])
        passes = pd.Series([float(row["epochs"]) for row, _ in apart])
        text += (
            f" In {count(len(apart), 'comparison')} the training loss is different "
            f"({_range(there)}) and this one is not ({_range(here)}), after "
            f"{_plain_range(passes)} passes over the corpus: on text "
            "seen before FP8 is behind, and on text never seen no loss was found."
        )
    return text


def _loss_sentence(gaps: pd.DataFrame, where: str) -> str:
    text = f"**Loss {where}.**"
    gone = gaps["verdict"] == DIVERGED
    if gone.any():
        text += f" {_diverged_sentence(gaps[gone])}"
    gaps = gaps[~gone]
    tested = gaps["gap_pct_low_90"].notna()
    if tested.any():
        text += f" {_tested_sentence(gaps[tested])}"
    if not tested.all():
        text += f" {_untested_sentence(gaps[~tested], bool(tested.any()))}"
    return text


def _diverged_sentence(gaps: pd.DataFrame) -> str:
    arms = "; ".join(
        f"{row['model']}, {row['arm']}: {row['judged'].removeprefix('diverged in ')}"
        for row in gaps.to_dict("records")
    )
    return (
        f"**In {count(len(gaps), 'comparison')} FP8 diverged in a seed in which BF16 did not** "
        f"({escape(arms)}); what the other seeds say is no verdict on it."
    )


def _tested_sentence(gaps: pd.DataFrame) -> str:
    counts = gaps["verdict"].value_counts()
    better = int(((gaps["verdict"] == "different") & (gaps["gap_pct"] < 0)).sum())
    side = f" (FP8 is better in {better})" if better else ""
    text = (
        f"Of {count(len(gaps), 'comparison')} with three seeds or more, at a margin of "
        f"{_margins(gaps)}: {counts.get('equivalent', 0)} equivalent, "
        f"{counts.get('different', 0)} different{side}, {counts.get('undecided', 0)} undecided "
        f"(mean gaps {_span(gaps)}; +: FP8 is worse). A paired t test "
        f"against zero finds true differences {_detectable(gaps['detectable_pct'])} four times in "
        "five; to be called different takes more."
    )
    if gaps["study"].str.startswith(FAILURE_STUDIES).all():
        text += (
            " All of these are from studies of document A's failure, at a learning rate far below "
            "a usual one: they say nothing of a run that anyone would start."
        )
    within = gaps[gaps["verdict"] == "equivalent"]
    sure = (within["gap_pct_low_95"] > 0) | (within["gap_pct_high_95"] < 0)
    if sure.any():
        text += (
            f" Equivalent is not equal: in {int(sure.sum())} of them the 95 % interval leaves out "
            "zero, so there is a difference, smaller than the margin."
        )
    return text


def _detectable(pct: pd.Series) -> str:
    low, high = f"{pct.min():.2f}", f"{pct.max():.2f}"
    return f"of {low} %" if low == high else f"of {low} % to {high} %, by the spread of the seeds,"


def _margins(gaps: pd.DataFrame) -> str:
    margins = sorted(gaps["margin_pct"].astype(float).dropna().unique())
    return " or ".join(f"±{margin:g} %" for margin in margins)


def _untested_sentence(gaps: pd.DataFrame, others: bool) -> str:
    worst = gaps.iloc[int(gaps["gap_pct"].astype(float).abs().to_numpy().argmax())]
    unit = "process" if worst["device"] == "cpu" else "GPU"
    several = "" if worst["num_gpus"] == 1 else "es" if unit == "process" else "s"
    return (
        f"{'The other ' if others else ''}{count(len(gaps), 'comparison')} "
        f"{'has' if len(gaps) == 1 else 'have'} fewer than three seeds and so no interval: gaps of "
        f"{_span(gaps)} (+: FP8 is worse), the largest with {escape(str(worst['model']))}, "
        f"{escape(str(worst['arm']))}, on {worst['num_gpus']} {unit}{several}. They show neither "
        "that FP8 and BF16 are the same, nor that they differ."
    )


def _span(gaps: pd.DataFrame) -> str:
    return _range(gaps["gap_pct"].astype(float))


def _range(pct: pd.Series) -> str:
    low, high = signed(pct.min(), 2), signed(pct.max(), 2)
    return f"{low} %" if low == high else f"{low} % to {high} %"
