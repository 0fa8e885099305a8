"""Sums of gradients and of squares; `fp8study.model.fsdp.peers` and `updates` say what for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8study.model.kernels.launching import NUMBERS, launch

#: Numbers that a thread reads at once, whatever their dtype.
LINED_UP = 16


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


def all_squares(tensors: list[torch.Tensor], squares_P: torch.Tensor) -> None:
    """Write what each program's squares of all numbers add up to, by one launch.

    The tensors are of one dtype, each with a multiple of `LINED_UP` numbers; the GPU reads their
    addresses and sizes.
    """
    assert all(t.is_contiguous() and t.dtype == tensors[0].dtype for t in tensors)
    assert all(t.numel() % LINED_UP == 0 for t in tensors)
    table_T2 = torch.tensor([(t.data_ptr(), t.numel()) for t in tensors])
    if squares_P.is_cuda:  # pinned, so that the host does not wait
        table_T2 = table_T2.pin_memory().to(squares_P.device, non_blocking=True)
    programs = squares_P.numel()
    launch(
        _all_squares, (programs,), tensors[0], table_T2, squares_P, len(tensors), SIZE=NUMBERS,
        PROGRAMS=programs,
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


@triton.jit
def _all_squares(  # type: ignore[no-untyped-def]
    like, table, squares, count, SIZE: tl.constexpr, PROGRAMS: tl.constexpr
):
    squared = tl.zeros((SIZE,), tl.float32)
    tensor = 0
    while tensor < count:
        numbers = tl.load(table + 2 * tensor).to(tl.pointer_type(like.dtype.element_ty))
        num = tl.multiple_of(tl.load(table + 2 * tensor + 1), 16)
        # Another program begins with each tensor, or the first would have all that is left over.
        start = ((tl.program_id(0) + 37 * tensor) % PROGRAMS).to(tl.int64) * SIZE
        while start < num:
            at = tl.multiple_of(start, SIZE) + tl.arange(0, SIZE)
            # torch's allocator gives addresses that are multiples of 512 bytes.
            places = tl.max_contiguous(tl.multiple_of(numbers + at, [16]), [SIZE])
            number = tl.load(places, at < num, other=0.0).to(tl.float32)
            squared += number * number
            start += PROGRAMS * SIZE
        tensor += 1
    tl.store(squares + tl.program_id(0), tl.sum(squared, 0))
