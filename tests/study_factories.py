"""Synthetic studies for tests: `make_results` fills a results folder with those the report knows.

In the shapes that it must survive: several machines, seeds, stale optimizers, failures, unknown
peaks. None of these numbers was measured.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fp8study.core.records import RunRecord
from tests.factories import CONFIG, CPU, loss_curve, make_record, store

MACHINE = "reference/h200x8"


def store_trained(results: Path, place: str, end: float, seed: int = 0, /, **changes: Any) -> None:
    """Store a completed run whose record and metrics agree on the loss it ended at."""
    num_steps = changes.get("num_steps", CONFIG["num_steps"])
    losses = loss_curve(num_steps, end, seed)
    results_changes = changes.pop("results", {}) | {
        "loss_start": losses[0],
        "loss_last20_mean": float(np.mean(losses[-20:])),
    }
    record = make_record(seed=seed, results=results_changes, **changes)
    store(results, place, record, losses)


def make_quick(results: Path, seeds: int = 1) -> None:
    """Two models, two precisions, three GPU counts."""
    for model, end in (("llama-3.2-1b", 4.5), ("llama-3.1-8b", 4.2)):
        for precision in ("bf16", "fp8_tensorwise"):
            for num_gpus in (1, 2, 4):
                for seed in range(seeds):
                    store_trained(
                        results,
                        MACHINE,
                        end + 0.01 * (precision != "bf16"),
                        seed,
                        model=model,
                        precision=precision,
                        num_gpus=num_gpus,
                        fp8_all_gather=precision != "bf16" and num_gpus > 1,
                    )


def make_document_a(results: Path) -> None:
    """The five arms of document A's single-GPU failure."""
    common: dict[str, Any] = {
        "study": "document-a",
        "sequence_length": 2048,
        "num_steps": 400,
        "learning_rate": 1e-5,
        "compile": False,
        "strategy": "none",
    }
    fp8 = {"precision": "fp8_tensorwise"}
    stale = {"optimizer_binding": "before_conversion", "fp8_all_gather": True}
    store_trained(results, MACHINE, 5.4, master_dtype="bf16", **common)
    store_trained(
        results, MACHINE, 10.0, master_dtype="bf16", outside_pct=78.4, **common, **fp8, **stale
    )
    store_trained(results, MACHINE, 5.41, master_dtype="bf16", **common, **fp8)
    store_trained(results, MACHINE, 3.6, **common)
    store_trained(results, MACHINE, 3.65, **common, **fp8)


def store_attribution_arm(
    results: Path, end: float, seed: int, machine: str = MACHINE, /, **changes: Any
) -> None:
    """One arm of the attribution: a fault leaves 78.4 % of the parameters untrained."""
    config = {
        "study": "attribution",
        "sequence_length": 2048,
        "num_steps": 40,
        "learning_rate": 1e-5,
        "strategy": "none",
        **changes,
    }
    losses = [loss + end - 5.0 for loss in loss_curve(40, 5.0, seed)]
    stale = config.get("optimizer_binding") == "before_conversion" and config["fp8_all_gather"]
    record = make_record(
        seed=seed,
        outside_pct=78.4 if stale or config.get("untrained") else 0.0,
        run_id=f"{seed}-{zlib.crc32(json.dumps(config, sort_keys=True).encode())}",
        results={"loss_start": losses[0], "loss_last20_mean": float(np.mean(losses[-20:]))},
        **config,
    )
    store(results, machine, record, losses)


def make_attribution(results: Path, seeds: int = 5) -> None:
    """The ten arms of the attribution; the fault costs 4 nats, BF16 masters 2, FP8 0.004."""
    rng = np.random.default_rng(0)
    fp8 = {"precision": "fp8_tensorwise", "fp8_all_gather": True}
    before = {"optimizer_binding": "before_conversion"}
    arms: list[tuple[float, dict[str, Any]]] = [
        (0.0, {"precision": "bf16"}),
        (4.004, fp8 | before),
        (0.004, fp8),
        (4.0, {"precision": "bf16", "untrained": ["model.layers.*"]}),
    ]
    one_switch = fp8 | before | {"fp8_all_gather": False}
    extra = [(0.004, one_switch), (0.003, {"precision": "fp8_rowwise"})]
    for seed in range(seeds):
        for masters, start in (("bf16", 6.0), ("fp32", 4.0)):
            for cost, arm in arms + (extra if masters == "bf16" else []):
                end = start + cost + float(rng.normal(0, 0.001))
                store_attribution_arm(results, end, seed, master_dtype=masters, **arm)


def make_effective_batch(results: Path, seeds: int = 3) -> None:
    """Effective batches of 1, 2 and 4, each in three ways; the gap is 0.1 %."""
    rng = np.random.default_rng(1)
    for size in (1, 2, 4):
        for way in ("num_gpus", "micro_batch_size", "gradient_accumulation_steps"):
            if size == 1 and way != "num_gpus":
                continue
            for seed in range(seeds):
                for precision in ("bf16", "fp8_tensorwise"):
                    loss = 5 + 0.01 * seed + (precision != "bf16") * rng.normal(0.005, 0.001)
                    record = make_record(
                        study="effective-batch",
                        run_id=f"{way}-{size}-{precision}-{seed}",
                        precision=precision,
                        seed=seed,
                        results={"loss_last20_mean": loss},
                        **{way: size},
                    )
                    store(results, MACHINE, record)


def make_smoke(results: Path) -> None:
    """A tiny model on a CPU, FP8 emulated, on one and two processes."""
    for precision in ("bf16", "fp8_tensorwise", "fp8_rowwise"):
        for num_gpus in (1, 2):
            losses = loss_curve(30, 7.0)
            record = make_record(
                study="smoke",
                model="tiny-llama",
                precision=precision,
                num_gpus=num_gpus,
                fp8_all_gather=precision == "fp8_tensorwise" and num_gpus > 1,
                num_steps=30,
                sequence_length=128,
                compile=False,
                machine=CPU,
                results={
                    "mfu_bf16_peak_pct": None,
                    "compile_seconds": None,
                    "loss_last20_mean": float(np.mean(losses[-20:])),
                },
            )
            store(results, "local", record, losses)


def make_broken(results: Path) -> None:
    """One run for each way of not completing, and one on a GPU whose peak nobody knows."""
    empty: dict[str, Any] = dict.fromkeys(make_record().results)
    for number, status in enumerate(("failed", "interrupted", "out_of_memory", "diverged")):
        record = make_record(
            study="broken",
            run_id=f"broken-{number}",
            status=status,
            status_detail=f"synthetic: {status} | with a bar",
            precision="fp8_tensorwise",
            results=empty,
            git={"commit": None, "dirty": None},
        )
        losses = [10.0, 9.0, None] if status == "diverged" else []
        store(results, "local", record, losses)
    bare = RunRecord("bare", "broken", "failed", {}, "2000-01-01T00:00:00Z", "2000-01-01T00:00:01Z")
    store(results, "local", bare)
    store_trained(
        results,
        "local",
        5.0,
        study="unknown-gpu",
        machine={"gpu_name": "Synthetic GPU", "gpu_memory_gib": None},
        results={"mfu_bf16_peak_pct": None, "memory_peak_gib": None},
    )


def make_results(results: Path) -> Path:
    """Fill `results` with everything above and return it."""
    results.mkdir(parents=True, exist_ok=True)
    make_quick(results)
    make_document_a(results)
    make_smoke(results)
    make_attribution(results, seeds=3)
    make_effective_batch(results)
    make_broken(results)
    return results
