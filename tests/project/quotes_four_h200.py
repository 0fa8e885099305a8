"""What the README and docs/results.md may say of four H200s: scaling, a 14B, kernels, sums."""

import pandas as pd

from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.naming import FAST_ACCUMULATION, FP8_HEAD
from tests.checkout import ROOT
from tests.project.quotes import ends, gap_ends, leads_of, one, per_cent, runs_of

RATES = {"BF16": "tokens_per_second_per_gpu_bf16", "FP8": "tokens_per_second_per_gpu"}
LARGE, SMALL = "llama-3.1-8b", "llama-3.2-1b"
UNTIED = "llama-3.2-1b-untied"


def four_h200_texts() -> list[str]:
    """What is said of the study scaling, and of the default study on four GPUs."""
    runs, leads = runs_of("h200x4"), leads_of("h200x4")
    leads = leads[leads["gradient_accumulation_steps"].eq(1)]
    scaling = leads_table(runs[runs["study"] == "scaling"])
    assert len(scaling) == 11
    assert set(scaling["num_pairs"]) == {2} and set(scaling["max_grad_norm"]) == {1}
    return [
        *_scaling_texts(scaling), *_machine_texts(leads), *_eight_b_loss_texts(runs),
        *_sharded_loss_texts(runs), *_head_texts(runs, leads), *_head_reach_texts(runs, leads),
        *_head_loss_texts(runs),
    ]  # fmt: skip


def _head_texts(runs: pd.DataFrame, leads: pd.DataFrame) -> list[str]:
    """What is said of a loss head in FP8, as the path has it: both hosts, and both blocks."""
    places = (1, LARGE, 1), (2, LARGE, 2), (1, UNTIED, 8)
    names = ["num_gpus", "model", "micro_batch_size"]
    own = leads[leads["arm"].str.contains(FP8_HEAD)].set_index(names)
    here = pd.concat([runs, runs_of("h200x1")])
    here = here[(here["study"] == "head-form") & (here["precision"] != "bf16")]
    assert len(here) == 12
    rates = here.assign(has_head=here["arm"].str.contains(FP8_HEAD)).pivot(
        index=[*names, "repeat"], columns="has_head", values="tokens_per_second_per_gpu"
    )
    gains = 100 * (rates[True] / rates[False] - 1)
    assert (gains.groupby(names).mean() >= 1).all()  # the study's rule
    more = [per_cent(gains.loc[place].mean()) for place in places]
    told = [per_cent(own.loc[place, "lead_pct"]) for place in places]
    spans = [ends(own.loc[place]) for place in places]
    less = [
        [f"{-own.loc[place, f'{what}_change_pct']:.1f} %" for what in ("memory", "energy")]
        for place in places[:2]
    ]
    peak = [f"{-own.loc[place, 'memory_change_pct']:.1f} %" for place in places]
    return [
        f"leads by {told[0]} (95 % CI {spans[0]}), with {less[0][0]} less memory "
        f"and {less[0][1]} less energy per token",
        f"| 8B | **{told[0]} at batch 1: FP8** |",
        f", {told[1]} at batch 2, ",
        f"gives {more[0]} (8B, batch 1, one GPU), {more[1]} (8B, batch 2, two) and {more[2]} "
        f"(1B, batch 8, one). FP8 then leads by {told[0]} (95 % CI {spans[0]}), {told[1]} "
        f"({spans[1]}) and {told[2]} ({spans[2]}), with {peak[0]}, {peak[1]} and {peak[2]} less",
        f"{told[2]} at 8 |",
    ]


def _head_reach_texts(runs: pd.DataFrame, leads: pd.DataFrame) -> list[str]:
    """What is said of that head in graphs, as the embedding and on four GPUs, of both blocks."""
    own = runs[runs["study"] == "head-reach"]
    names = ["num_gpus", "model"]
    own = own.assign(has_head=own["arm"].str.contains(FP8_HEAD))
    rates = own[own["precision"] != "bf16"].pivot(
        index=[*names, "repeat"], columns="has_head", values="tokens_per_second_per_gpu"
    )
    gains = 100 * (rates[True] / rates[False] - 1)
    assert (gains.groupby(names).size() == 2).all()
    assert (gains.groupby(names).mean() >= 1).all()  # the study's rule
    has_head = leads["arm"].str.contains(FP8_HEAD) & leads["studies"].str.contains("head-reach")
    told = leads[has_head].set_index(names)
    four, two, alone, tied = (4, LARGE), (2, UNTIED), (1, UNTIED), (1, SMALL)
    pairs = told["num_pairs"].to_dict()  # of two GPUs graph-pool has two more
    assert (pairs.pop(tied), pairs.pop(two), {*pairs.values()}) == (0, 4, {2})
    gained = [per_cent(gains.loc[place].mean()) for place in (two, alone, tied, four)]
    other = per_cent(told.loc[alone, "lead_pct"])
    before = one(
        leads[leads["arm"].eq("FP8 tensorwise, SwiGLU kernels")], model=LARGE, num_gpus=4,
        micro_batch_size=1, max_grad_norm=1.0,
    )  # fmt: skip
    ends_of_four = [per_cent(told.loc[four, f"lead_{end}_pct"]) for end in ("low", "high")]
    return [
        f"1B's FP8 gains {gained[0]} by it at batch 1 on two GPUs and {gained[1]} at batch 2 on "
        f"one, each step a CUDA graph, an 8B's {gained[3]} at batch 1 on four",
        f"FP8 leads by {ends_of_four[0]} on one host and {ends_of_four[1]} on another",
        f"{per_cent(before['lead_pct'])}ᵉ at batch 1; H100",
        f"| 1B, untied head | {other} at batch 2,",
    ]


def _head_loss_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of an 8B's loss with its loss head in FP8, and of the time to one loss."""
    own = runs[runs["study"] == "head-loss"]
    told = []
    for loss in ("loss_last20_mean", "validation_loss"):
        gaps = loss_gap_table(own, loss=loss)
        assert set(gaps["num_pairs"]) == {6} and set(gaps["verdict"]) == {"equivalent"}
        gap = one(gaps.assign(has_head=gaps["arm"].str.contains(FP8_HEAD)), has_head=True)
        told.append((*_gap(gap), _gap(gap, 90)[1]))
    saved = pd.read_csv(ROOT / "results" / "reference" / "h200x4" / "tables" / "equal-time.csv")
    saved = saved[saved["study"] == "head-loss"]
    time = one(saved.assign(has_head=saved["arm"].str.contains(FP8_HEAD)), has_head=True)
    (gap, ci, narrow), (held, held_ci, _) = told
    last = own[own["precision"] != "bf16"].assign(head=own["arm"].str.contains(FP8_HEAD))
    last = last.pivot(index="seed", columns="head", values="loss_last20_mean")
    apart = 100 * (last[True] / last[False] - 1)
    share, low, high = (f"{time[name]:.1f}" for name in ("saved_pct", "low_95", "high_95"))
    return [
        f"{gap} (90 % CI {narrow}), six seeds",
        f"{gap} (95 % CI {ci}; 90 % CI {narrow}), on held-out text {held} ({held_ci})",
        f"Within a seed it ends {per_cent(apart.min(), 2)[:-2]} to {per_cent(apart.max(), 2)} from "
        "FP8 with the head in BF16",
        f"reaches one held-out loss in {share} % less time (95 % CI {low} to {high})",
    ]


def _gap(row: pd.Series, level: int = 95) -> tuple[str, str]:
    """A loss gap, and its interval."""
    return per_cent(row["gap_pct"], 2), gap_ends(row, level)


def _eight_b_loss_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of an 8B's loss with SwiGLU's kernels, and if all GEMMs add up so."""
    own = runs[runs["study"] == "accumulation-loss"]
    told = []
    for loss in ("loss_last20_mean", "validation_loss"):
        gaps = loss_gap_table(own, loss=loss)
        fast = gaps["arm"].str.contains(FAST_ACCUMULATION)
        assert set(gaps["num_pairs"]) == {6} and set(gaps["verdict"]) == {"equivalent"}
        for rows in (gaps[~fast], gaps[fast]):
            told.append(_gap(one(rows)))
    (usual, usual_ci), (fast_, fast_ci), (held, held_ci), (fast_held, fast_held_ci) = told
    return [
        f"{usual} (95 % CI {usual_ci}), on held-out text {held} ({held_ci}); with "
        f"`fast_accumulation=all` {fast_} ({fast_ci}), on held-out text {fast_held} "
        f"({fast_held_ci}); all equivalent",
    ]


def _sharded_loss_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of an 8B's loss on four GPUs."""
    own = runs[(runs["study"] == "check-loss") & (runs["num_gpus"] > 1)]
    assert {*own["model"], *own["num_gpus"], *own["seed"]} == {LARGE, 4, 0, 1, 2, 3}
    told, told_of = [], []
    for loss in ("loss_last20_mean", "validation_loss"):
        gap = one(loss_gap_table(own, loss=loss))
        assert (gap["num_pairs"], gap["verdict"]) == (4, "undecided")
        told.append(_gap(gap))
        last = own.pivot(index="seed", columns="precision", values=loss)
        apart = 100 * (last["fp8_tensorwise"] / last["bf16"] - 1)
        assert (apart > 0).sum() == 3
        told_of.append(f"{per_cent(apart.min(), 2)[:-2]} to {per_cent(apart.max(), 2)}")
    (usual, usual_ci), (held, held_ci) = told
    ended = [f"{of['loss_last20_mean'].mean():.2f}" for of in (
        own[own["precision"] == "bf16"],
        runs[(runs["study"] == "accumulation-loss") & (runs["precision"] == "bf16")],
    )]  # fmt: skip
    return [
        f"{usual} (95 % CI {usual_ci}), on held-out text {held} ({held_ci}): three of four pairs "
        f"lie above BF16; they are at {told_of[0]} and {told_of[1]}",
        f"BF16 ends at {ended[0]} there, at {ended[1]} on one GPU",
        f"{usual} (95 % CI {usual_ci}), four seeds",
    ]


def _kept(rows: pd.DataFrame, precision: str, fewest: int) -> list[str]:
    """What each GPU keeps on 2 and 4 GPUs, or on 4, of what it makes on the fewest, %."""
    rates = rows.set_index("num_gpus")[RATES[precision]]
    return [f"{100 * rates[n] / rates[fewest]:.1f} %" for n in (2, 4) if n > fewest]


def _scaling_texts(scaling: pd.DataFrame) -> list[str]:
    def of(model: str, batch: int) -> tuple[pd.DataFrame, list[str]]:
        rows = scaling[(scaling["model"] == model) & (scaling["micro_batch_size"] == batch)]
        rows = rows.sort_values("num_gpus")
        return rows, [per_cent(lead) for lead in rows["lead_pct"]]

    (wide, wide_leads), (alone, leads) = of(LARGE, 4), of(LARGE, 1)
    (small, small_leads), (late, _) = of(SMALL, 4), of(SMALL, 1)
    assert [list(rows["num_gpus"]) for rows in (wide, alone)] == [[2, 4], [1, 2, 4]]
    kept = {name: _kept(wide, name, 2)[0] for name in RATES}
    bf16, fp8 = (" and ".join(_kept(alone, name, 1)) for name in RATES)
    to_four = [_kept(small, name, 1)[1] for name in RATES]
    return [
        f"makes {kept['BF16']} (BF16) and {kept['FP8']} (FP8) of what one of two makes of an 8B, "
        f"and {to_four[0]} and {to_four[1]} of what one alone makes of a 1B",
        f"by {' and '.join(wide_leads)} (8B, on 2 and 4 GPUs",
        f"{', '.join(small_leads[:2])} and {small_leads[2]} (1B, on 1, 2 and 4)",
        f"| {small_leads[2]} at batch 4 |",
        f"an 8B keeps {bf16} on 2 and 4 GPUs in BF16, {fp8} in FP8",
        f"leads by {', '.join(leads[:2])} and {leads[2]}",
        f"do not scale in FP8 ({_kept(late, 'FP8', 1)[1]} on four)",
    ]


def _machine_texts(leads: pd.DataFrame) -> list[str]:
    own = leads[leads["studies"] == "machine"]
    four = own[own["model"] == "qwen3-14b"]
    fp8, rowwise = (one(four, precision=name) for name in ("fp8_tensorwise", "fp8_rowwise"))
    rates = [f"{fp8[RATES[name]]:,.0f}" for name in ("FP8", "BF16")]
    memory = fp8["memory_peak_gib"], fp8["memory_peak_gib_bf16"]
    return [
        f"{per_cent(fp8['lead_pct'])} at batch 2 ({rates[0]} against {rates[1]} tokens/s a GPU; "
        f"rowwise {per_cent(rowwise['lead_pct'])}), at {memory[0]:.1f} GiB instead of "
        f"{memory[1]:.1f}",
        f"| Qwen3-14B | does not fit | not measured | {per_cent(fp8['lead_pct'])}ᵘ at batch 2 |",
    ]
