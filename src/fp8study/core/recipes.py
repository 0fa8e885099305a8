"""The arithmetics of a linear layer, one row each, and when a run changes from one to another.

The only place that knows what a recipe is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Precision = Literal["bf16", "fp16", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"]

#: The three GEMMs of a linear layer in training.
GEMMS = ("output", "grad_input", "grad_weight")
#: What torch's FP8 GEMMs need both dimensions of a weight to be multiples of, and, for the weight's
#: gradient, the tokens of a pass.
ALIGNMENT = 16
#: Tokens whose logits the chunked loss head makes at a time. A multiple of 16, as FP8 GEMMs ask;
#: large enough that a GEMM with them keeps a GPU busy.
CHUNK = 2048
#: Tokens whose gradients by their logits an FP8 one keeps for one GEMM, a byte each. More take a
#: sum.
GROUP = 16_384


def is_aligned(*sides: int) -> bool:
    """Return whether torch's FP8 GEMMs take a weight of these sides."""
    return not any(side % ALIGNMENT for side in sides)


@dataclass(frozen=True)
class Recipe:
    """How a linear layer computes, and what that asks for."""

    label: str
    """The report's name for it."""
    torchao_name: str = ""
    """What `Float8LinearConfig.from_recipe_name` calls it; empty for BF16."""
    scaling: Literal["", "tensorwise", "rowwise"] = ""
    """One FP8 scale for a whole tensor, or for each of its rows."""
    fp8_gemms: tuple[str, ...] = ()
    """Which of `GEMMS` multiply in FP8; the others stay in BF16."""
    gathers_in_fp8: bool = False
    """Whether FSDP2 can gather its weights in FP8."""
    needs_fsdp2: bool = False
    """Whether it trains under FSDP2 alone."""
    scales_loss: bool = False
    """Whether what it does in 16 bits is FP16, in which small gradients vanish unless the loss is
    scaled up; else it is BF16."""

    @property
    def fp8_share(self) -> float:
        """Share of a converted layer's FLOPs that are done in FP8, 0 to 1."""
        return len(self.fp8_gemms) / len(GEMMS)


RECIPES: dict[Precision, Recipe] = {
    "bf16": Recipe("BF16"),
    "fp16": Recipe("FP16", scales_loss=True),
    "fp8_tensorwise": Recipe("FP8 tensorwise", "tensorwise", "tensorwise", GEMMS, True),
    "fp8_rowwise": Recipe("FP8 rowwise", "rowwise", "rowwise", GEMMS),
    "fp8_rowwise_gw_hp": Recipe(
        "FP8 rowwise, BF16 weight gradient",
        "rowwise_with_gw_hp",
        "rowwise",
        ("output", "grad_input"),
        needs_fsdp2=True,
    ),
}

#: Those that compute in FP8.
FP8_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.fp8_gemms)

#: The others.
SIXTEEN_BIT = tuple(name for name in RECIPES if name not in FP8_RECIPES)

#: Those whose weights FSDP2 can gather in FP8.
GATHERED_IN_FP8 = tuple(name for name, recipe in RECIPES.items() if recipe.gathers_in_fp8)

#: Ways to compute one GEMM, by the recipe whose three GEMMs are all computed so. A GPU multiplies
#: FP16 as fast as BF16.
ARITHMETICS: tuple[str, ...] = tuple(
    name for name, recipe in RECIPES.items() if name == "bf16" or recipe.fp8_gemms == GEMMS
)

#: Shorter names for `Precision`.
ALIASES: dict[str, Precision] = {"fp8": "fp8_tensorwise"}

#: Of each part of ``precision_schedule``: a precision and, unless it is the last, the step at
#: which it ends.
SCHEDULE_PATTERN = r"(bf16|fp8\w*)(:-?[1-9][0-9]{0,8})?"


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
