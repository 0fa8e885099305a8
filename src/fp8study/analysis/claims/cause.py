"""Claims about document A's failure on one GPU: that it happens, why, and what ends it."""

from __future__ import annotations

import pandas as pd
from scipy.stats import binom

from fp8study.analysis.claims.finding import Claim, Finding, Verdict, judges
from fp8study.analysis.claims.rules import by_parts, ends, mean_gap, spread
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.losses import with_pairs
from fp8study.analysis.noise import tables as noise
from fp8study.analysis.runs.pairing import DIVERGED
from fp8study.core.words import count

_STALE = "; with a stale one it ends {} nats above ({})"
_SILENT = "; with {} BF16 itself learnt nothing there, and says nothing of FP8"


def _on_one_gpu(gaps: pd.DataFrame) -> pd.DataFrame:
    """Keep tensorwise arms of one GPU with three pairs; add ``batch``, sequences per update."""
    gaps = with_pairs(gaps[(gaps["num_gpus"] == 1) & (gaps["precision"] == "fp8_tensorwise")])
    return gaps.assign(batch=gaps["micro_batch_size"] * gaps["gradient_accumulation_steps"])


def _fails(gaps: pd.DataFrame, claim: Claim) -> pd.Series:
    """Whether FP8 alone diverges, or ends so far above BF16 that it learnt nothing, as A says."""
    return gaps["verdict"].eq(DIVERGED) | (gaps["gap_pct_low_95"] > claim.published["gap_pct"])


def _ended(gaps: pd.DataFrame) -> str:
    """Say where FP8's arms end."""
    is_lost = gaps["verdict"].eq(DIVERGED)
    told = [f"ends {ends(gaps['gap_pct'][~is_lost])} % from BF16"] if not is_lost.all() else []
    return " or ".join([*told, *(["diverges"] if is_lost.any() else [])])


def _place(gaps: pd.DataFrame) -> pd.Series:
    """Name the machine and the study of some arms."""
    return gaps["machine"] + "/" + gaps["study"]


def _masters(gaps: pd.DataFrame) -> str:
    """Name the master weights of some arms."""
    return f"{' and '.join(sorted({*gaps['master_dtype'].str.upper()}))} master weights"


@judges("A12")
def fails_alone(tables: Tables, claim: Claim) -> Finding:
    """Hold the run of document A's script against one whose weights are all in the optimizer.

    Of healthy arms those count that have a stale one beside them in their study, or document A's
    BF16 master weights.
    """
    stale, healthy, silent = (
        gaps[gaps["batch"] == 1]
        for gaps in map(_on_one_gpu, (tables.stale_gaps, tables.gaps, tables.silent_gaps))
    )
    healthy, silent = (
        gaps[_place(gaps).isin(_place(stale)) | (gaps["master_dtype"] == "bf16")]
        for gaps in (healthy, silent)
    )
    if healthy.empty:
        return claim.open()
    broken = stale[_fails(stale, claim)]
    if _fails(healthy, claim).any():
        verdict = Verdict.REPRODUCED
    elif (healthy["verdict"] != "equivalent").any():
        verdict = Verdict.UNDECIDED
    else:
        verdict = Verdict.ARTEFACT if len(broken) else Verdict.CONTRADICTED
    shown = broken if verdict is Verdict.ARTEFACT else healthy
    said = f"{count(len(healthy), 'setting')} ({_masters(healthy)})"
    stale_said = _STALE.format(ends(broken["gap"]), _masters(broken)) if len(broken) else ""
    return claim.found(
        verdict, mean_gap(shown), healthy, stale, healthy=_ended(healthy), settings=said,
        stale=stale_said + (_SILENT.format(_masters(silent)) if len(silent) else ""),
    )  # fmt: skip


@judges("A13")
def noise_meets_precision(tables: Tables, claim: Claim) -> Finding:
    """Ask whether FP8 fails at one sequence an update and not above, and where the errors meet.

    At one sequence of all studies whose text was new; above in those of the effective batch.
    """
    low, high = claim.published["batches"]
    alone, more = _on_one_gpu(tables.gaps), with_pairs(tables.effective_batches)
    alone = alone[(alone["batch"] <= low) & ~(alone["epochs"] > 1)]
    more = more[more["effective_batch"] >= high]
    meet = noise.over_runs(noise.crossing_table, tables.stored)
    if len(meet):
        against = (meet["reference"] == "bf16") & (meet["scope"] == "all")
        meet = meet[against & (meet["precision"] == "fp8_tensorwise")]
    if alone.empty or more.empty or meet.empty:
        return claim.open()
    turns = _fails(alone, claim).any() and not _fails(more, claim).any()
    batch = meet["crossing_batch"]
    nearest = meet.groupby(noise.ALIKE)["crossing_batch"].transform("median")
    near = batch[nearest == nearest.min()]  # places are not averaged with each other
    return claim.found(
        by_parts(turns, batch.between(low, high).any()), spread(near), alone, more, meet,
        alone=_ended(alone), more=_ended(more), epochs=more["epochs"].max(),
    )  # fmt: skip


@judges("A14")
def larger_batch_mends(tables: Tables, claim: Claim) -> Finding:
    """Ask whether what fails at batch 1 works at 4, with either binding of the optimizer.

    What fails at 1 and was not run at 4 leaves it open.
    """
    least = claim.published["batch"]

    def works(gaps: pd.DataFrame) -> str:
        if gaps.empty:
            return "was not run"
        return "fails" if _fails(gaps, claim).any() else "works"

    gaps = _on_one_gpu(tables.gaps), _on_one_gpu(tables.stale_gaps)
    healthy, stale = ((works(g[g["batch"] == 1]), works(g[g["batch"] >= least])) for g in gaps)
    if "was not run" in healthy:
        return claim.open()
    verdict = Verdict.ARTEFACT
    if ("fails", "works") in (healthy, stale):
        verdict = Verdict.REPRODUCED
    elif "fails" in (healthy[1], stale[1]):
        verdict = Verdict.CONTRADICTED
    elif "was not run" in stale:
        verdict = Verdict.UNDECIDED
    chosen = gaps[0][gaps[0]["batch"] >= least]
    return claim.found(verdict, mean_gap(chosen), *gaps, healthy=healthy, stale=stale)


@judges("A15")
def variance_falls(tables: Tables, claim: Claim) -> Finding:
    """Test the runs together: each lies outside its own band of 95 % once in twenty by chance.

    For sequences drawn at random the law is arithmetic; what the runs could show is that neighbours
    in a batch are more alike than that. Theirs were drawn at random.
    """
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
