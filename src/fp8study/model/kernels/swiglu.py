"""SwiGLU and its gradients, written in FP8; `fp8study.model.swiglu` says what for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8study.model.kernels.casts import places
from fp8study.model.kernels.launching import NUMBERS, TILE, launch

#: Tiles of `NUMBERS` that one program looks through for the largest, to raise that by one access.
_TILES = 8


def gated(
    gate: torch.Tensor, up: torch.Tensor, largest: torch.Tensor, scale: torch.Tensor,
    fp8: torch.Tensor, most: float, least: float,
) -> None:  # fmt: skip
    """Write SwiGLU's output in FP8, and its scale: ``most`` over its largest, or over ``least``.

    All contiguous; `largest` must be zero.
    """
    assert all(tensor.is_contiguous() for tensor in (gate, up, fp8))
    num = gate.numel()
    launch(
        _gated_largest, (triton.cdiv(num, NUMBERS * _TILES),), gate, up, largest, num,
        SIZE=NUMBERS, TILES=_TILES,
    )  # fmt: skip
    launch(
        _gated_cast, (triton.cdiv(num, NUMBERS),), gate, up, largest, scale, fp8, num, most, least,
        SIZE=NUMBERS,
    )  # fmt: skip


def gated_gradients(
    gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor,
    largest: torch.Tensor, scales: torch.Tensor, fp8: tuple[torch.Tensor, ...], most: float,
    least: float,
) -> None:  # fmt: skip
    """Write the gradients of SwiGLU's inputs in FP8 with their scales, and its output by `scale`.

    `fp8`: room for the gradients of gate and up, and for the output; or for these gradients, and
    for all three transposed. All contiguous; the two of `largest` must be zero. `most` and `least`:
    as in `gated`.
    """
    assert all(tensor.is_contiguous() for tensor in (gate, up, gradient, *fp8))
    num = gate.numel()
    launch(
        _gradients_largest, (triton.cdiv(num, NUMBERS * _TILES),), gate, up, gradient, largest,
        num, SIZE=NUMBERS, TILES=_TILES,
    )  # fmt: skip
    if len(fp8) > 3:
        launch(
            _gradients_cast_and_turn, tuple(triton.cdiv(size, TILE) for size in gate.shape), gate,
            up, gradient, scale, largest, scales, *fp8, *gate.shape, most, least, TILE=TILE,
            num_warps=8,
        )  # fmt: skip
        return
    launch(
        _gradients_cast, (triton.cdiv(num, NUMBERS),), gate, up, gradient, scale, largest, scales,
        *fp8, num, most, least, SIZE=NUMBERS,
    )  # fmt: skip


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
    return tl.div_rn(most, tl.maximum(tl.load(at), least))


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
def _cast_gradients(gate, up, gradient, largest, fp8_gate, fp8_up, at, inside, most, least):  # type: ignore[no-untyped-def]
    of_gate, of_up, output = _gradients(gate, up, gradient, at, inside)
    by_gate = _scale(largest, most, least)
    by_up = _scale(largest + 1, most, least)
    tl.store(fp8_gate + at, (of_gate * by_gate).to(fp8_gate.dtype.element_ty), mask=inside)
    tl.store(fp8_up + at, (of_up * by_up).to(fp8_up.dtype.element_ty), mask=inside)
    return output, by_gate, by_up


@triton.jit
def _gradients_cast(  # type: ignore[no-untyped-def]
    gate, up, gradient, scale, largest, scales, fp8_gate, fp8_up, fp8_output, num, most, least,
    SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    output, by_gate, by_up = _cast_gradients(
        gate, up, gradient, largest, fp8_gate, fp8_up, at, inside, most, least
    )
    kept = (output * tl.load(scale)).to(fp8_output.dtype.element_ty)
    tl.store(fp8_output + at, kept, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(scales, by_gate)
        tl.store(scales + 1, by_up)


@triton.jit
def _gradients_cast_and_turn(  # type: ignore[no-untyped-def]
    gate, up, gradient, scale, largest, scales, fp8_gate, fp8_up, turned_gate, turned_up,
    turned_output, num_rows, num_columns, most, least, TILE: tl.constexpr,
):  # fmt: skip
    at, turned, inside = places(num_rows, num_columns, TILE)
    output, by_gate, by_up = _cast_gradients(
        gate, up, gradient, largest, fp8_gate, fp8_up, at, inside, most, least
    )
    kept = (output * tl.load(scale)).to(turned_output.dtype.element_ty)
    tl.store(turned_output + turned, kept, mask=inside)
    tl.debug_barrier()  # what is turned is read again; `cast_both` says why
    tl.store(turned_gate + turned, tl.load(fp8_gate + at, mask=inside), mask=inside)
    tl.store(turned_up + turned, tl.load(fp8_up + at, mask=inside), mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scales, by_gate)
        tl.store(scales + 1, by_up)
