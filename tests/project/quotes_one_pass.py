"""What the README and docs/results.md may say of the tuned path that updates in one pass."""

from collections.abc import Mapping

import pandas as pd

from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import comparisons
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import (
    FAST_ACCUMULATION,
    FP8_HEAD,
    GRAPH,
    IN_ONE_PASS,
    SWIGLU_KERNELS,
)
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import switch_table
from fp8study.analysis.stats import MIN_PAIRS_FOR_INTERVAL
from fp8study.report import words
from fp8study.report.page import report_of
from tests.checkout import committed_runs
from tests.project.quotes import one, per_cent, stored

MACHINE = "h200x1"
PRECISIONS = ("bf16", "fp8_tensorwise")
#: Model and batch, in the order in which they are told.
SETTINGS = [("llama-3.1-8b", 1), ("llama-3.2-3b", 1), ("llama-3.2-3b", 4), ("llama-3.2-1b", 1),
            ("llama-3.2-1b", 4)]  # fmt: skip


def one_pass_texts() -> list[str]:
    """What is said of its speed, of two blocks in as many sessions, and of losses before it."""
    runs = shorten_arms(runs_frame(stored(MACHINE)))
    gains = switch_table(runs[runs["study"] == "tuned-form"])
    batches = gains["setting_plain"].str.extract(r"batch (\d+)", expand=False).astype(int)
    assert set(gains["num_blocks"]) == {2}
    gained = gains.assign(batch=batches).set_index(["model", "batch", "precision"])["gain_pct"]
    host = one(switch_table(runs), study="small-form")
    assert host["num_blocks"] == 3
    both = [[per_cent(gained[(*at, name)]) for name in ("bf16", "fp8_tensorwise")]
            for at in SETTINGS]  # fmt: skip
    big, three, three_4, small, small_4 = (f"{bf16} and {fp8}" for bf16, fp8 in both)
    leads = leads_table(runs)
    leads = leads[leads["studies"].isin(["tuned-form", "small-form, tuned-form"])]
    assert sorted(leads["num_pairs"]) == [*[2] * 9, 5]
    todays = leads["setting"].str.endswith(IN_ONE_PASS)
    now, then = (_leads(leads[form]) for form in (todays, ~todays))
    eight, before = (one(leads[form], model="llama-3.1-8b") for form in (todays, ~todays))
    return [
        f"8B at batch 1 {big}, 3B at batch 1 {three}, at 4 {three_4}, 1B at batch 1 {small}, "
        f"at 4 {small_4}",
        f"in a third session it gained {per_cent(host['gain_pct'])} (95 % CI "
        f"{per_cent(host['gain_low_95']).removesuffix(' %')} to "
        f"{per_cent(host['gain_high_95']).removesuffix(' %')}",
        f"at batch 1, {now['llama-3.2-3b', 4]}ᵘ at 4 |",
        f"FP8 then leads by {_listed(now)} instead of {_listed(then)}",
        f"Peak of the 8B in FP8 {eight['memory_peak_gib']:.1f} GiB instead of "
        f"{before['memory_peak_gib']:.1f}",
        *_shards_texts(),
        *_kernels_texts(),
        *once_texts(),
    ]


def _shards_texts() -> list[str]:
    """What is said of shards updated in one pass, of two blocks on as many machines."""
    runs = shorten_arms(runs_frame(stored("h200x2")))
    runs = runs[runs["study"] == "fsdp-form"]
    gains, leads = switch_table(runs), leads_table(runs)
    assert set(gains["num_sessions"]) == set(leads["num_sessions"]) == {2}
    eight = gains[gains["model"] == "llama-3.1-8b"].set_index(["precision", "setting"])
    gained = eight["gain_pct"].map(per_cent)
    small = one(gains, model="llama-3.2-1b-untied")
    form = leads["setting"].str.endswith(IN_ONE_PASS)
    now, then = (one(leads[which], model="llama-3.1-8b") for which in (form, ~form))
    behind = one(leads, model="llama-3.2-1b-untied")
    fp8, once = "fp8_tensorwise", "weights cast each update, one pass AdamW"
    return [
        f"by {gained['bf16', 'one pass AdamW']} in BF16 and {gained[fp8, 'one pass AdamW']} in "
        f"FP8, which gains {gained[fp8, once]} where its shards are cast once an update, too",
        f"FP8 then leads by {per_cent(now['lead_pct'])} instead of {per_cent(then['lead_pct'])}, "
        f"at {now['memory_peak_gib']:.1f} GiB instead of {then['memory_peak_gib']:.1f}",
        f"The 1B at batch 1 changes by {per_cent(small['gain_pct'])} in FP8 with both, and is at "
        f"{per_cent(behind['lead_pct'])} with torch's AdamW and BF16 all-gather",
    ]


def _kernels_texts() -> list[str]:
    """What is said of SwiGLU's kernels, and of collectives, of blocks of one session."""
    runs = shorten_arms(runs_frame(stored("h200x2")))
    leads, gains = leads_table(runs[runs["study"] == "swiglu-form"]), switch_table(runs)
    ours = leads[leads["arm"].str.endswith(SWIGLU_KERNELS)].set_index(["model", "num_gpus"])
    assert set(ours["num_pairs"]) == {2} and set(ours["num_sessions"]) == {1}
    settings = [("llama-3.1-8b", 1), ("llama-3.1-8b", 2), ("llama-3.2-1b-untied", 1)]
    table = gains[gains["study"] == "swiglu-form"].set_index(["model", "num_gpus"])
    assert set(table["setting"]) == {"SwiGLU by kernels"}
    of = [per_cent(table.loc[at, "gain_pct"]) for at in settings]
    spans = [
        f"{per_cent(table.loc[at, 'gain_low_95'])} to {per_cent(table.loc[at, 'gain_high_95'])}"
        for at in settings
    ]
    before = leads[leads["arm"].eq("FP8 tensorwise")]
    peaks = ours["memory_peak_gib"] - before.set_index(["model", "num_gpus"])["memory_peak_gib"]
    change = [f"{peaks[at]:+.1f}".replace("-", "−") for at in settings]
    now = [per_cent(ours.loc[at, "lead_pct"]) for at in settings]
    sent = gains[gains["study"] == "comm-form"].set_index(["setting", "precision"])["gain_pct"]
    either = [
        " in BF16 and ".join(per_cent(sent[words, name]) for name in ("bf16", "fp8_tensorwise"))
        for words in ("gradients by all to all", "8 NCCL CTAs, 8 SMs spared")
    ]
    return [
        f"rise by {of[0]} (8B at batch 1), {of[1]} (8B at batch 2 on two GPUs) and {of[2]} (1B at",
        "95 % CIs " + ", ".join(spans[:2]).replace(" %", "") + f" and {spans[2]}".replace(" %", ""),
        f"FP8 then leads by {now[0]}, {now[1]} and {now[2]}.",
        f"The peak changes by {change[0]}, {change[1]} and {change[2]} GiB",
        f"an 8B's tokens/s at batch 2 by {either[0]} in FP8;",
        "with 8 blocks of threads for it, by " + either[1].replace(" in BF16", ""),
    ]


def once_texts() -> list[str]:
    """What is said of training losses on text seen once, on all machines."""
    report = report_of(committed_runs())
    gaps = comparisons(report.loss_gaps[~report.loss_gaps["stale"].astype(bool)])
    once = gaps[(gaps["device"] == "cuda") & (gaps["epochs"] <= 1)]
    verdicts = once["verdict"].value_counts()
    assert {*verdicts.index} == {"equivalent", "undecided"}
    equal = once[once["verdict"] == "equivalent"]
    assert equal["arm"].str.contains("schedule").sum() == 2
    of_big = equal[~equal["model"].str.startswith("llama-3.2-1b")]
    assert equal["setting"].str.contains(GRAPH).sum() == 2
    assert [*of_big["model"]] == 5 * ["llama-3.1-8b"]
    assert of_big["arm"].str.contains(FAST_ACCUMULATION).sum() == 1
    assert of_big["arm"].str.contains(FP8_HEAD).sum() == 1
    runs = report.runs[report.runs["arm_key"].isin(equal["arm_key"])]
    of_small = runs["model"].str.startswith("llama-3.2-1b")
    small, big = runs[of_small], runs[~of_small]
    few = once[once["verdict"] == "undecided"]["num_pairs"] < MIN_PAIRS_FOR_INTERVAL
    return [
        f"equivalent in {len(equal)} comparisons, undecided in {verdicts['undecided']}, worse in "
        f"none.** Of the undecided {few.sum()} have one or two pairs",
        f"the 8B at {_rate(big)} in five and {len(equal) - 5} of a 1B, at learning rates of at "
        f"most {_rate(small)} in at most {small['num_steps'].max()} steps",
    ]


def _rate(runs: pd.DataFrame) -> str:
    return words.rate(runs["learning_rate"].max()).replace("\u2011", "-")


def _leads(leads: pd.DataFrame) -> Mapping[tuple[str, int], str]:
    found = leads.set_index(["model", "micro_batch_size"])["lead_pct"]
    return {at: per_cent(found[at]) for at in SETTINGS}


def _listed(leads: Mapping[tuple[str, int], str]) -> str:
    *first, last = leads.values()
    return f"{', '.join(first)} and {last}"
