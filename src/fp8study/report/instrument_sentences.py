"""What the instruments saw, in words; each speaks of the rows of the table below it."""

from __future__ import annotations

import math

import pandas as pd

from fp8study.analysis import instruments as tables
from fp8study.report.words import count, how_to_get, per_machine, span

#: A change of the energy per token by less is taken for none, %.
SAME_PCT = 1.0
#: How far the share of FP8 GEMMs may be from what the converted layers should give, points.
TOLERANCE = 0.5


def _missing(what: str) -> str:
    return f"**{what}: no records yet:** {how_to_get('instruments')}."


def proof(frame: pd.DataFrame) -> str:
    """Say whether every run computed what it claims to compute.

    Args:
        frame: From `fp8study.analysis.instruments.instruments_frame`.
    """
    seen = tables.numbers(frame, "step.fp8_gemm_flops_pct").notna()
    seen &= frame["device"] == "cuda"
    return per_machine(frame[seen], _proof) if seen.any() else _missing("Proof that FP8 ran")


def _proof(rows: pd.DataFrame) -> str:
    share = tables.numbers(rows, "step.fp8_gemm_flops_pct")
    expected = tables.numbers(rows, "audit.fp8_gemm_flops_pct_expected")
    fp8, judged = rows["precision"] != "bf16", expected.notna()
    parts = []
    if unknown := int((fp8 & ~judged).sum()):
        parts.append(
            f"{count(unknown, 'profiled FP8 run')} cannot be judged: FP8 was emulated, or the "
            "record is too old to say what to expect."
        )
    if silent := int((fp8 & judged & (share == 0)).sum()):
        parts.append(f"**{count(silent, 'FP8 run')} did no GEMM in FP8.**")
    if known := int((fp8 & judged).sum()):
        right = int((fp8 & judged & ((share - expected).abs() <= TOLERANCE)).sum())
        parts.append(
            f"In {right} of {count(known, 'profiled FP8 run')}, FP8 did the share of the GEMM "
            "FLOPs that the converted layers should give."
        )
    if bf16 := int((~fp8).sum()):
        wrong = int((~fp8 & (share > 0)).sum())
        parts.append(f"FP8 GEMMs in {wrong or 'none'} of {count(bf16, 'profiled BF16 run')}.")
    return " ".join(parts)


def audits(frame: pd.DataFrame) -> str:
    """Say how many audits found something, and what."""
    if tables.numbers(frame, "audit.num_trainable").dropna().empty:
        return _missing("Audits")
    audited = frame[frame["audit.num_trainable"].notna()]
    bad = audited[audited["audit.problems"].fillna("") != ""]
    asked = bad["stale"].fillna(False).astype(bool)
    text = f"{count(len(audited), 'run')} carried an audit: "
    if bad.empty:
        return text + "no problem was found."
    if asked.all():
        return text + f"only the {count(len(bad), 'deliberately stale run')} failed."
    names = ", ".join(f"`{name}`" for name in bad.loc[~asked, "run_id"])
    return text + f"{len(bad)} failed, {int((~asked).sum())} of them not on purpose: {names}."


def reach(table: pd.DataFrame) -> str:
    """Say how near the GEMMs of a step come to their GEMM peak, and when that peak is too low.

    Args:
        table: From `fp8study.report.rows.utilisation`.
    """
    known = table.dropna(subset="gemm_pct")
    return per_machine(known, _reach) if len(known) else _missing("GEMM peaks")


def _reach(rows: pd.DataFrame) -> str:
    text = f"Inside a step the GEMMs run at {span(rows['gemm_pct'], '.0f', ' %')} of their peak."
    if (rows["gemm_pct"] > 105).any():
        text += (
            " Above 100 % the peak was measured too low: records made before GEMMs were timed "
            "from a full queue hold the launches of small ones."
        )
    return text


def gathered(table: pd.DataFrame) -> str:
    """Say what the FP8 all-gather saves, and in what the gradients travel.

    Args:
        table: From `fp8study.analysis.instruments.communication_table`.
    """
    return per_machine(table, _gathered) if len(table) else _missing("Communication")


def _gathered(rows: pd.DataFrame) -> str:
    in_fp8 = rows[rows["all_gather_dtypes"].str.contains("uint8|float8")]
    change = in_fp8["all_gather_change_pct"].dropna()
    dtypes = sorted({d for d in rows["reduce_scatter_dtypes"].dropna() if d})
    parts = []
    if len(change):
        parts.append(
            f"FP8 all-gather changes the bytes by {span(change, '+.0f', ' %')}. Layers out "
            "of FP8 still travel in BF16; FSDP2 packs FP8 weights as bytes, so NCCL says uint8."
        )
    if dtypes:
        none = "" if any("float8" in d for d in dtypes) else ", never in FP8"
        parts.append(f"Gradients are reduce-scattered in {' or '.join(dtypes)}{none}.")
    return " ".join(parts)


def energy(table: pd.DataFrame) -> str:
    """Say what a token costs in energy.

    Args:
        table: From `fp8study.analysis.instruments.energy_table`.
    """
    known = table["change_pct"].notna() if len(table) else pd.Series(dtype=bool)
    return per_machine(table, _energy) if known.any() else _missing("Energy")


def _energy(rows: pd.DataFrame) -> str:
    change = rows["change_pct"].dropna()
    if change.empty:
        return ""
    less, more = int((change < -SAME_PCT).sum()), int((change > SAME_PCT).sum())
    text = (
        f"FP8 takes less energy per token than BF16 in {less} and more in {more} of "
        f"{count(len(change), 'comparison')} ({span(change, '+.1f', ' %')}; changes of up to "
        f"{SAME_PCT:g} % count as neither)."
    )
    bf16 = rows[(rows["precision"] == "bf16") & ~rows["stale"].fillna(False).astype(bool)]
    if capped := int((bf16["power_cap_pct"] > 50).sum()):
        text += (
            f" {capped} of {count(len(bf16), 'BF16 arm')} ran at the power limit for more than "
            "half of the time: the datasheet's peak was out of reach."
        )
    return text


def overhead(table: pd.DataFrame) -> str:
    """Say what measuring costs.

    Args:
        table: From `fp8study.report.rows.overhead`.
    """
    if table.empty:
        return _missing("What measuring costs")
    return per_machine(table, lambda rows: (
        "Measuring costs less than 1 % of a step."
        if (rows["high_pct"] < 1).all()
        else "Measuring is not shown to cost less than 1 % of a step."
    ))  # fmt: skip


def break_even(table: pd.DataFrame) -> str:
    """Say after how many steps FP8's warm-up is paid for.

    Args:
        table: From `fp8study.analysis.break_even.break_even_table`.
    """
    return per_machine(table, _break_even) if len(table) else _missing("Break-even")


def _break_even(rows: pd.DataFrame) -> str:
    never = rows["break_even_steps"] == math.inf
    text = f"In {int(never.sum())} of {count(len(rows), 'comparison')} FP8's step is no shorter"
    paid = rows.loc[~never, "break_even_steps"]
    if paid.empty:
        return f"{text}."
    return f"{text}; elsewhere its longer warm-up is paid for after {span(paid, ',.0f')} steps."
