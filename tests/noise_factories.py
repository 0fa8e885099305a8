"""Synthetic noise sections for tests. None of these numbers was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.factories import make_record, store

N = 8
NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
STATISTICS = ["error", *(f"{o}_{s}" for o in ("first", "second")
                         for s in ("error", "underflow", "saturated"))]  # fmt: skip


def make_point(step: int, error_size: float = 0.1) -> dict[str, Any]:
    """Synthetic: two parameters of 30 elements, only the second one with an FP8 error."""
    draw = np.random.default_rng(step)
    gradient = 1 + draw.standard_normal((N, 2, 30))
    error = np.zeros_like(gradient)
    error[:, 1] = error_size * (0.5 + draw.standard_normal((N, 30)))

    def gram(rows: Any) -> dict[str, Any]:
        flat, fp8 = rows.reshape(N, -1), rows[:, 1]
        return {"all": (flat @ flat.T).tolist(), "fp8_layers": (fp8 @ fp8.T).tolist()}

    comparison = {
        "precision": "fp8_rowwise",
        "reference": "bf16",
        "error_square": np.square(error).sum(2).mean(0).tolist(),
        "error_dot_reference": (error * gradient).sum(2).mean(0).tolist(),
    }
    return {
        "step": step,
        "num_samples": N,
        "losses": {"fp32": [2.0] * N, "bf16": [2.0] * N, "fp8_rowwise": [2.5] * N},
        "gradient_grams": gram(gradient),
        "comparisons": [
            comparison | {"error_grams": gram(error)},
            comparison | {"reference": "fp32"},
        ],
        "parameters": {
            "names": NAMES,
            "is_fp8": [False, True],
            "square": dict.fromkeys(("bf16", "fp32"), np.square(gradient).sum(2).mean(0).tolist()),
        },
        "products": {
            "statistics": STATISTICS,
            "layers": ["model.layers.0.mlp.up_proj"],
            "values": {"fp8_rowwise": {"output": [[0.1, 0.02, 0, 0, 0.03, 0.25, 0]]}},
        },
    }


def make_noise_section(error_size: float = 0.1, emulated: bool = False) -> dict[str, Any]:
    """Two points."""
    points = [make_point(step, error_size) for step in (0, 50)]
    return {"tokens_per_sample": 10, "emulated": emulated, "points": points}


def make_noise(results: Path, error_size: float = 0.1, emulated: bool = False) -> None:
    """Two runs with two points each, on a GPU."""
    for seed in range(2):
        record = make_record(
            study="precision-noise", precision="fp8_tensorwise", seed=seed,
            noise=make_noise_section(error_size, emulated), run_id=f"noise-{seed}-{emulated}",
        )  # fmt: skip
        store(results, "reference/h200x8", record)
