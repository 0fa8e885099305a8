"""What a run would take on the machine at hand: its memory, by a law, and roughly its minutes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fp8study.analysis.laws.memory import predicted_memory
from fp8study.analysis.laws.nearby import changed, cures, written
from fp8study.analysis.laws.room import HEADROOM, has_room
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.laws.speed import predicted_step
from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.core.hardware import find_peak
from fp8study.run.machine import Machine, memory_gib

#: How far a measured peak may be above the law's.
LAW_ERROR = 0.05
#: Share of the BF16 peak that a step reaches, whatever its precision; measured: 0.37 to 0.75.
_PEAK_SHARE = 0.45
#: TFLOP/s of a GPU that is not in our table, and how much slower emulated FP8 multiplies, in FP32.
_UNKNOWN_PEAK, _EMULATION = 150.0, 16.0
#: TFLOP/s of a CPU core, more than any has in FP32: a run takes longer than by it.
_CORE_PEAK = 0.1
#: GiB of host memory: a notebook with its launcher, a process that drives a GPU, one that does not.
_NOTEBOOK, _DRIVES_GPU, _PROCESS = 3.0, 12.0, 1.5
#: Seconds that a run holds its GPUs besides its steps: set up, profiled, ended, as the next one has
#: got ready; more in FP8 and on several GPUs. On the slowest host of the records.
_HELD_SECONDS, _MORE_IN_FP8, _MORE_ON_SEVERAL = 20.0, 6.0, 8.0
#: Seconds to compile, where nothing was kept: other recipes take the longest.
_COMPILE_SECONDS, _COMPILE_OTHERS = {"bf16": 10.0, "fp8_tensorwise": 14.0}, 24.0


def capacity_gib(machine: Machine) -> float:
    """Return the memory of the machine's smallest GPU; one that has none of its own shares ours."""
    return min(gpu.memory_gib or memory_gib() for gpu in machine.gpus)


def needed_gib(config: RunConfig) -> float:
    """Return what a run needs of each GPU, by the memory law.

    Raises:
        UserError: No law is known for such a model, or its configuration cannot be had.
    """
    return predicted_memory(config, shape_of(config.model)).needed


def check_memory(config: RunConfig, machine: Machine) -> None:
    """Refuse a run that would end out of memory, before it starts.

    Raises:
        UserError: It needs more than a GPU has, or so nearly as much that the law's error decides;
            without GPUs, more than the host's memory.
    """
    try:
        needed = needed_gib(config)
    except UserError:
        return  # of such a model nothing is known
    if not machine.gpus:
        if (needed := _of_processes(config, needed)) > (there := memory_gib()):
            less = "a smaller model, as model=tiny-llama"
            if config.model.startswith("tiny-"):
                less = "a smaller micro_batch_size or sequence_length"
            raise UserError(
                f"memory: {config.model} at batch {config.micro_batch_size} needs {needed:.0f} GiB "
                f"of this host's {there:.0f}, as there is no GPU; set {less}, or run it where GPUs "
                "are"
            )
        return
    there = capacity_gib(machine)
    if config.runs_per_gpu > 1 and not has_room(config.runs_per_gpu * needed, there):
        # Each keeps more than it uses, and none gives any of that back to the others.
        raise UserError(
            f"memory: {config.runs_per_gpu} runs of {config.model} at batch "
            f"{config.micro_batch_size} need {config.runs_per_gpu * needed:.0f} GiB of "
            f"{there:.0f}, of which a tenth should stay free; set runs_per_gpu=1"
        )
    if needed * (1 + LAW_ERROR) > there:
        raise UserError(
            f"memory: {config.model} at batch {config.micro_batch_size} needs {needed:.0f} GiB of "
            f"{there:.0f}{what_would_fit(config, there)}"
        )


def what_would_fit(config: RunConfig, there_gib: float) -> str:
    """Name what would make a run fit that does not, as the end of a sentence."""
    shape, usable = shape_of(config.model), (1 - HEADROOM) * there_gib
    first: dict[str, Any] = {}
    config = config.resolved()
    if predicted_memory(config, shape).building > usable:  # which no number of GPUs makes smaller
        first = {"master_dtype": "bf16"}
        config = changed(config, first)
    law = predicted_memory(config, shape)
    if law.building > usable:
        return f"; each GPU must first hold the whole model, {law.building:.0f} GiB in BF16"
    found = [(changes, gib) for changes, _, gib in cures(config, shape, there_gib)]
    if first and law.total <= usable:
        found = [({}, law.total)]
    ways = (" ".join(written(first | changes, {"num_gpus": "on {} GPUs"})) for changes, _ in found)
    words = "; ".join(f"{way} ({gib:.0f} GiB)" for way, (_, gib) in zip(ways, found, strict=True))
    return f"; would fit: {words}" if found else ""


def host_gib(config: RunConfig, on_gpu: bool) -> float:
    """Return host memory that a run asks of each node, rather too much: a job that lacks it dies.

    Without GPUs what the memory law counts is in the host's memory.
    """
    if on_gpu:
        return _NOTEBOOK + _DRIVES_GPU * config.gpus_per_node
    try:
        law = needed_gib(config)
    except UserError:
        law = 0.0
    return _NOTEBOOK + _of_processes(config, law)


def _of_processes(config: RunConfig, law_gib: float) -> float:
    """Return what a node's processes take of a host without GPUs, GiB, each with what it trains."""
    return (_PROCESS + law_gib) * config.gpus_per_node


def step_seconds(config: RunConfig, machine: Machine) -> float:
    """Return the length of a step on the slowest GPU by the law of speed.

    Where that does not speak of the run or the GPU, its FLOPs over a share of the peak: roughly.
    """
    peaks = [find_peak(gpu.name) for gpu in machine.gpus]
    is_emulated = config.is_fp8 and config.fp8_emulate
    with suppress(UserError, ValueError):
        if all(peaks) and not is_emulated:
            shape = shape_of(config.model)
            return max(predicted_step(config, shape, peak).total for peak in {*peaks}) / 1000
    tflops = min(peak.bf16_tflops if peak else _UNKNOWN_PEAK for peak in peaks)
    slower = _EMULATION if is_emulated else 1.0
    return slower * _flops_per_gpu(config) / (_PEAK_SHARE * tflops * 1e12)


def _flops_per_gpu(config: RunConfig) -> float:
    """Return roughly what a GPU computes in a step."""
    shape = shape_of(config.model)
    weights = shape.num_layers * shape.layer_parameters + shape.head_parameters
    attention = shape.num_layers * shape.query_size * config.sequence_length
    return 6 * (weights + attention) * config.tokens_per_step / config.num_gpus


def minutes_on_cpu(config: RunConfig, machine: Machine) -> float:
    """Return the least that a run's arithmetic takes on all cores, emulated FP8 not counted."""
    try:
        flops = config.num_gpus * _flops_per_gpu(config)
    except UserError:
        return 0.0  # of such a model nothing is known
    return _training_seconds(config, flops / (_CORE_PEAK * machine.num_cpus * 1e12)) / 60


def held_minutes(config: RunConfig, machine: Machine) -> float:
    """Return roughly how long a run holds its GPUs if its code was compiled before.

    Runs that share a GPU are as much slower: see `fp8study.core.studies.estimated_minutes`.
    """
    seconds = _training_seconds(config, config.runs_per_gpu * step_seconds(config, machine))
    held = _HELD_SECONDS + _MORE_IN_FP8 * config.is_fp8 + _MORE_ON_SEVERAL * (config.num_gpus > 1)
    return (held + seconds) / 60


def _training_seconds(config: RunConfig, step: float) -> float:
    """Return how long a run trains and validates whose steps take so many seconds."""
    if config.timed_seconds:  # see `fp8study.train.pace`
        warm_up = max(config.timed_seconds, 3 * step) + (1 + config.num_warmup_steps) * step
        return warm_up + max(config.timed_seconds, 5 * step)
    validated = config.validation_points * config.validation_sequences / config.sequences_per_step
    return (config.num_steps + validated / 3) * step  # a forward pass is a third of a step


def compile_minutes(config: RunConfig) -> float:
    """Return roughly what the first of equal runs takes longer, which compiles for the others."""
    return config.compile * _COMPILE_SECONDS.get(config.precision, _COMPILE_OTHERS) / 60
