"""What ``path=tuned`` chooses, and which of its switches exclude what: the torch-free half.

The plain path trains as the documents do. The tuned one computes the same loss, gradients and
updates faster, or with less memory: in another order, by fewer kernels, or gathering less often.
Each switch can be set alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8study.core.errors import UserError

if TYPE_CHECKING:
    from fp8study.core.config import RunConfig

#: What the plain path sets.
PLAIN: dict[str, Any] = {
    "loss_head": "plain",
    "optimizer_step": "after_backward",
    "attention": "default",
    "reshard_after_forward": True,
    "compile_mode": "default",
    "gather_cast": "eager",
    "allocator": "default",
    "recompute": "default",
    "clipping": "separate",
    "gradient_pool": "own",
    "gradient_copy": "chunk_cat",
    "attention_mask": "checked",
}
#: The fields that a path decides.
SWITCHES = tuple(PLAIN)
_TUNED = PLAIN | {
    "loss_head": "chunked",
    "optimizer_step": "in_backward",
    "attention": "cudnn",
    "allocator": "expandable",
    "attention_mask": "causal",
}


def switches_of(config: RunConfig) -> dict[str, Any]:
    """Return the value of every switch that the run left to its path."""
    values = dict(_TUNED if config.path == "tuned" else PLAIN)
    if config.max_grad_norm is not None or config.strategy == "ddp":
        values["optimizer_step"] = "after_backward"  # the other one cannot be had: `check_switches`
    if config.path == "tuned":
        values["clipping"] = "separate" if config.max_grad_norm is None else "in_update"
    if config.path == "tuned" and config.strategy == "fsdp2":
        values |= _tuned_sharding(config)
    return {name: value for name, value in values.items() if getattr(config, name) is None}


def _tuned_sharding(config: RunConfig) -> dict[str, Any]:
    if config.num_gpus == 1:
        return {"reshard_after_forward": False}  # there is nobody to gather from
    compiles_cast = config.fp8_all_gather and config.compile
    updates_later = config.max_grad_norm is not None or config.optimizer_step == "after_backward"
    shares_pool = updates_later and config.master_dtype == "fp32" and not config.untrained
    return {
        "reshard_after_forward": "half",
        "gather_cast": "compiled" if compiles_cast else "eager",
        "gradient_pool": "shared" if shares_pool else "own",
        "gradient_copy": "foreach",
    }


def check_switches(config: RunConfig) -> None:
    """Refuse switches that cannot hold or would do nothing.

    Raises:
        UserError: It names the switch, what it contradicts and the remedy.
    """
    if config.optimizer_step == "in_backward" and config.max_grad_norm is not None:
        raise UserError(
            "optimizer_step: 'in_backward' updates before the whole gradient is known, which "
            f"max_grad_norm={config.max_grad_norm} needs; use after_backward or max_grad_norm=none"
        )
    if config.optimizer_step == "in_backward" and config.strategy == "ddp":
        raise UserError(
            "optimizer_step: 'in_backward' frees nothing under strategy=ddp, whose buckets keep "
            "every gradient; use after_backward, or strategy=fsdp2"
        )
    bound = {"loss_head": "plain", "optimizer_step": "after_backward"}
    for name, value in bound.items():
        chosen = getattr(config, name)
        if chosen != value and config.optimizer_binding == "before_conversion":
            raise UserError(
                f"{name}: '{chosen}' needs optimizer_binding=after_conversion: with "
                f"before_conversion Accelerate replaces the layers afterwards; use {value}"
            )
    if config.reshard_after_forward is not True and config.strategy != "fsdp2":
        value = config.reshard_after_forward or "false"
        raise UserError(
            f"reshard_after_forward: {value} says nothing under strategy={config.strategy}, which "
            "gathers no weights; leave it out, or use strategy=fsdp2"
        )
    if config.gather_cast == "compiled" and not (
        config.fp8_all_gather and config.strategy == "fsdp2"
    ):
        raise UserError(
            "gather_cast: 'compiled' says nothing where no weights are gathered in FP8; leave it "
            "out, or use precision=fp8_tensorwise and strategy=fsdp2 on several GPUs"
        )
    for name in ("compile_mode", "recompute"):
        if getattr(config, name) != "default" and not config.compile:
            raise UserError(
                f"{name}: '{getattr(config, name)}' says nothing with compile=false; leave it "
                "out, or set compile=true"
            )
    if config.clipping == "in_update" and config.max_grad_norm is None:
        raise UserError(
            "clipping: 'in_update' says nothing without max_grad_norm; leave it out, or set "
            "max_grad_norm=1"
        )
    reduces = config.strategy == "fsdp2" and config.num_gpus > 1
    for name, plain in (("gradient_pool", "own"), ("gradient_copy", "chunk_cat")):
        if getattr(config, name) != plain and not reduces:
            raise UserError(
                f"{name}: '{getattr(config, name)}' says nothing where no gradients are reduced "
                "over GPUs by FSDP2; leave it out, or use strategy=fsdp2 on several GPUs"
            )
    if config.gradient_pool == "shared":
        _check_shared_pool(config)


def _check_shared_pool(config: RunConfig) -> None:
    """Refuse gradients in the activations' memory where they would be freed too early.

    Raises:
        UserError: As `check_switches`.
    """
    if config.optimizer_step == "in_backward":
        raise UserError(
            "gradient_pool: 'shared' does not go with optimizer_step=in_backward, which frees "
            "gradients beside the backward pass; use own, or optimizer_step=after_backward"
        )
    if config.master_dtype != "fp32":
        raise UserError(
            f"gradient_pool: 'shared' does not go with master_dtype={config.master_dtype}, for "
            "which gradients are cast and freed as they arrive; use own, or master_dtype=fp32"
        )
    if config.untrained:
        raise UserError(
            "gradient_pool: 'shared' does not go with untrained weights, whose gradients are never "
            "freed, so that later ones are added to them and freed early; use own"
        )
