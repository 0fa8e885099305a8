"""Claims about document A's failure on one GPU: that it happens, why, and what ends it."""

from __future__ import annotations

import pandas as pd
from scipy.stats import binom

from fp8study.analysis.claims.finding import Claim, Finding, Verdict, judges
from fp8study.analysis.claims.rules import by_parts, count, ends, mean_gap, spread, with_pairs
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.noise import tables as noise

_STALE = "; with a stale one it ends {} nats above"


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
        return claim.open()
    broken = stale[stale["gap_pct_low_95"] > claim.published["gap_pct"]]
    broken = broken.sort_values("num_pairs").tail(1)
    if (healthy["gap_pct_low_95"] > claim.published["gap_pct"]).any():
        verdict = Verdict.REPRODUCED
    elif (healthy["verdict"] != "equivalent").any():
        verdict = Verdict.UNDECIDED
    else:
        verdict = Verdict.ARTEFACT if len(broken) else Verdict.CONTRADICTED
    shown = broken if verdict is Verdict.ARTEFACT else healthy
    return claim.found(
        verdict, mean_gap(shown), healthy, stale, healthy=ends(healthy["gap_pct"]),
        settings=count(len(healthy), "setting"),
        stale=_STALE.format(ends(broken["gap"])) if len(broken) else "",
    )  # fmt: skip


@judges("A13")
def noise_meets_precision(tables: Tables, claim: Claim) -> Finding:
    gaps = with_pairs(tables.effective_batches)
    meet = noise.over_runs(noise.crossing_table, tables.stored)
    low, high = claim.published["batches"]
    alone, more = gaps[gaps["effective_batch"] <= low], gaps[gaps["effective_batch"] >= high]
    if len(meet):
        against = (meet["reference"] == "bf16") & (meet["scope"] == "all")
        meet = meet[against & (meet["precision"] == "fp8_tensorwise")]
    if alone.empty or more.empty or meet.empty:
        return claim.open()
    turns = (alone["verdict"] != "equivalent").any() and (more["verdict"] == "equivalent").all()
    batch = meet["crossing_batch"]
    return claim.found(
        by_parts(turns, batch.between(low, high).any()), spread(batch), gaps, meet,
        alone=ends(alone["gap_pct"]), more=ends(more["gap_pct"]),
    )  # fmt: skip


@judges("A14")
def larger_batch_mends(tables: Tables, claim: Claim) -> Finding:
    """Ask whether what fails at batch 1 works at 4, with either binding of the optimizer."""
    least = claim.published["batch"]

    def works(gaps: pd.DataFrame) -> str:
        if gaps.empty:
            return "was not run"
        small = gaps["gap_pct_low_95"] <= claim.published["gap_pct"]
        return "works" if small.all() else "fails"

    gaps = _on_one_gpu(tables.gaps), _on_one_gpu(tables.stale_gaps)
    healthy, stale = ((works(g[g["batch"] == 1]), works(g[g["batch"] >= least])) for g in gaps)
    if "was not run" in healthy:
        return claim.open()
    verdict = Verdict.ARTEFACT
    if ("fails", "works") in (healthy, stale):
        verdict = Verdict.REPRODUCED
    elif "fails" in (healthy[1], stale[1]):
        verdict = Verdict.CONTRADICTED
    chosen = gaps[0][gaps[0]["batch"] >= least]
    return claim.found(verdict, mean_gap(chosen), *gaps, healthy=healthy, stale=stale)


@judges("A15")
def variance_falls(tables: Tables, claim: Claim) -> Finding:
    """Test the runs together: each lies outside its own band of 95 % once in twenty by chance."""
    laws = noise.over_runs(noise.inverse_law_table, tables.stored)
    if laws.empty:
        return claim.open()
    laws = laws[laws["scope"] == "all"]
    ratio = laws["ratio_to_inverse_law"]
    inside = ratio.between(laws["ratio_to_inverse_law_low"], laws["ratio_to_inverse_law_high"])
    chance = float(binom.sf((~inside).sum() - 1, len(laws), 0.05))
    verdict = by_parts(abs(ratio.median() - 1) <= claim.published["within"], chance > 0.05)
    return claim.found(
        verdict, spread(ratio), laws, largest=laws["largest_batch"].max(),
        inside=inside.sum(), runs=len(laws), chance=chance,
    )  # fmt: skip
