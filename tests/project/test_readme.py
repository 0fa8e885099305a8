"""Every result that the README and docs/results.md quote is computed from the records."""

import math
import re
from datetime import datetime

import pandas as pd
import pytest

from fp8study.analysis import instruments as instrument_tables
from fp8study.analysis.claims.ledger import judge
from fp8study.analysis.losses import effective_batch_table, loss_gap_table, pass_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.speed import MEMORY_FULL, document_a_table, throughput_table
from fp8study.core.records import LOSS_MARGIN_PCT
from fp8study.core.studies import load_study
from fp8study.report.ledger import tally
from tests.checkout import committed_report
from tests.project.quotes import (
    ROOT,
    further_texts,
    lead_texts,
    one,
    path_texts,
    per_cent,
    runs_of,
    stored,
)
from tests.project.quotes_document_b import document_b_texts
from tests.project.quotes_four_h100 import four_h100_texts
from tests.project.quotes_four_h200 import four_h200_texts
from tests.project.quotes_graph import graph_texts, pool_texts, tied_texts
from tests.project.quotes_grid import grid_texts, slow_links_texts
from tests.project.quotes_h100 import h100_texts
from tests.project.quotes_losses import assert_by_rate, loss_texts, noise_texts
from tests.project.quotes_new_text import done_text, new_text, null_texts
from tests.project.quotes_one_h200 import one_h200_texts
from tests.project.quotes_one_pass import one_pass_texts
from tests.project.quotes_peers import all_pairs_texts, peer_rows
from tests.project.quotes_switches import switch_rows
from tests.project.quotes_two_h200 import passes_texts, two_h200_texts

README = (ROOT / "README.md").read_text(encoding="utf-8")
FINDINGS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
LOG = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
#: Seconds that a study takes beyond its first run's start and its last run's end.
OVERHEAD_S = 15


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return runs_of()


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
        *new_text(),
        done_text(),
        *null_texts(runs),
        *h100_texts(),
        *two_h200_texts(),
        *passes_texts(),
        *one_h200_texts(),
        *four_h200_texts(),
        *four_h100_texts(),
        *graph_texts(),
        *pool_texts(),
        *tied_texts(),
        *one_pass_texts(),
        *switch_rows(),
        *peer_rows(),
        *all_pairs_texts(),
        *loss_texts(),
        *noise_texts(),
        *path_texts(runs),
        *further_texts(runs),
        *lead_texts(runs),
        *grid_texts(),
        *slow_links_texts(),
        *document_b_texts(),
        *(
            f"`{study}` has {(runs['study'] == study).sum()} of its {len(load_study(study).runs)}"
            for study in ("tuned-switches", "best-batch", "small-products")
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
    learnt = tested.groupby("effective_batch")["learnt_pct"].mean()
    seen = tested.groupby("effective_batch")["epochs"].max()
    return [
        f"ends only {learnt[1]:.1f} % below what the tokens' frequencies alone give at a batch of "
        f"1, and {learnt[8]:.1f} % at 8",
        f"batches of 4 and 8 saw their text {seen[4]:.1f} and {seen[8]:.1f} times",
        f"{mean[1]:+.2f} % at a batch of 1, {mean[8]:+.2f} % at 8",
        f"at most {tested['gap_pct'].max():+.2f} %",
    ]


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


def test_every_finding_is_in_the_records(quotable: list[str]) -> None:
    text = " ".join(f"{README} {FINDINGS}".split())
    assert [words for words in quotable if words not in text] == []


def test_no_other_result_is_quoted(quotable: list[str]) -> None:
    """The README and the page of findings hold no percentage or loss but the computed ones."""
    number = r"[−+±]?\d+\.\d+(?:\.\d+)?"
    known = set(re.findall(number, " ".join(quotable)))
    start, end = README.index("## The answer so far"), README.index("## Two commands")
    for text in (README[start:end], FINDINGS):
        found = set(re.findall(number, text))
        assert found <= known, found - known


def test_the_short_answer_has_the_ranges_of_the_tables_below() -> None:
    def range_of(lines: list[str]) -> str:
        leads = [float(lead) for lead in re.findall(r"(\+[\d.]+)(?=,| %)", " ".join(lines))]
        return f"{min(leads):+.1f} to {max(leads):+.1f} %"

    rows = {line.split(" | ")[0]: line for line in README.splitlines() if line.startswith("| ")}
    large, small = rows["| H100 or H200, 8B or 14B"], rows["| H100 or H200, 1B to 4B"]
    assert range_of([rows["| 8B"], rows["| Qwen3-14B"]]) in large
    assert (
        range_of([rows[name] for name in ("| 1B", "| 1B, untied head", "| 3B, Qwen3-4B")]) in small
    )
    theirs = [line for line in FINDINGS.splitlines() if re.match(r"\| 8B, .*\| torchtitan", line)]
    own = [line.split("|")[6] for line in theirs]
    assert len(own) > 2 and f"torchtitan itself gains {range_of(own)}" in large


def test_verdicts_on_claims_are_counted_as_the_ledger_does() -> None:
    ledger = judge(committed_report())
    counts = tally(ledger).set_index("verdict")["all"]
    by_word = {str(badge).split(" ", 1)[1]: number for badge, number in counts.items()}
    assert sum(by_word.values()) == 49
    said = (
        "the 49 claims of three documents ([document A](docs/sources.md), B and C) from the "
        "records: {reproduced} are reproduced, {partly} partly, {contradicted} contradicted, "
        "{artefact} has another cause, and {not testable here} cannot be tested here"
    )
    assert said.format(**by_word) in " ".join(README.split())
    assert not by_word.get("undecided")


def test_what_is_decided_on_new_text_is_at_low_learning_rates() -> None:
    assert_by_rate(committed_report())


@pytest.mark.parametrize("study", ["quick", "document-a", "instruments", "attribution"])
def test_quoted_times_fit_the_records(study: str, runs: pd.DataFrame) -> None:
    chosen = runs[runs["study"] == study]
    first = datetime.fromisoformat(chosen["started_at"].min())
    last = datetime.fromisoformat(chosen["ended_at"].max())
    (row,) = re.findall(rf"STUDY={study}` +\| +(\d+) \| +(\d+) s, measured", FINDINGS)
    assert int(row[0]) == len(chosen) == len(load_study(study).runs)
    assert 0 <= int(row[1]) - (last - first).total_seconds() <= OVERHEAD_S


@pytest.mark.parametrize(
    ("machine", "study", "gpus"),
    [("h100x1", "machine-2", "1 × H100"), ("h200x2", "machine", "2 × H200")],
)
def test_quoted_minutes_of_the_default_study_fit_the_records(
    machine: str, study: str, gpus: str
) -> None:
    chosen = runs_frame(run for run in stored(machine) if run.run_dir.parent.name == study)
    ends = (chosen["started_at"].min(), chosen["ended_at"].max())
    first, last = map(datetime.fromisoformat, ends)
    (row,) = re.findall(rf"{gpus} \| `make reproduce` .*\| (\d+) \| (\d+) min, measured", FINDINGS)
    assert int(row[0]) == len(chosen)
    assert math.ceil((last - first).total_seconds() / 60) == int(row[1])


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
