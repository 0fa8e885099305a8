"""What was measured on the GPU at hand, in place of the speed law's constants; no torch here.

`fp8study.measure.layer_times` times it; a file under ``results/local`` keeps it, the newest of each
model and GPU, so that later advice need not measure again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8study.analysis.laws.communication import NETWORK, Network
from fp8study.analysis.laws.frozen import constants_of
from fp8study.analysis.laws.nearby import Law, as_run_on, changed
from fp8study.analysis.laws.shape import ModelShape
from fp8study.analysis.laws.speed import (
    CAST_KERNELS,
    OTHER_KERNELS,
    StepParts,
    num_kernels,
    predicted_step,
)
from fp8study.analysis.laws.speed_constants import BY_MEMORY, SpeedConstants, on_gpu
from fp8study.analysis.runs.naming import BEFORE
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.files import writing
from fp8study.core.hardware import GpuPeak
from fp8study.core.recipes import RECIPES
from fp8study.core.records import write_json

#: What `measure_here` returns.
Measured = Mapping[str, Any]
#: What two measurements have in common if the later one takes the place of the earlier.
_SAME = ("gpu_name", "model", "strategy", "master_dtype")
#: Of what a part takes by itself, what is left at least once fixed costs are taken off.
_LEAST = 0.05


def path_of(results: Path) -> Path:
    """Return the file that keeps what was measured."""
    return results / "local" / "measured.json"


def keep(measured: Measured, results: Path) -> None:
    """Add a measurement to the file, in place of an earlier one alike.

    Raises:
        UserError: The file is damaged or cannot be written.
    """
    path, key = path_of(results), [measured[name] for name in _SAME]
    others = [each for each in _read(path) if [each[name] for name in _SAME] != key]
    with writing("--measure", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, [*others, dict(measured)])


def find(config: ResolvedConfig, gpu_name: str, results: Path) -> Measured | None:
    """Return what was measured of such layers on such a GPU, at whatever batch; None if nothing.

    Of another number of GPUs without its link: a box's may be of several kinds.

    Raises:
        UserError: The file is damaged.
    """
    key = [gpu_name, config.model, config.strategy, config.master_dtype]
    alike = (m for m in _read(path_of(results)) if [m[name] for name in _SAME] == key)
    found = next(alike, None)
    if found and found.get("num_gpus") != config.num_gpus:
        return found | {"link_gb_per_s": None}
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    needed = {*_SAME, "layers", "at", "micro_batch_size", "sequence_length"}
    is_list = isinstance(content, list)
    if not (is_list and all(isinstance(m, dict) and needed <= m.keys() for m in content)):
        raise UserError(f"--measure: '{path}' is damaged; delete it, then measure again")
    return content


def law_of(
    shape: ModelShape, gpu: GpuPeak, measured: Measured | None, network: Network = NETWORK
) -> Law:
    """Return the speed law of a model on a GPU, with what was measured there, if anything."""

    def law(way: ResolvedConfig) -> StepParts:
        way = as_run_on(way, gpu)
        return predicted_step(way, shape, None, constants_for(way, shape, gpu, measured), network)

    return law


def constants_for(
    config: ResolvedConfig, shape: ModelShape, gpu: GpuPeak, measured: Measured | None
) -> SpeedConstants:
    """Return the law's constants on a GPU, by its datasheet or by what was measured there."""
    if measured is None:
        return on_gpu(constants_of(SpeedConstants, "speed"), gpu)
    return constants_here(measured, config, shape, gpu)


def constants_here(
    measured: Measured, config: ResolvedConfig, shape: ModelShape, gpu: GpuPeak
) -> SpeedConstants:
    """Return the law's constants such that it gives for a layer what was measured of it.

    For use without a GPU's scaling. GEMMs alone give their rates; what a BF16 layer takes beside
    them, attention's and the elementwise constants; what an FP8 layer takes more than that, the
    casts'; the host's time, a launch. Nobody measured the loss, the update and FSDP2's copies: they
    go with the copy's rate; and gathering in FP8 with the host's.
    """
    c = on_gpu(constants_of(SpeedConstants, "speed"), gpu)
    copy, link = measured.get("copy_tb_per_s"), measured.get("link_gb_per_s")
    anew = {name: getattr(c, name) * c.copy_tb_per_s / copy for name in BY_MEMORY if copy}
    anew |= {"copy_tb_per_s": copy} if copy else {}
    anew |= {"link_gb_per_s": link} if link else {}
    c = dataclasses.replace(c, **anew)
    recipe = RECIPES[config.precision]
    own_name = f"fp8_{recipe.scaling}" if recipe.scaling else "bf16"
    layers, rates = measured["layers"], measured.get("gemm_tflops") or {}
    own, plain = layers.get(own_name), layers.get("bf16")
    if not (own and plain and rates.get("bf16") and rates.get(own_name)):
        return c

    alone = dataclasses.replace(
        changed(config, BEFORE),  # layers by themselves keep no weights
        micro_batch_size=measured["micro_batch_size"],
        sequence_length=measured["sequence_length"],
        gradient_accumulation_steps=1,
        activation_checkpointing=False,
    )
    tokens = alone.tokens_per_pass
    weights = sum(wide * high for wide, high in shape.linears.values())
    kernels = {"gemm": 3 * len(shape.linears), "other": OTHER_KERNELS,
               "casts": CAST_KERNELS * len(shape.convertible)}  # fmt: skip
    fixed = {name: number * c.kernel_us * 1e-3 for name, number in kernels.items()}
    gflop = 6e-9 * tokens * weights
    gemm = {name: gflop / rates[name] for name in ("bf16", own_name)}
    rest = plain["device_ms"] - gemm["bf16"]
    casts = own["device_ms"] - gemm[own_name] - rest
    effective = {name: gflop / _beyond(ms, fixed["gemm"]) for name, ms in gemm.items()}
    anew = {"bf16_tflops": effective["bf16"]}

    parts = predicted_step(alone, shape, None, c).parts()
    names = ("attention", "elementwise") + ("sharding",) * (config.strategy != "fsdp2")
    by_law = sum(parts[name] for name in names) / shape.num_layers - fixed["other"]
    slower = _beyond(rest, fixed["other"]) / by_law
    for name in ("query_ps", "softmax_ps", "elementwise_ps", "autocast_ps"):
        anew[name] = slower * getattr(c, name)
    anew["attention_tflops"] = c.attention_tflops / slower
    if config.is_fp8:
        width = c.rowwise if recipe.scaling == "rowwise" else 1.0
        moved = sum(wide + high for wide, high in shape.convertible.values())
        by_law = c.weight_cast_ps * shape.convertible_parameters + c.cast_ps * tokens * moved
        slower = _beyond(casts / width, fixed["casts"]) / by_law * 1e9
        for name in ("cast_ps", "weight_cast_ps"):
            anew[name] = slower * getattr(c, name)
        anew["fp8_tflops"] = effective[own_name]
    if own.get("host_ms") and plain.get("host_ms"):
        anew["launch_us"] = 1e3 * own["host_ms"] * shape.num_layers / num_kernels(alone, shape)
        in_bf16 = 1e3 * plain["host_ms"] / (kernels["gemm"] + kernels["other"])
        anew["gather_us"] = c.gather_us * in_bf16 / c.launch_us
    return dataclasses.replace(c, **anew)


def _beyond(ms: float, fixed: float) -> float:
    """Return a time without its fixed costs, or little of it where those are more; at least 0."""
    return max(ms - fixed, _LEAST * ms, 0.0)
