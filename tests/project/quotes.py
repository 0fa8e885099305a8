"""What the README and docs/results.md may say of speed and memory, made from the records."""

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from fp8study.analysis.leads import leads_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import GRAPH
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import switch_table, throughput_table
from fp8study.core.records import StoredRun
from tests.checkout import committed_runs

ROOT = Path(__file__).parents[2]
MACHINE = "h200x4"


def stored(machine: str = MACHINE) -> list[StoredRun]:
    """The committed records of a machine."""
    return [run for run in committed_runs() if run.machine_label == machine]


@cache
def runs_of(machine: str = MACHINE) -> pd.DataFrame:
    """Their frame, made once for all: change none of it."""
    return shorten_arms(runs_frame(stored(machine)))


@cache
def leads_of(machine: str = MACHINE) -> pd.DataFrame:
    return leads_table(runs_of(machine))


def one(table: pd.DataFrame, **chosen: Any) -> pd.Series:
    """The one row of a table that has the given values."""
    rows = table[(table[list(chosen)] == pd.Series(chosen)).all(axis=1)]
    assert len(rows) == 1, chosen
    return rows.iloc[0]


def per_cent(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") + " %"


def ends(row: Any, names: str = "ci_{}_pct", digits: int = 1) -> str:
    """The ends of an interval, by default a lead's; `names` are those of its columns."""
    low, high = (per_cent(row[names.format(end)], digits) for end in ("low", "high"))
    return f"{low.removesuffix(' %')} to {high.removesuffix(' %')}"


def gap_ends(gap: Any, level: int = 95) -> str:
    """The ends of a loss gap's interval, from a table of loss gaps."""
    return ends(gap, f"gap_pct_{{}}_{level}", 2)


def further_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of leads on the plain path, of few runs each."""
    speed = throughput_table(runs[runs["precision"].isin(["bf16", "fp8_tensorwise"])])
    fp8 = speed[~speed["stale"] & speed["speedup_pct"].notna()]
    plain = fp8[(fp8["path"] == "plain") & fp8["setting"].str.contains("4096")]
    small = plain[plain["model"] == "llama-3.2-1b"]
    batch_8 = one(small[small["setting"].str.contains("batch 8")], num_runs=1)["speedup_pct"]
    alone = plain[plain["study"] != "document-b"]  # whose master weights are BF16
    alone = one(alone, model="llama-3.1-8b", strategy="none")
    two = one(plain, study="tuned-loss-fsdp", num_gpus=2, num_runs=3)["speedup_pct"]
    assert alone["num_runs"] == 1
    return [
        f"At batch 8 on 1 GPU {per_cent(batch_8)} (one run)",
        f"not sharded it is {per_cent(alone['speedup_pct'])} (one run)",
        f"{per_cent(two)} on 2 GPUs (three runs)",
    ]


def lead_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of leads over all sessions, and of document A's grid."""
    leads = leads_table(runs)
    leads = leads[(leads["precision"] == "fp8_tensorwise") & leads["lead_pct"].notna()]
    in_grid = leads["studies"].str.startswith(
        "document-a-grid"
    )  # some of them pooled with rowwise's
    plain = one(leads[leads["path"].eq("plain") & ~in_grid], model="llama-3.1-8b", num_gpus=4)
    others = map(leads_of, ("h200x1", "h200x2"))
    beside = pd.concat([leads, *others], ignore_index=True)
    small = beside[beside["model"].str.startswith("llama-3.2-1b")]
    small = small[small["micro_batch_size"].eq(1) & small["precision"].eq("fp8_tensorwise")]
    small = small[~small["setting"].str.contains(GRAPH)]
    spans = small.groupby("path")["lead_pct"].agg(["min", "max"]).map(per_cent)
    assert set(small[small["path"] == "tuned"]["num_gpus"]) == {1, 2, 4}
    worst = small.loc[small["lead_pct"].idxmin()]
    assert (worst["num_gpus"], worst["path"]) == (4, "plain")
    cells = leads[in_grid]
    grid = cells.set_index(["model", "sequence_length"])["lead_pct"].map(per_cent)
    models = {
        "1B": "llama-3.2-1b", "3B": "llama-3.2-3b", "Qwen3-4B": "qwen3-4b", "8B": "llama-3.1-8b",
        "Qwen3-14B": "qwen3-14b",
    }  # fmt: skip
    assert (len(cells), set(cells["num_gpus"]), cells["num_pairs"].sum()) == (15, {4}, 21)
    open_ = cells[(cells["ci_low_pct"] < 0) & (cells["ci_high_pct"] > 0)]
    decided = set(zip(cells["model"], cells["sequence_length"], strict=True)) - set(
        zip(open_["model"], open_["sequence_length"], strict=True)
    )
    assert decided == {
        *((model, 2048) for model in models.values() if model != "qwen3-14b"),
        *((model, 4096) for model in ("llama-3.2-1b", "llama-3.2-3b", "qwen3-4b")),
        *((model, 8192) for model in ("llama-3.1-8b", "qwen3-14b")),
    }  # fmt: skip
    longest = cells.groupby("model")["sequence_length"].transform("max")
    best = cells.groupby("model")["tokens_per_second_per_gpu"].idxmax()
    assert best.isin(cells.index[cells["sequence_length"] == longest]).all()
    recipes = leads_table(runs[runs["study"] == "document-a-rowwise"])
    recipes = recipes.set_index(["sequence_length", "precision", "model"])["lead_pct"]
    small_to_large = {4096: ("1B", "3B", "8B"), 8192: ("1B", "8B")}
    both = {
        (length, precision): ", ".join(
            f"{name} {per_cent(recipes.loc[length, precision, models[name]])}" for name in names
        )
        for length, names in small_to_large.items()
        for precision in ("fp8_rowwise", "fp8_tensorwise")
    }
    blocks = beside[beside["studies"].eq("document-a-blocks")].set_index(["num_gpus", "model"])
    assert set(blocks["num_pairs"]) == {3}
    alone, two = blocks.loc[1], blocks.loc[2]
    spread = blocks["lead_high_pct"] - blocks["lead_low_pct"]
    return [
        f"on one GPU the 1B is at {per_cent(alone.loc[models['1B'], 'lead_pct'])} and the 8B at "
        f"{per_cent(alone.loc[models['8B'], 'lead_pct'])}, on two at "
        f"{per_cent(two.loc[models['1B'], 'lead_pct'])} and "
        f"{per_cent(two.loc[models['8B'], 'lead_pct'])}",
        f"Its three blocks are {spread.loc[1, models['8B']]:.1f} (8B) and "
        f"{spread.loc[1, models['1B']]:.1f} points (1B) apart on one GPU, "
        f"{spread.loc[2, models['8B']]:.1f} and {spread.loc[2, models['1B']]:.1f} on two",
        f"Rowwise, at 4,096: {both[4096, 'fp8_rowwise']}, where tensorwise has "
        f"{both[4096, 'fp8_tensorwise']} in the same blocks; at 8,192: "
        f"{both[8192, 'fp8_rowwise']} against {both[8192, 'fp8_tensorwise']} "
        "(`document-a-rowwise`)",
        f"pooled {per_cent(plain['lead_pct'])} (95 % CI {ends(plain)})",
        "kernel by kernel FP8 gives a 1B "
        f"{spans['min']['tuned'].removesuffix(' %')} to {spans['max']['tuned']} on one to four "
        f"GPUs (plain path, four GPUs, {worst['sequence_length']:,} tokens: "
        f"{spans['min']['plain']})",
        *(f"| {name} | {' | '.join(grid[model])} |" for name, model in models.items()),
        *(f"{grid['llama-3.2-3b', n]} and {grid['qwen3-4b', n]} at" for n in (2048, 4096)),
        f"at 8,192 ({grid['llama-3.2-3b', 8192]} and {grid['qwen3-4b', 8192]}) it is undecided, "
        "one or two runs each",
    ]


def path_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of the tuned path's losses."""
    texts = []
    for study in ("tuned-loss", "tuned-loss-fsdp"):
        table = switch_table(runs[runs["study"] == study])
        assert (set(table["verdict"]), set(table["num_pairs"])) == ({"equivalent"}, {3})
        gap = table.set_index("precision")["loss_gap_pct"]
        bf16, fp8 = (per_cent(gap[p], 3) for p in ("bf16", "fp8_tensorwise"))
        texts.append(f"{bf16} in BF16 and {fp8} in FP8")
    return texts
