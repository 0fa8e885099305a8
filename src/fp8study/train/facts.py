"""What will be trained, and what a reader of a run's numbers must know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8study.core.audit_rules import LOSS_RISE, cautions
from fp8study.core.errors import UserError
from fp8study.measure.clock import FinishedStep
from fp8study.model.fsdp_patches import unchecked
from fp8study.model.sharding import parameters_outside_optimizer_pct

if TYPE_CHECKING:
    from fp8study.train.trainer import Trainer


def binding_facts(trainer: Trainer) -> dict[str, Any]:
    """Describe what will really be trained.

    Raises:
        RuntimeError: A stale optimizer that nobody asked for.
        UserError: FP8 is asked for, and no layer is left for it.
    """
    outside = parameters_outside_optimizer_pct(trainer.model, trainer.optimizer)
    asked_for = trainer.config.optimizer_binding != "after_conversion" or trainer.config.untrained
    if outside > 0 and not asked_for:
        raise RuntimeError(
            f"{outside:.1f} % of the weights are not in the optimizer although it was made "
            "last; this is a defect of fp8study or of the installed torchao or accelerate"
        )
    nothing_left = not trainer.audit["num_linear_fp8"] and not trainer.audit["num_unexplained"]
    if trainer.config.is_fp8 and nothing_left:
        reasons = [f"{n} × {why}" for why, n in trainer.audit["skipped"].items()]
        by_pattern = any("skip pattern" in reason for reason in reasons)
        raise UserError(
            f"precision: no linear layer is left for {trainer.config.precision} "
            f"({'; '.join(reasons) or 'the model has no nn.Linear'}); "
            f"{'remove a pattern of skip, or ' * by_pattern}use precision=bf16"
        )
    return {
        "num_linear": trainer.audit["num_linear"],
        "num_linear_fp8": trainer.audit["num_linear_fp8"],
        "parameters_outside_optimizer_pct": outside,
        "parameter_dtype": str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
    }


def warnings(trainer: Trainer) -> list[str]:
    """Return the defects of this run that a reader of its numbers must know."""
    config, outside = trainer.config, trainer.model_facts["parameters_outside_optimizer_pct"]
    fault = "planted fault" if config.untrained else "stale optimizer"
    untimed = "the run has no timings and no peak"
    skipped = trainer.found.get("loss_scaling", {}).get("num_skipped", 0)
    # Under a longer warm-up the first step says nothing of the peak rate.
    audited = cautions(trainer.audit) if config.lr_warmup_steps <= 1 else []
    notes = {
        f"{fault}: {outside:.1f} % of the weights are never trained": outside > 0,
        **dict.fromkeys(audited, True),
        "attention_mask: checked in each forward pass, for which the GPU is waited for: "
        f"{trainer.needs_masks}": trainer.needs_masks,
        **dict.fromkeys(unchecked(config), True),
        f"{trainer.beyond_fp8_pct:.0f} % of the weights are in layers that are no nn.Linear: "
        "FP8 does not reach them": trainer.beyond_fp8_pct > 1,
        f"the arithmetic of {trainer.uncounted_pct:.0f} % of the weights is not counted: "
        "FLOPs, TFLOP/s and MFU leave it out": trainer.uncounted_pct > 1,
        f"training paused to measure noise: {untimed}": config.noise_at_steps,
        f"training paused for validation: {untimed}": config.validation_points > 1,
        f"the GPU was shared with other runs: {untimed}": config.runs_per_gpu > 1,
        f"the precision changes during the run: {untimed}": config.precision_schedule,
        f"{skipped} steps changed nothing: a gradient overflowed in FP16": skipped,
        _rise(trainer.steps): _rise(trainer.steps),
        "FP8 is emulated: the numbers are FP8's, the speed is not": (
            config.fp8_emulate and config.is_fp8
        ),
    }
    return [note for note, holds in notes.items() if holds]


def _rise(steps: Sequence[FinishedStep]) -> str:
    """Say so if the loss rose far above its first value; empty if it did not."""
    losses = [step.loss for step in steps if math.isfinite(step.loss)]
    highest = max(losses, default=0.0)
    if not losses or highest < LOSS_RISE * losses[0]:
        return ""
    return (
        f"the loss rose from {losses[0]:.2f} to {highest:.2f} at step "
        f"{losses.index(highest) + 1}: after that two runs differ by chance; for a comparison of "
        "losses set a longer lr_warmup_steps or a lower learning_rate"
    )
