"""What the tuned path makes of a switch, where that depends on the run.

Each function takes a configuration of which the switches declared before the one it decides are
resolved, and later ones may be None.
"""

from __future__ import annotations

from typing import Any

from fp8study.core.presets import near_settings
from fp8study.core.recipes import RECIPES, is_aligned

#: What stays out of FP8 where nothing is said.
HEAD = ("lm_head",)
#: GPUs on which it was timed in FP8.
MOST_GPUS_OF_HEAD = 4


def is_sharded(c: Any) -> bool:
    """Whether each GPU holds a part of the weights."""
    return c.strategy == "fsdp2" and c.num_gpus > 1


def resharding(c: Any) -> bool | str:
    """Free the layers that the backward pass comes to last, where freeing them frees anything."""
    if is_sharded(c):
        return "half"
    return c.strategy != "fsdp2"  # FSDP2 on one GPU has nobody to gather from


def gradient_reduction(c: Any) -> str:
    """Reduce after each pass where copy engines gain more than that costs (docs/log.md, 94)."""
    by_copies = c.collectives in (None, "copy_engines") and may_copy(c)
    adds_up = c.gradient_accumulation_steps > 1 and c.gradient_pool != "shared"
    return "each_pass" if by_copies and adds_up else "last_pass"


def gradient_pool(c: Any) -> str:
    """Let gradients that are kept until all are there have the memory that activations leave."""
    keeps_whole = c.master_dtype == "fp32" and not c.untrained and c.sharding == "full"
    keeps_whole &= c.gradient_reduction != "each_pass"  # as it was made, not added to another
    later = c.optimizer_step == "after_backward"
    # In a graph's own memory it was tried on two GPUs alone (docs/log.md, 89).
    is_tried = c.step_launch != "as_graph" or c.num_gpus == 2
    return "shared" if is_sharded(c) and later and keeps_whole and is_tried else "own"


def updates_in_one_pass(c: Any) -> bool:
    """Whether a run is of those that were faster so, or like them (docs/log.md, 64, 68 and 94)."""
    keeps_fp32 = c.master_dtype == c.optimizer_state == "fp32"
    converts_first = c.optimizer_binding == "after_conversion"
    is_spread = c.strategy == "none" or (is_sharded(c) and c.sharding == "full")
    is_plain = is_spread and not RECIPES[c.precision].scales_loss
    return is_plain and keeps_fp32 and converts_first and not c.activation_checkpointing


def _may_update_in_one_pass(c: Any) -> bool:
    is_asked = c.update_kernel in (None, "one_pass")  # None: not decided yet
    return is_asked and updates_in_one_pass(c)


def weight_cast(c: Any) -> str:
    """Cast weights once where one scale a weight allows it, and the update finds that scale."""
    is_alike = RECIPES[c.precision].scaling == "tensorwise" and not c.precision_schedule
    is_whole = c.strategy == "none" and not c.fp8_all_gather  # else torchao's own weights
    is_alike &= is_whole or c.gather_cast == "compiled"
    return "each_update" if is_alike and _may_update_in_one_pass(c) else "each_pass"


def _keeps_fp8(c: Any) -> bool:
    """Whether weights stay in FP8 between updates, as far as is decided."""
    return (c.weight_cast or weight_cast(c)) == "each_update" and _may_update_in_one_pass(c)


def gradient_dtype(c: Any) -> str:
    """Keep gradients in BF16 where nothing but one update reads them."""
    keeps = c.weight_cast == "each_update" or c.precision == "bf16"
    clips_once = c.max_grad_norm is None or c.clipping == "in_update"
    is_tried = c.compile_mode != "reduce-overhead" and c.update_kernel == "one_pass"
    is_tried &= c.strategy == "none" and c.gradient_accumulation_steps == 1
    narrow = keeps and clips_once and is_tried and updates_in_one_pass(c)
    return "compute" if narrow else "master"


def may_copy(c: Any) -> bool:
    """Whether copy engines were faster (docs/log.md, 70): of more GPUs nothing is known."""
    adds_reduced = c.gradient_accumulation_steps == 1 or c.gradient_reduction != "last_pass"
    is_alike = c.num_gpus == 2 and c.num_nodes == 1 and is_sharded(c) and adds_reduced
    is_alike &= c.gpu_links in (None, "as_found")
    return is_alike and _may_update_in_one_pass(c)


def writes_apart(c: Any) -> bool:
    """Whether kernels of our own that turn FP8 were faster (docs/log.md, 78); as `may_copy`."""
    others = (c.transposes, "separate"), (c.cast_kernels, "both_layouts"), (c.swiglu, "kernels")
    if not _keeps_fp8(c) or any(value not in (None, wanted) for value, wanted in others):
        return False  # all of it, or none
    by_copies = c.collectives in (None, "copy_engines") and may_copy(c) and bool(c.fp8_all_gather)
    later = c.gradient_copy in (None, "reduce_stream") and c.compile_mode != "reduce-overhead"
    return c.strategy == "none" or (by_copies and later)


def gradient_norm(c: Any) -> str:
    """The kernel that a GPU, or two with copy engines, gained by (docs/log.md, 72)."""
    is_wanted = c.max_grad_norm is not None and c.optimizer_step == "after_backward"
    is_wanted &= c.gradient_accumulation_steps == 1  # of several passes never timed
    if not is_wanted or c.update_kernel != "one_pass" or not updates_in_one_pass(c):
        return "separate"
    if c.strategy == "none":
        return "by_kernel"
    adds_up = c.collectives == "copy_engines" and c.num_gpus == 2
    return "as_summed" if adds_up and c.clipping == "in_update" and not c.untrained else "separate"


def skipped(c: Any) -> tuple[str, ...]:
    """Put the loss head in FP8, too, where that was faster (docs/log.md, 83, 85 and 87).

    It cost an 8B no loss, nor a 1B, clipped or not. On up to four GPUs, where it is known here
    whether the head is the embedding, which cannot be gathered in FP8, and that FP8 GEMMs take it
    and GPUs share its rows evenly.
    """
    is_tried = _keeps_fp8(c) and c.loss_head == "chunked"
    is_tried &= c.num_gpus <= MOST_GPUS_OF_HEAD and c.num_nodes == 1
    settings = near_settings(c.model) if is_tried else {}
    named = (settings.get(name) for name in ("hidden_size", "vocab_size"))
    sides = [side for side in named if isinstance(side, int)]
    if len(sides) < 2 or not is_aligned(*sides):
        return HEAD
    if is_sharded(c) and settings["vocab_size"] % c.num_gpus:
        return HEAD
    is_tied = settings.get("tie_word_embeddings")  # None: transformers' default, not known here
    return () if is_tied is False or (is_tied is True and c.strategy == "none") else HEAD
