"""What the README and docs/results.md may say of the tuned path that updates in one pass."""

from collections import Counter

import pandas as pd

from fp8study.analysis.losses import comparisons
from fp8study.analysis.runs.naming import (
    FAST_ACCUMULATION,
    FP8_HEAD,
    GRAPH,
    IN_ONE_PASS,
)
from fp8study.analysis.runs.pairing import goes_on
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL
from fp8study.report import words
from tests.checkout import committed_report
from tests.project.quotes import leads_of, one, per_cent

MACHINE = "h200x1"
#: Model and batch, in the order in which they are told.
SETTINGS = [("llama-3.1-8b", 1), ("llama-3.2-3b", 1), ("llama-3.2-3b", 4), ("llama-3.2-1b", 1),
            ("llama-3.2-1b", 4)]  # fmt: skip


def one_pass_texts() -> list[str]:
    """What is said of the lead of a 3B there, and of losses."""
    leads = leads_of("h200x1")
    leads = leads[leads["studies"].eq("tuned-form") & leads["setting"].str.endswith(IN_ONE_PASS)]
    large = one(leads, model="llama-3.2-3b", micro_batch_size=4)
    assert large["num_pairs"] == 2
    return [f"at batch 1, {per_cent(large['lead_pct'])}ᵘᵉ at 4, ", *once_texts()]


def once_texts() -> list[str]:
    """What is said of training losses on text seen once, on all machines."""
    report = committed_report()
    gaps = comparisons(report.loss_gaps[~report.loss_gaps["stale"].astype(bool)])
    once = gaps[(gaps["device"] == "cuda") & (gaps["epochs"] <= 1)]
    once = once[~goes_on(once)]
    verdicts = once["verdict"].value_counts()
    assert {*verdicts.index} == {"equivalent", "undecided"}
    equal = once[once["verdict"] == "equivalent"]
    of_big = equal[~equal["model"].str.startswith("llama-3.2-1b")]
    assert equal["setting"].str.contains(GRAPH).sum() == 2
    assert Counter(of_big["model"]) == {"llama-3.1-8b": 5, "llama-3.2-3b": 3}
    assert of_big["arm"].str.contains(FAST_ACCUMULATION).sum() == 1
    assert of_big["arm"].str.contains(FP8_HEAD).sum() == 1
    runs = report.runs[report.runs["arm_key"].isin(equal["arm_key"])]
    big = runs[runs["model"] == "llama-3.1-8b"]
    few = once[once["verdict"] == "undecided"]["num_pairs"] < MIN_PAIRS_FOR_INTERVAL
    return [
        f"equivalent in {len(equal)} comparisons, undecided in {verdicts['undecided']} "
        f"({few.sum()} of one or two pairs), worse in none**; in "
        f"{(equal['gap_pct_low_95'] > 0).sum()} of the {len(equal)} it is surely higher",
        f"an 8B's from random weights see {big['num_tokens_seen'].max() / 1e6:.1f} million tokens",
        f"in {len(equal)} comparisons: five of the 8B at {_rate(big)} (the same six seeds), three "
        f"of a 3B and {len(equal) - 8} of a 1B, at rates up to {_rate(runs)}",
    ]


def _rate(runs: pd.DataFrame) -> str:
    return words.rate(runs["learning_rate"].max()).replace("\u2011", "-")
