"""Claims about document A's failure on one GPU: that it happens, why, and what ends it."""

from __future__ import annotations

import pandas as pd
from scipy.stats import binom

from fp8study.analysis.claims.finding import Claim, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import (
    behind,
    by_parts,
    count,
    ends,
    mean_gap,
    spread,
    with_pairs,
)
from fp8study.analysis.claims.tables import Tables


def _on_one_gpu(gaps: pd.DataFrame) -> pd.DataFrame:
    """Keep tensorwise arms of one GPU with three pairs; add ``batch``, sequences per update."""
    gaps = with_pairs(gaps[(gaps["num_gpus"] == 1) & (gaps["precision"] == "fp8_tensorwise")])
    return gaps.assign(batch=gaps["micro_batch_size"] * gaps["gradient_accumulation_steps"])


@judges("A12")
def fails_alone(tables: Tables, claim: Claim) -> Finding:
    """Hold the run of document A's script against one whose weights are all in the optimizer."""
    stale, healthy = (
        gaps[(gaps["batch"] == 1) & (gaps["master_dtype"] == "bf16")]
        for gaps in map(_on_one_gpu, (tables.stale_gaps, tables.gaps))
    )
    if healthy.empty:
        return undecided("no FP8 run at batch 1 on one GPU has three pairs")
    large, runs = claim.published["gap_pct"], behind(stale, healthy)
    why = (
        f"FP8 with every weight in the optimizer ends {ends(healthy['gap_pct'])} % from BF16 in "
        f"{count(len(healthy), 'setting')}"
    )
    figure = mean_gap("gap of healthy FP8", healthy)
    if (healthy["gap_pct_low_95"] > large).any():
        return Finding(Verdict.REPRODUCED, why, figure, runs)
    if (healthy["verdict"] != "equivalent").any():
        return Finding(Verdict.UNDECIDED, why, figure, runs)
    broken = stale[stale["gap_pct_low_95"] > large].sort_values("num_pairs").tail(1)
    if broken.empty:
        return Finding(Verdict.CONTRADICTED, why, figure, runs)
    why = (
        f"with an optimizer made before the conversion, which misses the converted weights, FP8 "
        f"ends {broken['gap'].iloc[0]:+.2f} nats above BF16; {why}"
    )
    return Finding(Verdict.ARTEFACT, why, mean_gap("gap with a stale optimizer", broken), runs)


@judges("A13")
def noise_meets_precision(tables: Tables, claim: Claim) -> Finding:
    gaps, meet = with_pairs(tables.effective_batches), tables.crossings
    low, high = claim.published["batches"]
    alone, more = gaps[gaps["effective_batch"] <= low], gaps[gaps["effective_batch"] >= high]
    if len(meet):
        against = (meet["reference"] == "bf16") & (meet["scope"] == "all")
        meet = meet[against & (meet["precision"] == "fp8_tensorwise")]
    if alone.empty or more.empty or meet.empty:
        return undecided("the effective batch was not swept, or the two errors were not measured")
    turns = (alone["verdict"] != "equivalent").any() and (more["verdict"] == "equivalent").all()
    near = meet["crossing_batch"].between(low, high).any()
    why = (
        f"the gap is {ends(alone['gap_pct'])} % at an effective batch of 1 and "
        f"{ends(more['gap_pct'])} % above; FP8's error would equal the sampling noise at "
        f"{meet['crossing_batch'].median():.0f} sequences"
    )
    figure = spread("both errors equal at a batch of", meet["crossing_batch"], spec=".0f")
    return Finding(by_parts(turns, near), why, figure, behind(gaps, meet))


@judges("A14")
def larger_batch_mends(tables: Tables, claim: Claim) -> Finding:
    """Ask whether what fails at batch 1 works at 4, with either binding of the optimizer."""
    least, said = claim.published["batch"], {True: "works", False: "fails", None: "was not run"}

    def works(gaps: pd.DataFrame) -> bool | None:
        small = gaps["gap_pct_low_95"] <= claim.published["gap_pct"]
        return bool(small.all()) if len(gaps) else None

    healthy, stale = _on_one_gpu(tables.gaps), _on_one_gpu(tables.stale_gaps)
    chosen = healthy[healthy["batch"] >= least]
    parts = [[works(gaps[gaps["batch"] == 1]), works(gaps[gaps["batch"] >= least])]
             for gaps in (healthy, stale)]  # fmt: skip
    if None in parts[0]:
        return undecided("FP8 was not run at batch 1 and at 4 on one GPU with three pairs")
    why = (
        f"FP8 with a healthy optimizer {said[parts[0][0]]} at batch 1 and {said[parts[0][1]]} from "
        f"{least} on; with a stale one it {said[parts[1][0]]} at 1 and {said[parts[1][1]]} from "
        f"{least} on"
    )
    verdict = Verdict.ARTEFACT
    if [False, True] in parts:
        verdict = Verdict.REPRODUCED
    elif False in (parts[0][1], parts[1][1]):
        verdict = Verdict.CONTRADICTED
    figure = mean_gap(f"gap at batch {least} and more", chosen)
    return Finding(verdict, why, figure, behind(chosen, healthy[healthy["batch"] == 1]))


@judges("A15")
def variance_falls(tables: Tables, claim: Claim) -> Finding:
    """Test the runs together: each lies outside its own band of 95 % once in twenty by chance."""
    if tables.inverse_law.empty:
        return undecided("no run measured the gradients of single sequences")
    laws = tables.inverse_law.query("scope == 'all'")
    ratio = laws["ratio_to_inverse_law"]
    inside = ratio.between(laws["ratio_to_inverse_law_low"], laws["ratio_to_inverse_law_high"])
    chance = float(binom.sf((~inside).sum() - 1, len(laws), 0.05))
    why = (
        f"the variance of means over up to {laws['largest_batch'].max()} sequences, times their "
        f"number, is {ratio.median():.2f} of one sequence's; {inside.sum()} of {len(laws)} runs "
        f"lie where 95 % of random orders do (p = {chance:.2f} for so many outside by chance)"
    )
    verdict = by_parts(abs(ratio.median() - 1) <= claim.published["within"], chance > 0.05)
    figure = spread("variance × number, over one sequence's", ratio, spec=".2f")
    return Finding(verdict, why, figure, behind(laws))
