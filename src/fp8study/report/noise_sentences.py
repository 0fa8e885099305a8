"""What was measured about noise and precision, in words that follow the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pandas as pd
from scipy.stats import binom

from fp8study.analysis import noise_tables as tables
from fp8study.analysis.noise import BF16, E4M3, E5M2, running_sum
from fp8study.analysis.pairing import PRECISION_LABELS
from fp8study.core.records import RESULTS, StoredRun
from fp8study.report.words import count, escape, how_to_get

_STUDY = "precision-noise"
#: Document A's transition is called far from a batch that is ten times its upper end.
FAR = 20

#: Tokens in a step of a large pre-training.
LARGE_BATCH_TOKENS = 1_000_000


def measured(stored: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the runs of one place that measured noise, real FP8 products before emulated ones.

    A place is a machine, study, model and sequence length: others are not averaged with it. It
    is the one with the most runs.
    """
    found = _all_measured(stored)
    real = [run for run in found if not run.record.noise.get("emulated")]
    places = Counter(_place(run) for run in real or found)
    if not places:
        return []
    best = max(places, key=lambda place: places[place])
    return [run for run in real or found if _place(run) == best]


def _all_measured(stored: Sequence[StoredRun]) -> list[StoredRun]:
    """Runs that gave an answer; one that diverged may have sound points."""
    return [run for run in stored if run.record.noise and run.record.status in RESULTS]


def _place(run: StoredRun) -> tuple[object, ...]:
    record = run.record
    length = record.noise.get("tokens_per_sample")
    return run.machine_label, record.study, record.config.get("model"), length


def _missing() -> str:
    return f"**Precision noise: no records yet:** {how_to_get(_STUDY)}."


def _range(values: pd.Series, spec: str) -> str:
    low, high = (format(float(end), spec) for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def fp8_rows(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """Return the crossings of all FP8 recipes against BF16, over all parameters."""
    table = tables.over_runs(tables.crossing_table, stored)
    if table.empty:
        return table
    return table[(table["precision"] != "bf16") & (table["scope"] == "all")]


def answer(stored: Sequence[StoredRun]) -> str:
    """Say whether FP8's error is near the sampling noise at an effective batch of one."""
    table = fp8_rows(stored)
    if table.empty:
        return _missing()
    percent = 100 * table[["ratio_at_1", "ratio_at_1_low", "ratio_at_1_high"]]
    ends = percent["ratio_at_1_low"].min(), percent["ratio_at_1_high"].max()
    tokens = max((run.record.noise["tokens_per_sample"] for run in stored), default=math.inf)
    text = (
        f"At an effective batch of 1, the error that FP8 adds to a gradient is "
        f"{_range(percent['ratio_at_1'], '.0f')} % of its sampling noise (95 % intervals from "
        f"{ends[0]:.0f} to {ends[1]:.0f} %; {count(table['step'].nunique(), 'point')} of training, "
        f"{count(table['precision'].nunique(), 'recipe')}, "
        f"{count(table['seed'].nunique(), 'seed')}). {_crossing(table)} "
        f"{_verdict(table, tokens)}"
    )
    return _emulated_note(stored) + text


def _crossing(table: pd.DataFrame) -> str:
    """Say at which effective batches the two errors would be equal."""
    crossing = table["crossing_batch"]
    there = crossing[(crossing > 0) & (crossing < math.inf)]
    larger, never = int((crossing == 0).sum()), int((crossing == math.inf).sum())
    parts = []
    if len(there):
        ends = table["crossing_batch_low"].min(), table["crossing_batch_high"].max()
        high = "no upper end" if ends[1] == math.inf else f"{ends[1]:.0f}"
        parts.append(
            f"The two would be equal at effective batches of {_range(there, '.0f')} sequences "
            f"(median {there.median():.0f}; 95 % intervals from {ends[0]:.0f} to {high})."
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
        text = "So a batch of 1 or 2, where document A puts the transition, is nowhere near."
    elif low > 2:
        text = "So 1 and 2, where document A puts the transition, are both below."
    elif high <= 2:
        return "That is where document A puts the transition."
    else:
        return "So a batch of 1 or 2 cannot be told apart from it here."
    if table["systematic_share_low"].min() > 0:
        text += (
            " And the order is the other way round: sampling noise falls with the batch and the "
            "systematic part of FP8's error does not, so precision matters *least* at batch 1 "
            "and relatively more in large batches."
        )
        if high * tokens_per_sample < LARGE_BATCH_TOKENS:
            text += (
                " A batch of a million tokens lies beyond where the two are equal: there FP8's "
                "error would be the larger part of what is left. What that costs is a question to "
                "losses at such a batch, which no run here has."
            )
    return text


def by_batch(stored: Sequence[StoredRun]) -> str:
    """Follow the ratio of the errors over the measured batches, and their sum at the first."""
    table = tables.over_runs(tables.budget_table, stored)
    if table.empty:
        return _missing()
    table = table[(table["precision"] != "bf16") & (table["scope"] == "all") & table["measured"]]
    if table.empty:
        return _missing()
    steps = "; ".join(
        f"{_range(100 * rows['ratio'], '.0f')} % at {batch}"
        for batch, rows in table.groupby("batch", sort=True)
    )
    alone = table.loc[table["batch"] == 1, "ratio"].astype(float)
    together = 100 * ((1 + alone**2) ** 0.5 - 1)
    return (
        f"FP8's error over sampling noise by effective batch, as measured: {steps}. If the two "
        f"are independent, their squares add, and at batch 1 FP8 makes a gradient's whole error "
        f"{_range(together, '.1f')} % larger than BF16's (if not, by no more than the ratio "
        f"itself). Two sequences instead of one make BF16's {100 * (1 - 0.5**0.5):.0f} % smaller."
    )


def _emulated_note(stored: Sequence[StoredRun]) -> str:
    if stored and all(run.record.noise.get("emulated") for run in stored):
        return "**FP8 is emulated in all of these runs.** "
    return ""


def scale(stored: Sequence[StoredRun]) -> str:
    """Say how large the gradient noise scale is along the training."""
    table = tables.over_runs(tables.scale_table, stored)
    if table.empty:
        return _missing()
    whole = table[table["scope"] == "all"]
    parts = [
        f"{_range(rows['noise_scale'], '.2g')} sequences after {step} steps"
        for step, rows in whole.groupby("step", sort=True)
    ]
    return f"The noise scale B_simple is {'; '.join(parts)}."


def variance_law(stored: Sequence[StoredRun]) -> str:
    """Say whether the variance of a mean falls as one over the number of sequences (A15)."""
    table = tables.over_runs(tables.inverse_law_table, stored)
    if table.empty:
        return _missing()
    whole = table[table["scope"] == "all"]
    ratio = whole["ratio_to_inverse_law"]
    above = int((ratio > whole["ratio_to_inverse_law_high"]).sum())
    below = int((ratio < whole["ratio_to_inverse_law_low"]).sum())
    number, outside = len(whole), above + below
    text = (
        f"Variance of means over 2 to {whole['largest_batch'].max()} sequences, times their "
        f"number, is {_range(ratio, '.2f')} of a single one's (mean over batches and points; "
        f"{count(number, 'run')}). Its sequences come in random order, so 1/N should hold, and "
        f"{number - outside} of {number} lie where 95 % of random orders do. "
    )
    if not outside:
        return text + "So it falls as 1/N as far as can be seen, as document A says."
    where = "above (neighbours resemble each other)" if above else "below"
    where = "on either side" if above and below else where
    chance = float(binom.sf(outside - 1, number, 0.05))
    if chance >= 0.05:
        return (
            text + f"The rest lie {where}; chance alone leaves that many outside in "
            f"{100 * chance:.0f} of 100 such tests. So this does not speak against 1/N, which is "
            "what document A says."
        )
    return text + f"The rest lie {where}, and they are more than chance leaves outside."


def formats() -> str:
    """Say what the formats' rounding errors are, and what sums in them give (A21, A22)."""
    errors = ", ".join(
        f"{f.name} {100 * f.worst_relative_error():.3g} %" for f in (E4M3, E5M2, BF16)
    )
    cases = {
        "E4M3": (E4M3, None), "E5M2": (E5M2, None), "BF16": (BF16, None), "FP32": (None, None),
        "E4M3 terms in a BF16 sum": (BF16, E4M3),
    }  # fmt: skip
    sums = ", ".join(
        f"{name} {running_sum(0.001, 1000, accumulator, values):.3g}"
        for name, (accumulator, values) in cases.items()
    )
    return (
        f"The worst relative error of rounding a normal number: {errors}. A thousand times 0.001, "
        f"added up one by one in the format itself: {sums}. A sum no longer grows once a term is "
        "no more than about half the gap to the next number. All of this is exact: it is computed "
        "from the lists of the formats' numbers, not from runs. Matrix products accumulate in "
        "higher precision than their factors have, so no such sum occurs in them."
    )


def limits(stored: Sequence[StoredRun]) -> str:
    """Say what the numbers rest on.

    Args:
        stored: All runs, of which `measured` chooses.
    """
    runs = measured(stored)
    if not runs:
        return _missing()
    scale = tables.over_runs(tables.scale_table, runs)
    if scale.empty:
        return "No point of these runs is sound: their gradients are not finite."
    first, noise = runs[0].record, runs[0].record.noise
    samples, last = scale["num_samples"].max(), scale["step"].max()
    trained = sorted({str(run.record.config.get("precision")) for run in runs})
    names = " and ".join(PRECISION_LABELS.get(name, name) for name in trained)
    corpora = " and ".join(sorted({escape(str(r.record.data.get("corpus"))) for r in runs}))
    lines = [
        f"- One shape ({escape(str(first.config.get('model')))}), one corpus ({corpora}), "
        f"{samples} sequences of {noise['tokens_per_sample']:,} tokens a point, at most {last:,} "
        f"steps. Beyond a batch of {samples // 2} the errors are computed from their measured "
        "parts, not measured. Later training, larger models and other data may differ.",
        f"- The weights are those of runs that trained in {names}. A batch is a mean over single "
        "sequences; in a larger micro-batch sequences share scales.",
        "- *Systematic* means: over sequences, at one set of weights. The rounding of the weights "
        "is part of it and changes as they move, so over many steps less of it may remain.",
        "- What is measured are eager stand-ins for the model: compiled, operations are fused and "
        "round in other places.",
    ]
    others = len(_all_measured(stored)) - len(runs)
    if others:
        lines.append(
            f"- Left out: {count(others, 'run')} that measured noise in another place, on another "
            "model, or with emulated FP8."
        )
    return "\n".join(lines)


def last_point(table: pd.DataFrame) -> pd.DataFrame:
    """Keep each run's last point, and the FP8 recipes."""
    if table.empty:
        return table
    last = table.groupby("run_id")["step"].transform("max")
    return table[(table["step"] == last) & (table["precision"] != "bf16")]


def with_labels(table: pd.DataFrame) -> pd.DataFrame:
    """Add ``what``: a comparison, or a recipe, in words; FP8 is compared with BF16 unless said."""
    if table.empty:
        return table
    names = table["precision"].map(lambda p: PRECISION_LABELS.get(p, p))
    if "reference" in table:
        names = names + table["reference"].map(lambda r: "" if r == "bf16" else f" v {r.upper()}")
    return table.assign(what=names.map(str))
