"""Tidy frames of what runs measured about noise and precision.

Each function takes the ``noise`` section of one record (see `fp8study.measure.gradient_noise`) and
returns one frame. Points of a diverged run, whose numbers are not finite, are left out. For all
records of a checkout, in seconds and without a GPU:

    over_runs(crossing_table, load_runs(results_dir()))

Errors are relative L2 norms. A comparison is named by its ``precision`` and its ``reference``.
A ``scope`` is ``all`` parameters, or those of the ``fp8_layers``: embedding and head make up much
of a gradient's norm and stay out of FP8, so the whole can look good where its parts do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from fp8study.analysis.noise import moments as noise
from fp8study.analysis.runs.frames import place_of, run_path
from fp8study.core.errors import UserError
from fp8study.core.records import StoredRun

#: Effective batches at which the two errors are set side by side.
BATCHES = noise.geometric_batches(4096)

#: What runs share that are averaged with each other; seeds, and repeats, differ.
ALIKE = ["machine", "study", "model", "corpus", "tokens_per_sample"]
#: Where one sequence holds more than this share of the squared error, a mean says little.
DOMINATED = 0.5

Section = Mapping[str, Any]


def alike(run: StoredRun) -> dict[str, Any]:
    """Return what `ALIKE` names of a run that measured noise."""
    record = run.record
    return dict(zip(ALIKE, (
        run.machine_label, record.study, record.config.get("model"),
        str(record.data.get("corpus")), record.noise.get("tokens_per_sample"),
    ), strict=True))  # fmt: skip


def over_runs(table: Callable[[Section], pd.DataFrame], runs: Iterable[StoredRun]) -> pd.DataFrame:
    """Apply one of the functions below to every run that measured noise.

    Returns:
        Their frames below each other, after the columns of `ALIKE`, run_id, trained (the precision
        of the training), seed, emulated and run_ids; empty if no run measured noise.
    """
    frames = []
    for run in runs:
        record = run.record
        if not record.noise:
            continue
        identity = (
            place_of(run)
            | alike(run)
            | {
                "trained": record.config.get("precision"),
                "seed": record.config.get("seed"),
                "emulated": record.noise.get("emulated"),
                "run_ids": run_path(run),
            }
        )
        frame = table(record.noise)
        frames.append(pd.DataFrame(identity, index=frame.index).join(frame))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _points(section: Section) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the sound points with their steps."""
    for point in section.get("points", []):
        grams = [point["gradient_grams"]]
        grams += [c["error_grams"] for c in point["comparisons"] if "error_grams" in c]
        try:
            for by_scope in grams:
                for gram in by_scope.values():
                    noise.gram_matrix(gram)
        except UserError:
            continue
        yield int(point["step"]), point


def _comparisons(
    section: Section,
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any], Mapping[str, Any]]]:
    """Yield step and comparison, the point, and what was found there."""
    for step, point in _points(section):
        for found in point["comparisons"]:
            what = {"step": step, "precision": found["precision"], "reference": found["reference"]}
            yield what, point, found


def _gradient_grams(section: Section) -> Iterator[tuple[dict[str, Any], noise.Array]]:
    """Yield step and scope, and the gradients' inner products there."""
    for step, point in _points(section):
        for scope, gram in point["gradient_grams"].items():
            yield {"step": step, "scope": scope}, noise.gram_matrix(gram)


def _error_grams(section: Section) -> Iterator[tuple[dict[str, Any], noise.Array, noise.Array]]:
    """Yield step, scope and comparison, the gradients' inner products and the errors'."""
    for what, point, found in _comparisons(section):
        for scope, errors in found.get("error_grams", {}).items():
            gradients = point["gradient_grams"][scope]
            row = {"step": what["step"], "scope": scope} | what
            yield row, noise.gram_matrix(gradients), noise.gram_matrix(errors)


def _spread(name: str, estimate: noise.Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def scale_table(section: Section) -> pd.DataFrame:
    """One row per point and scope: the gradient, its noise, the noise scale in sequences."""
    rows = []
    for what, gram in _gradient_grams(section):
        row = what | {"num_samples": len(gram)}
        square = noise.jackknife(lambda gram: noise.moments(gram).mean_square, gram)
        trace = noise.jackknife(lambda gram: noise.moments(gram).trace, gram)
        row |= _spread("gradient_square", square) | _spread("noise_trace", trace)
        row |= _spread("noise_scale", noise.noise_scale(gram))
        row["noise_scale_tokens"] = row["noise_scale"] * section["tokens_per_sample"]
        rows.append(row)
    return pd.DataFrame(rows)


def inverse_law_table(section: Section) -> pd.DataFrame:
    """One row per scope: `noise.inverse_law` over all points and batches of a run."""
    by_scope: dict[str, list[noise.Array]] = {}
    for what, gram in _gradient_grams(section):
        by_scope.setdefault(what["scope"], []).append(gram)
    rows = []
    for scope, grams in by_scope.items():
        batches = noise.geometric_batches(len(grams[0]) // 2)[1:]
        found = noise.inverse_law(grams, batches)
        row = {"scope": scope, "largest_batch": max(batches)}
        rows.append(row | _spread("ratio_to_inverse_law", found))
    return pd.DataFrame(rows)


def gradient_table(section: Section) -> pd.DataFrame:
    """One row per point, scope and comparison: the error of the gradient of one sequence.

    From mean squares over the sequences, which a single one may dominate: so the median and the
    worst sequence's errors over their BF16 gradients are given too, where they were kept.
    ``loss_change`` is the mean difference of the losses, nats per token, on the same sequences.
    """
    rows = []
    for what, point, found in _comparisons(section):
        parts = point["parameters"]
        is_fp8 = np.array(parts["is_fp8"], dtype=bool)
        losses = [point["losses"][found[k]] for k in ("precision", "reference")]
        for scope in point["gradient_grams"]:
            chosen = is_fp8 if scope == "fp8_layers" else np.ones_like(is_fp8)
            quality = _quality(*(np.sum(part[chosen]) for part in _sums(parts, found)))
            row = what | {"scope": scope} | quality
            row["loss_change"] = float(np.mean(np.subtract(*losses)))
            if "error_grams" in found:
                grams = (found["error_grams"][scope], point["gradient_grams"][scope])
                each = noise.relative_error(*(np.diagonal(gram) for gram in grams))
                row |= {"median_error": np.median(each), "worst_error": each.max()}
            rows.append(row)
    return pd.DataFrame(rows)


def _sums(parts: Mapping[str, Any], found: Mapping[str, Any]) -> list[noise.Array]:
    """Return |e|², |reference|² and <e, reference> of a comparison by parameter."""
    reference = parts["square"][found["reference"]]
    sums = (found["error_square"], reference, found["error_dot_reference"])
    return [np.array(part, dtype=float) for part in sums]


def _quality(error: Any, reference: Any, dot: Any) -> dict[str, Any]:
    relative = noise.relative_error(error, reference)
    return {
        "relative_error": relative,
        "cosine": noise.cosine(error, reference, dot),
        "sqnr_db": noise.sqnr_db(relative),
    }


def crossing_table(section: Section) -> pd.DataFrame:
    """One row per point, scope and comparison: where precision overtakes sampling error.

    ``crossing_batch`` in sequences; ``systematic_share`` of a single sequence's squared error;
    ``ratio_at_1``: precision over sampling error at an effective batch of one, whose interval is
    too narrow where one sequence holds most of the squared error: ``worst_share``, and
    ``ratio_without_worst``, the same ratio without that sequence.
    """
    rows = []
    for what, gradients, errors in _error_grams(section):
        row = what | _spread("crossing_batch", noise.crossing_batch(gradients, errors))
        row |= _spread("systematic_share", noise.systematic_share(errors))
        row |= _spread("ratio_at_1", noise.error_ratio(gradients, errors, 1))
        worst = int(np.argmax(each := np.diagonal(errors)))
        row["worst_share"] = each[worst] / max(each.sum(), np.finfo(float).tiny)
        rest = np.ix_(*[np.delete(np.arange(len(each)), worst)] * 2)
        without = noise.error_ratio(gradients[rest], errors[rest], 1)
        rows.append(row | {"ratio_without_worst": without.value})
    return pd.DataFrame(rows)


def budget_table(section: Section) -> pd.DataFrame:
    """One row per point, scope, comparison and effective batch: both errors on one axis.

    Errors are in units of the true gradient's norm |G|; missing if |G|² came out negative.
    ``measured`` is false where the batch is more than half the sample: the row extrapolates.
    """
    rows = []
    for what, gradients, errors in _error_grams(section):
        gradient, error = noise.moments(gradients), noise.moments(errors)
        unit = gradient.mean_square if gradient.mean_square > 0 else np.nan
        for batch in BATCHES:
            squares = {
                "sampling_error": gradient.trace / batch,
                "precision_error": error.at_batch(batch),
                "systematic_error": error.mean_square,
                "random_error": error.trace / batch,
            }
            row = what | {"batch": batch, "measured": 2 * batch <= len(errors)}
            row |= {name: float(np.sqrt(max(0.0, v) / unit)) for name, v in squares.items()}
            rows.append(row | _spread("ratio", noise.error_ratio(gradients, errors, batch)))
    return pd.DataFrame(rows)


def parameter_table(section: Section) -> pd.DataFrame:
    """One row per point, comparison and parameter: its gradient's error."""
    frames = []
    for what, point, found in _comparisons(section):
        parts = point["parameters"]
        content = what | {
            "parameter": parts["names"],
            "layer": [layer_number(name) for name in parts["names"]],
            "is_fp8": parts["is_fp8"],
        }
        frames.append(pd.DataFrame(content | _quality(*_sums(parts, found))))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def gemm_table(section: Section) -> pd.DataFrame:
    """One row per point, recipe, GEMM and converted layer: its error, and what its casts lose.

    ``error`` is relative to the FP32 GEMM of the uncast operands. ``to_zero`` and ``cut_off`` are
    shares of an operand's elements that the cast makes zero, or ends at the format's largest
    number, and ``operand_error`` is that of casting it: the larger of both operands'. ``cast`` is
    false of a GEMM that the recipe leaves in BF16, and of BF16's.
    """
    frames = []
    for step, point in _points(section):
        found = point["products"]
        for precision, gemms in found["values"].items():
            for gemm, values in gemms.items():
                seen = pd.DataFrame(values, columns=found["statistics"])
                larger = {each: seen[[f"first_{each}", f"second_{each}"]].max(axis=1)
                          for each in ("error", "underflow", "saturated")}  # fmt: skip
                frames.append(pd.DataFrame({
                    "step": step, "precision": precision, "gemm": gemm, "module": found["layers"],
                    "error": seen["error"], "cast": larger["error"] > 0,
                    "to_zero": larger["underflow"], "cut_off": larger["saturated"],
                    "operand_error": larger["error"],
                }))  # fmt: skip
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def layer_number(name: str) -> int:
    """Return the decoder layer that a parameter or module is in; -1 outside of all."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match.group(1)) if match else -1
