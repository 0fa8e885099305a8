"""Every result that the README and docs/results.md quote is computed from the records."""

import re
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis import instruments as instrument_tables
from fp8study.analysis.frames import metrics_frame, runs_frame
from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import effective_batch_table, loss_gap_table, pass_table
from fp8study.analysis.pairing import shorten_arms
from fp8study.analysis.peers import peer_table
from fp8study.analysis.speed import MEMORY_FULL, document_a_table, switch_table, throughput_table
from fp8study.core.records import LOSS_MARGIN_PCT, StoredRun, load_runs
from fp8study.core.studies import load_study

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FINDINGS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
LOG = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
MACHINE = "h200x4"
#: Seconds that a study takes beyond its first run's start and its last run's end.
OVERHEAD_S = 15


@cache
def stored(machine: str = MACHINE) -> list[StoredRun]:
    """The committed records of a machine, read once."""
    return [run for run in load_runs(ROOT / "results") if run.machine_label == machine]


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return shorten_arms(runs_frame(stored()))


def one(table: pd.DataFrame, **chosen: Any) -> pd.Series:
    """The one row of a table that has the given values."""
    rows = table[(table[list(chosen)] == pd.Series(chosen)).all(axis=1)]
    assert len(rows) == 1, chosen
    return rows.iloc[0]


def per_cent(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") + " %"


def speedups(runs: pd.DataFrame, model: str, study: str = "quick") -> list[str]:
    """The leads of tensorwise FP8 on the plain path, by GPUs."""
    speed = throughput_table(runs[runs["precision"].isin(["bf16", "fp8_tensorwise"])])
    rows = speed[(speed["study"] == study) & (speed["model"] == model)].dropna(subset="speedup_pct")
    ordered = rows.sort_values("num_gpus")
    return [
        f"{per_cent(pct)} on {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
        for pct, num_gpus in zip(ordered["speedup_pct"], ordered["num_gpus"], strict=True)
    ]


def fault_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of the fault planted in BF16, and of FP8 itself."""
    chosen = runs[(runs["study"] == "attribution") & (runs["master_dtype"] == "bf16")]
    end = chosen.pivot_table(index="seed", columns="arm", values="loss_last20_mean")
    above = {str(arm): (100 * (end[arm] / end["BF16"] - 1)).mean() for arm in end}
    planted, stale = (next(arm for arm in above if word in arm) for word in ("planted", "stale"))
    assert len(end.dropna()) == 5
    return [
        f"ends {above[planted]:.1f} % above healthy BF16, the stale FP8 run {above[stale]:.1f} %",
        f"costs {per_cent(above['FP8 tensorwise'], 2)} (tensorwise) and "
        f"{per_cent(above['FP8 rowwise'], 2)} (rowwise)",
    ]


def instrument_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of the study instruments."""
    speed = throughput_table(runs[runs["study"] == "instruments"])
    big = speed[(speed["model"] == "llama-3.1-8b") & (speed["num_gpus"] == 4)]
    lead = {p: one(big, precision=f"fp8_{p}")["speedup_pct"] for p in ("tensorwise", "rowwise")}
    frame = instrument_tables.instruments_frame(stored(), runs)
    moved = instrument_tables.communication_table(
        frame[(frame["model"] == "llama-3.1-8b") & (frame["study"] == "instruments")]
    )
    gathered = one(moved, precision="fp8_tensorwise")
    assert gathered["reduce_scatter_dtypes"] == "FP32"
    return [
        f"in another session {per_cent(lead['tensorwise'])} on 4 GPUs",
        f"Rowwise {per_cent(lead['rowwise'])} on 4 GPUs",
        f"{per_cent(gathered['all_gather_change_pct'])} for 8B",
    ]


@pytest.fixture(scope="module")
def quotable(runs: pd.DataFrame) -> list[str]:
    """What the README may quote, made from the records as it is written there."""
    arms = document_a_table(runs)
    gaps = loss_gap_table(runs)
    gaps = gaps[gaps["study"] == "document-a"].assign(
        masters=lambda t: t["setting"].str.extract(r"(\w+) masters", expand=False)
    )
    stale = one(arms, stale=True)
    loss = {
        (row["precision"], bool(row["stale"])): row["loss_last20_mean"]
        for _, row in arms[arms["masters"] == "BF16"].iterrows()
    }
    healthy = {m: one(gaps, masters=m, stale=False) for m in ("BF16", "FP32")}
    assert {row["verdict"] for row in healthy.values()} == {"equivalent"}
    assert {row["num_pairs"] for row in healthy.values()} == {3}
    eager = {m: one(arms, masters=m, stale=False, precision="fp8_tensorwise") for m in healthy}
    quick = runs[runs["study"] == "quick"]
    quick_speed = throughput_table(quick)
    full = quick_speed[quick_speed["note"] == MEMORY_FULL]
    assert full[["model", "num_gpus"]].drop_duplicates().values.tolist() == [["llama-3.1-8b", 1]]
    size = runs.loc[runs["model"] == "llama-3.2-1b", "num_parameters"].iloc[0]
    of_text = runs[runs["corpus"] != "synthetic"]
    texts = [
        f"{size / 1e9:.1f}B model",
        f"{stale['parameters_outside_optimizer_pct']:.1f} % of the parameters are outside",
        f"(loss {loss['fp8_tensorwise', True]:.2f} against {loss['bf16', False]:.2f})",
        f"FP8 ends at {loss['fp8_tensorwise', False]:.2f}",
        f"{healthy['BF16']['gap_pct']:.2f} % above BF16 with BF16 master weights",
        f"{healthy['FP32']['gap_pct']:.2f} % above with FP32 master weights",
        f"±{LOSS_MARGIN_PCT} %",
        *speedups(runs, "llama-3.1-8b"),
        ", ".join(speedups(runs, "llama-3.2-1b")),
        f"in another session {', '.join(speedups(runs, 'llama-3.2-1b', 'instruments'))}",
        f"{per_cent(eager['BF16']['speedup_pct'])} (1B, BF16 master weights)",
        f"FP32 master weights BF16 ends at {healthy['FP32']['loss_bf16']:.2f}",
        f"{per_cent(eager['FP32']['speedup_pct'])} (FP32 master weights)",
        f"{full['memory_peak_gib'].max():.1f} GiB for 8B",
        *fault_texts(runs),
        *batch_texts(runs),
        *parity_texts(runs),
        new_text(),
        *tuned_texts(runs),
        *peer_texts(),
        memory_text(),
        *path_texts(runs),
        *further_texts(runs),
        *lead_texts(runs),
        *(
            f"`{study}` has {(runs['study'] == study).sum()} of its {len(load_study(study).runs)}"
            for study in ("document-a-grid", "tuned-switches", "best-batch", "small-products")
        ),
        *instrument_texts(runs),
        *(f"torch {v}" for v in runs["version_torch"].unique()),
        *(f"torchao {v}" for v in runs["version_torchao"].unique()),
        f"{len(runs[runs['study'] == 'quick'])} |",
        f"BPE vocabulary of {', '.join(map(str, of_text['vocab_size'].unique()))}",
    ]
    return texts


def batch_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of the effective batch."""
    table = effective_batch_table(runs)
    tested = table[table["num_pairs"] == 5]
    assert set(tested["verdict"]) == {"equivalent"}
    assert set(tested["effective_batch"]) == {1, 2, 4, 8}
    mean = tested.groupby("effective_batch")["gap_pct"].mean()
    assert len(tested) == 9
    return [
        f"{mean[1]:+.2f} % at a batch of 1, {mean[8]:+.2f} % at 8",
        f"at most {tested['gap_pct'].max():+.2f} %",
    ]


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
    two = one(shared, precision="fp8_tensorwise")
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
        f"{per_cent(two['speedup_pct'])} on 2 GPUs",
        f"{rate['fp8_tensorwise']:,.0f} against {rate['bf16']:,.0f} tokens/s, give "
        f"{per_cent(100 * (rate['fp8_tensorwise'] / rate['bf16'] - 1))}",
    ]


def peer_texts() -> list[str]:
    """What is said of torchtitan beside the tuned path, which clips gradients or not."""
    table = peer_table(stored())
    assert (set(table["num_runs"]), set(table["num_peer_runs"])) == ({3}, {3})
    assert (table["ratio_interval"].str.split(" to ").str[0].astype(float) > 1).all()
    table["clips"] = table["max_grad_norm"].notna()
    texts = list(set(table["peer"]))
    for clips, rows in table.groupby("clips"):
        is_big = rows["model"] == "llama-3.1-8b"
        ratio = rows[is_big].set_index(["num_gpus", "precision"])["ratio"]
        texts.append(
            "8B "
            + ", ".join(
                f"{ratio[n, 'bf16']:.2f} (BF16) and {ratio[n, 'fp8_tensorwise']:.2f} times (FP8) "
                f"on {n} GPU{'s' if n > 1 else ''}"
                for n in (1, 4)
            )
        )
        if clips:
            small = rows.loc[~is_big, "ratio"]
            texts.append(f"the 1B {small.min():.2f} to {small.max():.2f} times")
    return texts


def memory_text() -> str:
    """What is said of the memory that the tuned path reserves for the 8B."""
    peers = peer_table(stored()).query("model == 'llama-3.1-8b'")
    less = peers["peer_reserved_gib"] - peers["reserved_gib"]
    assert len(less) == 8
    assert min(less) > 0
    texts = [
        f"{part.min():.1f} to {part.max():.1f} GiB less on {num_gpus}"
        for num_gpus, part in less.groupby(peers["num_gpus"])
    ]
    return f"reserves {texts[0]} GPU and {texts[1]}"


def further_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of leads on the plain path, between 1B and 8B, and with clipped gradients."""
    speed = throughput_table(runs[runs["precision"].isin(["bf16", "fp8_tensorwise"])])
    fp8 = speed[~speed["stale"] & speed["speedup_pct"].notna()]
    plain = fp8[(fp8["path"] == "plain") & fp8["setting"].str.contains("4096")]
    small = plain[plain["model"] == "llama-3.2-1b"]
    batch_8 = one(small[small["setting"].str.contains("batch 8")], num_runs=1)["speedup_pct"]
    alone = one(plain, model="llama-3.1-8b", strategy="none")
    two = one(plain, study="tuned-loss-fsdp", num_gpus=2, num_runs=3)["speedup_pct"]
    corners = fp8[(fp8["study"] == "corner-arms") & (fp8["num_runs"] <= 2)].set_index("model")
    corner = {m: per_cent(corners.loc[m, "speedup_pct"]) for m in corners.index}
    beside = fp8[fp8["study"].str.startswith("beside-torchtitan")]
    clipped = beside[beside["setting"].str.contains("clipped") & beside["model"].str.contains("8b")]
    lead = clipped.set_index("num_gpus")["speedup_pct"]
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
    alone, four = (one(tuned, model="llama-3.1-8b", num_gpus=n) for n in (1, 4))
    ends = [
        [per_cent(row[f"ci_{end}_pct"]).removesuffix(" %") for end in ("low", "high")]
        for row in (alone, four)
    ]
    less = [[f"{-row[f'{of}_change_pct']:.1f} %" for row in (alone, four)]
            for of in ("memory", "energy")]  # fmt: skip
    plain = one(leads[leads["path"] == "plain"], model="llama-3.1-8b", num_gpus=4)
    pooled = [per_cent(plain[f"{name}_pct"]) for name in ("lead", "ci_low", "ci_high")]
    small = leads[leads["model"].str.startswith("llama-3.2-1b") & (leads["micro_batch_size"] == 1)]
    eight = one(tuned, model="llama-3.2-1b-untied", micro_batch_size=8)["lead_pct"]
    cells = leads[leads["studies"] == "document-a-grid"]
    grid = cells.set_index(["model", "sequence_length"])["lead_pct"].map(per_cent)
    models = {"1B": "llama-3.2-1b", "3B": "llama-3.2-3b", "Qwen3-4B": "qwen3-4b"}
    assert (len(cells), set(cells["num_gpus"]), set(cells["num_pairs"])) == (9, {4}, {1})
    assert (
        cells.groupby("model")["tokens_per_second_per_gpu"]
        .idxmax()
        .isin(cells.index[cells["sequence_length"] == 8192])
        .all()
    )
    return [
        f"over all five pairs of today's form {per_cent(four['lead_pct'])}",
        f"pooled {pooled[0]} (95 % CI {pooled[1].removesuffix(' %')} to "
        f"{pooled[2].removesuffix(' %')})",
        f"by {per_cent(alone['lead_pct'])} on 1 GPU at batch 1 (95 % CI {' to '.join(ends[0])}) "
        f"and by {per_cent(four['lead_pct'])} on 4 GPUs at batch 2 ({' to '.join(ends[1])})",
        f"with {less[0][0]} and {less[0][1]} less memory and "
        f"{less[1][0]} and {less[1][1]} less energy per token",
        f"{per_cent(eight)} on 1 GPU at batch 8. At batch 1 from "
        f"{per_cent(small['lead_pct'].min())} to {per_cent(small['lead_pct'].max())}:",
        "; ".join(
            f"{name} {', '.join(grid[model, length] for length in (2048, 4096, 8192))}"
            for name, model in models.items()
        ),
        *(f"{grid['llama-3.2-3b', n]} and {grid['qwen3-4b', n]} at" for n in (2048, 4096)),
        f"({grid['llama-3.2-3b', 8192]} and {grid['qwen3-4b', 8192]})",
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


def parity_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of the study loss-parity."""
    chosen = runs[runs["study"] == "loss-parity"]
    passes = pass_table(metrics_frame(stored()), chosen)
    first, last = (passes[passes["passes"] == end] for end in (1, passes["passes"].max()))
    validation = loss_gap_table(chosen, loss="validation_loss")
    assert {len(part) for part in (first, last, validation)} == {5}
    assert set(first["verdict"]) == {"equivalent"}
    assert set(last["verdict"]) == {"different"}
    assert sorted(validation["verdict"]) == ["different", *["undecided"] * 4]
    spans = [
        f"{per_cent(part['gap_pct'].min(), 2)} to {per_cent(part['gap_pct'].max(), 2)}"
        for part in (first, last, validation)
    ]
    (steps,) = set(first["step"])
    return [*spans, f"seen {last['passes'].iloc[0]:.1f} times", f"({steps} steps)"]


def new_text() -> str:
    """What is said of the study new-text, which is not finished."""
    chosen = shorten_arms(runs_frame(stored("h200x2")))
    row = one(loss_gap_table(chosen[chosen["study"] == "new-text"]), precision="fp8_tensorwise")
    assert (row["verdict"], row["num_pairs"]) == ("undecided", 3)
    low, high = (per_cent(row[f"gap_pct_{e}_95"], 2).removesuffix(" %") for e in ("low", "high"))
    return f"{per_cent(row['gap_pct'], 2)} (95 % CI {low} to {high})"


def test_every_finding_is_in_the_records(quotable: list[str]) -> None:
    text = " ".join(f"{README} {FINDINGS}".split())
    for words in quotable:
        assert words in text, words


def test_no_other_result_is_quoted(quotable: list[str]) -> None:
    """The README and the page of findings hold no percentage or loss but the computed ones."""
    number = r"[−+±]?\d+\.\d+(?:\.\d+)?"
    known = set(re.findall(number, " ".join(quotable)))
    start, end = README.index("*FP8's lead over"), README.index("## Two commands")
    for text in (README[start:end], FINDINGS):
        found = set(re.findall(number, text))
        assert found <= known, found - known


@pytest.mark.parametrize("study", ["quick", "document-a", "instruments", "attribution"])
def test_quoted_times_fit_the_records(study: str, runs: pd.DataFrame) -> None:
    chosen = runs[runs["study"] == study]
    first = datetime.fromisoformat(chosen["started_at"].min())
    last = datetime.fromisoformat(chosen["ended_at"].max())
    (row,) = re.findall(rf"STUDY={study}` +\| +(\d+) \| +(\d+) s, measured", FINDINGS)
    assert int(row[0]) == len(chosen) == len(load_study(study).runs)
    assert 0 <= int(row[1]) - (last - first).total_seconds() <= OVERHEAD_S


def test_log_quotes_the_records(runs: pd.DataFrame) -> None:
    speed = throughput_table(runs)
    quick = speed[speed["study"] == "quick"]["tokens_per_second_per_gpu"]
    arms = document_a_table(runs)
    numbers = [f"{value:,.0f}" for value in [*quick, *arms["tokens_per_second_per_gpu"]]]
    numbers += [f"{value:.3f}" for value in arms["loss_last20_mean"]]
    numbers += [f"{value:.1f} GiB" for value in arms["memory_peak_gib"]]
    numbers += [f"{gap:+.4f}" for gap in loss_gap_table(runs).query("study == 'document-a'")["gap"]]
    for number in numbers:
        assert number in LOG, number
