"""What the README and docs/results.md may say of speed and memory, made from the records."""

from pathlib import Path
from typing import Any

import pandas as pd

from fp8study.analysis.leads import leads_table
from fp8study.analysis.peers import peer_table
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


def one(table: pd.DataFrame, **chosen: Any) -> pd.Series:
    """The one row of a table that has the given values."""
    rows = table[(table[list(chosen)] == pd.Series(chosen)).all(axis=1)]
    assert len(rows) == 1, chosen
    return rows.iloc[0]


def per_cent(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") + " %"


def ends(lead: pd.Series) -> str:
    """The ends of a lead's interval."""
    return " to ".join(
        per_cent(lead[f"ci_{end}_pct"]).removesuffix(" %") for end in ("low", "high")
    )


def tuned_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of the tuned path."""
    speed = throughput_table(runs[runs["study"].str.startswith("beside-torchtitan")])
    speed = speed[~speed["setting"].str.contains("clipped")]
    assert speed["setting"].str.contains("tuned").all()
    assert set(speed["num_runs"]) == {3}
    fp8 = speed[speed["precision"] == "fp8_tensorwise"]
    fp8 = fp8.assign(batch=fp8["setting"].str.extract(r"batch (\d)", expand=False))
    small = fp8[fp8["model"] == "llama-3.2-1b-untied"]
    largest = throughput_table(runs[runs["study"] == "best-batch"])
    tensorwise, rowwise = (
        one(largest.dropna(subset="speedup_pct"), precision=f"fp8_{kind}", num_runs=1)
        for kind in ("tensorwise", "rowwise")
    )
    assert "batch 5" in tensorwise["setting"] == rowwise["setting"]
    big = {n: one(fp8, model="llama-3.1-8b", num_gpus=n) for n in (1, 4)}
    shared = throughput_table(runs[runs["study"] == "tuned-loss-fsdp"])
    shared = shared[(shared["path"] == "tuned") & (shared["num_gpus"] == 2)]
    leads = leads_table(runs)
    leads = leads[(leads["path"] == "tuned") & ~leads["setting"].str.contains("clipped")]
    two = one(leads[leads["studies"] == "tuned-loss-fsdp"], num_gpus=2)
    pooled = one(leads, model="llama-3.2-1b-untied", micro_batch_size=1)
    assert two["num_pairs"] == 3
    paired = leads_table(runs[runs["study"].str.startswith("beside-torchtitan")])
    keys = ["model", "num_gpus", "setting"]
    both = fp8.merge(paired[paired["precision"] == "fp8_tensorwise"], on=keys)
    assert len(both) == len(fp8) == 4
    moved = (both["speedup_pct"] - both["lead_pct"]).abs().max()
    rate = {
        p: one(shared, precision=p)["tokens_per_second_per_gpu"] for p in set(shared["precision"])
    }
    return [
        *(
            f"on {n} GPU{'s' if n > 1 else ''} at batch {row['batch']}"
            f"{', not sharded,' if row['strategy'] == 'none' else ''} "
            f"{per_cent(row['speedup_pct'])} ({row['tokens_per_second_per_gpu']:,.0f} tokens/s"
            for n, row in big.items()
        ),
        f"at batch 5 {per_cent(tensorwise['speedup_pct'])} "
        f"({tensorwise['tokens_per_second_per_gpu']:,.0f}), rowwise "
        f"{per_cent(rowwise['speedup_pct'])} ({rowwise['tokens_per_second_per_gpu']:,.0f}; one run",
        *(f"{per_cent(one(small, batch=b)['speedup_pct'])} at batch {b}" for b in "18"),
        f"{per_cent(two['lead_pct'])} on 2 GPUs, the mean of three pairs (95 % CI {ends(two)})",
        f"of another study {per_cent(pooled['lead_pct'])}, 95 % CI {ends(pooled)})",
        f"moves them by at most {moved:.1f} points",
        f"{rate['fp8_tensorwise']:,.0f} against {rate['bf16']:,.0f} tokens/s, give "
        f"{per_cent(100 * (rate['fp8_tensorwise'] / rate['bf16'] - 1))}",
    ]


def clipped(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that clip gradients, as torchtitan always does."""
    return table[table["max_grad_norm"].notna()]


def peer_texts() -> list[str]:
    """What is said of torchtitan beside the tuned path as it was, both clipping gradients."""
    table = _out_of_blocks(peer_table(stored()))
    assert (set(table["num_runs"]), set(table["num_peer_runs"])) == ({3}, {3})
    assert (table["ratio_interval"].str.split(" to ").str[0].astype(float) > 1).all()
    rows = clipped(table)
    is_big = rows["model"] == "llama-3.1-8b"
    ratio = rows[is_big].set_index(["num_gpus", "precision"])["ratio"]
    small = rows.loc[~is_big, "ratio"]
    return [
        *set(table["peer"]),
        "8B "
        + ", ".join(
            f"{ratio[n, 'bf16']:.2f} (BF16) and {ratio[n, 'fp8_tensorwise']:.2f} times (FP8) "
            f"on {n} GPU{'s' if n > 1 else ''}"
            for n in (1, 4)
        ),
        f"the 1B {small.min():.2f} to {small.max():.2f} times",
    ]


def _out_of_blocks(peers: pd.DataFrame) -> pd.DataFrame:
    """Rows of the session in which trainers did not take turns on a GPU."""
    return peers[peers["num_blocks"].isna() & peers["num_peer_runs"].gt(0)]


def todays_peer_texts() -> list[str]:
    """What is said of torchtitan and Accelerate by turns with the tuned path as it is."""
    table = peer_table(stored())
    table = table[table["num_blocks"].notna()]
    assert set(table["num_blocks"]) == {4}
    rows = table.assign(peer=table["peer"].str.split().str[0]).set_index(
        ["peer", "model", "precision"]
    )
    told = []
    for model, batch in (("llama-3.1-8b", 1), ("llama-3.2-1b-untied", 8)):
        bf16, fp8 = (rows.loc["torchtitan", model, name] for name in ("bf16", "fp8_tensorwise"))
        name = "an 8B" if batch == 1 else "a 1B"
        told.append(
            f"{name} at batch {batch} {bf16['ratio']:.2f} times as fast in BF16, "
            f"{fp8['ratio']:.2f} in FP8, which leads by {per_cent(fp8['lead_pct'])}, "
            f"torchtitan's by {per_cent(fp8['peer_lead_pct'])}"
        )
        told.append(
            f"{name.split()[1]}'s 95 % CIs are {bf16['ratio_interval']} and {fp8['ratio_interval']}"
        )
        told.append(
            f"{bf16['reserved_gib']:.1f} and {fp8['reserved_gib']:.1f} GiB, torchtitan "
            f"{bf16['peer_reserved_gib']:.1f} and {fp8['peer_reserved_gib']:.1f}"
        )
    ratio = rows["ratio"]
    plain = [f"{ratio['accelerate', model, name]:.2f}" for name in ("bf16", "fp8_tensorwise")]
    return [*told, f"than Accelerate the 1B is {plain[0]} and {plain[1]} times as fast"]


def memory_text() -> str:
    """What is said of the memory that the tuned path reserved for the 8B."""
    peers = _out_of_blocks(clipped(peer_table(stored()).query("model == 'llama-3.1-8b'")))
    less = peers["peer_reserved_gib"] - peers["reserved_gib"]
    assert len(less) == 4
    assert min(less) > 0
    one_gpu, four = (f"{part.min():.1f} to {part.max():.1f} GiB less"
                     for _, part in less.groupby(peers["num_gpus"]))  # fmt: skip
    return f"reserves {one_gpu} than torchtitan on 1 GPU and {four} on 4"


def further_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of leads on the plain path, between 1B and 8B, and with clipped gradients."""
    speed = throughput_table(runs[runs["precision"].isin(["bf16", "fp8_tensorwise"])])
    fp8 = speed[~speed["stale"] & speed["speedup_pct"].notna()]
    plain = fp8[(fp8["path"] == "plain") & fp8["setting"].str.contains("4096")]
    small = plain[plain["model"] == "llama-3.2-1b"]
    batch_8 = one(small[small["setting"].str.contains("batch 8")], num_runs=1)["speedup_pct"]
    alone = plain[plain["study"] != "document-b"]  # whose master weights are BF16
    alone = one(alone, model="llama-3.1-8b", strategy="none")
    two = one(plain, study="tuned-loss-fsdp", num_gpus=2, num_runs=3)["speedup_pct"]
    corners = fp8[(fp8["study"] == "corner-arms") & (fp8["num_runs"] <= 2)].set_index("model")
    corner = {m: per_cent(corners.loc[m, "speedup_pct"]) for m in corners.index}
    beside = fp8[fp8["study"].str.startswith("beside-torchtitan")]
    clipped = beside[beside["setting"].str.contains("clipped") & beside["model"].str.contains("8b")]
    lead = clipped[clipped["num_runs"] == 3].set_index("num_gpus")["speedup_pct"]
    assert (alone["num_runs"], len(lead), len(corner)) == (1, 2, 3)
    return [
        f"At batch 8 on 1 GPU {per_cent(batch_8)} (one run)",
        f"not sharded it is {per_cent(alone['speedup_pct'])} (one run)",
        f"{per_cent(two)} on 2 GPUs (three runs)",
        f"3B {corner['llama-3.2-3b']}, Qwen3-4B {corner['qwen3-4b']}, 8B {corner['llama-3.1-8b']}",
        f"{per_cent(lead[1])} and {per_cent(lead[4])}",
    ]


def lead_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of leads over all sessions, and of document A's grid."""
    leads = leads_table(runs)
    leads = leads[(leads["precision"] == "fp8_tensorwise") & leads["lead_pct"].notna()]
    tuned = leads[(leads["path"] == "tuned") & ~leads["setting"].str.contains("clipped")]
    four = one(tuned, model="llama-3.1-8b", num_gpus=4)
    in_grid = leads["studies"].str.startswith(
        "document-a-grid"
    )  # some of them pooled with rowwise's
    plain = one(leads[leads["path"].eq("plain") & ~in_grid], model="llama-3.1-8b", num_gpus=4)
    others = (leads_table(shorten_arms(runs_frame(stored(of)))) for of in ("h200x1", "h200x2"))
    beside = pd.concat([leads, *others], ignore_index=True)
    small = beside[beside["model"].str.startswith("llama-3.2-1b")]
    small = small[small["micro_batch_size"].eq(1) & small["precision"].eq("fp8_tensorwise")]
    small = small[~small["setting"].str.contains(GRAPH)]
    spans = small.groupby("path")["lead_pct"].agg(["min", "max"]).map(per_cent)
    assert set(small[small["path"] == "tuned"]["num_gpus"]) == {1, 2, 4}
    assert small.loc[small["lead_pct"].idxmin(), "num_gpus"] == 4
    cells = leads[in_grid]
    grid = cells.set_index(["model", "sequence_length"])["lead_pct"].map(per_cent)
    models = {
        "1B": "llama-3.2-1b", "3B": "llama-3.2-3b", "Qwen3-4B": "qwen3-4b", "8B": "llama-3.1-8b",
        "Qwen3-14B": "qwen3-14b",
    }  # fmt: skip
    assert (len(cells), set(cells["num_gpus"]), cells["num_pairs"].sum()) == (15, {4}, 18)
    open_ = cells[(cells["ci_low_pct"] < 0) & (cells["ci_high_pct"] > 0)]
    decided = set(zip(cells["model"], cells["sequence_length"], strict=True)) - set(
        zip(open_["model"], open_["sequence_length"], strict=True)
    )
    assert decided == {
        *((model, 2048) for model in models.values() if model != "qwen3-14b"),
        *((model, 4096) for model in ("llama-3.2-1b", "llama-3.2-3b", "qwen3-4b")),
    }  # fmt: skip
    longest = cells.groupby("model")["sequence_length"].transform("max")
    best = cells.groupby("model")["tokens_per_second_per_gpu"].idxmax()
    assert best.isin(cells.index[cells["sequence_length"] == longest]).all()
    recipes = leads_table(runs[runs["study"] == "document-a-rowwise"])
    recipes = recipes.pivot(index="precision", columns="model", values="lead_pct")
    assert {*recipes} == {models[name] for name in ("1B", "3B", "8B")}
    by_row, by_tensor = (
        ", ".join(f"{name} {per_cent(recipes.loc[each, models[name]])}" for name in
                  ("1B", "3B", "8B")) for each in ("fp8_rowwise", "fp8_tensorwise")
    )  # fmt: skip
    return [
        f"Rowwise, at 4,096: {by_row}, where tensorwise has {by_tensor} in the same blocks",
        f"over all five pairs of today's form {per_cent(four['lead_pct'])}",
        f"pooled {per_cent(plain['lead_pct'])} (95 % CI {ends(plain)})",
        f"At batch 1 the host is late: by kernel {spans['min']['tuned'].removesuffix(' %')} to "
        f"{spans['max']['tuned']} on one to four GPUs (plain, on four, {spans['min']['plain']} at "
        "worst)",
        "; ".join(f"{name} {', '.join(grid[model])}" for name, model in models.items()),
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
