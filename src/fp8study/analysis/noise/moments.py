"""Sampling noise against precision error, from inner products alone. No torch here.

Let g_i be the gradient of sequence i, with expectation G (the true gradient) and covariance S.
The mean over a batch of B independent sequences misses G by a squared distance of tr(S)/B on
average: the sampling error. Let e_i be what a lower precision adds to g_i. Part of it, s = E[e_i],
is the same for every sequence; the rest has some covariance R. The error of a batch is then

    precision error² (B)  =  |s|²  +  tr(R) / B          sampling error² (B)  =  tr(S) / B

so only |s|² is left of it in large batches, and the two are equal at B = (tr(S) - tr(R)) / |s|².
Document A holds that FP8 fails below an effective batch of 2 for that reason. For a crossing
anywhere near 1, |s|² would have to be as large as tr(S), the noise that BF16 lives with too; and
since sampling error falls with B and precision error does not, it is at *large* batches that
precision is the larger of the two.

All of this follows from the N×N matrix of inner products of N vectors (its Gram matrix): pairs
of different sequences estimate |G|² without bias, and the diagonal, less that, tr(S) (McCandlish
et al. 2018, arXiv:1812.06162, appendix A). Their ratio is the noise scale, B_simple = tr(S) / |G|².

Intervals are from the jackknife: leave out one sequence, compute again, and take the spread of
the N results (Efron and Stein 1981). A bootstrap would draw sequences twice, and the product of a
sequence with itself would pass for one of an independent pair. Intervals of ratios are made for
the ratio whose denominator is known well (a variance) and then inverted: where the numerator (a
squared mean) cannot be told from zero, the upper end is infinite. In simulations with 8 to 32
sequences, 95 % intervals held the truth in 95 to 99 % of all cases; not where one sequence holds
most of the error: there that of the error at a batch of one ends too low, and its lower end means
nothing.

Last, the formats themselves: how far rounding to one of their numbers is off (`Format`).

A ``gradient_gram`` holds the inner products of N sequences' gradients, an ``error_gram`` those of
the same sequences' errors, float64[N, N]. Intervals are
of 95 %. What is out of range raises a `UserError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from fp8study.core.errors import UserError

Array = npt.NDArray[np.float64]

#: Random groupings behind an interval of `inverse_law`.
_REGROUPINGS = 400


@dataclass(frozen=True)
class Estimate:
    """A number with a two-sided confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Moments:
    """A random vector's mean and spread, both unbiased; either may come out negative."""

    mean_square: float
    """Squared norm of its expectation: |G|² of gradients, |s|² of errors."""
    trace: float
    """Trace of its covariance: tr(S), tr(R)."""

    def at_batch(self, batch: float) -> float:
        """Return the expected squared norm of the mean of `batch` independent ones."""
        return self.mean_square + self.trace / batch


def gram_matrix(rows: Any) -> Array:
    """Return a record's Gram matrix as an array.

    Raises:
        UserError: It is not square, smaller than 4×4, or holds numbers that are not finite.
    """
    gram = np.asarray(rows, dtype=float)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or len(gram) < 4:
        raise UserError(f"gram: shape {gram.shape} is not N×N with N of 4 or more; measure again")
    if not np.isfinite(gram).all():
        raise UserError("gram: not all are finite; leave out points of a diverged run")
    return gram


def moments(gram: Array) -> Moments:
    """Estimate the moments of vectors from their inner products, without bias."""
    diagonal, apart = _means(gram)
    return Moments(mean_square=apart, trace=diagonal - apart)


def _means(gram: Array) -> tuple[float, float]:
    """Return the mean of the diagonal and of the rest."""
    count = len(gram)
    diagonal = float(np.trace(gram))
    return diagonal / count, (float(gram.sum()) - diagonal) / (count * (count - 1))


def jackknife(statistic: Callable[..., float], *grams: Array) -> Estimate:
    """Estimate a function of Gram matrices of the same N sequences, with its interval.

    The statistic takes the matrices and is smooth in their means; a sequence is left out of all of
    them at once. The interval is Student's t with N - 1 degrees of freedom.
    """
    count = len(grams[0])
    if any(len(gram) != count for gram in grams):
        raise UserError(f"gram: sizes {[len(g) for g in grams]} differ; take them from one point")
    whole = statistic(*grams)
    without = []
    for left_out in range(count):
        keep = np.arange(count) != left_out
        without.append(statistic(*(gram[np.ix_(keep, keep)] for gram in grams)))
    with np.errstate(invalid="ignore"):  # infinite without the one that decides a sign
        spread = np.asarray(without) - np.mean(without)
    error = math.sqrt((count - 1) / count * float(spread @ spread))
    half = float(stdtrit(count - 1, 0.975)) * error
    return Estimate(whole, whole - half, whole + half)


def _inverse(estimate: Estimate) -> Estimate:
    """Invert a ratio that cannot really be negative; nothing bounds the inverse of zero."""
    if not math.isfinite(estimate.high):  # one sequence decides its sign: nothing is known
        estimate = Estimate(estimate.value, -math.inf, math.inf)

    def invert(value: float) -> float:
        return 1 / value if value > 0 else math.inf  # 0 for an infinite one

    return Estimate(invert(estimate.value), invert(estimate.high), invert(estimate.low))


def noise_scale(gradient_gram: Array) -> Estimate:
    """Return B_simple = tr(S) / |G|² in sequences; infinite where |G|² is lost in the noise."""

    def inverse(gram: Array) -> float:
        found = moments(gram)
        return found.mean_square / found.trace

    return _inverse(jackknife(inverse, gradient_gram))


def crossing_batch(gradient_gram: Array, error_gram: Array) -> Estimate:
    """Return the effective batch at which precision error equals sampling error, in sequences.

    Below it sampling error is the larger. It is infinite where no systematic error is seen, and
    0 where the precision error of a single sequence is already the larger; nothing bounds it from
    above where that may be chance.
    """

    def excess(gradients: Array, errors: Array) -> float:
        return moments(gradients).trace - moments(errors).trace

    def inverse(gradients: Array, errors: Array) -> float:
        apart = excess(gradients, errors)
        return moments(errors).mean_square / apart if apart > 0 else math.inf

    beyond = jackknife(excess, gradient_gram, error_gram)
    if beyond.value <= 0:
        return Estimate(0.0, 0.0, math.inf if beyond.high > 0 else 0.0)
    return _inverse(jackknife(inverse, gradient_gram, error_gram))


def systematic_share(error_gram: Array) -> Estimate:
    """Return the share of a single sequence's squared error that no averaging removes."""

    def share(gram: Array) -> float:
        diagonal, apart = _means(gram)
        return apart / diagonal if diagonal > 0 else math.nan

    return jackknife(share, error_gram)


def error_ratio(gradient_gram: Array, error_gram: Array, batch: int) -> Estimate:
    """Return precision error over sampling error at an effective batch.

    Averaging over all subsets of B measured sequences gives the same number as the formula, so
    for B < N this is measured, beyond it is extrapolated.

    The interval is made for the squared ratio.
    """
    if batch < 1:
        raise UserError(f"batch: {batch} is not positive; give 1 or more")

    def squared(gradients: Array, errors: Array) -> float:
        return moments(errors).at_batch(batch) * batch / moments(gradients).trace

    found = jackknife(squared, gradient_gram, error_gram)
    return Estimate(*(math.sqrt(max(0.0, v)) for v in (found.value, found.low, found.high)))


def inverse_law(grams: Sequence[Array], batches: Sequence[int]) -> Estimate:
    """Test whether the variance of a mean over B sequences falls as 1/B (document A's σ²/N).

    The groups are disjoint and consecutive, as GPUs would share a batch: averaged over all ways of
    grouping, the ratio is 1 by algebra; neighbours that resemble each other would show as more. All
    points of a run measure the same sequences, and groups of four are made of groups of two, so
    single ratios are no independent tests: every regrouping is made at all points and batches at
    once, and the run is one test. Of sequences drawn at random, as a shuffled corpus gives them,
    1/B is arithmetic: then the test is of the drawing.

    Of `grams` of the same sequences at several points, and of batches that each make two full
    groups or more, it returns the mean ratio of the variance of means times B to that of single
    sequences. Its interval is the range of 95 % of random groupings (a permutation test).
    """
    for batch in batches:
        if batch < 1 or len(grams[0]) // batch < 2:
            raise UserError(f"batch: {batch} makes no two groups of {len(grams[0])} sequences")
    grams = [gram / moments(gram).trace for gram in grams]

    def ratio(order: npt.NDArray[np.int64]) -> float:
        shuffled = [gram[np.ix_(order, order)] for gram in grams]
        return float(np.mean([_grouped(gram, batch) for gram in shuffled for batch in batches]))

    in_order, draw = np.arange(len(grams[0])), np.random.default_rng(0)
    others = [ratio(draw.permutation(in_order)) for _ in range(_REGROUPINGS)]
    low, high = np.quantile(others, [0.025, 0.975])
    return Estimate(ratio(in_order), float(low), float(high))


def _grouped(gram: Array, batch: int) -> float:
    """Return the variance trace of means over consecutive groups, times the batch."""
    count = len(gram) // batch
    used = gram[: count * batch, : count * batch].reshape(count, batch, count, batch)
    return batch * moments(used.mean((1, 3))).trace


def relative_error(error_square: Any, reference_square: Any) -> Any:
    """Return |e| / |reference| of sums of squares; arrays or numbers."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(np.asarray(error_square, float) / np.asarray(reference_square, float))


def cosine(error_square: Any, reference_square: Any, error_dot_reference: Any) -> Any:
    """Return the cosine of the angle between reference + e and the reference; arrays."""
    e, r, d = (np.asarray(v, float) for v in (error_square, reference_square, error_dot_reference))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (r + d) / np.sqrt(r * (r + 2 * d + e))


def sqnr_db(relative: Any) -> Any:
    """Return the signal-to-quantisation-noise ratio of a relative error, in decibels."""
    with np.errstate(divide="ignore"):
        return -20 * np.log10(np.asarray(relative, float))


def geometric_batches(largest: int) -> Sequence[int]:
    """Return 1, 2, 4 … up to `largest`."""
    return [2**k for k in range(largest.bit_length()) if 2**k <= largest]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals, all of whose numbers can be listed.

    Statements about its accuracy then need no theory. Layouts after the OCP 8-bit floating point
    specification, revision 1.0: E4M3 spends its top exponent on numbers, E5M2 and BF16 are laid
    out as IEEE 754 asks.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool
    """Whether the top exponent is infinity and NaN; else only the very last code is NaN."""

    @cached_property
    def numbers(self) -> Array:
        """All numbers that are not negative, in order; the index is the code without its sign."""
        codes = np.arange(2 ** (self.exponent_bits + self.mantissa_bits))
        mantissa = codes % 2**self.mantissa_bits / 2**self.mantissa_bits
        exponent = codes // 2**self.mantissa_bits
        bias = 2 ** (self.exponent_bits - 1) - 1
        is_subnormal = exponent == 0
        power = np.ldexp(1.0, np.where(is_subnormal, 1, exponent) - bias)
        values: Array = np.where(is_subnormal, mantissa, 1 + mantissa) * power
        unused = 2**self.mantissa_bits if self.has_infinity else 1
        return values[:-unused]

    def round(self, value: float) -> float:
        """Round to the nearest number, ties to the even code; cut off at the largest."""
        apart = np.abs(self.numbers - abs(value))
        nearest = np.flatnonzero(apart == apart.min())
        code = min(nearest, key=lambda code: code % 2)
        return float(np.copysign(self.numbers[code], value))

    def worst_relative_error(self) -> float:
        """Return the largest relative error of rounding any number in the normal range.

        Found halfway between each two neighbours: half their distance over their mean.
        """
        normal = self.numbers[2**self.mantissa_bits :]  # the codes before are subnormal
        low, high = normal[:-1], normal[1:]
        return float(((high - low) / (high + low)).max())


E4M3 = Format("E4M3", 4, 3, has_infinity=False)
E5M2 = Format("E5M2", 5, 2, has_infinity=True)
BF16 = Format("BF16", 8, 7, has_infinity=True)


def running_sum(term: float, count: int, accumulator: Format | None) -> float:
    """Add a number to itself many times; it and each sum are rounded to the accumulator's format.

    Without an `accumulator` they are in FP32.
    """

    def rounded(value: float | np.float32) -> np.float32:
        exact = np.float32(value)
        return exact if accumulator is None else np.float32(accumulator.round(float(exact)))

    operand, total = rounded(term), np.float32(0)
    for _ in range(count):
        total = rounded(total + operand)
    return float(total)
