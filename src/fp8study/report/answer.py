"""The answer, first: what to train in on one GPU and on several, in words and by model.

What the words say is counted over the rows that the table shows: one for each kind of GPU, model,
number of GPUs and batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pandas as pd

from fp8study.analysis import decision
from fp8study.analysis.runs.naming import num_kernels
from fp8study.analysis.runs.pairing import together
from fp8study.core.hardware import find_peak
from fp8study.report.page import Report
from fp8study.report.speed_rows import batch_words, is_of_before, other_length
from fp8study.report.table import Layout
from fp8study.report.words import count, escape, how_to_get, number, rate, recipe, span

#: What makes a setting large, a column, and how it is written.
_UNITS: dict[str, Callable[[float], str]] = {
    "num_parameters": lambda size: f"{number(size / 1e9, '.2g')}B",
    "tokens_per_gpu": lambda tokens: f"{tokens:,.0f} tokens a GPU and step",
}
_YOURS = "your machine"
#: What an untied twin's name has besides its model's.
_TWIN = "-untied"
#: The recipe that a cell does not name.
_USUAL = "fp8_tensorwise"
_KINDS = {"fp8": "FP8", "bf16": "BF16", "": "open"}
#: Sequences of a GPU and pass, and passes of a step.
_BATCH = ["micro_batch_size", "gradient_accumulation_steps"]


def settled(report: Report) -> pd.DataFrame:
    """Choose one decision for each kind of GPU, model, number of GPUs, batch and passes.

    Machines with one kind of GPU count as one, but for the reader's own, which comes first, and an
    untied twin as its model. The tuned path comes before the plain one, which counts where no other
    was timed; then what has an interval, then today's path, then its latest form, then what is
    decided, then what has the most sessions and pairs. An earlier form whose gain today's path does
    not have, as far as that was timed, is open.

    Returns:
        The columns of the decisions, and ``num_parameters``, ``gpu``, ``name``, ``is_plain`` and
        ``is_before``: whether it is of the path before today's, and ``today_pct`` the lead of
        today's, which has no interval; ``least_pct`` and ``most_pct``, the
        leads of all machines with that GPU and the very setting and arm, whose runs ``run_ids``
        are.
    """
    table, sizes = report.decisions, report.runs.groupby("model")["num_parameters"].max()
    table = table.assign(
        num_parameters=table["model"].map(sizes).astype(float),
        gpu=[_gpu(row) for _, row in table.iterrows()],
        name=table["model"].astype(str).str.removesuffix(_TWIN),
        is_plain=table["path"] == "plain",
        is_before=[is_of_before(row) for _, row in table.iterrows()],
        _other=table["machine"] != "local",
        _alone=table["ci_low_pct"].isna(),
        _behind=[decision.forms_behind(row) for _, row in table.iterrows()],
        _kernels=-table["arm"].map(num_kernels).astype(int),
        _open=table["action"] == decision.MORE,
    )
    same = table.groupby(["gpu", "model", "num_gpus", "setting", "arm"], dropna=False)
    table = table.assign(
        least_pct=same["lead_pct"].transform("min"),
        most_pct=same["lead_pct"].transform("max"),
        run_ids=same["run_ids"].transform(together),
    )
    place = ["gpu", "name", "num_gpus"]
    by = ["_other", "is_plain", "_alone", "is_before", "_behind", "_kernels", "_open",
          "num_sessions", "num_pairs"]  # fmt: skip
    ranked = table.sort_values(by, ascending=[True] * 7 + [False] * 2, kind="stable")
    first = ranked.drop_duplicates([*place, *_BATCH])
    chosen = first[~first["is_plain"] | first.groupby(place)["is_plain"].transform("all")]
    today = ranked[~ranked["is_plain"] & ~ranked["is_before"]].drop_duplicates([*place, *_BATCH])
    leads = today[[*place, *_BATCH, "lead_pct"]].rename(columns={"lead_pct": "today_pct"})
    chosen = chosen.merge(leads, how="left", on=[*place, *_BATCH])
    chosen["today_pct"] = chosen["today_pct"].where(chosen["is_before"])
    is_lost = chosen["action"].isin([decision.FP8, decision.CHECK])
    chosen.loc[is_lost & (chosen["today_pct"] <= decision.WORTH_PCT), "action"] = decision.MORE
    chosen = chosen.assign(
        _rows=-chosen.groupby("gpu")["gpu"].transform("size"),
        num_parameters=chosen.groupby("name")["num_parameters"].transform("min"),
    )
    order = ["_other", "_rows", "gpu", "num_parameters", "num_gpus", *reversed(_BATCH)]
    return chosen.sort_values(order, kind="stable")


def _gpu(row: pd.Series) -> str:
    peak = find_peak(str(row["gpu_name"]))
    name = peak.name_part if peak else str(row["gpu_name"])
    return f"{_YOURS} ({name})" if row["machine"] == "local" else name


def by_kind(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Split settings into those for FP8, those for BF16, and open ones, in this order."""
    kinds = table["action"].map(decision.TO_TRAIN_IN)
    return {word: table[kinds == kind] for kind, word in _KINDS.items()}


def counted(table: pd.DataFrame) -> str:
    """Count settings of each kind, with their leads; those of two machines are not to be joined."""
    parts = []
    for kind, rows in by_kind(table).items():
        leads = rows["lead_pct"].dropna()
        known = f" ({span(leads, '+.1f', ' %')})" if len(leads) else ""
        parts += [f"{kind} in {len(rows)}{known}"] if len(rows) else []
    return ", ".join(parts)


def decide(report: Report, table: pd.DataFrame) -> str:
    """Answer for the reader's own machine where it is measured, else for all, from `settled`."""
    if table.empty:
        return (
            "**No answer yet.** No FP8 run on a GPU has a BF16 partner that differs in precision "
            f"alone and ran in its session: {how_to_get()}."
        )
    own = table["machine"] == "local"
    table = table[own] if own.any() else table
    alone = table["num_gpus"] == 1
    parts = [("On one GPU", table[alone]), ("On several GPUs", table[~alone])]
    lines = [f"**{where}: {_verdict(rows)}** {_counts(rows)}" for where, rows in parts if len(rows)]
    return "\n\n".join([*lines, *_limits(report, table)])


def _verdict(rows: pd.DataFrame) -> str:
    """Say where FP8 is to be used: above a size or a length if these tell, else for which models.

    They tell if no setting above either is BF16's or open.
    """
    fp8, bf16, open_ = by_kind(rows).values()
    if fp8.empty:
        return "stay with BF16." if len(bf16) else "not decided, measure more."
    checks = fp8["action"].eq(decision.CHECK)
    once = ", once its loss is checked" if checks.any() else ""
    once += " where it is not shown equal" if checks.any() and not checks.all() else ""
    rest = pd.concat([bf16, open_])
    if rest.empty:
        return f"yes{once}."
    most = rest[[*_UNITS]].max()
    longer = fp8["tokens_per_gpu"] > most["tokens_per_gpu"]
    larger = fp8["num_parameters"] > most["num_parameters"]
    # A size tells where a model gains at a usual length, and for all above it then: of a length
    # that only such models have nothing is known for smaller ones.
    larger &= fp8["num_parameters"] >= fp8.loc[larger & ~longer, "num_parameters"].min()
    longer &= ~larger
    if (longer | larger).all() and rows["num_parameters"].notna().all():
        above = {"num_parameters": fp8[larger], "tokens_per_gpu": fp8[longer]}
        ends = [_UNITS[name](of[name].min()) for name, of in above.items() if len(of)]
        return f"yes, from {' or '.join(ends)} on{once}."
    named = [_named(of, rows[rows["name"] == name]) for name, of in fp8.groupby("name", sort=False)]
    return f"FP8 for {', '.join(named)}{once}."


def _named(chosen: pd.DataFrame, of_it: pd.DataFrame) -> str:
    """Name a model, with where in its settings if not in all."""
    name = escape(chosen["name"].iloc[0])
    if len(chosen) == len(of_it):
        return name
    if len(chosen) > 1:
        return f"{name} ({len(chosen)} of {len(of_it)} settings)"
    num_gpus, batch, passes = chosen[["num_gpus", *_BATCH]].to_numpy().tolist()[0]
    return f"{name} ({count(num_gpus, 'GPU')}, {batch_words(batch, passes)})"


def _counts(rows: pd.DataFrame) -> str:
    fp8, bf16, open_ = by_kind(rows).values()
    others = [f"BF16 is to be kept in {len(bf16)}"] * bool(len(bf16))
    others += [f"{len(open_)} open"] * bool(len(open_))
    first = f"FP8 is surely faster in {len(fp8)} of {count(len(rows), 'setting')}"
    return ", ".join([first, *others]) + "."


def _limits(report: Report, table: pd.DataFrame) -> list[str]:
    """Say how little is known of the loss where FP8 is faster, and how to ask of one's own."""
    fp8 = by_kind(table)["FP8"]
    command = "fp8study advise --model llama-3.1-8b --num-gpus 8 --gpu h100-80gb"
    ask = f"For your setting run, as an example, `{command}`."
    if fp8.empty:
        return [ask]
    equal, of = int(fp8["action"].eq(decision.FP8).sum()), count(len(fp8), "faster setting")
    tested = int(fp8.apply(_open_loss, axis=1).astype(bool).sum())
    known = (
        f"**FP8's loss is [shown equal](quality.qmd) in {equal} of the {of}"
        f"{': check yours first' * (equal < len(fp8))}**"
        f"{f', tested and still open in {tested}' * bool(tested)}"
        f"{longest(report, '; no run is longer than')}."
    )
    return [f"{known} {ask}"]


def _open_loss(row: pd.Series) -> str:
    """Say how far FP8 is off where the loss of the very setting was tested and is undecided."""
    if row["loss_verdict"] != "undecided" or not row["loss_is_same"]:
        return ""
    return f": {number(row['loss_gap_pct'], '+.2f')} %"


def longest(report: Report, before: str) -> str:
    """Say how long the longest run was, after the words `before`; nothing without a run."""
    steps, tokens = (report.runs[name].max() for name in ("steps_completed", "num_tokens_seen"))
    if pd.isna(steps) or pd.isna(tokens):
        return ""
    return f"{before} {int(steps):,} steps or {tokens / 1e6:,.1f} million tokens"


def matrix(table: pd.DataFrame) -> tuple[pd.DataFrame, Layout]:
    """Return a row for each kind of GPU and model, with a column for each number of GPUs.

    `table`: from `settled`.
    """
    numbers = {int(n): count(int(n), "GPU") for n in sorted(table["num_gpus"].unique())}
    rows = [
        {"gpu": gpu, "name": str(name).replace("-", "\u2011")}
        | {words: _cell(own[own["num_gpus"] == n]) for n, words in numbers.items()}
        | {"run_ids": together(own["run_ids"])}
        for (gpu, name), own in table.groupby(["gpu", "name"], sort=False)
    ]
    columns = {"name": ("model", "")} | {words: (words, "") for words in numbers.values()}
    return pd.DataFrame(rows), Layout(columns, group="{gpu}")


def _cell(rows: pd.DataFrame) -> str:
    """Write what is decided by batch, batches next to each other that are alike together."""

    def told(row: pd.Series) -> tuple[int, str, list[str]]:
        path = "plain path" if row["is_plain"] else "earlier path" if row["is_before"] else ""
        if pd.notna(row["today_pct"]):
            path += f"; today's {number(row['today_pct'], '+.1f')} %, no CI"
        kind = _KINDS[decision.TO_TRAIN_IN[row["action"]]]
        clips = " if clipped" * pd.notna(row["max_grad_norm"])
        gap = _open_loss(row)
        said = "undecided" * bool(gap and row["action"] == decision.CHECK)
        if row["action"] == decision.FP8:
            said = "equal" if row["loss_verdict"] == "equivalent" else decision.LOWER
        loss = f"loss {said} at {rate(row['loss_rate'])}{clips}{gap}" if said else ""
        untied = "untied" if str(row["model"]).endswith(_TWIN) else ""
        kinds = recipe(row["precision"]).removeprefix("FP8 ")
        passes = int(row["gradient_accumulation_steps"])
        kinds = kinds if row["precision"] != _USUAL else ""
        return passes, kind, [loss, untied, other_length(row), kinds, path]

    parts = []
    for (passes, kind, more), group in itertools.groupby((row for _, row in rows.iterrows()), told):
        same = pd.DataFrame(group)
        leads = pd.concat([same["least_pct"], same["most_pct"]]).dropna()
        batch = span(same["micro_batch_size"], ".0f")
        facts = [span(leads, "+.1f", " %")] if len(leads) else ["no timing that holds"]
        facts += filter(None, more)
        words = (f"{kind} at {batch_words(batch, passes)}", f"({', '.join(facts)})")
        text = " ".join(text.replace(" ", "\u00a0") for text in words)
        parts.append(text.replace(",\u00a0loss", ", loss"))  # else too long for its column
    return "; ".join(parts)
