"""Sampling noise and precision error of a gradient, measured at one point of a training run.

A training step sees the gradient of a few sequences instead of that of all text (sampling noise),
and computes it with rounded numbers (precision error). Document A says that the two together
make FP8 fail at an effective batch of 1. Here both are measured at the same weights and on the
same sequences, none of which the run trains on:

1.  g_i, the BF16 gradient of sequence i, for i = 1 … N. The matrix of their inner products
    <g_i, g_j> holds all that `fp8study.analysis.noise` needs to know about sampling noise.
2.  e_i = (gradient in one precision) - (gradient in another), same weights, same sequence. Their
    inner products say how much of the error averages away over sequences and how much does not.
3.  The error of each single GEMM: `fp8study.measure.quantisation`.

A batch here is a mean of gradients of single sequences, as with ``micro_batch_size=1`` on many
GPUs or in many accumulation steps. In a larger micro-batch sequences share tensorwise scales.

What computes in which precision is said in `model.shadows`. An error is taken in FP32 before
anything is rounded; the inner products are of its BF16 rounding, whose own relative error of at
most 2^-9 per element is of no account here.

Memory. With P parameters we keep at most two sets of N gradients in BF16: the g_i, which are
BF16 numbers, so nothing is lost, and the errors of one comparison at a time, 4·N·P bytes
together. On top come the BF16 weights (2P), one FP32 gradient (4P), one BF16 gradient (2P) and
working space for the largest parameter. Llama-3.2-1B (P = 1.24e9) with N = 16 needs 79 GB for
the two sets and 14 GB for the rest, beside the 15 GB of the master weights and Adam states.
Keeping all comparisons at once would need 198 GB; so the FP32 gradients are computed anew for
each recipe, and a point costs N × (1 BF16 + 4 FP32 + 3 FP8) passes forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.recipes import FP8_RECIPES
from fp8study.measure.quantisation import measure_products, short_numbers
from fp8study.model.shadows import Shadows

#: Inner products are summed over this many elements in FP32, beyond that in FP64.
_CHUNK = 1024
#: Elements of each of N gradients that are in FP32 at a time.
SPAN = 4096 * _CHUNK


def measure_noise(
    config: ResolvedConfig, trained: torch.nn.Module, ids_NT: torch.Tensor
) -> dict[str, Any]:
    """Measure one point on int64[N, T] token ids; nothing of the model in training is changed.

    Returns:
        ``num_samples``; ``losses`` (precision to N losses, nats per token); ``gradient_grams``
        (the N×N inner products <g_i, g_j> of the BF16 gradients, over ``all`` parameters and
        over those of the ``fp8_layers``, if there are any); ``comparisons``, each with
        ``precision``, ``reference``, by parameter the means over sequences of
        ``error_square`` |e_i|² and ``error_dot_reference``, and, but for FP8 against FP32,
        ``error_grams`` (<e_i, e_j>);
        ``parameters``: their names and, by reference, mean squared gradients;
        ``products``: `measure_products` of the first sequence.
    """
    _release(ids_NT.device)
    with exact_fp32():
        shadows = Shadows(config, trained)
        point = _gradients(shadows, ids_NT)
        converted = {recipe: shadows.models[recipe] for recipe in FP8_RECIPES}
        point["products"] = measure_products(shadows.models["bf16"], converted, ids_NT[0])
    del shadows, converted
    _release(ids_NT.device)
    return point


def _gradients(shadows: Shadows, ids_NT: torch.Tensor) -> dict[str, Any]:
    weights = shadows.trainable("bf16")
    num = len(ids_NT)
    samples, errors = GradientSet(weights, num), GradientSet(weights, num)
    losses = {precision: ids_NT.new_zeros(num, dtype=torch.float32) for precision in shadows.models}

    def gradient(precision: str, i: int) -> tuple[torch.Tensor, ...]:
        found, losses[precision][i] = shadows.gradient(precision, ids_NT[i])
        return found

    for i in range(num):
        for p, row in enumerate(gradient("bf16", i)):
            samples.blocks[p][i] = row.reshape(-1)
    against_fp32 = [_compare(samples.rows(i), gradient("fp32", i), errors, i) for i in range(num)]
    gradient_grams = samples.grams()
    scopes = {"all": torch.ones(len(weights), dtype=torch.bool)}
    if any(shadows.is_fp8):
        scopes["fp8_layers"] = torch.tensor(shadows.is_fp8)

    def in_batches() -> dict[str, Any]:
        return {"error_grams": _by_scope(errors.grams(), scopes)}

    fp32_square = torch.stack(against_fp32).mean(0)[:, 2]
    comparisons = [_comparison("bf16", "fp32", against_fp32) | in_batches()]
    for recipe in FP8_RECIPES:
        against_bf16, against_fp32 = [], []
        for i in range(num):
            rounded = gradient(recipe, i)
            against_bf16.append(_compare(rounded, samples.rows(i), errors, i))
            against_fp32.append(_compare(rounded, gradient("fp32", i)))
        comparisons.append(_comparison(recipe, "bf16", against_bf16) | in_batches())
        comparisons.append(_comparison(recipe, "fp32", against_fp32))
    return {
        "num_samples": num,
        "losses": {p: short_numbers(found, 9) for p, found in losses.items()},
        "gradient_grams": _by_scope(gradient_grams, scopes),
        "comparisons": comparisons,
        "parameters": {
            "names": shadows.names,
            "is_fp8": shadows.is_fp8,
            "square": {
                "bf16": short_numbers(gradient_grams.diagonal(dim1=1, dim2=2).mean(1), 5),
                "fp32": short_numbers(fp32_square, 5),
            },
        },
    }


class GradientSet:
    """N gradients in BF16: one block [N, numel] a parameter, in the parameters' order."""

    def __init__(self, parameters: list[torch.nn.Parameter], num_samples: int) -> None:
        self.blocks = [
            torch.empty(num_samples, p.numel(), dtype=torch.bfloat16, device=p.device)
            for p in parameters
        ]

    def rows(self, i: int) -> list[torch.Tensor]:
        """Return gradient `i`, one flat vector a parameter."""
        return [block[i] for block in self.blocks]

    def grams(self) -> torch.Tensor:
        """Return the inner products of all pairs by parameter: float64[parameters, N, N].

        Short FP32 products in a batch, added in FP64: a single product over millions of columns
        would keep one multiprocessor busy and the others waiting, and lose digits.
        """
        grams = []
        for block in self.blocks:
            gram = block.new_zeros(len(block), len(block), dtype=torch.float64)
            for span in block.split(SPAN, dim=1):
                padding = -span.shape[1] % _CHUNK
                columns = torch.nn.functional.pad(span.float(), (0, padding))
                chunks = columns.view(len(block), -1, _CHUNK).transpose(0, 1)
                gram += torch.bmm(chunks, chunks.mT).double().sum(0)
            grams.append(gram)
        return torch.stack(grams)


def _compare(
    rounded: Any, reference: Any, errors: GradientSet | None = None, i: int = 0
) -> torch.Tensor:
    """Return float64[parameters, 3]: |e|², <e, reference> and |reference|² of one sequence.

    Each gradient has one tensor a parameter. The error becomes row `i` of `errors`.
    """
    rows = []
    for p, (a, b) in enumerate(zip(rounded, reference, strict=True)):
        exact = b.reshape(-1).float()
        error = a.reshape(-1).float() - exact
        if errors is not None:
            errors.blocks[p][i] = error
        rows.append(
            torch.stack([(error * error).sum(), (error * exact).sum(), (exact * exact).sum()])
        )
    return torch.stack(rows).double()


def _comparison(precision: str, reference: str, sums: list[torch.Tensor]) -> dict[str, Any]:
    """Write a comparison down; `sums` holds float64[parameters, 3] for each of N sequences."""
    means_P3 = torch.stack(sums).mean(0)
    return {
        "precision": precision,
        "reference": reference,
        "error_square": short_numbers(means_P3[:, 0], 5),
        "error_dot_reference": short_numbers(means_P3[:, 1], 5),
    }


def _by_scope(grams: torch.Tensor, scopes: dict[str, torch.Tensor]) -> dict[str, Any]:
    sums = {name: grams[chosen.to(grams.device)].sum(0) for name, chosen in scopes.items()}
    return {name: short_numbers(gram, 9) for name, gram in sums.items()}


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Multiply FP32 matrices in FP32 (no TF32), whatever the training has chosen.

    On a GPU the attention kernel for FP32 heeds no such flag: it makes one FP32 product from three
    TF32 ones, which is nearly as accurate. `tests/gpu` holds the gradient against FP64.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _release(device: torch.device) -> None:
    """Give cached memory back: training and measuring use blocks of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
