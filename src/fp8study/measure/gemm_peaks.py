"""What this GPU really reaches at a model's own shapes: the achievable peaks.

A datasheet's peak is out of reach: a GPU at its power limit lowers its clocks under real numbers.
So every run on a GPU measures, right after training and on the same warm GPU, its own matrix
GEMMs alone, in BF16 and in both scalings of FP8, without the casts around them; a copy; and how
fast its host launches kernels, which limits small models and differs from host to host. GEMMs run
one after the other from a full queue: one of a small layer takes less time than its launch.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig, make_config
from fp8study.core.errors import UserError
from fp8study.core.recipes import ARITHMETICS, GEMMS, RECIPES, Precision
from fp8study.model.build import build_model
from fp8study.model.float8 import float8_config, is_converted, why_skipped

_COPY_BYTES = 2**30
_REPEATS = 12
_WARM_UPS = 3
#: A time stamp between two kernels costs some microseconds, so a block of calls is this long.
_BLOCK_SECONDS = 200e-6
_MOST_CALLS = 16
#: Some milliseconds, in which the host queues all that is timed.
_HEAD_START_CYCLES = 2**24
#: Fewer than CUDA queues, or the host would wait for the GPU.
_LAUNCHES = 500


@dataclass(frozen=True)
class LinearShape:
    """All linear layers of one shape and one treatment."""

    in_features: int
    out_features: int
    in_fp8: bool
    """Whether the run computes them in FP8."""


def linear_shapes(model: torch.nn.Module, config: ResolvedConfig) -> Counter[LinearShape]:
    """Return how many linear layers of each shape a model has, converted or not yet."""
    shapes: Counter[LinearShape] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            in_fp8 = is_converted(module) or why_skipped(config, name, module) is None
            shapes[LinearShape(module.in_features, module.out_features, in_fp8)] += 1
    return shapes


def ceilings_of(config: ResolvedConfig) -> dict[str, Any]:
    """Measure, on the first GPU, what GEMMs reach at the shapes of a configuration's model.

    Raises:
        UserError: There is no GPU that torch could use.
    """
    if not torch.cuda.is_available():
        raise UserError(
            "--measure: no NVIDIA GPU is visible here, and a CPU's GEMMs say nothing of one; "
            "run it on the GPU in question"
        )
    model = build_model(config.model, torch.bfloat16, torch.device("meta"), seed=0)
    num_tokens = config.tokens_per_pass
    shapes = linear_shapes(model, config)
    return measure_ceilings(shapes, num_tokens, config.precision, torch.device("cuda", 0))


def measure_ceilings(
    shapes: Counter[LinearShape], num_tokens: int, precision: Precision, device: torch.device
) -> dict[str, Any]:
    """Time every GEMM of a model's linear layers by itself, a copy, and the host's launches.

    Args:
        shapes: From `linear_shapes`.
        num_tokens: Tokens of one forward pass on one GPU: micro batch times sequence length.
        precision: The run's, for ``run_tflops``.
        device: A GPU with FP8 matrix units.

    Returns:
        ``num_tokens``; ``bf16_tflops``, ``fp8_tensorwise_tflops``, ``fp8_rowwise_tflops``: useful
        TFLOP/s over all GEMMs, each as often as the model has it; ``run_tflops``: with each
        GEMM in the arithmetic that the run gives it; ``copy_tb_per_s``: bytes read and
        written, from device to device; ``launch_us``: what an elementwise operator on one number
        costs the host, eager PyTorch's own work included; ``products``: one entry per shape and
        GEMM with ``tflops`` by arithmetic. A figure that could not be had is null.
    """
    recipe = RECIPES[precision]
    rows = []
    seconds = dict.fromkeys((*ARITHMETICS, "run"), 0.0)
    total = 0.0
    for shape, count in shapes.items():
        into, out = shape.in_features, shape.out_features
        sizes = {
            "output": (num_tokens, into, out),
            "grad_input": (num_tokens, out, into),
            "grad_weight": (out, num_tokens, into),
        }
        work = 2.0 * num_tokens * into * out
        for product in GEMMS:
            took = {a: _time_product(a, product, *sizes[product], device) for a in ARITHMETICS}
            tflops = {a: work / s / 1e12 if s else None for a, s in took.items()}
            rows.append(vars(shape) | {"count": count, "product": product, "tflops": tflops})
            in_fp8 = shape.in_fp8 and product in recipe.fp8_gemms
            took["run"] = took[f"fp8_{recipe.scaling}" if in_fp8 else "bf16"]
            for arithmetic, took_s in took.items():
                seconds[arithmetic] += count * (took_s or math.nan)
            total += count * work
    rates = {f"{a}_tflops": total / s / 1e12 if s > 0 else None for a, s in seconds.items()}
    beside = {"copy_tb_per_s": _copy_rate(device), "launch_us": _launch_us(device)}
    return {"num_tokens": num_tokens, **rates, **beside, "products": rows}


def _time_product(
    arithmetic: str, product: str, m: int, k: int, n: int, device: torch.device
) -> float | None:
    """Return a GEMM's median time, s; None where this GPU or torch cannot do it."""
    try:
        left_MK = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        right_KN = torch.randn(n, k, device=device, dtype=torch.bfloat16).t()
        if arithmetic == "bf16":
            return median_seconds(lambda: torch.mm(left_MK, right_KN), device)
        return median_seconds(_scaled_product(arithmetic, product, left_MK, right_KN), device)
    except (RuntimeError, ValueError):  # out of memory is a RuntimeError too
        return None


def _scaled_product(
    arithmetic: str, product: str, left_MK: torch.Tensor, right_KN: torch.Tensor
) -> Callable[[], object]:
    """Prepare a GEMM as torchao's recipe does it: dtypes, scales, accumulation."""
    from torchao.float8.config import ScalingGranularity

    recipe = float8_config(make_config({"precision": arithmetic}).resolved())
    inputs, weights = recipe.cast_config_input.target_dtype, recipe.cast_config_weight.target_dtype
    gradients = recipe.cast_config_grad_output.target_dtype
    left_dtype, right_dtype, accumulation = {
        "output": (inputs, weights, recipe.gemm_config_output),
        "grad_input": (gradients, weights, recipe.gemm_config_grad_input),
        "grad_weight": (gradients, inputs, recipe.gemm_config_grad_weight),
    }[product]
    by_row = recipe.cast_config_input.scaling_granularity is ScalingGranularity.AXISWISE
    return partial(
        torch._scaled_mm,
        left_MK.to(left_dtype),
        right_KN.to(right_dtype),  # keeps its layout
        scale_a=left_MK.new_ones((len(left_MK), 1) if by_row else (), dtype=torch.float32),
        scale_b=right_KN.new_ones((1, right_KN.shape[1]) if by_row else (), dtype=torch.float32),
        out_dtype=torch.bfloat16,
        use_fast_accum=accumulation.use_fast_accum,
    )


def _copy_rate(device: torch.device) -> float | None:
    """Return TB/s, reads and writes counted, or None where there is no room for two buffers."""
    try:
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_(0, 255)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None
    return 2 * _COPY_BYTES / median_seconds(lambda: target.copy_(source), device) / 1e12


def _launch_us(device: torch.device) -> float:
    value = torch.zeros(1, device=device)
    took = []
    for _ in range(_WARM_UPS + _REPEATS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(_LAUNCHES):
            value.add_(1)
        took.append(time.perf_counter() - started)
    return 1e6 * statistics.median(took[_WARM_UPS:]) / _LAUNCHES


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of what one call of `run` queues, s on the GPU's own clock."""
    for _ in range(_WARM_UPS):
        run()
    once = _block_seconds(run, 1, 1, device)[0]
    calls = min(_MOST_CALLS, max(1, math.ceil(_BLOCK_SECONDS / max(once, 1e-6))))
    return statistics.median(_block_seconds(run, _REPEATS, calls, device)) / calls


def _block_seconds(
    run: Callable[[], object], num_blocks: int, calls: int, device: torch.device
) -> list[float]:
    """Time blocks of calls; the GPU waits first, so that none of them waits for its launch."""
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_HEAD_START_CYCLES)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_blocks + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(calls):
            run()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def ceilings_text(ceilings: dict[str, Any]) -> str:
    """Return the figures for reading."""

    def cells(rates: Iterable[float | None]) -> str:
        return "".join(f"{rate:>10.0f}" if rate else f"{'–':>10}" for rate in rates)

    lines = [
        f"{ceilings['num_tokens']} tokens; TFLOP/s of the GEMMs alone, without casts",
        f"  {'layer':<28}{'GEMM':<12}{'BF16':>10}{'tensor':>10}{'row':>10}",
    ]
    for row in ceilings["products"]:
        layer = f"{row['in_features']} → {row['out_features']} ({row['count']} ×)"
        rates = cells(row["tflops"][a] for a in ARITHMETICS)
        lines.append(f"  {layer:<28}{row['product']:<12}{rates}")
    totals = cells(ceilings[f"{a}_tflops"] for a in ARITHMETICS)
    lines.append(f"  {'all, as often as they occur':<40}{totals}")
    copy = ceilings["copy_tb_per_s"]
    lines.append(f"  copy: {copy:.2f} TB/s, read and written" if copy else "  copy: no room")
    lines.append(f"  launch: {ceilings['launch_us']:.1f} µs of the host, an eager operator")
    return "\n".join(lines)
