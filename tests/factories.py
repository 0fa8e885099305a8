"""Synthetic run records for tests. None of these numbers was measured.

`make_results` fills a results folder with the studies that the report knows, in the shapes that
it must survive: several machines, seeds, stale optimizers, failures, unknown peaks.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fp8study.core.records import RunRecord, write_record

VOCAB_SIZE = 128_256
CONFIG: dict[str, Any] = {
    "model": "llama-3.2-1b",
    "precision": "bf16",
    "num_gpus": 1,
    "strategy": "fsdp2",
    "sequence_length": 4096,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_steps": 60,
    "num_warmup_steps": 10,
    "learning_rate": 3e-4,
    "lr_schedule": "constant",
    "seed": 0,
    "compile": True,
    "activation_checkpointing": False,
    "master_dtype": "fp32",
    "optimizer_binding": "after_conversion",
    "fp8_all_gather": False,
    "fp8_emulate": None,
    "skip": ["lm_head"],
    "corpus": "tinystories",
    "untrained": [],
    "repeat": 0,
    "validation_sequences": 0,
    "runs_per_gpu": 1,
    "max_grad_norm": None,
}
H200 = {
    "device": "cuda",
    "gpu_name": "NVIDIA H200",
    "num_gpus_on_machine": 8,
    "gpu_memory_gib": 139.8,
    "driver": "000.00.00",
    "cpu_name": "synthetic CPU",
}
CPU = {"device": "cpu", "gpu_name": None, "cpu_name": "synthetic CPU", "num_cpus": 4}

#: Synthetic speed-ups over BF16.
SPEEDUP = {"bf16": 1.0, "fp8_tensorwise": 1.2, "fp8_rowwise": 0.9, "fp8_rowwise_gw_hp": 0.85}


def make_record(**changes: Any) -> RunRecord:
    """Build one record; configuration fields and record fields are both given by name.

    ``results``, ``model``, ``machine``, ``data`` and ``git`` are merged into the defaults.
    """
    config = CONFIG | {key: changes.pop(key) for key in list(changes) if key in CONFIG}
    fields: dict[str, Any] = {
        "run_id": _run_id(config),
        "study": "quick",
        "status": "completed",
        "config": config,
        "started_at": "2000-01-01T00:00:00+00:00",
        "ended_at": "2000-01-01T00:10:00+00:00",
        "versions": {"python": "3.11.0", "torch": "2.11.0", "torchao": "0.17.0"},
        "machine": dict(H200),
        "git": {"commit": "0123456789abcdef" * 2 + "01234567", "dirty": False},
        "data": {
            "corpus": config["corpus"],
            "corpus_sha256": "ab" * 32,
            "vocab_size": 8192,
            "num_train_tokens": 1_000_000,
            "num_tokens_seen": 250_000,
            "epochs": 0.25,
        },
        "model": {
            "vocab_size": VOCAB_SIZE,
            "num_parameters": 1_235_814_400,
            "flops_per_token": 8.1e9,
            "num_linear": 113,
            "num_linear_fp8": 0 if config["precision"] == "bf16" else 112,
            "parameters_outside_optimizer_pct": 0.0,
            "parameter_dtype": config["master_dtype"],
        },
        "results": _results(config),
        "judgement": {"question": "What would a synthetic run decide?"},
    }
    for key, value in changes.items():
        merge = isinstance(value, dict) and key in fields
        fields[key] = fields[key] | value if merge else value
    return RunRecord(**fields)


def _run_id(config: dict[str, Any]) -> str:
    names = ("model", "precision", "num_gpus", "strategy", "master_dtype", "optimizer_binding")
    return "-".join(str(config[name]) for name in (*names, "seed"))


def _results(config: dict[str, Any]) -> dict[str, Any]:
    big = "8b" in config["model"]
    speed = (9_000.0 if big else 42_000.0) * SPEEDUP[config["precision"]]
    speed *= 1 - 0.02 * math.log2(config["num_gpus"])
    tflops = speed * (52e9 if big else 8.1e9) / 1e12
    return {
        "steps_completed": config["num_steps"],
        "startup_seconds": 20.0,
        "first_step_seconds": 30.0,
        "compile_seconds": 25.0,
        "num_timed_steps": config["num_steps"] - config["num_warmup_steps"],
        "step_time_ms_median": 1000 * 4096 / speed,
        "step_time_ms_p10": 990 * 4096 / speed,
        "step_time_ms_p90": 1010 * 4096 / speed,
        "tokens_per_second_per_gpu": speed,
        "tflops_per_gpu": tflops,
        "mfu_bf16_peak_pct": 100 * tflops / 989,
        "memory_peak_gib": (123.0 if big else 24.0) / config["num_gpus"] + 2,
        "loss_start": 11.8,
        "loss_last20_mean": 5.5,
    }


def loss_curve(num_steps: int, end: float, seed: int = 0) -> list[float]:
    """Fall from ln(vocabulary) to about `end`, with noise that a seed fixes."""
    rng = np.random.default_rng(seed)
    start = math.log(VOCAB_SIZE)
    step = np.arange(num_steps)
    curve = end + (start - end) * np.exp(-6 * step / num_steps)
    return (curve + rng.normal(0, 0.12, num_steps)).tolist()


def store(
    results: Path, machine: str, record: RunRecord, losses: Iterable[float | None] = ()
) -> Path:
    """Write a record and its metrics where `load_runs` finds them; return the run's folder."""
    run_dir = results / machine / record.study / record.run_id
    run_dir.mkdir(parents=True)
    write_record(record, run_dir)
    lines = [
        json.dumps(
            {
                "step": step,
                "loss": loss,
                "learning_rate": 1e-5,
                "step_time_ms": 100.0,
                "tokens_per_second_per_gpu": 40_000.0,
                "tflops_per_gpu": 330.0,
                "tokens_seen": 4096 * step,
                "timed": step > 10,
            }
        )
        for step, loss in enumerate(losses, start=1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run_dir


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


def make_quick(results: Path, machine: str = "reference/h200x8", seeds: int = 1) -> None:
    """Two models, two precisions, three GPU counts."""
    for model, end in (("llama-3.2-1b", 4.5), ("llama-3.1-8b", 4.2)):
        for precision in ("bf16", "fp8_tensorwise"):
            for num_gpus in (1, 2, 4):
                for seed in range(seeds):
                    store_trained(
                        results,
                        machine,
                        end + 0.01 * (precision != "bf16"),
                        seed,
                        model=model,
                        precision=precision,
                        num_gpus=num_gpus,
                        fp8_all_gather=precision != "bf16" and num_gpus > 1,
                    )


def make_document_a(results: Path, machine: str = "reference/h200x8") -> None:
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
    store_trained(results, machine, 5.4, master_dtype="bf16", **common)
    _store_stale(results, machine, common | fp8 | stale)
    store_trained(results, machine, 5.41, master_dtype="bf16", **common, **fp8)
    store_trained(results, machine, 3.6, **common)
    store_trained(results, machine, 3.65, **common, **fp8)


def _store_stale(results: Path, machine: str, config: dict[str, Any]) -> None:
    losses = loss_curve(400, 10.0)
    record = make_record(
        **config,
        master_dtype="bf16",
        results={"loss_start": losses[0], "loss_last20_mean": float(np.mean(losses[-20:]))},
    )
    record.model["parameters_outside_optimizer_pct"] = 78.4
    store(results, machine, record, losses)


def store_attribution_arm(
    results: Path, end: float, seed: int, machine: str = "reference/h200x8", /, **changes: Any
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
    record = make_record(
        seed=seed,
        run_id=f"{seed}-{zlib.crc32(json.dumps(config, sort_keys=True).encode())}",
        results={"loss_start": losses[0], "loss_last20_mean": float(np.mean(losses[-20:]))},
        **config,
    )
    stale = config.get("optimizer_binding") == "before_conversion" and config["fp8_all_gather"]
    if stale or config.get("untrained"):
        record.model["parameters_outside_optimizer_pct"] = 78.4
    store(results, machine, record, losses)


def make_attribution(
    results: Path, machine: str = "reference/h200x8", seeds: int = 5, study: str = "attribution"
) -> None:
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
                noise = float(rng.normal(0, 0.001))
                store_attribution_arm(
                    results, start + cost + noise, seed, machine,
                    master_dtype=masters, study=study, **arm,
                )  # fmt: skip


def make_effective_batch(results: Path, machine: str = "reference/h200x8", seeds: int = 3) -> None:
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
                    store(results, machine, record)


def make_smoke(results: Path, machine: str = "local") -> None:
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
            store(results, machine, record, losses)


def make_broken(results: Path, machine: str = "local") -> None:
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
        store(results, machine, record, losses)
    bare = RunRecord("bare", "broken", "failed", {}, "2000-01-01T00:00:00Z", "2000-01-01T00:00:01Z")
    store(results, machine, bare)
    store_trained(
        results,
        machine,
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
