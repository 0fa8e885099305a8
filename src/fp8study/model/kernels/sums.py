"""Sums of gradients and of squares; `fp8study.model.fsdp.peers` and `updates` say what for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8study.model.kernels.launching import NUMBERS, launch


def add_two(
    one_N: torch.Tensor, other_N: torch.Tensor, sum_N: torch.Tensor, squares_P: torch.Tensor,
    divisor: int,
) -> None:  # fmt: skip
    """Write the sum of two gradients over `divisor`, and what each program's squares add up to.

    All contiguous; `squares_P` decides how many programs there are.
    """
    assert all(tensor.is_contiguous() for tensor in (one_N, other_N, sum_N))
    num, programs = sum_N.numel(), squares_P.numel()
    launch(
        _add_two, (programs,), one_N, other_N, sum_N, squares_P, num, divisor, SIZE=NUMBERS,
        PROGRAMS=programs, ROUNDS=triton.cdiv(num, programs * NUMBERS),
    )  # fmt: skip


def squares(numbers: torch.Tensor, squares_P: torch.Tensor) -> None:
    """Write what each program's squares add up to; `squares_P` decides how many there are."""
    assert numbers.is_contiguous()
    num, programs = numbers.numel(), squares_P.numel()
    launch(
        _squares, (programs,), numbers, squares_P, num, SIZE=NUMBERS, PROGRAMS=programs,
        ROUNDS=triton.cdiv(num, programs * NUMBERS),
    )  # fmt: skip


@triton.jit
def _add_two(  # type: ignore[no-untyped-def]
    one, other, total, squares, num, divisor,
    SIZE: tl.constexpr, PROGRAMS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    squared = tl.zeros((SIZE,), tl.float32)
    for turn in range(ROUNDS):
        at = (turn * PROGRAMS + tl.program_id(0)).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        inside = at < num
        first = tl.load(one + at, inside, other=0.0).to(tl.float32)
        second = tl.load(other + at, inside, other=0.0).to(tl.float32)
        added = (first + second) / divisor
        tl.store(total + at, added, inside)
        squared += added * added
    tl.store(squares + tl.program_id(0), tl.sum(squared, 0))


@triton.jit
def _squares(  # type: ignore[no-untyped-def]
    numbers, squares, num, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, ROUNDS: tl.constexpr
):
    squared = tl.zeros((SIZE,), tl.float32)
    for turn in range(ROUNDS):
        at = (turn * PROGRAMS + tl.program_id(0)).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        number = tl.load(numbers + at, at < num, other=0.0).to(tl.float32)
        squared += number * number
    tl.store(squares + tl.program_id(0), tl.sum(squared, 0))
