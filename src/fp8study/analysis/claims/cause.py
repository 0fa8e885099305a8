"""Claims about document A's failure on one GPU: that it happens, why, and what ends it."""

from __future__ import annotations

from scipy import stats as scipy_stats

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import behind, by_parts, count, mean_gap, spread, with_pairs
from fp8study.analysis.claims.tables import Tables


@judges("A12")
def fails_alone(tables: Tables, claim: Claim) -> Finding:
    """Hold the run of document A's script against one whose weights are all in the optimizer."""
    alone = [gaps[(gaps["num_gpus"] == 1) & (gaps["micro_batch_size"] == 1)
                  & (gaps["gradient_accumulation_steps"] == 1) & (gaps["master_dtype"] == "bf16")]
             for gaps in (tables.stale_gaps, tables.gaps)]  # fmt: skip
    stale, healthy = (with_pairs(gaps) for gaps in alone)
    large = claim.published["gap_pct"]
    if healthy.empty:
        return undecided("no FP8 run at batch 1 on one GPU has three pairs", behind(*alone))
    runs = behind(stale, healthy)
    fails = healthy["gap_pct_low_95"] > large
    if fails.any():
        why = f"FP8 ends {healthy['gap_pct'].max():+.1f} % above BF16 with every weight trained"
        return Finding(Verdict.REPRODUCED, why, mean_gap("gap of healthy FP8", healthy), runs)
    same = (healthy["verdict"] == "equivalent").all()
    broken = stale[stale["gap_pct_low_95"] > large]
    why = (
        f"FP8 with every weight in the optimizer ends {healthy['gap_pct'].min():+.2f} to "
        f"{healthy['gap_pct'].max():+.2f} % from BF16 in {count(len(healthy), 'setting')}"
    )
    if broken.empty:
        verdict = Verdict.CONTRADICTED if same else Verdict.UNDECIDED
        return Finding(verdict, why, mean_gap("gap of healthy FP8", healthy), runs)
    worst = broken.sort_values("num_pairs").tail(1)
    why = (
        f"a script that makes its optimizer before the conversion fails by "
        f"{worst['gap'].iloc[0]:+.2f} nats, since the optimizer misses the converted weights; {why}"
    )
    verdict = Verdict.ARTEFACT if same else Verdict.UNDECIDED
    return Finding(verdict, why, mean_gap("gap with a stale optimizer", worst), runs)


@judges("A13")
def noise_meets_precision(tables: Tables, claim: Claim) -> Finding:
    gaps, crossings = with_pairs(tables.effective_batches), tables.crossings
    low, high = claim.published["batches"]
    if gaps.empty or crossings.empty:
        return undecided("the effective batch was not swept, or the two errors were not measured")
    alone, more = (gaps[gaps["effective_batch"] <= low], gaps[gaps["effective_batch"] >= high])
    against = (crossings["reference"] == "bf16") & (crossings["scope"] == "all")
    meet = crossings[against & (crossings["precision"] == "fp8_tensorwise")]
    if alone.empty or more.empty or meet.empty:
        return undecided("the sweep lacks an effective batch of 1 or a larger one")
    turns = (alone["verdict"] != "equivalent").any() and (more["verdict"] == "equivalent").all()
    near = meet["crossing_batch"].between(low, high).any()
    why = (
        f"the gap is {alone['gap_pct'].iloc[0]:+.2f} % at an effective batch of 1 and "
        f"{more['gap_pct'].min():+.2f} to {more['gap_pct'].max():+.2f} % above; FP8's error would "
        f"equal the sampling noise at {meet['crossing_batch'].median():.0f} sequences, in large "
        "batches and not at 1"
    )
    figure = spread("both errors equal at a batch of", meet["crossing_batch"], spec=".0f")
    return Finding(by_parts(turns, near), why, figure, behind(gaps, meet))


@judges("A14")
def larger_batch_mends(tables: Tables, claim: Claim) -> Finding:
    """Ask whether a run that fails at batch 1 works at 4, with either binding of the optimizer."""
    least = claim.published["batch"]

    def swept(stale: bool) -> tuple[bool | None, bool | None]:
        gaps = with_pairs(tables.stale_gaps if stale else tables.gaps)
        gaps = gaps[(gaps["num_gpus"] == 1) & (gaps["precision"] == "fp8_tensorwise")]
        size = gaps["micro_batch_size"] * gaps["gradient_accumulation_steps"]
        works = gaps["gap_pct_low_95"] <= claim.published["gap_pct"]
        parts = (works[size == 1], works[size >= least])
        return (bool(parts[0].all()) if len(parts[0]) else None,
                bool(parts[1].all()) if len(parts[1]) else None)  # fmt: skip

    alone, larger = swept(stale=False)
    stale_alone, stale_larger = swept(stale=True)
    gaps = with_pairs(tables.gaps)
    size = gaps["micro_batch_size"] * gaps["gradient_accumulation_steps"]
    chosen = gaps[(gaps["num_gpus"] == 1) & (size >= least)]
    runs = behind(chosen)
    if larger is None or alone is None:
        return undecided("FP8 was not run at batch 1 and at 4 on one GPU with three pairs", runs)
    said = {True: "works", False: "fails", None: "was not run"}
    why = (
        f"with a healthy optimizer FP8 {said[alone]} at batch 1 and {said[larger]} from {least} on;"
        f" with a stale one it {said[stale_alone]} at 1 and {said[stale_larger]} from {least} on"
    )
    if (not alone and larger) or (stale_alone is False and stale_larger):
        verdict = Verdict.REPRODUCED
    elif stale_larger is False or not larger:
        verdict = Verdict.CONTRADICTED
    else:
        verdict = Verdict.ARTEFACT
    return Finding(verdict, why, mean_gap(f"gap at batch {least} and more", chosen), runs)


@judges("A15")
def variance_falls(tables: Tables, claim: Claim) -> Finding:
    """Test the runs together: each lies outside its own band of 95 % once in twenty by chance."""
    laws = tables.inverse_law
    laws = laws[laws["scope"] == "all"] if len(laws) else laws
    if laws.empty:
        return undecided("no run measured the gradients of single sequences")
    ratio = laws["ratio_to_inverse_law"]
    ends = laws["ratio_to_inverse_law_low"], laws["ratio_to_inverse_law_high"]
    inside = ratio.between(*ends)
    chance = float(scipy_stats.binom.sf((~inside).sum() - 1, len(laws), 0.05))
    within = abs(float(ratio.median()) - 1) <= claim.published["within"]
    why = (
        f"the variance of means over up to {laws['largest_batch'].max()} sequences, times their "
        f"number, is {ratio.median():.2f} of that of one; {inside.sum()} of {len(laws)} runs lie "
        f"where 95 % of random orders do (p = {chance:.2f} for that many outside)"
    )
    verdict = by_parts(within, chance > 0.05)
    low, high = float(ratio.min()), float(ratio.max())
    figure = Figure("variance × number, over one sequence's", float(ratio.median()), "", low, high,
                    f"range of {len(laws)}", ".2f")  # fmt: skip
    return Finding(verdict, why, figure, behind(laws))
