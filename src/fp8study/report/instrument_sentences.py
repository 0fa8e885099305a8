"""What the instruments saw, in words; each speaks of the rows of the table below it."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis import instruments as tables
from fp8study.analysis.runs.pairing import in_fp8
from fp8study.report.words import count, each_machine, escape, missing, number, per_machine, span

#: A change of the energy per token by less is taken for none, %.
SAME_PCT = 1.0
#: How far the share of FP8 GEMMs may be from what the converted layers should give, points.
TOLERANCE = 0.5


def proof(frame: pd.DataFrame) -> str:
    """Say of all machines' runs whether each computed what it claims to compute."""
    seen = tables.numbers(frame, "step.fp8_gemm_flops_pct").notna()
    seen &= frame["device"] == "cuda"
    if not seen.any():
        return missing("Proof that FP8 ran", "instruments")
    rows = frame[seen]
    share = tables.numbers(rows, "step.fp8_gemm_flops_pct")
    expected = tables.numbers(rows, "audit.fp8_gemm_flops_pct_expected")
    fp8, judged = in_fp8(rows), expected.notna()
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
            f"{right} of {count(known, 'profiled FP8 run')} did the expected share of their GEMMs "
            "in FP8."
        )
    if others := int((~fp8).sum()):
        wrong = int((~fp8 & (share > 0)).sum())
        parts.append(f"Of {count(others, 'other profiled run')}, {wrong or 'none'} did any.")
    return " ".join(parts)


def audits(frame: pd.DataFrame) -> str:
    """Say how many audits found something, and what."""
    if tables.numbers(frame, "audit.num_trainable").dropna().empty:
        return missing("Audits", "instruments")
    audited = frame[frame["audit.num_trainable"].notna()]
    bad = audited[audited["audit.problems"].fillna("") != ""]
    asked = bad["stale"].fillna(False).astype(bool)
    text = f"Of the runs that were timed or profiled {len(audited):,} were audited: "
    if bad.empty:
        return text + "no problem was found."
    if asked.all():
        runs = count(len(bad), "run")
        return f"{text}only the {runs} with a deliberately stale optimizer failed."
    names = ", ".join(f"`{name}`" for name in bad.loc[~asked, "run_id"])
    return text + f"{len(bad)} failed, {int((~asked).sum())} of them not on purpose: {names}."


@each_machine()
def left_out(frame: pd.DataFrame) -> str:
    """Say which runs' times the allocator may have made: these pages show none of them."""
    void = frame[frame["timing_void"]]
    if void.empty:
        return ""
    runs = void.groupby(["model", "num_gpus"]).size().reset_index(name="runs").to_dict("records")
    named = [f"{escape(row['model'])} on {count(int(row['num_gpus']), 'GPU')} "
             f"({count(row['runs'], 'run')})" for row in runs]  # fmt: skip
    return f"Memory full, so left out of times and energy here: {', '.join(named)}."


@each_machine("\n\n", missing("What measuring costs", "instruments"))
def overhead(rows: pd.DataFrame) -> str:
    """Say what the instruments cost; from `fp8study.report.rows.overhead`."""
    row = rows.iloc[0]
    return (
        f"Instruments change the time of a step by {number(row['median_pct'], '+.2f')} % (blocks "
        f"of steps with and without, in turns; median of {row['num_pairs']} pairs; 95 % CI "
        f"{row['interval']})."
    )


def energy(table: pd.DataFrame) -> str:
    """Say what a token costs in energy."""
    if table.empty or table["change_pct"].isna().all():
        return missing("Energy", "instruments")
    others = "Other settings and paths: [energy in the answer](index.qmd#tbl-decisions)."
    return f"{per_machine(table, _energy)} {others}"


def _energy(rows: pd.DataFrame) -> str:
    change = rows["change_pct"].dropna()
    if change.empty:
        return ""
    less, more = int((change < -SAME_PCT).sum()), int((change > SAME_PCT).sum())
    paths = rows["setting"].str.contains(", tuned").map({True: "tuned", False: "plain"})
    studies, path = rows["study"].unique(), " and ".join(paths.unique())
    where = f"the study {escape(studies[0])}" if len(studies) == 1 else f"{len(studies)} studies"
    return (
        f"In {where}, on the {path} path, FP8 takes less energy per token than BF16 in {less} and "
        f"more in {more} of {count(len(change), 'comparison')} ({span(change, '+.1f', ' %')}; "
        f"changes of up to {SAME_PCT:g} % count as neither)."
    )
