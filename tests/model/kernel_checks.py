"""What the Triton kernels must do, wherever they run.

TRITON_INTERPRET=1 python kernel_checks.py    by Triton's interpreter, without a GPU
"""

from __future__ import annotations

import itertools
from functools import partial

import torch

from fp8study.model import fp8_head, kept_weights, kernels, optimizer, swiglu
from fp8study.model.chunked_head import IGNORED
from fp8study.model.fsdp import peers
from fp8study.model.swiglu import GRADIENT

#: Multiples of a tile, less than one, and neither.
SHAPES = [(128, 256), (16, 48), (130, 33), (1, 300), (300, 1)]
DTYPES = [torch.float32, torch.bfloat16]


def check_both_layouts(weight_MK: torch.Tensor, scale: torch.Tensor) -> None:
    """Every byte is plain torch's, and none beyond the end is touched."""
    results = []
    at_once = partial(kernels.cast_both, at_once=True)
    for cast in (kept_weights._cast_both, kernels.cast_both, at_once):
        poison = torch.full((2, weight_MK.numel() + 64), 0x55, device=weight_MK.device)
        whole = poison.to(torch.uint8).view(kept_weights.FP8)
        rows_N, columns_N = (one[: weight_MK.numel()] for one in whole)
        cast(weight_MK, scale, rows_N.view(weight_MK.shape), columns_N.view(weight_MK.shape[::-1]))
        results.append(whole.view(torch.uint8))
    assert all(torch.equal(results[0], own) for own in results[1:])
    assert bool((results[0][:, weight_MK.numel() :] == 0x55).all())


def check_update(num: int, divisor: float | None, dtype: torch.dtype, device: str = "cpu") -> None:
    """Numbers are plain torch's but for rounding, and none beyond the end is touched."""
    start = [torch.randn(num + 8), torch.randn(num + 8), torch.randn(num + 8), torch.rand(num + 8)]
    start = [tensor.to(device, dtype) for tensor in start]
    by = None if divisor is None else torch.tensor(divisor, device=device)
    numbers = torch.tensor([3e-5, 0.9, 0.1, 0.95, 0.05, 1e-3, 0.7, 1e-8], device=device)
    results = []
    for update in (optimizer._update_adamw, kernels.adamw):
        whole, largest = [tensor.clone() for tensor in start], torch.zeros((), device=device)
        weight, gradient, mean, square = (tensor[:num] for tensor in whole)
        kept = torch.zeros(num + 8, dtype=torch.bfloat16, device=device)
        update(weight, gradient, (mean, square), largest, kept[:num], by, numbers)
        assert largest == weight.abs().max()
        assert is_narrowed(kept[:num], weight) and not kept[num:].any()
        over = [tensor.clone() for tensor in start]  # written over the gradient that was read
        over[1] = over[1].bfloat16()
        rest = [over[1][:num], (over[2][:num], over[3][:num]), torch.zeros_like(largest)]
        update(over[0][:num], *rest, over[1][:num], by, numbers)
        assert is_narrowed(over[1][:num], over[0][:num])
        assert torch.equal(over[1][num:], start[1][num:].bfloat16())
        results.append(whole)
    unit = torch.finfo(dtype).eps
    for plain, own, before in zip(*results, start, strict=True):
        torch.testing.assert_close(own, plain, rtol=4 * unit, atol=unit)
        assert torch.equal(own[num:], before[num:])
    assert torch.equal(results[1][1], start[1])  # gradients are read alone


def is_narrowed(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether BF16 numbers are FP32 ones rounded; Triton's interpreter cuts them off."""
    if narrow.is_cuda:
        return torch.equal(narrow, wide.bfloat16())
    return bool(((narrow.float() - wide.float()).abs() <= 2**-7 * wide.float().abs()).all())


def check_transpose(shape: tuple[int, int], device: str = "cpu") -> None:
    """Every byte goes to its place, and none beyond the end is touched."""
    bytes_MK = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    whole = torch.full((bytes_MK.numel() + 64,), 0x55, dtype=torch.uint8, device=device)
    turned_KM = whole[: bytes_MK.numel()].view(shape[::-1])
    kernels.transpose(bytes_MK.view(kept_weights.FP8), turned_KM.view(kept_weights.FP8))
    assert torch.equal(turned_KM, bytes_MK.t())
    assert bool((whole[bytes_MK.numel() :] == 0x55).all())


def check_gated(num: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Scales and numbers are those of torch's operators but for rounding; no byte beyond the end.

    A scale may be one unit in the last place off, and so each number one step of FP8.
    """
    gate, up, gradient = (
        (torch.randn(3, num + 64) * torch.tensor([[3.0], [1.0], [1e-3]]))
        .to(device, dtype)[:, :num]
        .unbind()
    )
    silu = torch.nn.functional.silu(gate)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    plain = (of_gate, gradient * silu, silu * up)
    kinds = (swiglu.GRADIENT, swiglu.GRADIENT, kept_weights.FP8)
    room = [torch.full((num + 64,), 0x55, dtype=torch.uint8, device=device) for _ in range(4)]
    first, *rest = (
        one[:num].view(kind) for one, kind in zip(room, (kinds[2], *kinds), strict=True)
    )
    scale, scales = (torch.zeros(n, device=device).squeeze() for n in (1, 2))
    most = [torch.finfo(kind).max for kind in kinds]
    kernels.gated(gate, up, torch.zeros_like(scale), scale, first, most[2], 1e-12)
    kernels.gated_gradients(
        gate, up, gradient, scale, torch.zeros_like(scales), scales, tuple(rest), most[0], 1e-12
    )
    assert torch.equal(first.view(torch.uint8), rest[2].view(torch.uint8))
    for made, exact, by, top in zip(rest, plain, [*scales, scale], most, strict=True):
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(by, top / exact.abs().max().float(), rtol=2 * unit, atol=0)
        found, wanted = made.float(), exact.float() * by
        rounded, info = wanted.to(made.dtype), torch.finfo(made.dtype)
        is_near = (found - wanted).abs() <= info.eps * wanted.abs() + info.smallest_normal
        if made.is_cuda:
            assert (
                float((made.view(torch.uint8) == rounded.view(torch.uint8)).float().mean()) > 0.98
            )
        else:  # Triton's interpreter does not carry into the exponent, as all GPUs do
            is_near |= torch.frexp(rounded.float())[1] > torch.frexp(wanted)[1]
        assert bool(is_near.all())
    assert all(bool((one[num:] == 0x55).all()) for one in room)


def check_turned_gradients(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """One kernel writes the bytes of those that cast and then turn, and none beyond the end."""
    num = shape[0] * shape[1]
    gate, up, gradient = torch.randn(3, *shape, device=device).to(dtype).unbind()
    gate, gradient = 3 * gate, gradient / 1000
    scale, found = torch.tensor(0.5, device=device), []
    for count in (3, 5):
        room = torch.full((count, num + 64), 0x55, dtype=torch.uint8, device=device)
        kinds = swiglu._FORMATS if count == 3 else (*swiglu._FORMATS[:2], *swiglu._FORMATS)
        shapes = [shape] * count if count == 3 else [shape] * 2 + [shape[::-1]] * 3
        fp8 = tuple(
            each[:num].view(kind).view(size)
            for each, kind, size in zip(room, kinds, shapes, strict=True)
        )
        scales = torch.zeros(2, device=device)
        kernels.gated_gradients(
            gate, up, gradient, scale, torch.zeros_like(scales), scales, fp8,
            torch.finfo(swiglu.GRADIENT).max, 1e-12,
        )  # fmt: skip
        assert bool((room[:, num:] == 0x55).all())
        found.append((scales, [each.view(torch.uint8) for each in fp8]))
    (scales, cast), (own, turned) = found
    assert torch.equal(scales, own)
    for each, wanted in zip(turned, [*cast[:2], *(one.t() for one in cast)], strict=True):
        assert torch.equal(each, wanted)


def check_sum(num: int, device: str = "cpu") -> None:
    """A sum is plain torch's to the bit, and its squares' but for rounding; none beyond the end."""
    one, other = torch.randn(2, num, device=device).bfloat16().unbind()
    # A program's lanes add up in FP32: of 500 million squares 3 programs are off by 3e-5.
    whole = torch.zeros(num + 8, device=device)
    squares = torch.full((3 if num < 2**20 else peers.PROGRAMS,), 7.0, device=device)
    kernels.add_two(one, other, whole[:num], squares, 2)
    expected = (one.float() + other.float()) / 2
    assert torch.equal(whole[:num], expected) and not whole[num:].any()
    torch.testing.assert_close(squares.sum(), expected.square().sum(), rtol=1e-5, atol=0)


def check_squares(num: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Squares add up as in FP64, but for rounding, however many programs have nothing to do."""
    numbers = torch.randn(num, device=device).to(dtype)
    for programs in (3, 40) if num < 2**20 else (peers.PROGRAMS,):
        sums = torch.full((programs,), 7.0, device=device)
        kernels.squares(numbers, sums)
        exact = numbers.double().square().sum()
        torch.testing.assert_close(sums.double().sum(), exact, rtol=1e-5, atol=0)


def check_logits_gradient(shape: tuple[int, int], device: str = "cpu") -> None:
    """Plain torch's but for a step of the format, turned exactly, and nothing else touched."""
    num_tokens, num_labels = shape
    logits_CV = (3 * torch.randn(shape, device=device)).bfloat16()
    sums_C = torch.logsumexp(logits_CV.float(), dim=1)
    if device == "cpu":  # numbers that FP8 has, as above: 0 and 1, less 0 or 1
        logits_CV, sums_C = torch.where(logits_CV > 0, 0.0, -200.0).bfloat16(), 0 * sums_C
    targets_C = torch.randint(num_labels, (num_tokens,), device=device)
    targets_C[1::3] = IGNORED
    poison = torch.full((num_labels, num_tokens + 9), 0x55, device=device, dtype=torch.uint8)
    found = []
    for write in (fp8_head.plain_gradient, kernels.logits_gradient):
        turned = poison.clone().view(GRADIENT)
        fp8_CV = torch.empty(shape, device=device, dtype=GRADIENT)
        given = (fp8_head.MOST, IGNORED) if write is kernels.logits_gradient else ()
        write(logits_CV, sums_C, targets_C, fp8_CV, turned[:, 4:-5], *given)
        bytes_VC = turned.view(torch.uint8)
        assert torch.equal(bytes_VC[:, 4:-5], fp8_CV.view(torch.uint8).t())
        assert bool((bytes_VC[:, :4] == 0x55).all()) and bool((bytes_VC[:, -5:] == 0x55).all())
        assert not fp8_CV[1::3].float().any()
        found.append(fp8_CV.float())
    step = 0.0 if device == "cpu" else 0.26
    torch.testing.assert_close(found[1], found[0], rtol=step, atol=step / 1e3)
    labelled = found[1].gather(1, targets_C.clamp(min=0)[:, None])[targets_C != IGNORED]
    assert bool((labelled <= 0).all())
    assert num_labels == 1 or bool(found[1].any())  # a lone label has all the probability


if __name__ == "__main__":
    torch.manual_seed(0)
    layouts = [*itertools.product(SHAPES, DTYPES)]
    for shape, dtype in layouts:
        # Numbers that FP8 has: the interpreter rounds 127 to 64, which no GPU does.
        exact_MK = (torch.randn(shape) * 100).to(kept_weights.FP8).to(dtype)
        check_both_layouts(exact_MK / 1024, torch.tensor(1024.0))
    for shape in SHAPES:
        check_transpose(shape)
        check_turned_gradients(shape, torch.float32)
        check_logits_gradient(shape)
    updates = [*itertools.product((5000, 2048, 7), (None, 3.0), DTYPES)]
    for case in updates:
        check_update(*case)
    sizes = (40_000, 2048, 7)
    for size in sizes:
        check_gated(size, torch.float32)
        check_sum(size)
        for dtype in DTYPES:
            check_squares(size, dtype)
    num_sizes = (2 + len(DTYPES)) * len(sizes)
    print(len(layouts) + 3 * len(SHAPES) + len(updates) + num_sizes, "cases")
