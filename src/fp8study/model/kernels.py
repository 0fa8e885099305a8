"""Triton kernels; `kept_weights`, `optimizer` and `swiglu` say what for.

Imported where there is a GPU alone: torch for CPUs comes without Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE, _NUMBERS = 128, 2048
#: Numbers that a thread reads at once, whatever their dtype.
LINED_UP = 16
#: Tiles of `_NUMBERS` that one program looks through for the largest, to raise that by one access.
_TILES = 8


def _launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, by_compiler: bool = False, **constants: Any
) -> None:
    """Launch a kernel, or let the compiler that traces this launch it as it does its own."""
    if by_compiler:
        torch.library.wrap_triton(kernel)[grid](*arguments, **constants)
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants)


def cast_both(
    weight_MK: torch.Tensor, scale: torch.Tensor, rows_MK: torch.Tensor, columns_KM: torch.Tensor
) -> None:
    """Write a scaled weight in FP8 as it is and transposed; each contiguous, of any size.

    Without a clamp: the GPU's cast saturates, and leaves what is no number one that all will see.
    In two kernels, though one would read a byte a weight less: where one casts and stores both
    layouts, the ptxas of CUDA 12.8 and 12.9, which Triton brings, builds for Hopper what reads
    registers that nothing wrote (https://github.com/triton-lang/triton/issues/11111).
    """
    assert weight_MK.is_contiguous() and rows_MK.is_contiguous()
    num = weight_MK.numel()
    _launch(_cast, (triton.cdiv(num, _NUMBERS),), weight_MK, scale, rows_MK, num, SIZE=_NUMBERS)
    transpose(rows_MK, columns_KM)


def transpose(
    rows_MK: torch.Tensor, columns_KM: torch.Tensor, after: torch.Tensor | None = None,
    by_compiler: bool = False,
) -> None:  # fmt: skip
    """Write FP8 numbers transposed; both contiguous, of any size.

    `after` is not read: a compiler does not launch the kernel before that is there.
    """
    assert rows_MK.is_contiguous() and columns_KM.is_contiguous()
    num_rows, num_columns = rows_MK.shape
    grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(num_columns, _TILE))
    after = rows_MK if after is None else after
    _launch(
        _transpose, grid, rows_MK, columns_KM, num_rows, num_columns, after, TILE=_TILE,
        num_warps=8, by_compiler=by_compiler,
    )  # fmt: skip


def adamw(
    weight: torch.Tensor, gradient: torch.Tensor, averages: tuple[torch.Tensor, torch.Tensor],
    largest: torch.Tensor, kept: torch.Tensor | None, divisor: torch.Tensor | None,
    numbers: tuple[float, ...],
) -> None:  # fmt: skip
    """Update a weight and its averages, and raise `largest` to the weight's largest size.

    A gradient is divided by `divisor` as it is read. `kept`, which may be the gradient itself,
    receives the weight in its own dtype. `numbers`: those of `fp8study.model.optimizer.numbers_of`.
    """
    assert all(tensor.is_contiguous() for tensor in (weight, gradient, *averages))
    grid = (triton.cdiv(weight.numel(), _NUMBERS),)
    _launch(
        _adamw, grid, weight, gradient, *averages, largest, kept, divisor, weight.numel(),
        *numbers, SIZE=_NUMBERS,
    )  # fmt: skip


def gated(
    gate: torch.Tensor, up: torch.Tensor, largest: torch.Tensor, scale: torch.Tensor,
    fp8: torch.Tensor, most: float, least: float, by_compiler: bool = False,
) -> None:  # fmt: skip
    """Write SwiGLU's output in FP8, and its scale: ``most`` over its largest, or over ``least``.

    All contiguous; `largest` must be zero.
    """
    assert all(tensor.is_contiguous() for tensor in (gate, up, fp8))
    num = gate.numel()
    _launch(
        _gated_largest, (triton.cdiv(num, _NUMBERS * _TILES),), gate, up, largest, num,
        SIZE=_NUMBERS, TILES=_TILES, by_compiler=by_compiler,
    )  # fmt: skip
    _launch(
        _gated_cast, (triton.cdiv(num, _NUMBERS),), gate, up, largest, scale, fp8, num, most, least,
        SIZE=_NUMBERS, by_compiler=by_compiler,
    )  # fmt: skip


def gated_gradients(
    gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor,
    largest: torch.Tensor, scales: torch.Tensor, fp8: tuple[torch.Tensor, ...], most: float,
    least: float, by_compiler: bool = False,
) -> None:  # fmt: skip
    """Write the gradients of SwiGLU's inputs in FP8 with their scales, and its output by `scale`.

    `fp8`: room for the gradients of gate and up, and for the output. All contiguous; the two of
    `largest` must be zero. `most` and `least`: as in `gated`.
    """
    assert all(tensor.is_contiguous() for tensor in (gate, up, gradient, *fp8))
    num = gate.numel()
    _launch(
        _gradients_largest, (triton.cdiv(num, _NUMBERS * _TILES),), gate, up, gradient, largest,
        num, SIZE=_NUMBERS, TILES=_TILES, by_compiler=by_compiler,
    )  # fmt: skip
    _launch(
        _gradients_cast, (triton.cdiv(num, _NUMBERS),), gate, up, gradient, scale, largest, scales,
        *fp8, num, most, least, SIZE=_NUMBERS, by_compiler=by_compiler,
    )  # fmt: skip


def add_two(
    one_N: torch.Tensor, other_N: torch.Tensor, sum_N: torch.Tensor, squares_P: torch.Tensor,
    divisor: int,
) -> None:  # fmt: skip
    """Write the sum of two gradients over `divisor`, and what each program's squares add up to.

    All contiguous; `squares_P` decides how many programs there are.
    """
    assert all(tensor.is_contiguous() for tensor in (one_N, other_N, sum_N))
    num, programs = sum_N.numel(), squares_P.numel()
    _launch(
        _add_two, (programs,), one_N, other_N, sum_N, squares_P, num, divisor, SIZE=_NUMBERS,
        PROGRAMS=programs, ROUNDS=triton.cdiv(num, programs * _NUMBERS),
    )  # fmt: skip


def squares(numbers: torch.Tensor, squares_P: torch.Tensor) -> None:
    """Write what each program's squares add up to; `squares_P` decides how many there are."""
    assert numbers.is_contiguous()
    num, programs = numbers.numel(), squares_P.numel()
    _launch(
        _squares, (programs,), numbers, squares_P, num, SIZE=_NUMBERS, PROGRAMS=programs,
        ROUNDS=triton.cdiv(num, programs * _NUMBERS),
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
    _launch(
        _all_squares, (programs,), tensors[0], table_T2, squares_P, len(tensors), SIZE=_NUMBERS,
        PROGRAMS=programs,
    )  # fmt: skip


@triton.jit
def _cast(weight, scale, rows, num, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    scaled = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(rows + at, scaled.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _transpose(rows, columns, num_rows, num_columns, _after, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = (tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
    j = (tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE))[None, :]
    inside = (i < num_rows) & (j < num_columns)
    fp8 = tl.load(rows + i * num_columns + j, mask=inside)
    tl.store(columns + j * num_rows + i, fp8, mask=inside)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, largest, kept, divisor, num,
    decay, beta1, rest1, beta2, rest2, step_size, root, eps, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    if divisor is not None:
        g = g / tl.load(divisor)
    # Left to itself the compiler rounds another of a sum's two terms for gradients in BF16.
    w = tl.fma(w, -decay, w)
    m = tl.fma(m, beta1, rest1 * g)
    v = tl.fma(v, beta2, rest2 * g * g)
    w -= step_size * m / (tl.sqrt_rn(v) / root + eps)
    updated = w.to(weight.dtype.element_ty)
    tl.store(weight + at, updated, mask=inside)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=inside)
    if kept is not None:
        tl.store(kept + at, updated.to(kept.dtype.element_ty), mask=inside)
    tl.atomic_max(largest, tl.max(tl.abs(updated.to(tl.float32))))


@triton.jit
def _silu(gate, up, at, inside):  # type: ignore[no-untyped-def]
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-g))
    silu = (g * sigmoid).to(gate.dtype.element_ty).to(tl.float32)
    return g, u, sigmoid, silu


@triton.jit
def _output(gate, up, at, inside):  # type: ignore[no-untyped-def]
    _g, u, _sigmoid, silu = _silu(gate, up, at, inside)
    return (silu * u).to(gate.dtype.element_ty).to(tl.float32)


@triton.jit
def _gradients(gate, up, gradient, at, inside):  # type: ignore[no-untyped-def]
    # Rounded wherever torch would write a number to memory.
    g, u, sigmoid, silu = _silu(gate, up, at, inside)
    d = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    of_silu = (d * u).to(gate.dtype.element_ty).to(tl.float32)
    of_gate = (of_silu * sigmoid * (1 + g * (1 - sigmoid))).to(gate.dtype.element_ty)
    of_up = (d * silu).to(gate.dtype.element_ty)
    output = (silu * u).to(gate.dtype.element_ty)
    return of_gate.to(tl.float32), of_up.to(tl.float32), output.to(tl.float32)


@triton.jit
def _gated_largest(gate, up, largest, num, SIZE: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * SIZE * TILES
    most = tl.zeros([SIZE], tl.float32)
    for tile in range(TILES):
        at = first + tile * SIZE + tl.arange(0, SIZE)
        most = tl.maximum(most, tl.abs(_output(gate, up, at, at < num)))
    tl.atomic_max(largest, tl.max(most))


@triton.jit
def _scale(at, most, least):  # type: ignore[no-untyped-def]
    # A kernel that torch.compile launches gets Python's floats as FP64.
    return tl.div_rn(tl.cast(most, tl.float32), tl.maximum(tl.load(at), tl.cast(least, tl.float32)))


@triton.jit
def _gated_cast(gate, up, largest, scale, fp8, num, most, least, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    by = _scale(largest, most, least)
    output = _output(gate, up, at, at < num)
    tl.store(fp8 + at, (output * by).to(fp8.dtype.element_ty), mask=at < num)
    if tl.program_id(0) == 0:
        tl.store(scale, by)


@triton.jit
def _gradients_largest(  # type: ignore[no-untyped-def]
    gate, up, gradient, largest, num, SIZE: tl.constexpr, TILES: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * SIZE * TILES
    most_gate = tl.zeros([SIZE], tl.float32)
    most_up = tl.zeros([SIZE], tl.float32)
    for tile in range(TILES):
        at = first + tile * SIZE + tl.arange(0, SIZE)
        of_gate, of_up, _output = _gradients(gate, up, gradient, at, at < num)
        most_gate = tl.maximum(most_gate, tl.abs(of_gate))
        most_up = tl.maximum(most_up, tl.abs(of_up))
    tl.atomic_max(largest, tl.max(most_gate))
    tl.atomic_max(largest + 1, tl.max(most_up))


@triton.jit
def _gradients_cast(  # type: ignore[no-untyped-def]
    gate, up, gradient, scale, largest, scales, fp8_gate, fp8_up, fp8_output, num, most, least,
    SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    of_gate, of_up, output = _gradients(gate, up, gradient, at, inside)
    by_gate = _scale(largest, most, least)
    by_up = _scale(largest + 1, most, least)
    tl.store(fp8_gate + at, (of_gate * by_gate).to(fp8_gate.dtype.element_ty), mask=inside)
    tl.store(fp8_up + at, (of_up * by_up).to(fp8_up.dtype.element_ty), mask=inside)
    kept = (output * tl.load(scale)).to(fp8_output.dtype.element_ty)
    tl.store(fp8_output + at, kept, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(scales, by_gate)
        tl.store(scales + 1, by_up)


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
