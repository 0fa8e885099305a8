"""Synthetic records for the tests of claims, kept in memory. None of these numbers was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.instruments import instruments_frame
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import throughput_table
from fp8study.core.records import RunRecord, StoredRun
from tests.factories import make_record
from tests.instrument_factories import audit_of, instruments_of
from tests.noise_factories import N, make_noise_section

SMALL, LARGE = "llama-3.2-1b", "llama-3.1-8b"
SIZES = {SMALL: 1_200_000_000, LARGE: 8_000_000_000, "tiny-llama": 1_000_000}
FP8 = ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp")
#: Made when a test asks for them.
Records = Callable[[], list[RunRecord]]
_number = itertools.count()


class Frames:
    """What `Tables` takes, each frame made when it is first asked for."""

    def __init__(self, records: Iterable[RunRecord], label: str = "local") -> None:
        self.stored = [
            StoredRun(record, Path(), label, record.__dict__.get("curve", {})) for record in records
        ]

    runs = cached_property(lambda self: shorten_arms(runs_frame(self.stored)))
    metrics = cached_property(lambda self: metrics_frame(self.stored))
    throughput = cached_property(lambda self: throughput_table(self.runs))
    loss_gaps = cached_property(lambda self: loss_gap_table(self.runs))
    instruments = cached_property(lambda self: instruments_frame(self.stored, self.runs))


def tables(records: Iterable[RunRecord]) -> Tables:
    return Tables(Frames(records), ["local"])


def run(
    precision: str = "bf16", model: str = SMALL, rate: float = 100.0, **changes: Any
) -> RunRecord:
    """One run; fields of `instruments`, `audit` and the rest as `make_record` takes them.

    What is given as ``config`` is added to the configuration, whether it is a field or not.
    """
    flops = 6.0 * SIZES[model]
    measured = {
        "tokens_per_second_per_gpu": rate, "tflops_per_gpu": rate * flops / 1e12,
        "step_time_ms_median": 4e6 / rate, "memory_peak_gib": 20.0,
    } | changes.pop("results", {})  # fmt: skip
    facts = {"num_parameters": SIZES[model], "flops_per_token": flops}
    facts |= changes.pop("model_facts", {})
    extra, curve = changes.pop("config", {}), changes.pop("curve", {})
    record = make_record(
        precision=precision, model=model, run_id=f"run-{next(_number)}", results=measured,
        study=changes.pop("study", "synthetic"), **changes,
    )  # fmt: skip
    record.model.update(facts)
    record.config.update(extra)
    record.__dict__["curve"] = curve
    return record


def pair(lead: float = 10.0, precision: str = "fp8_tensorwise", rate: float = 100.0,
         fp8: dict[str, Any] | None = None, **changes: Any) -> list[RunRecord]:  # fmt: skip
    """A BF16 run and an FP8 run that is faster by `lead` %; `fp8` are changes of the second."""
    return [run(rate=rate, **changes),
            run(precision, rate=rate * (1 + lead / 100), **changes | (fp8 or {}))]  # fmt: skip


def grid(rate: Callable[[str, int, int, str], float]) -> list[RunRecord]:
    """Document A's grid; `rate` is of model, length, GPUs and precision."""
    cells = itertools.product((SMALL, LARGE), (2048, 4096, 8192), (1, 2, 4), ("bf16", FP8[0]))
    return [
        run(precision, model, rate(model, length, gpus, precision), sequence_length=length,
            num_gpus=gpus)
        for model, length, gpus, precision in cells
    ]  # fmt: skip


def losses(gap_pct: float, precision: str = "fp8_tensorwise", seeds: int = 4, outside: float = 0.0,
           config: dict[str, Any] | None = None, both: dict[str, Any] | None = None,
           wobble: float = 0.002, **changes: Any) -> list[RunRecord]:  # fmt: skip
    """Pairs by seed whose FP8 run ends `gap_pct` above BF16's, and by turns a `wobble` off that.

    `config` is added to the FP8 runs' configuration, `both` to that of all.
    """
    both = both or {}
    found = []
    for seed in range(seeds):
        base = 5 + 0.01 * seed
        found.append(run(seed=seed, results={"loss_last20_mean": base}, config=both, **changes))
        ended = base * (1 + gap_pct / 100) + wobble * (-1) ** seed
        found.append(
            run(precision, seed=seed, results={"loss_last20_mean": ended},
                config=both | (config or {}),
                model_facts={"parameters_outside_optimizer_pct": outside}, **changes)
        )  # fmt: skip
    return found


def measured(lead: float = 10.0, num_gpus: int = 4, fp8: dict[str, Any] | None = None,
             **changes: Any) -> list[RunRecord]:  # fmt: skip
    """A pair with instruments; `changes` are parts of the FP8 run's, `fp8` fields of its record."""
    base = {"audit": audit_of("bf16"), "instruments": instruments_of("bf16", num_gpus)}
    both = pair(lead, num_gpus=num_gpus, **base)
    fields = {
        "audit": audit_of(FP8[0]) | changes.pop("audit", {}),
        "instruments": instruments_of(FP8[0], num_gpus, **changes),
        "fp8_all_gather": num_gpus > 1,
    }
    rate = both[1].results["tokens_per_second_per_gpu"]
    return [both[0], run(FP8[0], rate=rate, num_gpus=num_gpus, **fields | (fp8 or {}))]


def gathered(dtype: str, gib: float, reduced: str = "float32") -> dict[str, Any]:
    """The communication of a step: what is gathered, and the format of what is reduced."""
    return {"communication": [
        {"collective": "all_gather", "dtype": dtype, "num": 7, "gib": gib},
        {"collective": "reduce_scatter", "dtype": reduced, "num": 8, "gib": 20.0},
    ]}  # fmt: skip


def operators(*low: str, num_fast: int | None = 0) -> dict[str, Any]:
    """A run that was not compiled, profiled: operators that took FP8, and GEMMs that sum fast."""
    gemm = {"dtypes": "float8_e4m3fn × float8_e4m3fn", "num": 7, "num_fast": num_fast, "tflop": 1.0}
    by_dtype = {"bfloat16": ["silu"], "float8_e4m3fn": [*low]}
    step = {"gemm": [gemm], "operations": {k: v for k, v in by_dtype.items() if v}}
    return {"config": {"compile": False, "fp8_emulate": False}, "instruments": {"step": step}}


def noisy(errors: Sequence[float] = (0.1,), alike: int = 1) -> RunRecord:
    """A run that measured noise: a relative error for each recipe, and `alike` equal neighbours."""
    section = make_noise_section()
    draw = np.random.default_rng(0)
    rows = 1 + np.repeat(draw.standard_normal((N // alike, 60)), alike, axis=0)
    for point in section["points"]:
        gram = (rows @ rows.T).tolist()
        point["gradient_grams"] = {"all": gram, "fp8_layers": gram}
        template = point["comparisons"][0]
        point["losses"] |= dict.fromkeys(FP8, [2.5] * N)
        # All of it systematic: the same for each sequence.
        point["comparisons"] = [
            template | {
                "precision": name, "error_square": [0.0, 60 * size**2],
                "error_grams": dict.fromkeys(
                    ("all", "fp8_layers"), (60 * size**2 * (0.9 + 0.1 * np.eye(N))).tolist()
                ),
            }
            for name, size in zip(FP8, errors, strict=False)
        ]  # fmt: skip
    return run(FP8[0], study="precision-noise", noise=section)


def curves(
    early_pct: float,
    late_pct: float,
    num_steps: int = 1000,
    period: int = 0,
    crossing: int = 0,
    blocks: int = 2000,
    seeds: int = 3,
) -> list[RunRecord]:
    """Some seeds over a thousand steps: FP8's gap in the first half and in the second.

    With a `period` it comes and goes, and is gone at the end. Around the step `crossing` all seeds
    have one loss. The text has as many `blocks`, one of which is a step.
    """
    found = []
    for seed, precision in itertools.product(range(seeds), ("bf16", FP8[0])):
        step = np.arange(1, num_steps + 1)
        gap = np.where(step <= num_steps // 2, early_pct, late_pct) * (precision != "bf16")
        gap = gap * np.sin(np.pi * step / period) if period else gap
        apart = 0.01 * seed * (np.abs(step - crossing) > 30 if crossing else 1)
        loss = (5 + apart) * (1 + gap / 100)
        curve = {"step": step.tolist(), "loss": loss.tolist(), "step_time_ms": [None] * num_steps}
        ended = {"loss_last20_mean": float(loss[-20:].mean()), "steps_completed": num_steps}
        found.append(run(precision, seed=seed, num_steps=num_steps, results=ended, curve=curve,
                         data={"num_train_tokens": 4096 * blocks}))  # fmt: skip
    return found


def rising(precision: str, breaks_at: float, how: str = "diverged", at: int = 30,
           **changes: Any) -> list[RunRecord]:  # fmt: skip
    """A sweep of three rates, two seeds or one; from `breaks_at` on runs are lost, at a step."""
    found, too_high = [], 7.0 if how == "no better than frequencies" else 12.0
    config = {"lr_warmup_steps": changes.pop("warm_up", 20)}
    seeds = [changes.pop("seed")] if "seed" in changes else [0, 1]
    for rate, seed in itertools.product((1e-4, 1e-3, 1e-2), seeds):
        last = too_high if rate >= breaks_at else 5.0
        ended = {"loss_start": 9.0, "loss_last20_mean": last}
        curve = {"step": [*range(1, 61)], "loss": [6.0] * at + [last] * (60 - at)}
        status = "completed"
        if how == "diverged":
            curve = {}
            if rate >= breaks_at:
                ended |= {"loss_last20_mean": None, "steps_completed": at}
                status = "diverged"
        data = {"unigram_loss": 6.5}
        found.append(run(precision, learning_rate=rate, seed=seed, status=status, results=ended,
                         curve=curve, config=config, data=data, **changes))  # fmt: skip
    return found


def sweep(bf16: float, fp8: float, how: str = "diverged", at: int = 30, **changes: Any) -> Records:
    return lambda: (rising("bf16", bf16, how, at, **changes)
                    + rising(FP8[0], fp8, how, at, **changes))  # fmt: skip


def with_warm_up(fp8: float, later: float) -> Records:
    return lambda: sweep(1e-2, fp8)() + sweep(1e-2, later, warm_up=100)()
