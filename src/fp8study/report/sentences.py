"""What the records say one should train in, how little that rests on, and what would change it.

Each function returns Markdown. The words follow the sign of the numbers, and what is not there
yet is said together with the command that would make it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from fp8study.analysis import decision
from fp8study.analysis.leads import LEVEL
from fp8study.analysis.losses import comparisons
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

#: What makes a setting large, a column, and how it is written.
_UNITS: dict[str, Callable[[float], str]] = {
    "num_parameters": lambda size: f"{number(size / 1e9, '.2g')}B",
    "tokens_per_gpu": lambda tokens: f"{tokens:,.0f} tokens",
}


def decide(report: Report) -> str:
    """Answer in one sentence: for the reader's own machine where it is measured, else for all."""
    table = _sized(report)
    if table.empty:
        return (
            "**No answer yet.** No FP8 run on a GPU has a BF16 partner that differs in precision "
            f"alone and ran in its session: {how_to_get()}."
        )
    own = table["machine"] == "local"
    parts = [_by_action(rows) for _, rows in by_machine(table[own] if own.any() else table)]
    fp8, bf16 = (pd.concat(of) for of in list(zip(*parts, strict=True))[:2])
    checks = fp8["action"].eq(decision.CHECK)
    once = ", once its loss is checked" if checks.any() else ""
    once += " where nobody judged it" if checks.any() and not checks.all() else ""
    if fp8.empty:
        return "**No: stay with BF16.**" if len(bf16) else "**Not decided: measure more.**"
    if bf16.empty:
        return f"**Yes{once}.**"
    tell = [_tells(*of[:2]) for of in parts if len(of[0]) and len(of[1])]
    above = _above(fp8, bf16) if tell and all(tell) else {}
    if not above:
        return f"**In some settings{once}; in others BF16.**"
    all_ = pd.concat(rows for of in parts for rows in of)
    least = {column: rows[column].min() for column, rows in above.items()}
    there = pd.concat([all_[c] >= low for c, low in least.items()], axis=1).any(axis=1)
    ends = " or ".join(_UNITS[column](low) for column, low in least.items())
    ends += " per GPU and step" * ("tokens_per_gpu" in least)
    pays = fp8[fp8.index.isin(all_.index[there])]
    one_gpu = int((pays["num_gpus"] == 1).sum())
    alone = "all" if one_gpu == len(pays) else one_gpu or "none"
    below = [int(of.index.isin(all_.index[~there]).sum()) for of in (bf16, fp8)]
    rest = int((~there).sum()) - sum(below)
    others = [f"FP8 in {below[1]}"] * bool(below[1]) + [f"{rest} open"] * bool(rest)
    less = [f"BF16 in {below[0]} of {int((~there).sum())}", *others]
    where = f"in {len(pays)} of {count(int(there.sum()), 'setting')}, {alone} on one GPU"
    return f"**Yes, from {ends} on{once}.** So {where}. Below that {', '.join(less)}."


def conditions(report: Report) -> list[str]:
    """Say machine by machine where FP8 pays, where BF16 does, what is open, and by how much."""
    return [f"**{at_start(n)}:** {_condition(rows)}" for n, rows in by_machine(_sized(report))]


def _sized(report: Report) -> pd.DataFrame:
    """Return the decisions with the size of each model."""
    sizes = report.runs.groupby("model")["num_parameters"].max()
    table = report.decisions
    return table.assign(num_parameters=table["model"].map(sizes).astype(float))


def _by_action(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Split settings into those for FP8, those for BF16, and open ones."""
    kind = table["action"].map(decision.TO_TRAIN_IN)
    return table[kind == "fp8"], table[kind == "bf16"], table[kind == ""]


def _condition(table: pd.DataFrame) -> str:
    fp8, bf16, open_ = _by_action(table)
    if _tells(fp8, bf16):
        above = [_of_rows(rows, column) for column, rows in _above(fp8, bf16).items()]
        most = bf16[[*_UNITS]].max()
        size = _of_rows(bf16[bf16["num_parameters"] == most["num_parameters"]], "num_parameters")
        low = f"{size} and {_UNITS['tokens_per_gpu'](most['tokens_per_gpu'])}"
        where = [f"FP8 at {' or '.join(above)}", f"BF16 up to {low}"]
    else:
        where = [f"FP8 for {_named(fp8, table)}", f"BF16 for {_named(bf16, table)}"]
    parts = [f"{said}: {_leads(rows)}" for said, rows in zip(where, (fp8, bf16), strict=True)
             if len(rows)]  # fmt: skip
    if len(open_):
        so_far = (
            f" ({_leads(open_)} so far)" if not parts and open_["lead_pct"].notna().any() else ""
        )
        parts.append(f"{len(open_)} of {len(table)} open{so_far}")
    return f"{'; '.join(parts)}."


def _leads(rows: pd.DataFrame) -> str:
    return span(rows["lead_pct"].dropna(), "+.1f", " %")


def _above(fp8: pd.DataFrame, bf16: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the settings for FP8 with more tokens than any for BF16, and with a larger model.

    By what is larger, a column. A setting with both is told by its tokens: that a model is large
    enough is told only by settings in which its tokens would not do.
    """
    most = bf16[[*_UNITS]].max()
    longer = fp8["tokens_per_gpu"] > most["tokens_per_gpu"]
    larger = (fp8["num_parameters"] > most["num_parameters"]) & ~longer
    found = {"num_parameters": fp8[larger], "tokens_per_gpu": fp8[longer]}
    return {column: rows for column, rows in found.items() if len(rows)}


def _tells(fp8: pd.DataFrame, bf16: pd.DataFrame) -> bool:
    """Return whether a model's size and a GPU's tokens a step tell FP8's settings from BF16's."""
    if fp8.empty or bf16.empty or bf16["num_parameters"].isna().any():
        return False
    return sum(map(len, _above(fp8, bf16).values())) == len(fp8)


def _of_rows(rows: pd.DataFrame, column: str) -> str:
    """Write how large settings are, and on how many GPUs; the tuned path is the usual one."""
    ends = dict.fromkeys(_UNITS[column](end) for end in (rows[column].min(), rows[column].max()))
    gpus = sorted({int(n) for n in rows["num_gpus"]})
    path = ", plain" if rows["path"].eq("plain").all() else ""
    on = f"{', '.join(map(str, gpus))} GPU{'s' * (gpus[-1] > 1)}"
    return f"{' to '.join(ends).replace(' tokens to ', ' to ')} ({on}{path})"


def _named(chosen: pd.DataFrame, table: pd.DataFrame) -> str:
    return ", ".join(_of_model(rows, table[table["model"] == model])
                     for model, rows in chosen.groupby("model", sort=False))  # fmt: skip


def _of_model(rows: pd.DataFrame, of_it: pd.DataFrame) -> str:
    """Name a model, with where in its settings if not in all."""
    name = escape(rows["model"].iloc[0])
    if len(rows) == len(of_it):
        return name
    if len(rows) > 1:
        return f"{name} ({len(rows)} of {len(of_it)} settings)"
    num_gpus, batch = rows[["num_gpus", "micro_batch_size"]].to_numpy().tolist()[0]
    return f"{name} ({count(num_gpus, 'GPU')}, batch {batch})"


def lead_caption(report: Report, peers: pd.DataFrame) -> str:
    """Say what the picture of the leads shows, and so what to do on which machine, line by line."""
    theirs = " ×: ratio of geometric means." if peers["peer_lead_pct"].notna().any() else ""
    read = f"Marks: means of paired ratios; bars: all pairs.{theirs}"
    return "\\\n".join([*conditions(report), read])


def plain_only(table: pd.DataFrame) -> str:
    """Say what is decided where only the plain path was timed."""
    if table.empty:
        return "No setting was timed on the plain path alone"
    kinds = zip(("FP8", "BF16", "open"), _by_action(table), strict=True)
    told = [f"{name} in {len(rows)} ({_leads(rows)})" for name, rows in kinds if len(rows)]
    return f"{count(len(table), 'setting')} timed on the plain path alone: {', '.join(told)}"


def rule() -> str:
    """Write down the rule behind the column that says what to do, and what a lead is."""
    worth = f"{decision.WORTH_PCT:g} %"
    return (
        "Unless [*path*](glossary.qmd) says otherwise: tuned, tensorwise, 4,096 tokens, FP32 "
        "master weights, compiled.\n\n"
        f"**The rule**, by the {100 * LEVEL:.0f} % CI of FP8's lead. Wholly above {worth}, "
        "*surely faster*: FP8 if its loss in this very setting is equivalent, BF16 if it is worse; "
        f"else check it first. Wholly below {worth}: BF16; if below zero with weights gathered in "
        "FP8, try gathering them in BF16. Otherwise: measure more.\n\n"
        "**The lead** is the geometric mean of a session's paired ratios, then of sessions "
        f"({SESSION_GAP.seconds // 60} idle minutes begin a new one). Its CI is Student's t of the "
        "logarithms, by how far sessions differ, over all settings of a machine and path that had "
        "several, those on one GPU by themselves; where none had, by how far pairs differ, and "
        "another day may fall outside it. A setting whose step times had not settled counts by "
        "itself; older runs do not tell.\n\n"
        "**A row** is the tuned path where it was timed, then FP32 master weights, the length "
        "nearest to 4,096 tokens, no clipping, the most pairs, the recipe with the largest lead. "
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
    if needed:
        lines.append(
            f"more sessions of {count(len(needed), 'open setting')}: {span(needed, '.0f')} in all, "
            "if lead and spread stay"
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
    if report.runs.empty:
        return "- There are no records."
    lines = [
        f"- **{at_start(name)}:** {text}"
        for name, rows in by_machine(report.runs)
        if name == "your machine" or (rows["device"] == "cuda").any()
        if (text := _unknown(report, rows))
    ]
    steps, tokens = (report.runs[name].max() for name in ("steps_completed", "num_tokens_seen"))
    if pd.notna(steps) and pd.notna(tokens):
        lines.append(
            f"- No run is longer than {int(steps):,} steps or {tokens / 1e6:,.1f} million tokens: "
            "late instabilities and evaluation scores are unknown. Losses were judged at small "
            "batches; at those of a real run FP8's error weighs more: see [Noise]"
            "(precision-noise.qmd)."
        )
    return "\n".join(lines)


def _unknown(report: Report, runs: pd.DataFrame) -> str:
    machine = runs["machine"].iloc[0]
    settings, leads, gaps = (
        t[t["machine"] == machine] for t in (report.decisions, report.leads, report.loss_gaps)
    )
    gaps = comparisons(gaps[~gaps["stale"].astype(bool)])
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
