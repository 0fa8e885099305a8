"""Every number of the small formats against torch's casts, and document A's two statements."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8study.analysis.noise.moments import BF16, E4M3, E5M2, Format, running_sum

DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "BF16": torch.bfloat16}
FORMATS = pytest.mark.parametrize("format_", [E4M3, E5M2, BF16], ids=lambda f: f.name)


@FORMATS
def test_the_numbers_are_torchs(format_: Format) -> None:
    bits = torch.arange(len(format_.numbers)).to(
        torch.uint8 if format_ is not BF16 else torch.int16
    )
    theirs = bits.view(DTYPES[format_.name]).double().numpy()
    assert np.array_equal(format_.numbers, theirs)
    assert format_.numbers[-1] == torch.finfo(DTYPES[format_.name]).max


@pytest.mark.parametrize("format_", [E4M3, E5M2], ids=lambda f: f.name)
def test_rounding_is_torchs_for_every_bf16_number_in_range(format_: Format) -> None:
    bf16 = BF16.numbers[(BF16.numbers > 1e-12) & (BF16.numbers <= format_.numbers[-1])]
    values = np.concatenate([bf16, -bf16])
    theirs = torch.tensor(values).float().to(DTYPES[format_.name]).double().numpy()
    assert np.array_equal([format_.round(v) for v in values], theirs)


def test_halfway_goes_to_the_even_code_and_too_much_to_the_largest() -> None:
    assert [E4M3.round(v) for v in (17.0, 19.0, -17.0, 0.0, 1e9)] == [16.0, 20.0, -16.0, 0.0, 448.0]


@pytest.mark.parametrize(("format_", "bits"), [(E4M3, 3), (E5M2, 2), (BF16, 7)])
def test_the_worst_relative_error_by_exhaustion(format_: Format, bits: int) -> None:
    """Document A: E4M3 ≈ 0.1 %, E5M2 ≈ 1 %. It is half a unit in the last place: 5.9 %, 11 %."""
    half_unit = 2.0 ** -(bits + 1)
    assert format_.worst_relative_error() == pytest.approx(half_unit / (1 + half_unit))
    # Brute force over a hundred values between each two neighbours of one binade.
    values = np.linspace(1, 2, 100 * 2**bits, endpoint=False)
    errors = np.array([abs(format_.round(v) - v) / v for v in values])
    assert 0.98 * errors.max() < format_.worst_relative_error() <= 1.02 * errors.max()


SUMS = {  # a thousand times 0.001, which should be 1
    "E4M3": (E4M3, 0.03125), "E5M2": (E5M2, 0.0078125), "BF16": (BF16, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_thousand_thousandths(name: str) -> None:
    """Document A: 0.87 in FP8, 0.999 in BF16. All three stop growing long before."""
    format_, expected = SUMS[name]
    assert running_sum(0.001, 1000, format_) == expected
    total, term = torch.zeros(()), torch.tensor(0.001).to(DTYPES[name]).float()
    for _ in range(1000):
        total = (total + term).to(DTYPES[name]).float()
    assert float(total) == expected


def test_an_fp32_accumulator_is_right() -> None:
    assert running_sum(0.001, 1000, None) == pytest.approx(1, abs=2e-5)
