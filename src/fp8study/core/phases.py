"""When the linear layers of one run change their precision: ``precision_schedule``."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

#: Of each part of a schedule: a precision and, unless it is the last, the step at which it ends.
PATTERN = r"(bf16|fp8\w*)(:-?[1-9][0-9]{0,8})?"


class Phase(NamedTuple):
    """A part of a run that computes in one precision."""

    first_step: int
    """The first of its optimizer steps, counted from 0."""
    precision: str


def phases(config: Any) -> tuple[Phase, ...]:
    """Return the phases of a run, in their order; a run without a schedule has one.

    ``bf16:100,fp8_tensorwise:-50,bf16`` is BF16 in the first 100 steps and in the last 50.
    """
    found, first = [], 0
    for part in config.precision_schedule or (config.precision,):
        precision, _, end = part.partition(":")
        found.append(Phase(first, precision))
        first = int(end or config.num_steps)
        first += config.num_steps * (first < 0)
    return tuple(found)


def precision_at(config: Any, step: int) -> str:
    """Return the precision of an optimizer step, counted from 0."""
    return next(p.precision for p in reversed(phases(config)) if p.first_step <= step)


def is_schedule(config: Any) -> bool:
    """Whether the parts of a schedule follow each other and end with the run.

    They name ``bf16`` and the run's own FP8 recipe in turns: a layer is made for one recipe.
    """
    ends_early = [":" in part for part in config.precision_schedule]
    found = phases(config)
    firsts = [*(phase.first_step for phase in found), config.num_steps]
    return (
        ends_early == [True] * (len(found) - 1) + [False]
        and all(one < next_ for one, next_ in itertools.pairwise(firsts))
        and all(one.precision != next_.precision for one, next_ in itertools.pairwise(found))
        and {phase.precision for phase in found} == {"bf16", config.precision}
        and config.precision != "bf16"
    )
