"""Small floating-point formats, number by number. No torch here.

A format of eight bits has 256 numbers and one of sixteen 65,536: all can be listed, so statements
about their accuracy need no theory. Layouts after the OCP 8-bit floating point specification,
revision 1.0: E4M3 spends its top exponent on numbers (only the last mantissa is NaN, there is no
infinity), E5M2 is laid out as IEEE 754 asks, as is BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals."""

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

    @cached_property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return float(2.0 ** (2 - 2 ** (self.exponent_bits - 1)))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return float(self.numbers[-1])

    def round(self, value: float) -> float:
        """Round to the nearest number, ties to the even code; cut off at the largest."""
        size = abs(value)
        above = int(np.searchsorted(self.numbers, size))
        if above == 0:
            return 0.0
        if above == len(self.numbers):
            return float(np.copysign(self.largest, value))
        below = above - 1
        to_above, to_below = self.numbers[above] - size, size - self.numbers[below]
        is_nearer = to_above < to_below or (to_above == to_below and above % 2 == 0)
        return float(np.copysign(self.numbers[above if is_nearer else below], value))

    def worst_relative_error(self) -> float:
        """Return the largest relative error of rounding any number in the normal range.

        Found halfway between each two neighbours, where it is half their distance over their
        mean. Halving a unit in the last place of 1 instead gives 2^-(mantissa_bits + 1).
        """
        normal = self.numbers[self.numbers >= self.smallest_normal]
        low, high = normal[:-1], normal[1:]
        return float(((high - low) / (high + low)).max())

    def rms_relative_error(self) -> float:
        """Return the root mean square of it, over numbers spread evenly between neighbours.

        Every interval between neighbours of the normal range counts the same. Within one, the
        error is uniform between ± half the distance d: d/√12, taken over the middle.
        """
        normal = self.numbers[self.numbers >= self.smallest_normal]
        low, high = normal[:-1], normal[1:]
        relative = (high - low) / np.sqrt(12) / ((high + low) / 2)
        return float(np.sqrt((relative**2).mean()))


E4M3 = Format("E4M3", 4, 3, has_infinity=False)
E5M2 = Format("E5M2", 5, 2, has_infinity=True)
BF16 = Format("BF16", 8, 7, has_infinity=True)


def running_sum(
    term: float, count: int, accumulator: Format | None, values: Format | None = None
) -> float:
    """Add a number to itself many times, rounding after each addition.

    Args:
        term: The number.
        count: How often it is added.
        accumulator: Format of the sum; none for FP32.
        values: Format that the term is rounded to first; by default the accumulator's.
    """
    operand = np.float32(term)
    if (values or accumulator) is not None:
        operand = np.float32((values or accumulator).round(float(operand)))  # type: ignore[union-attr]
    total = np.float32(0)
    for _ in range(count):
        total = np.float32(total + operand)
        if accumulator is not None:
            total = np.float32(accumulator.round(float(total)))
    return float(total)
