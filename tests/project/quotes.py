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
    """What is said of leads over all sessions."""
    leads = leads_table(runs)
    leads = leads[(leads["precision"] == "fp8_tensorwise") & leads["lead_pct"].notna()]
    plain = leads[leads["path"].eq("plain") & leads["master_dtype"].eq("fp32")]
    plain = one(plain, model="llama-3.1-8b", num_gpus=4)
    beside = pd.concat([leads, *map(leads_of, ("h200x1", "h200x2"))], ignore_index=True)
    small = beside[beside["model"].str.startswith("llama-3.2-1b")]
    small = small[small["micro_batch_size"].eq(1) & small["precision"].eq("fp8_tensorwise")]
    small = small[~small["setting"].str.contains(GRAPH)]
    spans = small.groupby("path")["lead_pct"].agg(["min", "max"]).map(per_cent)
    assert set(small[small["path"] == "tuned"]["num_gpus"]) == {1, 2, 4}
    worst = small.loc[small["lead_pct"].idxmin()]
    assert (worst["num_gpus"], worst["path"]) == (4, "plain")
    return [
        f"pooled {per_cent(plain['lead_pct'])} (95 % CI {ends(plain)})",
        "kernel by kernel FP8 gives a 1B "
        f"{spans['min']['tuned'].removesuffix(' %')} to {spans['max']['tuned']} on one to four "
        f"GPUs (plain path, four GPUs, {worst['sequence_length']:,} tokens: "
        f"{spans['min']['plain']})",
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
