"""What the records say one should train in, how little that rests on, and what would change it.

Each function returns Markdown. The words follow the sign of the numbers, and what is not there
yet is said together with the command that would make it.
"""

from __future__ import annotations

import math

import pandas as pd

from fp8study.analysis import decision
from fp8study.analysis.leads import LEVEL
from fp8study.analysis.losses import comparisons
from fp8study.analysis.runs.pairing import SESSION_GAP, healthy
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL
from fp8study.report.answer import counted, longest
from fp8study.report.page import Report
from fp8study.report.words import (
    at_start,
    by_machine,
    count,
    how_to_get,
    per_machine,
    span,
)

#: More than so many sessions nobody will do.
_MOST_SESSIONS = 20


def _leads(rows: pd.DataFrame) -> str:
    return span(rows["lead_pct"].dropna(), "+.1f", " %")


def lead_caption(peers: pd.DataFrame) -> str:
    """Say what the picture of the leads shows."""
    theirs = " ×: torchtitan's, a ratio of geometric means." * bool(
        peers["peer_lead_pct"].notna().any()
    )
    return (
        "Every setting that was timed, a panel per machine. Marks: means of paired ratios, moved "
        f"sideways by model; bars: all pairs.{theirs}"
    )


def lead_words(table: pd.DataFrame) -> str:
    """Say of each machine what the picture shows, for who cannot see it."""
    return "; ".join(f"{name}: {counted(rows)}" for name, rows in by_machine(table))


def plain_only(table: pd.DataFrame) -> str:
    """Say what is decided where only the plain path was timed."""
    if table.empty:
        return "No setting was timed on the plain path alone"
    return f"{count(len(table), 'setting')} timed on the plain path alone: {counted(table)}"


def rule() -> str:
    """Write down the rule behind the column that says what to do, and what a lead is."""
    worth = f"{decision.WORTH_PCT:g} %"
    return (
        "Unless [*path*](glossary.qmd) says otherwise: tuned, tensorwise, 4,096 tokens, FP32 "
        "master weights, compiled, gradients not clipped, one GPU not under FSDP2.\n\n"
        f"**The rule**, by the {100 * LEVEL:.0f} % CI of FP8's lead. Wholly above {worth}, "
        "*surely faster*: FP8 if its loss in this very setting, clipped or not, is equivalent or "
        f"lower, BF16 if it is worse; else check it first. Wholly below {worth}: BF16; if below "
        "zero with weights gathered in FP8, try gathering them in BF16. Otherwise: measure more; "
        "so too where FP8 lost with its kernels launched one by one and the tuned path launches "
        "such a step as one CUDA graph today."
        "\n\n"
        "**The lead** is the geometric mean of a session's paired ratios, then of sessions "
        f"({SESSION_GAP.seconds // 60} idle minutes begin a new one). **Its CI** is Student's t of "
        "the logarithms. How far sessions differ is learnt from every setting of that machine and "
        "path that had several, one GPU and several GPUs apart. Where none had, the CI is by how "
        "far pairs differ, and another day may fall outside it. A setting whose step times had not "
        "settled goes by its own sessions.\n\n"
        "**A row** of the first table is one of the second: of machines with one kind of GPU, "
        "today's path before the one before it, the plain one where no other was timed, then what "
        "is decided. One of the second is the tuned path where it was timed, then FP32 master "
        "weights, the length nearest to 4,096 tokens, no clipping, the most pairs, the recipe with "
        "the largest lead. "
        "*FP8's loss* was judged for that model and recipe in the nearest setting, of several "
        "studies in that with the most pairs; –: not yet."
    )


def changes(report: Report) -> str:
    """Say setting by setting what would change the answer."""
    if report.decisions.empty:
        return f"Any measurement: {how_to_get()}."
    return per_machine(report.decisions, _changes)


def _changes(table: pd.DataFrame) -> str:
    lines = []
    check = table[table["action"] == decision.CHECK]
    if len(check):
        tried = int((check["loss_is_same"].eq(True) & check["loss_verdict"].eq("undecided")).sum())
        open_yet = f", {tried} of them judged and undecided" if tried else ""
        lines.append(
            "a loss verdict ([`check-loss`](quality.qmd#sec-scatter)) for "
            f"{count(len(check), 'setting')} surely faster ({_leads(check)}{open_yet})"
        )
    if (table["action"] == decision.TRY).any():
        lines.append("weights gathered in BF16 (`fp8_all_gather=false`) if the GPU waits for casts")
    open_ = table[table["action"] == decision.MORE]
    needed = [n for _, row in open_.iterrows() if (n := _sessions_needed(row))]
    if few := [n for n in needed if n <= _MOST_SESSIONS]:
        lines.append(
            f"more sessions of {count(len(few), 'open setting')}: {span(few, '.0f')} in all, "
            "if lead and spread stay as they are"
        )
    if many := len(needed) - len(few):
        lines.append(
            f"steadier timings of {count(many, 'open setting')}: more than {_MOST_SESSIONS} "
            "sessions would be needed now"
        )
    if thin := int(open_["ci_low_pct"].isna().sum()):
        lines.append(
            f"repeats of {count(thin, 'setting')} without a CI: too few pairs, or memory full"
        )
    return "; ".join(lines) + "." if lines else ""


def _sessions_needed(row: pd.Series) -> int | None:
    """Return how many sessions would take the threshold out of the interval."""
    away = abs(row["lead_pct"] - decision.WORTH_PCT)
    half = (row["ci_high_pct"] - row["ci_low_pct"]) / 2
    if math.isnan(half) or away < 1:
        return None
    return math.ceil(row["num_sessions"] * (half / away) ** 2)


def unknown(report: Report) -> str:
    """Say what these answers do not know, machine by machine."""
    faulty = f"- {count(len(report.unreadable), 'record')} at fault or left out: "
    lines = [f"{faulty}[which](methods.qmd#sec-provenance)."] * bool(report.unreadable)
    if report.runs.empty:
        return "\n".join([*lines, "- There are no records."])
    lines += [
        f"- **{at_start(name)}:** {text}"
        for name, rows in by_machine(report.runs)
        if name == "your machine" or (rows["device"] == "cuda").any()
        if (text := _unknown(report, rows))
    ]
    if length := longest(report, "- No run is longer than"):
        lines.append(
            f"{length}: late instabilities and evaluation scores are unknown. Losses were judged "
            "at small batches; at those of a real run FP8's error weighs more: see "
            "[Gradient noise](precision-noise.qmd)."
        )
    return "\n".join(lines)


def _unknown(report: Report, runs: pd.DataFrame) -> str:
    machine = runs["machine"].iloc[0]
    settings, leads, gaps = (
        t[t["machine"] == machine] for t in (report.decisions, report.leads, report.loss_gaps)
    )
    gaps = comparisons(healthy(gaps))
    once, full = (settings["num_sessions"] == 1).sum(), (leads["num_pairs"] == 0).sum()
    few = (gaps["num_pairs"] < MIN_PAIRS_FOR_INTERVAL).sum()
    lost = (runs["status"] != "completed").sum()
    numbers = {
        f"{once} of {count(len(settings), 'setting')} timed in one session only": once,
        f"{few} of {count(len(gaps), 'loss comparison')} on fewer than three seeds": few,
        f"{count(full, 'lead')} left out, as memory was nearly full": full,
        f"{count(lost, 'run')} [not completed](runs.qmd#sec-failures)": lost,
    }
    parts = [text for text, number in numbers.items() if number]
    if settings.empty and gaps.empty:
        parts.append(f"{count(len(runs), 'run')}, none to compare")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def beside(report: Report) -> str:
    """Say why there is no table of this machine beside the reference."""
    named = report.decisions["machine"]
    if (named == "local").any():
        return "No setting was timed both on your machine and on the reference."
    own = report.runs[report.runs["machine"] == "local"]
    if len(own) and not (own["device"] == "cuda").any():
        return (
            "Your machine has no GPU: its [losses](quality.qmd) count, its timings say nothing. "
            f"To be here, {how_to_get()}."
        )
    return (
        "Your machine is not here yet. `make reproduce` runs what fits it; its answers then come "
        "first, beside the reference, never averaged with it."
    )
