"""Synthetic instruments for tests. None of these numbers was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.factories import loss_curve, make_record, store

E4M3 = "float8_e4m3fn × float8_e4m3fn"
E5M2 = "float8_e5m2 × float8_e4m3fn"
BF16 = "bfloat16 × bfloat16"


def audit_of(precision: str, silent: bool = False) -> dict[str, Any]:
    """An audit; `silent`: an FP8 run whose products were all in BF16."""
    is_fp8 = precision != "bf16"
    return {
        "num_linear": 113, "num_linear_fp8": 112 if is_fp8 else 0, "skipped": {},
        "num_unexplained": 0, "unexplained": [], "num_trainable": 146,
        "num_in_optimizer_twice": 0, "num_outside_optimizer": 0, "outside_optimizer": [],
        "num_frozen": 0, "frozen": [], "stalled_pct": 0.0, "master_dtypes": ["float32"],
        "gradient_dtypes": ["float32"], "optimizer_state_dtypes": ["float32"],
        "matmul_dtypes": [E4M3, BF16] if is_fp8 and not silent else [BF16],
        "communication_dtypes": {},
        "fp8_gemm_flops_pct": 80.0 if is_fp8 and not silent else 0.0,
        "fp8_gemm_flops_pct_expected": 80.0 if is_fp8 else 0.0,
    }  # fmt: skip


def instruments_of(precision: str, num_gpus: int = 1, **changes: Any) -> dict[str, Any]:
    """Instruments in which FP8's products take half the time, and its casts some of it back."""
    is_fp8 = precision != "bf16"
    gathers_fp8 = precision == "fp8_tensorwise" and num_gpus > 1
    whole = [{"collective": "all_gather", "dtype": "bfloat16", "num": 8, "gib": 10.0}]
    parts = [{"collective": "all_gather", "dtype": "uint8", "num": 7, "gib": 4.0},
             {"collective": "all_gather", "dtype": "bfloat16", "num": 1, "gib": 2.0}]  # fmt: skip
    reduced = [{"collective": "reduce_scatter", "dtype": "float32", "num": 8, "gib": 20.0}]
    gathered = parts if gathers_fp8 else whole
    product = {"dtypes": E4M3 if is_fp8 else BF16, "num": 3, "tflop": 1.0, "time_ms": 20.0}
    found: dict[str, Any] = {
        "memory": {
            "parameters_gib": 5.0, "gradients_gib": 5.0, "optimizer_gib": 10.0, "rest_gib": 3.0,
            "first_step_allocated_gib": 18.0, "steady_allocated_gib": 23.0,
            "steady_reserved_gib": 28.0, "peak_gib": 23.0, "num_alloc_retries": 0,
            "num_device_allocs": 0, "ranks": [],
        },
        "energy": {
            "joule_per_token": 0.012 if is_fp8 else 0.015, "watts_mean": 650.0,
            "clock_sm_mhz_median": 1900.0, "clock_sm_mhz_min": 1800,
            "throttled_pct": {} if is_fp8 else {"power_cap": 100.0}, "ranks": [],
        },
        "step": {
            "num_kernels": 100,
            "gemm": [product | {"kernels": ["synthetic_fp8" if is_fp8 else "synthetic_bf16"]}],
            "fp8_gemm_flops_pct": 80.0 if is_fp8 else 0.0,
            "fp8_gemm_time_pct": 70.0 if is_fp8 else 0.0,
            "communication": [*gathered, *reduced] if num_gpus > 1 else [],
            "step_ms": 110.0, "exposed_communication_ms": 5.0, "idle_ms": 15.0,
            "by_kind_ms": {
                "gemm_fp8" if is_fp8 else "gemm_bf16": 20.0 if is_fp8 else 40.0,
                "attention": 10.0, "fused": 20.0 if is_fp8 else 5.0, "optimizer": 10.0,
            },
        },
        "ceilings": {
            "num_tokens": 4096, "bf16_tflops": 750.0, "fp8_tensorwise_tflops": 1300.0,
            "fp8_rowwise_tflops": 1250.0, "run_tflops": 1100.0 if is_fp8 else 750.0,
            "copy_tb_per_s": 4.1, "products": [],
        },
        "overhead": {
            "plain_ms": [100.0] * 8,
            "measured_ms": [100.1, 100.2, 99.9, 100.0, 100.3, 99.8, 100.1, 150.0],
        },
    }  # fmt: skip
    for section, values in changes.items():
        found[section] = found[section] | values
    return found


def store_measured(
    results: Path, precision: str, num_gpus: int = 1, /, step_ms: float = 100.0,
    warm_up_s: float = 20.0, cache: tuple[int, int] = (0, 2), outside_pct: float = 0.0,
    **changes: Any,
) -> None:  # fmt: skip
    """Store a run of the study ``instruments``; `changes` are fields of the record."""
    fields = {
        "study": "instruments",
        "precision": precision,
        "num_gpus": num_gpus,
        "fp8_all_gather": precision == "fp8_tensorwise" and num_gpus > 1,
        "audit": audit_of(precision),
        "instruments": instruments_of(precision, num_gpus),
    } | changes
    fields["results"] = {
        "step_time_ms_median": step_ms, "warm_up_seconds": warm_up_s,
        "compile_cache_hits": cache[0], "compile_cache_misses": cache[1],
        "bf16_peak_tflops": 989.0, "mixed_peak_tflops": 1500.0, "mfu_mixed_peak_pct": 25.0,
        "mfu_achievable_pct": 40.0, **changes.get("results", {}),
    }  # fmt: skip
    record = make_record(outside_pct, **fields)
    store(results, "reference/h200x8", record, loss_curve(60, 5.0))


def make_instruments(results: Path) -> None:
    """BF16 and two recipes, on one and four GPUs."""
    for num_gpus in (1, 4):
        store_measured(results, "bf16", num_gpus)
        store_measured(results, "fp8_tensorwise", num_gpus, step_ms=80.0, warm_up_s=26.0)
        store_measured(results, "fp8_rowwise", num_gpus, step_ms=120.0, warm_up_s=30.0)
