"""What the Triton kernels must do, wherever they run.

TRITON_INTERPRET=1 python kernel_checks.py    by Triton's interpreter, without a GPU
"""

from __future__ import annotations

import itertools

import torch

from fp8study.model import float8_layers, kernels, optimizer

#: Multiples of a tile, less than one, and neither.
SHAPES = [(128, 256), (16, 48), (130, 33), (1, 300), (300, 1)]
DTYPES = [torch.float32, torch.bfloat16]


def check_both_layouts(weight_MK: torch.Tensor, scale: torch.Tensor) -> None:
    """Every byte is plain torch's, and none beyond the end is touched."""
    results = []
    for cast in (float8_layers._cast_both, kernels.cast_both):
        poison = torch.full((2, weight_MK.numel() + 64), 0x55, device=weight_MK.device)
        whole = poison.to(torch.uint8).view(float8_layers.FP8)
        rows_N, columns_N = (one[: weight_MK.numel()] for one in whole)
        cast(weight_MK, scale, rows_N.view(weight_MK.shape), columns_N.view(weight_MK.shape[::-1]))
        results.append(whole.view(torch.uint8))
    assert torch.equal(*results)
    assert bool((results[1][:, weight_MK.numel() :] == 0x55).all())


def check_update(num: int, divisor: float | None, dtype: torch.dtype, device: str = "cpu") -> None:
    """Numbers are plain torch's but for rounding, and none beyond the end is touched."""
    start = [torch.randn(num + 8), torch.randn(num + 8), torch.randn(num + 8), torch.rand(num + 8)]
    start = [tensor.to(device, dtype) for tensor in start]
    by = None if divisor is None else torch.tensor(divisor, device=device)
    numbers = (3e-5, 0.9, 0.1, 0.95, 0.05, 1e-3, 0.7, 1e-8)
    results = []
    for update in (optimizer._update_adamw, kernels.adamw):
        whole, largest = [tensor.clone() for tensor in start], torch.zeros((), device=device)
        weight, gradient, mean, square = (tensor[:num] for tensor in whole)
        update(weight, gradient, (mean, square), largest, by, numbers)
        assert largest == weight.abs().max()
        results.append(whole)
    unit = torch.finfo(dtype).eps
    for plain, own, before in zip(*results, start, strict=True):
        torch.testing.assert_close(own, plain, rtol=4 * unit, atol=unit)
        assert torch.equal(own[num:], before[num:])
    assert torch.equal(results[1][1], start[1])  # gradients are read alone


if __name__ == "__main__":
    torch.manual_seed(0)
    layouts = [*itertools.product(SHAPES, DTYPES)]
    for shape, dtype in layouts:
        # Numbers that FP8 has: the interpreter rounds 127 to 64, which no GPU does.
        exact_MK = (torch.randn(shape) * 100).to(float8_layers.FP8).to(dtype)
        check_both_layouts(exact_MK / 1024, torch.tensor(1024.0))
    updates = [*itertools.product((5000, 2048, 7), (None, 3.0), DTYPES)]
    for case in updates:
        check_update(*case)
    print(len(layouts) + len(updates), "cases")
