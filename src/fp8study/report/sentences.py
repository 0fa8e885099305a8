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
from fp8study.report.words import by_machine, count, escape, how_to_get, span

_CONCLUSIVE = ["equivalent", "different"]
_SAID = {"fp8": "train {} in FP8", "bf16": "keep {} in BF16"}


def decide(report: Report) -> str:
    """Say in one sentence for each machine what to train in."""
    table = report.decisions
    if table.empty:
        return (
            "**No answer yet.** No FP8 run on a GPU has a BF16 partner that differs in precision "
            f"alone and ran in its session: {how_to_get()}."
        )
    return "\n\n".join(f"**{name}:** {_decision(rows)}" for name, rows in by_machine(table))


def _decision(table: pd.DataFrame) -> str:
    kind = table["action"].map(decision.TO_TRAIN_IN)
    parts = []
    for train_in, said in _SAID.items():
        chosen = table[kind == train_in]
        models = [_of_model(rows, table[table["model"] == model], says_lead=train_in == "fp8")
                  for model, rows in chosen.groupby("model", sort=False)]  # fmt: skip
        if models:
            checked = chosen["action"].eq(decision.CHECK).any()
            then = " once its loss is checked" if checked else ""
            parts.append(f"{said.format(_joined(models))}{then}")
    if len(rows := table[kind == ""]):
        leads = rows["lead_pct"].dropna()
        so_far = f" ({span(leads, '+.1f', ' %')} so far)" if len(leads) else ""
        parts.append(f"measure more in {count(len(rows), 'setting')} of {len(table)}{so_far}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _of_model(rows: pd.DataFrame, of_it: pd.DataFrame, says_lead: bool) -> str:
    """Name a model with where in its settings, and the leads there."""
    facts = [f"{len(rows)} of {len(of_it)} settings"] if len(rows) < len(of_it) else []
    if len(rows) == 1 < len(of_it):
        num_gpus, batch = rows[["num_gpus", "micro_batch_size"]].to_numpy().tolist()[0]
        facts = [f"{count(num_gpus, 'GPU')}, batch {batch}"]
    facts += [span(rows["lead_pct"], "+.1f", " %")] if says_lead else []
    more = f" ({', '.join(facts)})" if facts else ""
    return f"{escape(rows['model'].iloc[0])}{more}"


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def lead_caption(leads: pd.DataFrame, peers: pd.DataFrame) -> str:
    """Say what the picture of these leads shows."""
    parts = []
    for machine, rows in by_machine(leads.dropna(subset="lead_pct")):
        sizes = {n: rows.loc[rows["tokens_per_gpu"] == n, "lead_pct"]
                 for n in sorted(set(rows["tokens_per_gpu"].astype(int)))}  # fmt: skip
        ends = [min(sizes), max(sizes)] if len(sizes) > 1 else list(sizes)
        said = ", ".join(f"{span(sizes[n], '+.1f', ' %')} at {n:,} tokens" for n in ends)
        parts.append(f"{machine}: {said} per GPU and step.")
    if peers["peer_lead_pct"].notna().any():
        name = escape(peers["peer"].iloc[0])
        parts.append(f"Crosses: {name} against itself, a ratio of geometric means, "
                     f"{span(peers['peer_lead_pct'].dropna(), '+.1f', ' %')}.")  # fmt: skip
    how = "A lead: medians of paired ratios, averaged over sessions; bars span all pairs."
    return " ".join([*parts, how])


def rule() -> str:
    """Write down the rule behind the column that says what to do."""
    worth, level = f"{decision.WORTH_PCT:g} %", f"{100 * LEVEL:.0f} %"
    lines = {
        decision.CHECK: f"it lies above {worth}.",
        decision.FP8: "so it does, and the loss in this very setting is equivalent.",
        decision.WORSE: "so it does, and the loss there is not.",
        decision.LITTLE: f"it ends below {worth}.",
        decision.BF16: "it ends below zero.",
        decision.TRY: "so it does, and gathering weights in BF16 is untried.",
        decision.MORE: f"{worth} lies inside it, or there is none.",
    }
    return (
        f"**The rule**, by the {level} CI of FP8's lead:\n\n"
        + "\n".join(f"- *{action}*: {when}" for action, when in lines.items())
        + "\n\n"
        "**The lead.** Median of the paired ratios of a session, geometric mean over sessions. The "
        "CI takes the spread between sessions from all settings of the same machine and path that "
        "were timed in several; where there are none, the spread between the pairs of the one "
        "session, which says too little of another day. A session ends where the host did nothing "
        f"for {SESSION_GAP.seconds // 60} minutes."
    )


def changes(report: Report) -> str:
    """Say setting by setting what would change the answer."""
    table = report.decisions
    if table.empty:
        return f"Any measurement: {how_to_get()}."
    lines = []
    check = table[table["action"] == decision.CHECK]
    if len(check):
        lines.append(
            f"A loss that is worse: {count(len(check), 'setting')} "
            f"{'gains' if len(check) == 1 else 'gain'} {span(check['lead_pct'], '+.1f', ' %')} in "
            "speed, and a study of the loss there, three seeds or more, would end in *FP8* or "
            "*BF16*."
        )
    if (table["action"] == decision.TRY).any():
        lines.append(
            "Gathering weights in BF16 (`fp8_all_gather=false`): the casts before an FP8 "
            "all-gather may be what keeps the GPU waiting."
        )
    open_ = table[table["action"] == decision.MORE]
    needed = [n for _, row in open_.iterrows() if (n := _sessions_needed(row))]
    if needed:
        lines.append(
            f"More sessions: {span(needed, '.0f')} in all would decide "
            f"{count(len(needed), 'setting')} that {'is' if len(needed) == 1 else 'are'} open, if "
            f"their leads and the spread between sessions stay as they are."
        )
    if thin := int(open_["ci_low_pct"].isna().sum()):
        lines.append(
            f"Repeats: {count(thin, 'setting')} {'has' if thin == 1 else 'have'} fewer than three "
            "pairs, or memory nearly full, and no interval."
        )
    return "\n".join(f"- {line}" for line in lines)


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
    lines = [f"- **{name}:** {_unknown(report, rows)}" for name, rows in by_machine(report.runs)]
    if (report.runs["device"] == "cpu").any():
        lines.append("- On a CPU, FP8 is emulated: its timings mean nothing for GPUs.")
    steps = report.runs["steps_completed"].max()
    if pd.notna(steps):
        lines.append(
            f"- No run is longer than {int(steps):,} steps: late instabilities, evaluation scores "
            "and a whole pre-training run are outside."
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
        f"{count(warned, 'run')} with [a warning](methods.qmd#sec-warnings)": warned,
        f"{count(lost, 'run')} [not completed](methods.qmd#sec-failures)": lost,
    }
    parts += [text for text, number in numbers.items() if number]
    parts = parts or [f"{count(len(runs), 'run')}, none to compare"]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def beside(report: Report) -> str:
    """Say how this machine compares with the reference, setting by setting in the same order."""
    named = report.decisions["machine"]
    if (named == "local").any() and (named != "local").any():
        return ""
    if (named == "local").any():
        return "There is no reference beside this machine's records."
    return (
        "Your machine is not here yet: `make reproduce` runs what fits it, and its answers then "
        "come first on this page, beside the reference and apart from it."
    )


def machines(report: Report) -> str:
    """List the machines, the reader's own first, each with its number of runs."""
    if report.runs.empty:
        return f"**There are no records yet:** {how_to_get()}."
    lines = []
    for machine, rows in by_machine(report.runs):
        done = int((rows["status"] == "completed").sum())
        cpu = ", FP8 emulated on its CPU" if (rows["device"] == "cpu").any() else ""
        lines.append(f"- **{machine}**{cpu}: {count(len(rows), 'run')}, {done} completed.")
    if not (report.runs["device"] == "cuda").any():
        lines.append(f"\n**No GPU records yet:** {how_to_get()}.")
    return "\n".join(lines)


def unreadable(report: Report) -> str:
    """Name the records that could not be read, or say that all were."""
    if not report.unreadable:
        return "Every record could be read."
    lines = [f"- {escape(line)}" for line in report.unreadable]
    return "Records that could not be read:\n\n" + "\n".join(lines)


def kept_in_bf16(runs: pd.DataFrame, are_all: bool = True) -> str:
    """Say which layers these FP8 runs keep out of FP8, where the arms' names do not.

    Where they `are_all` the report's, say so of the others too.
    """
    known = runs.dropna(subset="kept_in_bf16").drop_duplicates(["study", "kept_in_bf16"])
    if known.empty:
        return ""
    names = [
        f"{' and '.join(f'`{name}`' for name in str(kept).split())} ({', '.join(rows['study'])})"
        for kept, rows in known.groupby("kept_in_bf16", sort=False)
    ]
    rest = "; elsewhere `lm_head`, unless an arm's name says otherwise" if are_all else ""
    return f"Kept out of FP8: {'; '.join(names)}{rest}."
