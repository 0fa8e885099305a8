"""The switches: fields on which a training path decides where nothing was said.

They are declared as the other fields are (`fp8study.core.fields`), which they come after: what a
path makes of a switch may depend on any of those, and on the switches before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8study.core.field_types import Field, declare, switch
from fp8study.core.path import choices
from fp8study.core.path.choices import is_sharded
from fp8study.core.recipes import RECIPES

#: What refuses several fields, written once.
_NOT_REDUCED = (
    "says nothing where no gradients are reduced over GPUs by FSDP2; leave it out, or use "
    "strategy=fsdp2 on several GPUs"
)
#: What patterns of layers look like.
LAYERS = {
    "pattern": r"[\w.*?!\[\]-]+",
    "example": "give shell-style patterns of module names, as *.o_proj",
}
BOUND_EARLY = (
    "needs optimizer_binding=after_conversion: with before_conversion Accelerate replaces the "
    "layers afterwards; use "
)


# A field reads like an entry of a table.
# fmt: off
@dataclass(frozen=True)
class Switches:
    """The training path, and every switch that it sets."""

    path: Literal["plain", "tuned"] = declare(
        "plain", "tuning", "`plain` trains as the documents do; `tuned` sets the fields of this "
        "group that were left unset. Both compute the same losses.", differs="switch resume")
    loss_head: Literal["plain", "compiled", "chunked"] | None = switch(
        "plain", lambda c: "compiled" if RECIPES[c.precision].scales_loss else "chunked",
        "{} loss head", "transformers' own loss, compiled together with the "
        "loss head, or a few tokens at a time, so that the logits are never whole.", refused=(
            (lambda c: c.loss_head != "plain" and c.optimizer_binding == "before_conversion",
             BOUND_EARLY + "plain"),
            (lambda c: c.loss_head == "chunked" and RECIPES[c.precision].scales_loss,
             "makes its gradient before precision={precision} scales the loss; use compiled")))
    optimizer_step: Literal["after_backward", "in_backward"] | None = switch(
        "after_backward",
        lambda c: "in_backward" if c.max_grad_norm is None and c.strategy != "ddp"
        and c.optimizer_state == "fp32" and not RECIPES[c.precision].scales_loss
        else "after_backward",
        "updates {}", "`in_backward`: a decoder layer is updated, and its gradients freed, as soon "
        "as they are complete.", refused=(
            (lambda c: c.optimizer_step == "in_backward" and c.max_grad_norm is not None,
             "updates before the whole gradient is known, which max_grad_norm={max_grad_norm} "
             "needs; use after_backward or max_grad_norm=none"),
            (lambda c: c.optimizer_step == "in_backward" and c.strategy == "ddp",
             "frees nothing under strategy=ddp, whose buckets keep every gradient; use "
             "after_backward, or strategy=fsdp2"),
            (lambda c: c.optimizer_step == "in_backward"
             and c.optimizer_binding == "before_conversion",
             BOUND_EARLY + "after_backward"),
            (lambda c: c.optimizer_step == "in_backward" and c.optimizer_state != "fp32",
             "would compile the update inside the backward pass, as optimizer_state="
             "{optimizer_state} needs; use after_backward or optimizer_state=fp32"),
            (lambda c: c.optimizer_step == "in_backward" and RECIPES[c.precision].scales_loss,
             "updates before precision={precision} knows whether a gradient is infinite; use "
             "after_backward")))
    attention: Literal["default", "flash", "flash4", "cudnn"] | None = switch(
        "default", "cudnn", "{} attention", "Fused attention kernel that is preferred on a GPU; "
        "`default`: torch's own choice; `flash4`: FlashAttention 4, for Hopper and the "
        "Blackwell of data centres, of the package flash-attn-4.")
    reshard_after_forward: bool | Literal["half"] | None = switch(
        True, choices.resharding, "resharding {}", "FSDP2 frees a layer's gathered weights after "
        "the forward pass and gathers them again in the backward pass; `half`: in the first half "
        "of the layers.", refused=(
            (lambda c: c.reshard_after_forward is not True and c.strategy != "fsdp2",
             "says nothing under strategy={strategy}, which gathers no weights; leave it out, or "
             "use strategy=fsdp2"),))
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] | None = (
        switch("default", "default", "compile mode {}", "torch.compile's mode for the decoder "
        "layers.", refused=(
            (lambda c: c.compile_mode != "default" and not c.compile,
             "says nothing with compile=false; leave it out, or set compile=true"),)))
    step_launch: Literal["by_kernel", "as_graph"] | None = switch(
        "by_kernel", "by_kernel", "steps launched {}", "The CPU launches each kernel of a step, "
        "or, from the fourth step on, all of it as one CUDA graph. `fp8study run` and `machine` "
        "use a graph for small steps of the tuned path that wait for the CPU, on one GPU without "
        "FSDP2, on two and on four.", refused=(
            (lambda c: c.step_launch == "as_graph" and c.attention_mask == "checked",
             "cannot look for packed sequences; use attention_mask=causal, or by_kernel"),
            (lambda c: c.step_launch == "as_graph" and c.gradient_accumulation_steps > 1,
             "is of one backward pass; use gradient_accumulation_steps=1, or by_kernel"),
            (lambda c: c.step_launch == "as_graph" and c.precision_schedule,
             "is of steps in one precision; leave precision_schedule out, or use by_kernel"),
            (lambda c: c.step_launch == "as_graph" and RECIPES[c.precision].scales_loss,
             "would not wait to see whether a gradient of precision={precision} overflows; use "
             "by_kernel"),
            (lambda c: c.step_launch == "as_graph" and c.activation_checkpointing,
             "cannot restore the state of random numbers; use activation_checkpointing=false, or "
             "by_kernel"),
            (lambda c: c.step_launch == "as_graph" and c.compile_mode == "reduce-overhead",
             "has the graphs of compile_mode=reduce-overhead in it; use default, or by_kernel"),
            (lambda c: c.step_launch == "as_graph" and c.num_warmup_steps < 5,
             "is recorded in the fourth step, and replayed once before steps are timed; use "
             "num_warmup_steps=5 or more, or by_kernel"),
            (lambda c: c.step_launch == "as_graph" and c.update_kernel != "one_pass",
             "needs an update whose numbers a graph finds anew; use update_kernel=one_pass, or "
             "by_kernel")))
    gather_cast: Literal["eager", "compiled"] | None = switch(
        "eager",
        lambda c: "compiled" if c.fp8_all_gather and c.compile and is_sharded(c) else "eager",
        "{} cast before gathering", "How weights become FP8 before FP8 all-gather: by torchao's "
        "own three kernels, or by one.", differs="pair effect", refused=(
            (lambda c: c.gather_cast == "compiled"
             and not (c.fp8_all_gather and c.strategy == "fsdp2"),
             "says nothing where no weights are gathered in FP8; leave it out, or use "
             "precision=fp8_tensorwise and strategy=fsdp2 on several GPUs"),))
    allocator: Literal["default", "expandable"] | None = switch(
        "default", "expandable", "{} allocator", "`expandable`: torch keeps GPU memory in segments "
        "that grow, which lowers fragmentation.")
    clipping: Literal["separate", "in_update"] | None = switch(
        "separate", lambda c: "in_update" if c.max_grad_norm is not None
        and c.optimizer_state == "fp32" else "separate",
        "clipping {}", "Gradients are scaled for max_grad_norm by a pass of their own, or by "
        "AdamW's kernel as it reads them.", refused=(
            (lambda c: c.clipping == "in_update" and c.max_grad_norm is None,
             "says nothing without max_grad_norm; leave it out, or set max_grad_norm=1"),
            (lambda c: c.clipping == "in_update" and c.optimizer_state != "fp32",
             "needs torch's own AdamW, not that of optimizer_state={optimizer_state}; use separate "
             "or optimizer_state=fp32")))
    gradient_reduction: Literal["last_pass", "each_pass"] | None = switch(
        "last_pass", choices.gradient_reduction, "gradients reduced {}", "When FSDP2 reduces "
        "gradients: after a step's last backward pass (until then each GPU holds them whole, in "
        "FP32), or after each (it holds its share).", refused=(
            (lambda c: c.gradient_reduction == "each_pass" and not is_sharded(c), _NOT_REDUCED),
            (lambda c: c.gradient_reduction == "each_pass" and c.gradient_accumulation_steps == 1,
             "says nothing with gradient_accumulation_steps=1; leave it out"),
            (lambda c: c.gradient_reduction == "each_pass" and c.master_dtype != "fp32",
             "would add gradients up in master_dtype={master_dtype}; use last_pass, or "
             "master_dtype=fp32")))
    gradient_pool: Literal["own", "shared"] | None = switch(
        "own", choices.gradient_pool, "gradients' memory {}", "`shared`: FSDP2's reduced gradients "
        "take the memory that the activations leave.", refused=(
            (lambda c: c.gradient_pool == "shared" and not is_sharded(c), _NOT_REDUCED),
            (lambda c: c.gradient_pool == "shared" and c.gradient_reduction == "each_pass",
             "does not go with gradient_reduction=each_pass, which adds reduced gradients up; use "
             "own, or last_pass"),
            (lambda c: c.gradient_pool == "shared" and c.sharding == "hybrid",
             "does not go with sharding=hybrid, which reduces them again across nodes; use own"),
            (lambda c: c.gradient_pool == "shared" and c.optimizer_step == "in_backward",
             "does not go with in_backward updates; use own, or optimizer_step=after_backward"),
            (lambda c: c.gradient_pool == "shared" and c.master_dtype != "fp32",
             "does not go with master_dtype={master_dtype}; use own, or master_dtype=fp32"),
            (lambda c: c.gradient_pool == "shared" and c.untrained,
             "does not go with untrained weights, whose gradients are never freed; use own")))
    gradient_copy: Literal["chunk_cat", "foreach", "reduce_stream"] | None = switch(
        "chunk_cat",
        lambda c: "chunk_cat" if not is_sharded(c)
        else "reduce_stream" if choices.writes_apart(c) else "foreach",
        "gradients copied by {}", "Kernels by which FSDP2 copies gradients together to reduce "
        "them; where a weight's rows do not divide by the number of GPUs it stays chunk_cat. "
        "`reduce_stream`: as `foreach`, beside the backward pass.",
        differs="pair effect", refused=(
            (lambda c: c.gradient_copy != "chunk_cat" and not is_sharded(c), _NOT_REDUCED),
            (lambda c: c.gradient_copy == "reduce_stream" and c.collectives != "copy_engines",
             "copies into what copy engines read; use collectives=copy_engines, or foreach"),
            (lambda c: c.gradient_copy == "reduce_stream" and c.compile_mode == "reduce-overhead",
             "keeps gradients for longer than a CUDA graph does; use foreach")))
    attention_mask: Literal["checked", "causal"] | None = switch(
        "checked", "causal", "masks {}", "`causal`: no search for packed sequences in each forward "
        "pass, which makes the CPU wait for the GPU; a model that attends to less keeps its masks.")
    weight_cast: Literal["each_pass", "each_update"] | None = switch(
        "each_pass", choices.weight_cast, "weights cast {}", "FP8 layers cast their weights in "
        "each forward and backward pass, or once after each update, for 2 bytes a weight (where "
        "weights are gathered in FP8, one byte a weight of a shard).",
        differs="pair effect", refused=(
            (lambda c: c.weight_cast == "each_update" and c.gather_cast != "compiled" and not (
                RECIPES[c.precision].scaling == "tensorwise" and c.strategy == "none"),
             "keeps weights with one scale each; use precision=fp8_tensorwise and strategy=none or "
             "gather_cast=compiled, or each_pass"),
            (lambda c: c.weight_cast == "each_update" and c.precision_schedule,
             "saves no time that is measured: such a run has no timings; use each_pass"),
            (lambda c: c.weight_cast == "each_update"
             and c.optimizer_binding == "before_conversion", BOUND_EARLY + "each_pass")))
    update_kernel: Literal["torch", "one_pass"] | None = switch(
        "torch", lambda c: "one_pass" if choices.updates_in_one_pass(c) else "torch", "{} AdamW",
        "torch's fused AdamW, or one in FP32 that reads and writes each number once and finds the "
        "largest weight for its FP8 scale.", refused=(
            (lambda c: c.update_kernel == "one_pass"
             and (c.strategy == "ddp" or c.optimizer_state != "fp32"),
             "is for strategy=none or fsdp2 and optimizer_state=fp32; use these, or torch"),
            (lambda c: c.update_kernel == "one_pass"
             and c.optimizer_binding == "before_conversion", BOUND_EARLY + "torch")))
    gradient_dtype: Literal["master", "compute"] | None = switch(
        "master", choices.gradient_dtype, "gradients in the {} dtype", "`compute`: linear layers' "
        "gradients stay in BF16, as their GEMMs make them, where FP32 would hold the same numbers; "
        "layers that are not FP8 then keep their weights in BF16 between updates.",
        differs="pair effect", refused=(
            (lambda c: c.gradient_dtype == "compute" and not (
                c.update_kernel == "one_pass" and c.gradient_accumulation_steps == 1
                and c.strategy == "none"),
             "is for updates that take one backward pass's gradients as they are; use "
             "strategy=none, update_kernel=one_pass and gradient_accumulation_steps=1, or master"),
            (lambda c: c.gradient_dtype == "compute" and c.master_dtype != "fp32",
             "changes nothing where master_dtype={master_dtype}; use master"),
            (lambda c: c.gradient_dtype == "compute" and c.max_grad_norm is not None
             and c.clipping == "separate",
             "would be rounded to BF16 again by clipping=separate; use clipping=in_update, or "
             "master"),
            (lambda c: c.gradient_dtype == "compute" and c.is_fp8
             and c.weight_cast != "each_update",
             "needs FP8 layers that keep their weights; use weight_cast=each_update, or master"),
            (lambda c: c.gradient_dtype == "compute" and not c.is_fp8
             and (c.precision != "bf16" or c.precision_schedule),
             "is for precision=bf16 and fp8_tensorwise; use master"),
            (lambda c: c.gradient_dtype == "compute" and c.compile_mode == "reduce-overhead",
             "was never tried with the graphs of compile_mode=reduce-overhead; use master")))
    transposes: Literal["fused", "separate"] | None = switch(
        "fused", lambda c: "separate" if choices.writes_apart(c) else "fused", "{} transposes",
        "A weight's gradient needs FP8 inputs and gradients transposed: by the kernel that casts "
        "them, or by one of its own.",
        differs="pair effect", refused=(
            (lambda c: c.transposes == "separate" and not (
                c.weight_cast == "each_update" and (c.strategy == "none" or c.fp8_all_gather)),
             "is for FP8 weights that are kept, or gathered so; use weight_cast=each_update and, "
             "on several GPUs, fp8_all_gather=true, or fused"),))
    swiglu: Literal["compiled", "kernels"] | None = switch(
        "compiled",
        lambda c: "kernels" if c.weight_cast == "each_update" and choices.updates_in_one_pass(c)
        and c.update_kernel == "one_pass" else "compiled",
        "SwiGLU by {}", "What becomes of SwiGLU between FP8 layers: the "
        "compiler's kernels, which cast and transpose as they compute, or Triton ones that write "
        "FP8, and one that transposes it; an MLP of another kind stays the compiler's.",
        differs="pair effect", refused=(
            (lambda c: c.swiglu == "kernels" and c.weight_cast != "each_update",
             "is for FP8 layers that keep their weights; use weight_cast=each_update, or "
             "compiled"),))
    cast_kernels: Literal["one_layout", "both_layouts"] | None = switch(
        "one_layout",
        lambda c: "both_layouts" if choices.writes_apart(c) else "one_layout",
        "FP8 cast to {}", "Our Triton kernels that cast kept weights and "
        "SwiGLU's output to FP8 write one layout, which others transpose, or both.",
        differs="pair effect", refused=(
            (lambda c: c.cast_kernels == "both_layouts" and c.swiglu != "kernels" and not (
                c.weight_cast == "each_update" and c.strategy == "none"),
             "is for Triton kernels of ours that cast; use weight_cast=each_update with "
             "strategy=none or swiglu=kernels, or one_layout"),))
    gpu_links: Literal["as_found", "unused"] | None = switch(
        "as_found", "as_found", "{} GPU links", "What joins GPUs of a host. `unused`: "
        "NCCL goes through the host's memory (NCCL_P2P_DISABLE), as where no NVLink is.",
        refused=(
            (lambda c: c.gpu_links == "unused" and c.num_gpus == 1,
             "says nothing on one GPU; use num_gpus=2, or leave it out"),
            (lambda c: c.gpu_links == "unused" and c.collectives == "copy_engines",
             "leaves copy engines nothing to read by; use collectives=nccl, or as_found")))
    collectives: Literal["nccl", "copy_engines"] | None = switch(
        "nccl", lambda c: "copy_engines" if choices.may_copy(c) else "nccl", "collectives by {}",
        "`copy_engines`: GPUs of one host read each other's weights and gradients by their copy "
        "engines, which use no multiprocessor; gradients travel in BF16, as they were computed, "
        "and are added up in FP32 where they arrive; GPUs that cannot read each other's memory use "
        "NCCL. `nccl`: by its kernels, gradients in FP32.", refused=(
            (lambda c: c.collectives == "copy_engines" and not is_sharded(c), _NOT_REDUCED),
            (lambda c: c.collectives == "copy_engines" and c.num_nodes > 1,
             "reads GPUs of its own host only, not of num_nodes={num_nodes}; use nccl"),
            (lambda c: c.collectives == "copy_engines" and c.gradient_accumulation_steps > 1
             and c.gradient_reduction == "last_pass",
             "would round to BF16 what gradient_accumulation_steps={gradient_accumulation_steps} "
             "adds up in FP32; use nccl, or gradient_reduction=each_pass"),
            (lambda c: c.collectives == "copy_engines" and RECIPES[c.precision].scales_loss,
             "sends BF16, and precision={precision} has none; use nccl")))
    gradient_norm: Literal["separate", "by_kernel", "as_summed"] | None = switch(
        "separate", choices.gradient_norm, "gradients' norm {}", "What finds the norm of all "
        "gradients: torch's kernels; one of our own; or, where two GPUs' copy engines exchange "
        "gradients, the kernel that adds them up.", refused=(
            (lambda c: c.gradient_norm == "by_kernel" and not (
                c.strategy == "none" and c.update_kernel == "one_pass"),
             "is for whole gradients; use strategy=none and update_kernel=one_pass, or separate"),
            (lambda c: c.gradient_norm == "by_kernel" and c.optimizer_step == "in_backward",
             "is of all gradients together; use optimizer_step=after_backward, or separate"),
            (lambda c: c.gradient_norm == "as_summed"
             and not (c.collectives == "copy_engines" and c.num_gpus == 2),
             "is found as copy engines' gradients of two GPUs are added up; use num_gpus=2 and "
             "collectives=copy_engines, or separate"),
            (lambda c: c.gradient_norm == "as_summed" and c.gradient_accumulation_steps > 1,
             "is of one backward pass's gradients; use separate"),
            (lambda c: c.gradient_norm == "as_summed" and c.optimizer_step == "in_backward",
             "is of all gradients together; use optimizer_step=after_backward, or separate"),
            (lambda c: c.gradient_norm == "as_summed" and c.max_grad_norm is not None
             and c.clipping == "separate",
             "is of no use to clipping=separate; use clipping=in_update, or separate"),
            (lambda c: c.gradient_norm == "as_summed" and c.master_dtype != "fp32",
             "is that of FP32 gradients, which master_dtype={master_dtype} rounds; use separate"),
            (lambda c: c.gradient_norm == "as_summed" and c.untrained,
             "counts untrained weights' gradients, too; use separate")))
    skip: tuple[str, ...] | None = declare(
        None, "float8", "Shell-style patterns of module names that stay out of FP8; each must "
        "match a linear layer. On the tuned path a preset's loss head is in FP8, too, on up to "
        "four GPUs (on one if tied to the embedding), and a folder's, if its config.json says "
        "whether it is tied. `none`: every layer in FP8.",
        differs="pair", plain=choices.HEAD, decide=lambda c: choices.skipped(c) if c.path == "tuned"
        else choices.HEAD, **LAYERS)
# fmt: on


#: Switches that were taken out, with the value that changes nothing; their records still read.
RETIRED: dict[str, Field] = {
    "recompute": Field(
        "tuning", "no GPU gained by it (docs/log.md)", plain="default", words="{} recomputation",
        differs=("switch",)),
    "gradient_exchange": Field(
        "tuning", "two GPUs gained nothing by it (docs/log.md, 69)", plain="reduce_scatter",
        words="gradients by {}", differs=("switch",)),
    "spared_sms": Field(
        "tuning", "two GPUs gained nothing by it (docs/log.md, 69)", plain=0,
        words="{} SMs spared", differs=("switch",)),
    "fp8_writes": Field(
        "tuning", "an 8B on one GPU lost 0.6 % by it (docs/log.md, 76)", plain="per_reader",
        words="FP8 written {}", differs=("switch",)),
    "kernel_launch": Field(
        "tuning", "steps gained nothing by it (docs/log.md, 78)", plain="from_python",
        words="own kernels launched {}", differs=("pair", "effect", "switch")),
    "nccl_ctas": Field(
        "tuning", "two GPUs lost 2 % by it (docs/log.md, 70)", plain=0, words="{} NCCL CTAs",
        differs=("switch",)),
    "combo_kernels": Field(
        "tuning", "an 8B gained at most 0.5 % by it (docs/log.md, 107)",
        plain="apart", words="small kernels {}", differs=("switch",)),
}  # fmt: skip

#: Likewise values of switches that stay, with the one that is nearest.
RETIRED_VALUES = {"gradient_norm": {"by_one_launch": "by_kernel"}}  # docs/log.md, 86
