"""What a run would take on the machine at hand: its memory, by a law, and roughly its minutes."""

from __future__ import annotations

import dataclasses

from fp8study.analysis.laws.memory import predicted_memory
from fp8study.analysis.laws.shape import shape_of
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
#: GiB of host memory: a notebook with its launcher, a process that drives a GPU, one that does not.
_NOTEBOOK, _DRIVES_GPU, _PROCESS = 3.0, 12.0, 1.5
#: Seconds that a run holds its GPUs besides its steps: set up, profiled, ended; on an H100, as its
#: last run ends and the next has got ready, 18 to 30. The first of an arm compiles, too: 28 to 54.
_HELD_SECONDS, _COMPILE_SECONDS, _MORE_ON_SEVERAL = 22.0, 19.0, 8.0


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
        UserError: It needs more than a GPU has, or so nearly as much that the law's error decides.
    """
    try:
        needed = config.runs_per_gpu * needed_gib(config)
    except UserError:
        return  # of such a model nothing is known
    there = capacity_gib(machine)
    if needed * (1 + LAW_ERROR) > there:
        cures = remedies(config, there / (1 + LAW_ERROR))
        raise UserError(
            f"memory: {config.model} at batch {config.micro_batch_size} needs {needed:.0f} GiB of "
            f"{there:.0f}{': ' * bool(cures)}{cures}"
        )


def remedies(config: RunConfig, usable_gib: float) -> str:
    """Name what would make a run fit that does not; empty if none of our few remedies does."""
    counts = (n for n in (2, 4, 8, 16, 32, 64) if n > config.num_gpus)
    anew = dataclasses.replace(config, fp8_all_gather=None, weight_cast=None, update_kernel=None)
    sharded = ((n, dataclasses.replace(anew, num_gpus=n, strategy="fsdp2")) for n in counts)
    enough = next((n for n, wider in sharded if needed_gib(wider) <= usable_gib), None)
    found = [f"{enough} GPUs"] if enough else []
    for change in ({"master_dtype": "bf16"}, {"activation_checkpointing": True}):
        gib = needed_gib(dataclasses.replace(config, **change))
        if gib <= usable_gib:
            ((name, value),) = change.items()
            found.append(f"{name}={str(value).lower()} with {gib:.0f} GiB")
    return ", or ".join(found)


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
    return _NOTEBOOK + (_PROCESS + law) * config.gpus_per_node


def step_seconds(config: RunConfig, machine: Machine) -> float:
    """Return a rough length of a step: its FLOPs over a share of the slowest GPU's peak."""
    shape = shape_of(config.model)
    weights = shape.num_layers * shape.layer_parameters + shape.head_parameters
    attention = shape.num_layers * shape.query_size * config.sequence_length
    flops = 6 * (weights + attention) * config.tokens_per_step / config.num_gpus
    peaks = [find_peak(gpu.name) for gpu in machine.gpus]
    tflops = min(peak.bf16_tflops if peak else _UNKNOWN_PEAK for peak in peaks)
    slower = _EMULATION if config.is_fp8 and config.fp8_emulate else 1.0
    return slower * flops / (_PEAK_SHARE * tflops * 1e12)


def held_minutes(config: RunConfig, machine: Machine) -> float:
    """Return roughly how long a run holds its GPUs."""
    step = step_seconds(config, machine)
    seconds = config.num_steps * step
    if config.timed_seconds:  # see `fp8study.train.pace`
        warm_up = max(config.timed_seconds, 3 * step) + (1 + config.num_warmup_steps) * step
        seconds = warm_up + max(config.timed_seconds, 5 * step)
    is_first = not config.repeat and not config.seed  # later ones find its compiled code
    held = _HELD_SECONDS + _COMPILE_SECONDS * is_first + _MORE_ON_SEVERAL * (config.num_gpus > 1)
    return (held + seconds) / 60
