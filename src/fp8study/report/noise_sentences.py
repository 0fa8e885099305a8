"""What was measured about noise and precision, in words that follow the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from scipy.stats import binom

from fp8study.analysis.noise import tables
from fp8study.analysis.runs.pairing import in_fp8
from fp8study.core.records import RESULTS, StoredRun
from fp8study.core.words import listed
from fp8study.report.words import count, escape, machine_name, missing, recipe, span

#: Document A's transition is called far from a batch that is ten times its upper end.
FAR = 20
#: Elements lost at the ends of the format are called rare up to this share, %.
RARE_PCT = 1
#: Operands are off as others are up to this multiple of the median of their kind.
ORDINARY = 1.25
#: Tokens in a step of a large pre-training.
LARGE_BATCH_TOKENS = 1_000_000
_MISSING = missing("Gradient noise", "precision-noise")


def places(stored: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Return the runs that measured noise by place, the place of most runs first.

    A place is what `tables.ALIKE` names: no other is averaged with it.
    Emulated FP8 GEMMs count where no run has real ones.
    """
    found = _all_measured(stored)
    real = [run for run in found if not run.record.noise.get("emulated")]
    by_place: dict[tuple[object, ...], list[StoredRun]] = {}
    for run in real or found:
        by_place.setdefault(tuple(tables.alike(run).values()), []).append(run)
    return sorted(by_place.values(), key=len, reverse=True)


def _all_measured(stored: Sequence[StoredRun]) -> list[StoredRun]:
    """Runs that gave an answer; one that diverged may have sound points."""
    return [run for run in stored if run.record.noise and run.record.status in RESULTS]


def fp8_rows(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """Return the crossings of all FP8 recipes against BF16, over all parameters."""
    table = tables.over_runs(tables.crossing_table, stored)
    if table.empty:
        return table
    return table[in_fp8(table) & (table["scope"] == "all")]


def answer(stored: Sequence[StoredRun]) -> str:
    """Say whether FP8's error is near the sampling noise at an effective batch of one."""
    found = [(runs, table) for runs in places(stored) if len(table := fp8_rows(runs))]
    if not found:
        return _MISSING
    emulated = all(run.record.noise.get("emulated") for runs, _ in found for run in runs)
    verdicts = [[*_verdict(table), *_in_large_steps(table, runs)] for runs, table in found]
    shared = [text for text in verdicts[0] if all(text in others for others in verdicts)]
    told = [
        " ".join([
            f"- {here(runs)}: {_size(table)}{_crossing(table)}{_outliers(table)}",
            *(text for text in verdict if text not in shared),
        ])
        for (runs, table), verdict in zip(found, verdicts, strict=True)
    ]  # fmt: skip
    note = "**FP8 is emulated in all of these runs.** " if emulated else ""
    what = (
        "FP8's error in % of the sampling noise at an effective batch of 1, and the batch at which "
        "they are equal, in sequences:"
    )
    return "\n\n".join(filter(None, [note + " ".join(shared), what, "\n".join(told)]))


def here(runs: Sequence[StoredRun]) -> str:
    """Name the model, the text and the machine of a place."""
    first = runs[0].record
    machine = escape(machine_name(runs[0].machine_label))
    return f"{escape(first.config.get('model'))} on {escape(first.data.get('corpus'))}, {machine}"


def _by_stage(table: pd.DataFrame, column: str, spec: str, unit: str = "") -> str:
    """Give the range of a column at the start, and that after some training."""
    stages = table.groupby(table["step"] > 0)[column]
    told = {is_later: span(values, spec, unit) for is_later, values in stages}
    names = {False: "at the start", True: "after training"}
    return " and ".join(f"{text} {names[is_later]}" for is_later, text in told.items())


def _size(table: pd.DataFrame) -> str:
    """Say how large FP8's error is at a batch of one."""
    sizes = _by_stage(table.assign(pct=100 * table["ratio_at_1"]), "pct", ".0f", " %")
    return f"{sizes} ({count(table['seed'].nunique(), 'seed')})"


def _outliers(table: pd.DataFrame) -> str:
    """Say in how many cases one sequence makes the error at a batch of one."""
    one = table[table["worst_share"] > tables.DOMINATED]
    if one.empty:
        return ""
    return (
        f" In {len(one)} of {len(table)} cases one sequence holds more than half of the squared "
        f"error at a batch of 1, and no interval of that is known; without it they are at "
        f"{span(100 * one['ratio_without_worst'], '.0f', ' %')}."
    )


def _crossing(table: pd.DataFrame) -> str:
    """Say at which effective batches the two errors would be equal."""
    crossing = table["crossing_batch"]
    there = table[(crossing > 0) & (crossing < math.inf)]
    larger, never = int((crossing == 0).sum()), int((crossing == math.inf).sum())
    text = f"; equal at {_by_stage(there, 'crossing_batch', ',.0f')}." if len(there) else "."
    if never:
        what = "In all cases" if never == len(table) else f"In {never} of {len(table)} cases"
        text += f" {what} no systematic part of it is seen, so they are never equal."
    if larger:
        text += (
            f" In {larger} of {len(table)} cases FP8's error is the larger at a batch of 1 already."
        )
    return text


def _in_large_steps(table: pd.DataFrame, runs: Sequence[StoredRun]) -> list[str]:
    """Say which error would be the larger in steps of a million tokens, where that is known."""
    batch = LARGE_BATCH_TOKENS / runs[0].record.noise["tokens_per_sample"]
    if table["crossing_batch_high"].max() < batch:
        return ["In steps of a million tokens FP8's error would be the larger."]
    if table["crossing_batch_low"].min() > batch:
        return ["In steps of a million tokens the sampling noise would still be the larger."]
    return []


def _verdict(table: pd.DataFrame) -> list[str]:
    """Judge document A's explanation by where the two errors are equal, sentence by sentence."""
    low, high = table["crossing_batch_low"].min(), table["crossing_batch_high"].max()
    equal = "FP8's error in a gradient equals the gradient's sampling noise"
    if low > FAR:
        text = f"A batch of 1 or 2, document A's transition, is nowhere near where {equal}."
    elif low > 2:
        text = f"Batches of 1 and 2, document A's transition, are both below that at which {equal}."
    elif high <= 2:
        return [f"{equal} where document A puts the transition."]
    else:
        return [f"A batch of 1 or 2 cannot be told apart from that at which {equal}."]
    if high == math.inf:
        return [text]
    return [
        text,
        "Sampling noise falls with the batch, the systematic part of FP8's error does not: beside "
        "the noise, precision matters *least* at batch 1.",
        "What a larger error costs in loss, no run here has measured.",
    ]


def gemms(stored: Sequence[StoredRun]) -> str:
    """Say how far one GEMM is off, and what its casts lose at either end of the format."""
    table = tables.over_runs(tables.gemm_table, stored)
    if table.empty:
        return _MISSING
    fp8, bf16 = table[table["cast"]], table[~table["cast"]]
    medians = 100 * fp8.groupby([*tables.ALIKE, "precision", "gemm"])["error"].median()
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
        f"{zero:.2f} % become zero, and {ends}: " + _underflow(fp8)
    )


def _underflow(fp8: pd.DataFrame) -> str:
    """Say whether casts that lose elements are further off than others of their kind."""
    many = fp8[["to_zero", "cut_off"]].max(axis=1) > RARE_PCT / 100
    if not many.any():
        return "what document A calls underflow is rare, and the error is that of rounding."
    others = fp8.assign(operand_error=fp8["operand_error"].mask(many))
    kind = ["run_ids", "step", "precision", "gemm"]
    usual = others.groupby(kind)["operand_error"].transform("median")[many]
    error = fp8.loc[many, "operand_error"]
    if usual.isna().any():
        return "whether that adds to the error cannot be told, as no GEMM of its kind loses less."
    if (error <= ORDINARY * usual).all():
        return (
            f"{many.sum():,} of {len(many):,} GEMMs lose more than {RARE_PCT} %, and their "
            f"operands are off by {span(100 * error, '.1f', ' %')}, as others are "
            f"({span(100 * usual, '.1f', ' %')}): the error is that of rounding."
        )
    return "the range of the format takes part in the error, not rounding alone."


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
        inside = len(whole) - above - below
        most = listed(f"{size}" for size in sorted(whole["largest_batch"].unique()))
        return (
            f"{law} as 1/N, within chance: {inside} of {count(len(whole), 'run')} in the "
            f"band of 95 %, of up to {most} sequences. That is arithmetic for sequences drawn at "
            "random."
        )
    side = "more slowly than" if not below else "faster than" if not above else "unlike"
    return f"{law} {side} 1/N in {above + below} of {count(len(whole), 'run')}."


def limits(stored: Sequence[StoredRun]) -> str:
    """Say what the numbers rest on."""
    lines = [line for runs in places(stored) if (line := _limits_of(runs))]
    if not lines:
        unsound = "These runs have no sound point."
        return unsound if places(stored) else _MISSING
    lines.append(
        "- The gradients were computed without compilation, one sequence at a time. Errors beyond "
        "half of the sequences are computed, and systematic is what holds at one set of weights."
    )
    others = len(_all_measured(stored)) - sum(map(len, places(stored)))
    if others:
        lines.append(f"- Left out: {count(others, 'run')} with emulated FP8.")
    return "\n".join(lines)


def _limits_of(runs: Sequence[StoredRun]) -> str:
    """Say what the numbers of one place rest on; nothing if no point of it is sound."""
    scale = tables.over_runs(tables.scale_table, runs)
    if scale.empty:
        return ""
    whole = scale[scale["scope"] == "all"]
    trained = sorted({str(run.record.config.get("precision")) for run in runs})
    return (
        f"- {here(runs)}: {count(int(scale['num_samples'].max()), 'sequence')} of "
        f"{runs[0].record.noise['tokens_per_sample']:,} tokens a point, at most "
        f"{scale['step'].max():,} steps in {' and '.join(recipe(name) for name in trained)}. Noise "
        f"scale in sequences: {_by_stage(whole, 'noise_scale', '.0f')}."
    )
