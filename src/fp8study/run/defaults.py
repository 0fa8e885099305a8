"""What a run without parameters does: something small and real on the machine at hand."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fp8study.analysis.laws.nearby import UPDATE, as_fp8, fits_before_alone
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.runs.naming import BEFORE
from fp8study.analysis.small_steps import for_small_steps, launch_open, rests_on_the_path
from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.core.hardware import find_peak
from fp8study.run.machine import Machine

#: The study whose runs are chosen for the GPUs that are there, see `fp8study.run.chosen.study`.
MACHINE_STUDY = "machine"

_ON_GPU: dict[str, Any] = {"precision": "fp8_tensorwise", "corpus": "tinystories"}

#: A minute on two CPU cores: a tiny model, FP8 emulated, nothing compiled.
_ON_CPU: dict[str, Any] = {
    "model": "tiny-llama",
    "precision": "fp8_tensorwise",
    "sequence_length": 128,
    "micro_batch_size": 4,
    "num_steps": 60,
    "learning_rate": 1e-3,
    "compile": False,
    "corpus": "synthetic",
}


def config_for(
    machine: Machine, chosen: Mapping[str, Any], source: str = "parameters"
) -> RunConfig:
    """Return a run's configuration; the machine decides the fields that were not `chosen`, or None.

    Raises:
        UserError: A name or value is invalid; it names the `source`.
    """
    given = {name: value for name, value in chosen.items() if value is not None}
    defaults = _ON_GPU if machine.gpus else _ON_CPU
    if machine.gpus and not machine.has_fp8:
        defaults = defaults | {"precision": "bf16"}
    config = make_config(defaults | given, source)
    changes = suited_to(machine, config)
    if "update_kernel" not in changes and keeps_more_than_fits(config, machine):
        warnings.warn(
            "update_kernel: torch, as FP8 fits this GPU with no weights kept; set it to choose "
            "otherwise",
            stacklevel=2,
        )
        changes = dict(BEFORE)
    return make_config(defaults | changes | given, source).resolved()


def better_than_asked(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """Return the field that makes an FP8 run of the tuned path faster whose steps are small.

    Of one that gathers in FP8, or is alone on its GPU; nothing where the law of speed finds none,
    or knows nothing.
    """
    decided = config.resolved()
    asks = decided.fp8_all_gather or (decided.is_fp8 and decided.num_gpus == 1)
    if not asks or decided.step_launch == "as_graph":
        return {}
    changes = _for_small_steps(launch_open(config), machine)
    return {"fp8_all_gather": False} if changes == BEFORE else changes


def suited_to(machine: Machine, config: RunConfig) -> dict[str, Any]:
    """Return what is faster than the tuned path's own choice where steps are small.

    See `for_small_steps`. Both precisions get the same, but for what a run sets itself, or needs. A
    run that sets a switch which rests on the path's own choice keeps that.
    """
    changes = _for_small_steps(config, machine)
    if changes != BEFORE:
        return changes
    plain = {"gather_cast": "eager", "weight_cast": "each_pass", "swiglu": "compiled"}
    is_open = all(getattr(config, name) in (None, value) for name, value in plain.items())
    gathers = is_open and config.resolved().fp8_all_gather
    return changes | ({"fp8_all_gather": False} if gathers else {})


def _for_small_steps(config: RunConfig, machine: Machine) -> dict[str, Any]:
    if config.path == "tuned" and config.compile and machine.has_fp8:
        with suppress(UserError):  # of such a model no law is known
            return for_small_steps(config, find_peak(machine.gpus[0].name))
    return {}


def keeps_more_than_fits(config: RunConfig, machine: Machine) -> bool:
    """Return whether a run, or its FP8 partner, fits but for the FP8 weights that it keeps.

    By the law of memory; False where it knows nothing.
    """
    sizes = [gpu.memory_gib for gpu in machine.gpus if gpu.memory_gib]
    decided = config.resolved()
    is_open = all(getattr(config, name) is None for name in UPDATE)
    is_open &= not rests_on_the_path(config)
    if decided.update_kernel == "one_pass" and is_open and sizes:
        with suppress(UserError):
            fp8 = decided if decided.is_fp8 else as_fp8(decided, "fp8_tensorwise")
            kept = fp8.weight_cast == "each_update"
            return kept and fits_before_alone(fp8, shape_of(fp8.model), min(sizes))
    return False


def study_for(machine: Machine) -> str:
    """Return the study that ``make reproduce`` runs when none is named."""
    return MACHINE_STUDY if machine.gpus else "smoke"
