"""What the figures of the page on performance show, in the words of their own numbers."""

from __future__ import annotations

import pandas as pd

from fp8study.report.answer import counted
from fp8study.report.speed_rows import is_of_before, switches
from fp8study.report.words import count, each_machine, escape, recipe, span


def rates(table: pd.DataFrame) -> str:
    """Count what the rule of the answer says of each machine's settings, with FP8's leads."""
    read = "Dots: medians; bars: all runs; right: FP8's lead."
    return f"What to train in, by the answer's rule. {_rates(table)} {read}"


@each_machine()
def _rates(rows: pd.DataFrame) -> str:
    return f"of {count(len(rows), 'setting')} {counted(rows)}."


def memory(table: pd.DataFrame) -> str:
    """Say what FP8 does to peak memory."""
    return (
        f"FP8's peak over BF16's. {_memory(table)} Changes, at the right: medians of paired ratios."
    )


@each_machine()
def _memory(rows: pd.DataFrame) -> str:
    change = rows["memory_change_pct"].dropna()
    return f"{span(change, '+.1f', ' %')}." if len(change) else ""


def steps(table: pd.DataFrame) -> str:
    """Say what of a step FP8 shortens, and what it adds."""
    return (
        f"What FP8 changes, % of the BF16 step. {_steps(table)} One profiled step; kernels that "
        "overlap make a bar longer."
    )


@each_machine()
def _steps(rows: pd.DataFrame) -> str:
    bf16, fp8 = (rows[rows["precision"].eq("bf16") == of] for of in (True, False))
    if bf16.empty or len(bf16) != len(fp8):
        return ""
    kinds = {"GEMMs": ["gemm_fp8", "gemm_bf16"], "casts, scales and norms": ["fused"],
             "time without computing": ["not_computing_ms"]}  # fmt: skip
    changes = []
    for words, columns in kinds.items():
        ours, theirs = (part[columns].fillna(0).sum(axis=1).to_numpy() for part in (fp8, bf16))
        change = 100 * (ours - theirs) / bf16["bf16_step_ms"].to_numpy()
        changes.append(f"{words} {span(change, '+.0f', ' %')}")
    return f"{'; '.join(changes)}."


def scaling(table: pd.DataFrame) -> str:
    """Say what is left of the rate per GPU on the most GPUs."""
    kept = _scaling(table) or "Nothing was measured."
    return (
        "Tokens/s per GPU, % of those on the fewest GPUs. For each model and batch the setting "
        "timed on the most numbers of GPUs: so path, length and all-gather differ. "
        f"{kept}"
    )


@each_machine()
def _scaling(rows: pd.DataFrame) -> str:
    line = ["model", "micro_batch_size", "precision"]
    last = rows.sort_values("num_gpus").drop_duplicates(line, keep="last")
    parts = []
    for num_gpus, most in last.groupby("num_gpus", sort=False):
        kept = [f"{recipe(precision)} {span(rows['kept_pct'], '.0f', ' %')}"
                for precision, rows in most.groupby("precision", sort=False)]  # fmt: skip
        parts.append(f"on {num_gpus} GPUs {', '.join(kept)}")
    return f"{'; '.join(parts)}."


def others(table: pd.DataFrame) -> str:
    """Say how leads of ours lie beside others'."""
    kinds = {"ours": "ours", "beside ours": "the other trainer's, same session and shapes",
             "published": "published, other hardware"}  # fmt: skip
    parts = [f"{words} {span(table.loc[table['kind'] == kind, 'lead_pct'], '+.1f', ' %')}"
             for kind, words in kinds.items() if (table["kind"] == kind).any()]  # fmt: skip
    return f"FP8's lead: {'; '.join(parts)}. Bars: 95 % CI."


def peers(table: pd.DataFrame) -> str:
    """Say how fast our arms were beside other trainers', as the path is today first."""
    clipped = table[table["max_grad_norm"].notna()]
    timed = clipped.dropna(subset="ratio")
    parts = ["Both sides clip gradients and have the same shapes."]
    before = timed.apply(is_of_before, axis=1).astype(bool)
    by_turns = timed["num_blocks"].notna()
    earlier = "The tuned path, before it updated in one pass,"
    for chosen, subject in ((~before, "The tuned path"), (before, earlier)):
        for own in (timed[chosen & by_turns], timed[chosen & ~by_turns]):
            parts += [_beside(rows, subject, peer) for peer, rows in own.groupby("peer")]
    full = clipped[clipped["ratio_interval"].str.contains("out of memory", na=False)]
    for (peer, _), rows in full.groupby(["peer", "num_gpus"]):
        models = escape(", ".join(dict.fromkeys(rows["model"])))
        recipes = " and ".join(recipe(p) for p in dict.fromkeys(rows["precision"]))
        where = count(int(rows["num_gpus"].iloc[0]), "GPU")
        parts.append(f"Out of memory on {where}: {escape(peer)} with {models} in {recipes}.")
    if len(parts) == 1:
        return "No other trainer was run beside ours: see `scripts/beside_torchtitan.py`."
    return " ".join(parts)


def _beside(own: pd.DataFrame, subject: str, peer: object) -> str:
    """Say what arms make of another trainer's tokens, model by model, and how they were timed."""
    made = []
    for _, rows in own.groupby(["model", "num_gpus"], sort=False):
        model, num_gpus = rows[["model", "num_gpus"]].iloc[0]
        named = rows.assign(switched=rows["setting"].map(switches).map(", ".join))
        times = [f"{span(arms['ratio'], '.2f')} times in {recipe(precision)}"
                 + f" (with {switched})" * bool(switched)
                 for (precision, switched), arms
                 in named.groupby(["precision", "switched"], sort=False)]  # fmt: skip
        where = f"{escape(model)} on {count(num_gpus, 'GPU')}"
        made.append(f"{where} {' and '.join(times)}")
    blocks = own["num_blocks"]
    if blocks.notna().all():
        fewest = f"{blocks.min()} to " * bool(blocks.min() < blocks.max())
        how = f"{fewest}{count(int(blocks.max()), 'block')} on the same GPUs"
    else:
        apart = ", and arms of one GPU ran on different ones" * bool((own["num_gpus"] == 1).any())
        how = (
            f"one session, in which the other trainer tokenised inside its steps{apart}: that may "
            "be part of the difference"
        )
    return f"{subject} over {escape(peer)}, tokens/s: {'; '.join(made)} ({how})."


def sources(table: pd.DataFrame) -> str:
    """Link to where the published figures stand."""
    links = table.drop_duplicates("source")
    return "Published figures: " + "; ".join(
        f"[{escape(row['source'])}]({row['link']})" for _, row in links.iterrows()
    )
