"""Achievable peaks: which products are timed, how often they count, and in which arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.recipes import GEMMS
from fp8study.measure import gemm_peaks as ceilings
from fp8study.measure.gemm_peaks import (
    ARITHMETICS,
    LinearShape,
    ceilings_text,
    linear_shapes,
    measure_ceilings,
)
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8

CPU = torch.device("cpu")
SHAPES = Counter({LinearShape(32, 64, True): 3, LinearShape(32, 16, False): 1})


def test_shapes_are_those_of_the_model_converted_or_not() -> None:
    config = make_config({"model": "tiny-llama", "precision": "fp8"})
    model = build_model("tiny-llama", torch.float32, CPU, seed=0)
    before = linear_shapes(model, config)
    convert_to_float8(model, config)
    assert linear_shapes(model, config) == before
    assert before[LinearShape(128, 2048, False)] == 1  # the loss head
    assert before[LinearShape(128, 384, True)] == 8  # gate and up, four layers
    assert sum(before.values()) == 29


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, int, int]]:
    """BF16 runs at 1 TFLOP/s, tensorwise at 2, rowwise at 1.5."""
    asked: list[tuple[str, str, int, int, int]] = []
    rates = dict(zip(ARITHMETICS, (1e12, 2e12, 1.5e12), strict=True))

    def play(arithmetic: str, product: str, m: int, k: int, n: int, device: Any) -> float:
        asked.append((arithmetic, product, m, k, n))
        return 2 * m * k * n / rates[arithmetic]

    monkeypatch.setattr(ceilings, "_time_product", play)
    monkeypatch.setattr(ceilings, "_copy_rate", lambda device: 4.0)
    monkeypatch.setattr(ceilings, "_launch_us", lambda device: 5.5)
    return asked


def test_the_three_products_of_a_layer_have_their_own_shapes(timed: list[Any]) -> None:
    measure_ceilings(Counter({LinearShape(32, 64, True): 1}), 8, "bf16", CPU)
    assert [(p, m, k, n) for a, p, m, k, n in timed if a == "bf16"] == [
        ("output", 8, 32, 64), ("grad_input", 8, 64, 32), ("grad_weight", 64, 8, 32),
    ]  # fmt: skip
    assert {a for a, *_ in timed} == set(ARITHMETICS)


@pytest.mark.parametrize(
    ("precision", "fp8_rate", "fp8_products"),
    [("bf16", 1e12, 0), ("fp8_tensorwise", 2e12, 3), ("fp8_rowwise", 1.5e12, 3),
     ("fp8_rowwise_gw_hp", 1.5e12, 2)],
)  # fmt: skip
def test_the_runs_own_rate_mixes_what_the_run_mixes(
    timed: list[Any], precision: str, fp8_rate: float, fp8_products: int
) -> None:
    found = measure_ceilings(SHAPES, 8, precision, CPU)
    converted, kept = 3 * 2 * 8 * 32 * 64, 2 * 8 * 32 * 16  # FLOPs of one product
    seconds = fp8_products * converted / fp8_rate
    seconds += ((3 - fp8_products) * converted + 3 * kept) / 1e12
    assert found["run_tflops"] == pytest.approx(3 * (converted + kept) / seconds / 1e12)
    assert found["bf16_tflops"] == pytest.approx(1)
    assert found["fp8_tensorwise_tflops"] == pytest.approx(2)
    assert "1.00 TFLOP" not in ceilings_text(found)
    assert "copy: 4.00 TB/s" in ceilings_text(found)
    assert "launch: 5.5 µs" in ceilings_text(found)


def test_an_arithmetic_that_is_not_there_is_null_and_harms_no_other(
    timed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = ceilings._time_product

    def without_rowwise(arithmetic: str, *rest: Any) -> float | None:
        return None if arithmetic == "fp8_rowwise" else play(arithmetic, *rest)

    monkeypatch.setattr(ceilings, "_time_product", without_rowwise)
    found = measure_ceilings(SHAPES, 8, "fp8_tensorwise", CPU)
    assert found["fp8_rowwise_tflops"] is None
    assert found["run_tflops"] is not None
    assert measure_ceilings(SHAPES, 8, "fp8_rowwise", CPU)["run_tflops"] is None


@pytest.mark.parametrize("product", GEMMS)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_product_has_the_shape_it_is_timed_as(
    product: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued is a product of the right size; torch has FP8 products on some CPUs only."""
    results: list[Any] = []

    def once(run: Callable[[], Any], device: torch.device) -> float:
        results.append(run())
        return 1.0

    monkeypatch.setattr(ceilings, "median_seconds", once)
    took = ceilings._time_product(arithmetic, product, 16, 32, 48, CPU)
    if took is None and arithmetic != "bf16":
        pytest.skip("no FP8 product on this CPU")
    assert took == 1.0
    assert (results[0].shape, results[0].dtype) == ((16, 48), torch.bfloat16)


class Queue:
    """A GPU that works off a queue, and a host to which every launch costs time, s."""

    LAUNCH, KERNEL, STAMP = 25e-6, 5e-6, 1e-6

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.free = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mark(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.wait())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / 2e9, 0.0))

    def launch(self, seconds: float, cost: float = LAUNCH) -> None:
        self.host += cost
        self.free = max(self.free, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)


class Mark:
    """A time stamp on that queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.at = queue, math.nan

    def record(self) -> None:
        self.queue.launch(Queue.STAMP, Queue.STAMP)
        self.at = self.queue.free

    def elapsed_time(self, later: Mark) -> float:
        return 1000 * (later.at - self.at)


@pytest.mark.parametrize("kernel_s", [Queue.KERNEL, 200e-6])
def test_a_short_product_is_not_timed_as_its_launch(
    kernel_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(monkeypatch)
    took = ceilings.median_seconds(lambda: queue.launch(kernel_s), CPU)
    assert took == pytest.approx(kernel_s, rel=0.1)


@pytest.mark.parametrize("kernel_s", [Queue.KERNEL, 200e-6])
def test_a_launch_is_timed_on_the_host_and_not_as_its_kernel(
    kernel_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(monkeypatch)
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: queue.host)
    monkeypatch.setattr(torch.Tensor, "add_", lambda value, other: queue.launch(kernel_s))
    assert ceilings._launch_us(CPU) == pytest.approx(1e6 * Queue.LAUNCH)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(UserError, match="a CPU's GEMMs say nothing of one"):
        ceilings.ceilings_of(make_config({"precision": "fp8"}).resolved())
