"""What the README and docs/results.md may say of today's tuned path, and its last switches."""

import pandas as pd

from fp8study.analysis.leads import leads_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import (
    COPY_ENGINES,
    FAST_ACCUMULATION,
    IN_ONE_PASS,
    NORM_AS_SUMMED,
    NORM_BY_KERNEL,
    SWIGLU_KERNELS,
)
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import switch_table
from tests.project.quotes import ends, one, per_cent, stored

PRECISIONS = ("bf16", "fp8_tensorwise")
FP8 = f"FP8 tensorwise, {SWIGLU_KERNELS}"


def today_texts() -> list[str]:
    """What is said of an 8B on one H200 and on two, and of the switches that came last."""
    runs = shorten_arms(runs_frame(stored("h200x2")))
    gains, leads = switch_table(runs), leads_table(runs)
    return [
        *_lead_texts(leads), *_copies_texts(runs, gains, leads), *_norm_texts(gains),
        *_apart_texts(gains), *_accumulation_texts(gains, leads), *_compiler_texts(runs, gains),
        *_launch_texts(runs, gains, leads),
    ]  # fmt: skip


def _of_8b(leads: pd.DataFrame, form: str, num_gpus: int, arm: str = FP8) -> pd.Series:
    """The lead of the 8B in a form of the tuned path, which its setting ends with."""
    there = leads[leads["setting"].str.endswith(form)]
    return one(there, model="llama-3.1-8b", num_gpus=num_gpus, arm=arm)


def _lead_texts(leads: pd.DataFrame) -> list[str]:
    alone, two = _of_8b(leads, NORM_BY_KERNEL, 1), _of_8b(leads, NORM_AS_SUMMED, 2)
    before = _of_8b(leads, IN_ONE_PASS, 1)
    assert (alone["num_pairs"], alone["num_sessions"]) == (6, 2)
    assert (two["num_pairs"], two["num_sessions"]) == (4, 3)
    assert (before["num_pairs"], before["num_sessions"]) == (6, 3)
    less = [
        [f"{-lead[f'{what}_change_pct']:.1f} %" for what in ("memory", "energy")]
        for lead in (alone, two)
    ]
    return [
        f"leads by {per_cent(alone['lead_pct'])} (95 % CI {ends(alone)}) on the tuned path, with "
        f"{less[0][0]} less memory and {less[0][1]} less energy",
        f"(six pairs of two sessions; six of three, with torch's norm, lead by "
        f"{per_cent(before['lead_pct'])})",
        f"on 2 GPUs at batch 2 by {per_cent(two['lead_pct'])} (95 % CI {ends(two)}; four pairs of "
        f"three), with {less[1][0]} and {less[1][1]} less",
    ]


def _gained(gains: pd.DataFrame, study: str, words: str) -> tuple[list[str], list[int]]:
    """What both precisions gained, with intervals, and the blocks of each."""
    rows = gains[(gains["study"] == study) & (gains["setting"] == words)].set_index("precision")
    spans = [
        " to ".join(per_cent(row[f"gain_{end}_95"]).removesuffix(" %") for end in ("low", "high"))
        for row in (rows.loc[name] for name in PRECISIONS)
    ]
    gained = [per_cent(rows.loc[name, "gain_pct"]) for name in PRECISIONS]
    told = [f"{gain} (95 % CI {span})" for gain, span in zip(gained, spans, strict=True)]
    return told, [int(rows.loc[name, "num_blocks"]) for name in PRECISIONS]


def _norm_texts(gains: pd.DataFrame) -> list[str]:
    """What is said of kernels that find the norm of the gradients."""
    two, blocks_of_two = _gained(gains, "norm-form", NORM_AS_SUMMED)
    alone, blocks = _gained(gains, "one-gpu-form", NORM_BY_KERNEL)
    assert (blocks_of_two, blocks) == ([3, 2], [2, 2])
    return [
        f"An 8B's tokens/s, clipped, rise by {alone[0]} in BF16 and {alone[1]} in FP8 at batch 1 "
        f"on one H200, and by {two[0]} and {two[1]} at batch 2 on two",
    ]


def _apart_texts(gains: pd.DataFrame) -> list[str]:
    """What is said of transposes by kernels of their own, and of gradients copied on the side."""
    of = gains.set_index(["study", "precision", "setting"])["gain_pct"].map(per_cent)
    later, apart = "gradients copied by reduce stream", "separate transposes"
    one_gpu = one(gains, study="one-gpu-form", setting=apart)
    more = one_gpu["memory_peak_gib"] * (1 - 1 / (1 + one_gpu["memory_change_pct"] / 100))
    bf16, fp8 = (of["two-gpu-form", name, later] for name in PRECISIONS)
    alone, both = (
        of["two-gpu-form", "fp8_tensorwise", words] for words in (apart, f"{later}, {apart}")
    )
    two = gains[gains["study"] == "two-gpu-form"]
    assert set(two["num_blocks"]) == {1}
    return [
        f"with `transposes=separate` by {per_cent(one_gpu['gain_pct'])} on one H200 (two blocks, "
        f"one session) for {more:.1f} GiB more",
        f"by {bf16} in BF16 and {fp8} in FP8 with `gradient_copy=reduce_stream`, by {alone} in FP8 "
        f"with `transposes=separate`, by {both} with both",
    ]


def _by_block(of: pd.DataFrame, than: pd.DataFrame) -> float:
    """By how much runs are faster than others, %: the mean over both blocks of a study."""
    rates, others = (
        rows.set_index("repeat")["tokens_per_second_per_gpu"].sort_index() for rows in (of, than)
    )
    assert [*rates.index] == [*others.index] == [0, 1]
    return float(100 * (rates / others - 1).mean())


def _compiler_texts(runs: pd.DataFrame, gains: pd.DataFrame) -> list[str]:
    """What is said of FP8 matrices that are written once, and of who launches our kernels."""
    eight = gains[(gains["study"] == "compiler-form") & (gains["model"] == "llama-3.1-8b")]
    assert set(eight["num_blocks"]) == {2} and set(eight["num_sessions"]) == {1}
    of = eight.set_index(["num_gpus", "setting"])["gain_pct"].map(per_cent)
    once, launched = "FP8 written once", "own kernels launched by compiler"
    apart = f"separate transposes, {launched}, {once}"
    beside = f"gradients copied by reduce stream, {apart}"
    here = runs[(runs["study"] == "compiler-form") & (runs["model"] == "llama-3.1-8b")]
    leads = [
        per_cent(
            _by_block(
                there[there["setting"].str.contains(apart)], there[there["precision"] == "bf16"]
            )
        )
        for _, there in here.groupby("num_gpus")
    ]
    return [
        f"change by {of[1, once]} on one H200 and {of[2, once]} on two",
        f"`kernel_launch=by_compiler` besides by {of[1, f'{launched}, {once}']} and "
        f"{of[2, f'{launched}, {once}']}",
        f"too, by {of[1, apart]} and {of[2, beside]}: FP8 then leads by {leads[0]} and {leads[1]}",
    ]


def _launch_texts(runs: pd.DataFrame, gains: pd.DataFrame, leads: pd.DataFrame) -> list[str]:
    """What is said of one launch for the norm of all gradients."""
    here, by_one = runs[runs["study"] == "one-launch"], "gradients' norm by one launch"
    most = max(
        _by_block(*(rows[rows["setting"].str.endswith(norm)] for norm in (by_one, NORM_BY_KERNEL)))
        for _, rows in here[here["model"] == "llama-3.1-8b"].groupby("precision")
    )
    small = gains[(gains["study"] == "one-launch") & (gains["precision"] == "bf16")]
    gained = small.set_index("setting")["gain_pct"].map(per_cent)
    moving = here[(here["model"] == "llama-3.2-1b-untied") & (here["precision"] != "bf16")]
    assert moving["unsteady"].all()
    by_each = leads[leads["setting"].str.endswith(NORM_BY_KERNEL)]
    behind = one(by_each, model="llama-3.2-1b-untied", num_gpus=1, arm=FP8)
    assert (behind["num_pairs"], behind["num_sessions"]) == (3, 1)
    return [
        f"changes an 8B's tokens/s by {most:.1f} % at most; a 1B at batch 1 in BF16 gains "
        f"{gained[NORM_BY_KERNEL]} by a launch for each, "
        f"{gained[by_one]} by one for all",
        f"by a launch for each they are at {per_cent(behind['lead_pct'])} (95 % CI "
        f"{ends(behind)}; three pairs of one session)",
    ]


def _accumulation_texts(gains: pd.DataFrame, leads: pd.DataFrame) -> list[str]:
    """What is said of GEMMs that all add up with fewer bits."""
    fast = one(gains, study="accumulation-form", setting=FAST_ACCUMULATION)
    assert fast["num_blocks"] == 2
    span = " to ".join(
        per_cent(fast[f"gain_{end}_95"]).removesuffix(" %") for end in ("low", "high")
    )
    lead = _of_8b(leads, IN_ONE_PASS, 1, f"{FP8}, {FAST_ACCUMULATION}")
    usual = _of_8b(leads, IN_ONE_PASS, 1)
    return [
        f"by {per_cent(fast['gain_pct'])} (95 % CI {span}), and lead BF16 by "
        f"{per_cent(lead['lead_pct'])} (95 % CI {ends(lead)}) instead of "
        f"{per_cent(usual['lead_pct'])}",
    ]


def _copies_texts(runs: pd.DataFrame, gains: pd.DataFrame, leads: pd.DataFrame) -> list[str]:
    """What is said of copy engines."""
    of_study = gains.set_index(["study", "model", "setting", "precision"])["gain_pct"].map(per_cent)
    eight = gains[gains["study"] == "copy-form"].set_index(["setting", "precision"])
    copies = [eight.loc[(COPY_ENGINES, name)] for name in PRECISIONS]
    assert {row["num_sessions"] for row in copies} == {2}
    gained, fewer = (
        [of_study["copy-form", "llama-3.1-8b", words, name] for name in PRECISIONS]
        for words in (COPY_ENGINES, "8 NCCL CTAs")
    )
    spans = [
        f"{per_cent(row['gain_low_95'])} to {per_cent(row['gain_high_95'])}".replace(" %", "")
        for row in copies
    ]
    small = {
        (model, name): of_study["copy-small", model, COPY_ENGINES, name]
        for model in ("llama-3.2-1b-untied", "llama-3.2-3b")
        for name in PRECISIONS
    }
    now, then = (_of_8b(leads, form, 2) for form in (COPY_ENGINES, IN_ONE_PASS))
    unsettled = runs[(runs["study"] == "copy-small") & runs["unsteady"]]
    settled = runs[(runs["study"] == "copy-small") & ~runs["unsteady"]]
    assert len(unsettled) == 10 and set(settled["model"] + settled["arm"]) == {"llama-3.2-3bBF16"}
    blocks = gains[gains["study"] == "copy-small"].set_index("model")["num_blocks"]
    assert {*blocks["llama-3.2-1b-untied"]} == {2} and {*blocks["llama-3.2-3b"]} == {1}
    more = now["memory_peak_gib"] - then["memory_peak_gib"]
    one_b, three_b = ([small[model, name] for name in PRECISIONS]
                      for model in dict.fromkeys(m for m, _ in small))  # fmt: skip
    return [
        f"rise by {gained[0]} in BF16 and {gained[1]} in FP8 (95 % CIs {spans[0]} and {spans[1]})",
        f"FP8 then leads by {per_cent(now['lead_pct'])} (95 % CI {ends(now)}) instead of "
        f"{per_cent(then['lead_pct'])}. Each GPU needs {more:.1f} GiB more",
        f"NCCL in 8 blocks of threads changes it by {fewer[0]} and {fewer[1]},",
        f"A 1B at batch 1 changes by {one_b[0]} in BF16 and {one_b[1]} in FP8 in two blocks, "
        f"a 3B by {three_b[0]} and {three_b[1]} in one",
    ]
