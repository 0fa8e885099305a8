"""The arithmetics of a linear layer, one row each: the only place that knows what a recipe is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"]

#: The three GEMMs of a linear layer in training.
GEMMS = ("output", "grad_input", "grad_weight")


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
    needs_fsdp2: str = ""
    """Why it trains under FSDP2 alone; empty if it trains under any strategy."""

    @property
    def fp8_share(self) -> float:
        """Share of a converted layer's FLOPs that are done in FP8, 0 to 1."""
        return len(self.fp8_gemms) / len(GEMMS)


RECIPES: dict[Precision, Recipe] = {
    "bf16": Recipe("BF16"),
    "fp8_tensorwise": Recipe("FP8 tensorwise", "tensorwise", "tensorwise", GEMMS, True),
    "fp8_rowwise": Recipe("FP8 rowwise", "rowwise", "rowwise", GEMMS),
    "fp8_rowwise_gw_hp": Recipe(
        "FP8 rowwise, BF16 weight gradient",
        "rowwise_with_gw_hp",
        "rowwise",
        ("output", "grad_input"),
        needs_fsdp2="its BF16 GEMM would mix FP32 weights with BF16 activations",
    ),
}

#: Those that compute in FP8.
FP8_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.fp8_gemms)

#: Those whose weights FSDP2 can gather in FP8.
GATHERED_IN_FP8 = tuple(name for name, recipe in RECIPES.items() if recipe.gathers_in_fp8)

#: Ways to compute one GEMM, by the recipe whose three GEMMs are all computed so.
ARITHMETICS: tuple[str, ...] = tuple(
    name for name, recipe in RECIPES.items() if recipe.fp8_gemms in ((), GEMMS)
)

#: Shorter names for `Precision`.
ALIASES: dict[str, Precision] = {"fp8": "fp8_tensorwise"}
