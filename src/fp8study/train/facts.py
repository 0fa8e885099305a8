"""What will be trained, and what a reader of a run's numbers must know."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fp8study.core.audit_rules import LOSS_RISE, LOSS_ROSE, attention_taken_over, cautions
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS
from fp8study.core.record_shape import INSTEAD
from fp8study.measure.clock import FinishedStep
from fp8study.model.fsdp.patches import unchecked, without_copy_engines
from fp8study.model.sharding import parameters_outside_optimizer_pct
from fp8study.model.swiglu import asks_for_kernels, num_gated

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
    } | _shape(trainer.config.model, trainer.bare_model.config)


def _shape(model: str, config: PreTrainedConfig) -> dict[str, str]:
    """Return a hash of the shape of a model that is no preset: its file may change between runs."""
    if model in PRESETS:
        return {}
    told = {n: v for n, v in config.to_dict().items() if n not in ("_name_or_path", "dtype")}
    text = json.dumps(told, sort_keys=True, default=str)
    return {"config_sha256": hashlib.sha256(text.encode()).hexdigest()}


def warnings(trainer: Trainer) -> list[str]:
    """Return the defects of this run that a reader of its numbers must know."""
    config, outside = trainer.config, trainer.model_facts["parameters_outside_optimizer_pct"]
    fault = "planted fault" if config.untrained else "stale optimizer"
    untimed = "the run has no timings and no peak"
    skipped = trainer.found.get("loss_scaling", {}).get("num_skipped", 0)
    high = high_loss(config, trainer.steps)
    other = attention_taken_over(config.attention, trainer.found.get("step", {}))
    # Under a longer warm-up the first step says nothing of the peak rate.
    audited = cautions(trainer.audit) if config.lr_warmup_steps <= 1 else []
    notes = {
        f"{fault}: {outside:.1f} % of the weights are never trained": outside > 0,
        **dict.fromkeys(audited, True),
        "attention_mask: checked in each forward pass, for which the GPU is waited for: "
        f"{trainer.needs_masks}": trainer.needs_masks,
        f"step_launch: a graph makes no masks: {INSTEAD.format('step_launch', 'by_kernel')}": (
            trainer.needs_masks and config.step_launch == "as_graph"
        ),
        **dict.fromkeys([*unchecked(config), *without_copy_engines(config)], True),
        "swiglu: compiled, as no MLP of this model is SwiGLU between FP8 layers without bias": (
            asks_for_kernels(config) and not num_gated(trainer.bare_model)
        ),
        f"{trainer.beyond_fp8_pct:.0f} % of the weights are in layers that are no nn.Linear: "
        "FP8 does not reach them": trainer.beyond_fp8_pct > 1,
        f"the arithmetic of {trainer.uncounted_pct:.0f} % of the weights is not counted: "
        "FLOPs, TFLOP/s and MFU leave it out": trainer.uncounted_pct > 1,
        f"training paused to measure noise: {untimed}": config.noise_at_steps,
        f"training paused for validation: {untimed}": config.validation_points > 1,
        f"the GPU was shared with other runs: {untimed}": config.runs_per_gpu > 1,
        f"the precision changes during the run: {untimed}": config.precision_schedule,
        f"{skipped} steps changed nothing: a gradient overflowed in FP16": skipped,
        f"lr_warmup_steps: {config.lr_warmup_steps} is more than num_steps={config.num_steps}: the "
        "learning rate never reached its peak": config.lr_warmup_steps > config.num_steps,
        high: high,
        other: other and trainer.device.type == "cuda",
        "FP8 is emulated: the numbers are FP8's, the speed is not": (
            config.fp8_emulate and config.is_fp8
        ),
    }
    return [note for note, holds in notes.items() if holds]


def high_loss(config: ResolvedConfig, steps: Sequence[FinishedStep]) -> str:
    """Say so if a step's loss was far above the first; empty if none was, or nothing follows.

    Weights that were trained before begin so low that a usual text may be as far above. Of a timed
    run no loss is compared.
    """
    if not steps or config.init_from or config.timed_seconds:
        return ""
    finite = (step for step in steps if math.isfinite(step.loss))
    first, highest = steps[0], max(finite, key=lambda step: step.loss, default=steps[0])
    if not highest.loss >= LOSS_RISE * first.loss:
        return ""
    return (
        f"{LOSS_ROSE} from {first.loss:.2f} to {highest.loss:.2f} at step {highest.step + 1}: "
        "an update that went too far, or a text unlike the others; for a comparison of losses "
        "a longer lr_warmup_steps or a lower learning_rate may need fewer seeds"
    )


def torch_versions() -> dict[str, str | None]:
    """Return those of what torch was built with and runs on; None without a GPU."""
    has_cuda = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
    }
