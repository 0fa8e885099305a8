"""What was measured about noise and precision, in words that follow the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from scipy.stats import binom

from fp8study.analysis.noise import tables
from fp8study.analysis.runs.pairing import in_fp8
from fp8study.core.records import RESULTS, StoredRun
from fp8study.report.words import count, escape, missing, recipe, span

#: Document A's transition is called far from a batch that is ten times its upper end.
FAR = 20
#: Elements lost at the ends of the format are called rare up to this share, %.
RARE_PCT = 1
#: Tokens in a step of a large pre-training.
LARGE_BATCH_TOKENS = 1_000_000
_MISSING = missing("Gradient noise", "precision-noise")


def measured(stored: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the runs of one place that measured noise, real FP8 GEMMs before emulated ones.

    A place is a machine, study, model and sequence length: others are not averaged with it. It
    is the one with the most runs.
    """
    found = _all_measured(stored)
    real = [run for run in found if not run.record.noise.get("emulated")]
    places = [_place(run) for run in real or found]
    best = max(places, key=places.count, default=None)
    return [run for run, place in zip(real or found, places, strict=True) if place == best]


def _all_measured(stored: Sequence[StoredRun]) -> list[StoredRun]:
    """Runs that gave an answer; one that diverged may have sound points."""
    return [run for run in stored if run.record.noise and run.record.status in RESULTS]


def _place(run: StoredRun) -> tuple[object, ...]:
    record = run.record
    length = record.noise.get("tokens_per_sample")
    return run.machine_label, record.study, record.config.get("model"), length


def fp8_rows(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """Return the crossings of all FP8 recipes against BF16, over all parameters."""
    table = tables.over_runs(tables.crossing_table, stored)
    if table.empty:
        return table
    return table[in_fp8(table) & (table["scope"] == "all")]


def answer(stored: Sequence[StoredRun]) -> str:
    """Say whether FP8's error is near the sampling noise at an effective batch of one."""
    table = fp8_rows(stored)
    if table.empty:
        return _MISSING
    tokens = max((run.record.noise["tokens_per_sample"] for run in stored), default=math.inf)
    ends = 100 * pd.concat([table["ratio_at_1_low"], table["ratio_at_1_high"]])
    emulated = stored and all(run.record.noise.get("emulated") for run in stored)
    note = "**FP8 is emulated in all of these runs.** " if emulated else ""
    return (
        f"{note}At an effective batch of 1, the error that FP8 adds to a gradient is "
        f"{span(100 * table['ratio_at_1'], '.0f', ' %')} of its sampling noise (95 % CIs from "
        f"{span(ends, '.0f', ' %')}; {count(table['step'].nunique(), 'point')} of training, "
        f"{count(table['precision'].nunique(), 'recipe')}, "
        f"{count(table['seed'].nunique(), 'seed')}). {_crossing(table)} {_verdict(table, tokens)}"
    )


def _crossing(table: pd.DataFrame) -> str:
    """Say at which effective batches the two errors would be equal."""
    crossing = table["crossing_batch"]
    there = crossing[(crossing > 0) & (crossing < math.inf)]
    larger, never = int((crossing == 0).sum()), int((crossing == math.inf).sum())
    parts = []
    if len(there):
        ends = pd.concat([table["crossing_batch_low"], table["crossing_batch_high"]])
        parts.append(
            f"The two would be equal at effective batches of {span(there, '.0f')} sequences "
            f"(95 % CIs from {span(ends, '.0f')})."
        )
    if never:
        what = "In all cases" if never == len(table) else f"In {never} of {len(table)} cases"
        parts.append(f"{what} no systematic part of it is seen, so they are never equal.")
    if larger:
        parts.append(
            f"In {larger} of {len(table)} cases FP8's error is the larger at a batch of 1 already."
        )
    return " ".join(parts)


def _verdict(table: pd.DataFrame, tokens_per_sample: float) -> str:
    """Judge document A's explanation by where the two errors are equal."""
    low, high = table["crossing_batch_low"].min(), table["crossing_batch_high"].max()
    if low > FAR:
        text = "A batch of 1 or 2, document A's transition, is nowhere near."
    elif low > 2:
        text = "Batches of 1 and 2, where document A puts the transition, are both below."
    elif high <= 2:
        return "That is where document A puts the transition."
    else:
        return "A batch of 1 or 2 cannot be told apart from it here."
    if table["systematic_share_low"].min() > 0:
        text += (
            " Sampling noise falls with the batch, the systematic part of FP8's error does not: "
            "precision matters *least* at batch 1."
        )
        if high * tokens_per_sample < LARGE_BATCH_TOKENS:
            text += (
                " At a million tokens FP8's error would be the larger; what that costs in loss, no "
                "run here has measured."
            )
    return text


def gemms(stored: Sequence[StoredRun]) -> str:
    """Say how far one GEMM is off, and what its casts lose at either end of the format."""
    table = tables.over_runs(tables.gemm_table, stored)
    if table.empty:
        return _MISSING
    fp8, bf16 = table[table["cast"]], table[~table["cast"]]
    medians = 100 * fp8.groupby(["precision", "gemm"])["error"].median()
    beside = f", a BF16 one by {100 * bf16['error'].median():.2f} %" if len(bf16) else ""
    zero, cut = 100 * fp8["to_zero"].max(), 100 * fp8["cut_off"].max()
    ends = (
        f"at most {cut:.2f} % are cut off at its largest"
        if cut
        else "none is cut off, as scales follow the largest"
    )
    return (
        f"A single FP8 GEMM is off by {span(medians, '.1f', ' %')}{beside} (medians over "
        f"{count(fp8['module'].nunique(), 'layer')}). Of an operand's elements at most "
        f"{zero:.2f} % become zero, and {ends}: "
        + (
            "what document A calls underflow is rare, and the error is that of rounding."
            if max(zero, cut) < RARE_PCT
            else "the range of the format takes part in the error, not rounding alone."
        )
    )


def variance_law(stored: Sequence[StoredRun]) -> str:
    """Say whether the variance of a mean falls as one over the number of sequences (A15)."""
    table = tables.over_runs(tables.inverse_law_table, stored)
    if table.empty:
        return _MISSING
    whole = table[table["scope"] == "all"]
    ratio = whole["ratio_to_inverse_law"]
    above = int((ratio > whole["ratio_to_inverse_law_high"]).sum())
    below = int((ratio < whole["ratio_to_inverse_law_low"]).sum())
    law = "The variance of a mean over N sequences falls"
    # Of sound runs, one in twenty lies outside of its band.
    if binom.sf(above + below - 1, len(whole), 0.05) >= 0.05:
        runs = count(len(whole), "run")
        return f"{law} as 1/N, within chance ({runs}): arithmetic for sequences drawn at random."
    side = "more slowly than" if not below else "faster than" if not above else "unlike"
    return f"{law} {side} 1/N in {above + below} of {count(len(whole), 'run')}."


def limits(stored: Sequence[StoredRun]) -> str:
    """Say what the numbers rest on."""
    runs = measured(stored)
    if not runs:
        return _MISSING
    scale = tables.over_runs(tables.scale_table, runs)
    if scale.empty:
        return "No point of these runs is sound: their gradients are not finite."
    first, noise = runs[0].record, runs[0].record.noise
    samples, last = scale["num_samples"].max(), scale["step"].max()
    trained = sorted({str(run.record.config.get("precision")) for run in runs})
    names = " and ".join(recipe(name) for name in trained)
    corpora = " and ".join(sorted({escape(r.record.data.get("corpus")) for r in runs}))
    lines = [
        f"- One shape ({escape(first.config.get('model'))}), one corpus ({corpora}), {samples} "
        f"sequences of {noise['tokens_per_sample']:,} tokens a point, at most {last:,} steps. "
        f"Errors beyond a batch of {samples // 2} are computed.",
        f"- The weights are of runs that trained in {names}; the gradients were computed without "
        "compilation, one sequence at a time.",
    ]
    others = len(_all_measured(stored)) - len(runs)
    if others:
        lines.append(
            f"- Left out: {count(others, 'run')} that measured noise in another place, on another "
            "model, or with emulated FP8."
        )
    return "\n".join(lines)
