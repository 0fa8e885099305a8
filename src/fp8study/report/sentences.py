"""What the records say one should train in, how little that rests on, and what would change it.

Each function returns Markdown. The words follow the sign of the numbers, and what is not there
yet is said together with the command that would make it.
"""

from __future__ import annotations

import math

import pandas as pd

from fp8study.analysis import decision
from fp8study.analysis.leads import LEVEL
from fp8study.analysis.pairing import SESSION_GAP
from fp8study.analysis.stats import MIN_PAIRS_FOR_INTERVAL
from fp8study.report.page import Report
from fp8study.report.words import (
    at_start,
    by_machine,
    count,
    escape,
    how_to_get,
    number,
    per_machine,
    span,
)

_CONCLUSIVE = ["equivalent", "different"]


def decide(report: Report) -> str:
    """Say in one sentence for each machine what to train in, and under which condition."""
    table = report.decisions
    if table.empty:
        return (
            "**No answer yet.** No FP8 run on a GPU has a BF16 partner that differs in precision "
            f"alone and ran in its session: {how_to_get()}."
        )
    sizes = report.runs.groupby("model")["num_parameters"].max()
    table = table.assign(num_parameters=table["model"].map(sizes).astype(float))
    return "\n\n".join(
        f"**{at_start(name)}:** {_decision(rows)}" for name, rows in by_machine(table)
    )


def _decision(table: pd.DataFrame) -> str:
    kind = table["action"].map(decision.TO_TRAIN_IN)
    fp8, bf16, open_ = (table[kind == name] for name in ("fp8", "bf16", ""))
    advice = _conditions(fp8, bf16) or (_named(fp8, table, "FP8"), _named(bf16, table, "BF16"))
    parts = [f"{said} ({_leads(rows)})" for said, rows in zip(advice, (fp8, bf16), strict=True)
             if len(rows)]  # fmt: skip
    if fp8["action"].eq(decision.CHECK).any():
        parts[0] += ", once its loss is checked"
    if len(open_):
        so_far = f" ({_leads(open_)} so far)" if open_["lead_pct"].notna().any() else ""
        parts.append(f"measure more in {count(len(open_), 'setting')} of {len(table)}{so_far}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _leads(rows: pd.DataFrame) -> str:
    return span(rows["lead_pct"].dropna(), "+.1f", " %")


def _conditions(fp8: pd.DataFrame, bf16: pd.DataFrame) -> tuple[str, str] | None:
    """Tell the settings for FP8 from those for BF16 by the model's size and a GPU's tokens a step.

    None where no two such thresholds do, or where one of the two has no setting.
    """
    if fp8.empty or bf16.empty or bf16["num_parameters"].isna().any():
        return None
    most = bf16[["num_parameters", "tokens_per_gpu"]].max()
    larger = fp8[fp8["num_parameters"] > most["num_parameters"]]
    longer = fp8[fp8["tokens_per_gpu"] > most["tokens_per_gpu"]]
    if not fp8.index.isin(larger.index.union(longer.index)).all():
        return None
    when = []
    if len(larger):
        low, high = larger["num_parameters"].min(), larger["num_parameters"].max()
        when.append(f"the model has {_billions(low)} or more (measured up to {_in_billions(high)})")
    if rest := set(longer.index) - set(larger.index):
        tokens = longer.loc[[*rest], "tokens_per_gpu"]
        when.append(f"each GPU gets {tokens.min():,.0f} tokens a step or more (measured up to "
                    f"{tokens.max():,.0f})")  # fmt: skip
    return (
        f"pre-train in FP8 if {' or '.join(when)}",
        f"stay with BF16 up to {_billions(most['num_parameters'])} with at most "
        f"{most['tokens_per_gpu']:,.0f} tokens",
    )


def _billions(parameters: float) -> str:
    return f"{_in_billions(parameters)} billion parameters"


def _in_billions(parameters: float) -> str:
    return number(parameters / 1e9, ".2g")


def _named(chosen: pd.DataFrame, table: pd.DataFrame, precision: str) -> str:
    models = [_of_model(rows, table[table["model"] == model])
              for model, rows in chosen.groupby("model", sort=False)]  # fmt: skip
    return f"train {', '.join(models)} in {precision}"


def _of_model(rows: pd.DataFrame, of_it: pd.DataFrame) -> str:
    """Name a model, with where in its settings if not in all."""
    name = escape(rows["model"].iloc[0])
    if len(rows) == len(of_it):
        return name
    if len(rows) > 1:
        return f"{name} ({len(rows)} of {len(of_it)} settings)"
    num_gpus, batch = rows[["num_gpus", "micro_batch_size"]].to_numpy().tolist()[0]
    return f"{name} ({count(num_gpus, 'GPU')}, batch {batch})"


def lead_caption(leads: pd.DataFrame, peers: pd.DataFrame) -> str:
    """Say what the picture of these leads shows."""
    parts = []
    for machine, rows in by_machine(leads.dropna(subset="lead_pct")):
        sizes = {n: rows.loc[rows["tokens_per_gpu"] == n, "lead_pct"]
                 for n in sorted(set(rows["tokens_per_gpu"].astype(int)))}  # fmt: skip
        ends = [min(sizes), max(sizes)] if len(sizes) > 1 else list(sizes)
        said = ", ".join(f"{span(sizes[n], '+.1f', ' %')} at {n:,} tokens" for n in ends)
        parts.append(f"{machine}: {said}." if leads["machine"].nunique() > 1 else f"{said}.")
    if peers["peer_lead_pct"].notna().any():
        name = escape(peers["peer"].iloc[0])
        parts.append(f"×: {name}'s, {span(peers['peer_lead_pct'].dropna(), '+.1f', ' %')}, ratios "
                     "of geometric means.")  # fmt: skip
    return " ".join([*parts, "Ours: medians of paired ratios; bars: all pairs."])


def rule() -> str:
    """Write down the rule behind the column that says what to do, and what a lead is."""
    worth = f"{decision.WORTH_PCT:g} %"
    return (
        "Unless *path* says otherwise: tensorwise, 4,096 tokens, FP32 master weights, compiled.\n\n"
        f"**The rule**, by the {100 * LEVEL:.0f} % CI of FP8's lead. Above {worth}: FP8 if the "
        "loss in this very setting is equivalent, BF16 if it is worse, and to be checked if "
        f"nobody judged it. Below {worth}: BF16; where all of it is below zero and weights were "
        "gathered in FP8, a BF16 all-gather is worth a try. Otherwise measure more.\n\n"
        "**The lead** is the median of a session's paired ratios, and the geometric mean over "
        "sessions. Its CI takes the spread from all settings of the machine that were timed in "
        "several; where there are none, from pairs of one session, which says too little of "
        f"another day. A session ends where the host rests for {SESSION_GAP.seconds // 60} minutes."
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
        lines.append(
            f"a study of the loss, three seeds or more, in {count(len(check), 'setting')} faster "
            f"by {_leads(check)}: it would end in *FP8* or *BF16*"
        )
    if (table["action"] == decision.TRY).any():
        lines.append(
            "weights gathered in BF16 (`fp8_all_gather=false`), as the casts before an FP8 "
            "all-gather may be what keeps the GPU waiting"
        )
    open_ = table[table["action"] == decision.MORE]
    needed = [n for _, row in open_.iterrows() if (n := _sessions_needed(row))]
    if needed:
        lines.append(
            f"{span(needed, '.0f')} sessions in all would decide "
            f"{count(len(needed), 'open setting')}, leads and spread as they are"
        )
    if thin := int(open_["ci_low_pct"].isna().sum()):
        lines.append(
            f"repeats in {count(thin, 'setting')} without an interval, for want of pairs or memory"
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
    if report.runs.empty:
        return "- There are no records."
    lines = [
        f"- **{at_start(name)}:** {_unknown(report, rows)}"
        for name, rows in by_machine(report.runs)
    ]
    if (report.runs["device"] == "cpu").any():
        lines.append("- On a CPU, FP8 is emulated: its timings mean nothing for GPUs.")
    steps = report.runs["steps_completed"].max()
    if pd.notna(steps):
        lines.append(
            f"- No run is longer than {int(steps):,} steps: nothing here speaks of late "
            "instabilities or of evaluation scores."
        )
    return "\n".join(lines)


def _unknown(report: Report, runs: pd.DataFrame) -> str:
    machine = runs["machine"].iloc[0]
    leads, gaps = (t[t["machine"] == machine] for t in (report.leads, report.loss_gaps))
    gaps = gaps[~gaps["stale"].astype(bool)]
    parts = []
    faster = leads[leads["ci_low_pct"] > 0]
    if len(faster):
        known = gaps.loc[gaps["verdict"].isin(_CONCLUSIVE), ["model", "num_gpus", "setting", "arm"]]
        judged = len(faster.merge(known.drop_duplicates()))
        parts.append(
            f"of {count(len(faster), 'setting')} in which FP8 is surely faster, "
            f"{judged or 'none'} {'have' if judged > 1 else 'has'} a conclusive loss verdict"
        )
    once, full = ((leads[name] == n).sum() for name, n in (("num_sessions", 1), ("num_pairs", 0)))
    few = (gaps["num_pairs"] < MIN_PAIRS_FOR_INTERVAL).sum()
    warned, lost = (runs["num_warnings"] > 0).sum(), (runs["status"] != "completed").sum()
    numbers = {
        f"{once} of {count(len(leads), 'lead')} from one session": once,
        f"{few} of {count(len(gaps), 'loss comparison')} on fewer than three seeds": few,
        f"{count(full, 'lead')} left out, memory nearly full": full,
        f"{count(warned, 'run')} with [a warning](runs.qmd#sec-warnings)": warned,
        f"{count(lost, 'run')} [not completed](runs.qmd#sec-failures)": lost,
    }
    parts += [text for text, number in numbers.items() if number]
    parts = parts or [f"{count(len(runs), 'run')}, none to compare"]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def beside(report: Report) -> str:
    """Say why there is no table of this machine beside the reference."""
    named = report.decisions["machine"]
    if (named == "local").any():
        return "No setting was timed both on your machine and on the reference."
    return (
        "Your machine is not here yet: `make reproduce` runs what fits it, and its answers then "
        "come first on this page, beside the reference and apart from it."
    )
