"""Compile, convert, shard, bind: the order in which a model becomes trainable.

The order matters more than anything else in FP8 training. torchao may wrap every weight in a
new parameter, and sharding replaces parameters again; an optimizer made before either keeps
updating tensors that nobody reads. So by default the optimizer is made last:

    compile each layer  →  convert to FP8  →  replace the loss head  →  shard  →  make the optimizer

Compilation comes first because it is only announced: a layer is compiled at its first forward
pass, with the FP8 modules and the hooks of sharding that it has by then.

``optimizer_binding=before_conversion`` leaves all of it to `Accelerator.prepare`, as document
A does. Accelerate re-points the optimizer only under FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.recipes import RECIPES
from fp8study.model.build import decoder_layers
from fp8study.model.compiling import compile_layers
from fp8study.model.float8 import convert_to_float8, float8_config, float8_filter, let_change
from fp8study.model.fsdp.patches import applies, cast_shards, shards, tune_communication
from fp8study.model.kept_weights import FP8, keep_weights, noted_largest, refresh, turn_apart
from fp8study.model.loss_head import check_loss_head, replace_loss_head
from fp8study.model.swiglu import write_fp8_between

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def make_accelerator(config: ResolvedConfig, model: torch.nn.Module) -> Accelerator:
    """Build the Accelerator of a run.

    Under FSDP2 the sharding policy alone sets the compute dtype (bf16 or fp16, gradients
    reduced in fp32). One process and DDP compute under autocast: Accelerate's, as the documents do,
    or in fp16, which Accelerate refuses on a CPU, that of `prepare`.
    """
    on_cpu, handlers = not torch.cuda.is_available(), []
    has_own = config.strategy == "fsdp2" or RECIPES[config.precision].scales_loss
    autocast = "no" if has_own else "bf16"
    if config.is_fp8 and config.optimizer_binding == "before_conversion":
        chosen = float8_filter(config, model)
        handlers = [AORecipeKwargs(config=float8_config(config), module_filter_func=chosen)]
        autocast = "fp8"
    if config.strategy != "fsdp2":
        return Accelerator(cpu=on_cpu, mixed_precision=autocast, kwargs_handlers=handlers)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=bool(config.reshard_after_forward),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(decoder_layers(model)[0]).__name__],
        cpu_ram_efficient_loading=config.cpu_ram_efficient_loading,
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype(config), reduce_dtype=torch.float32
        ),
    )
    accelerator = Accelerator(
        cpu=on_cpu, mixed_precision=autocast, fsdp_plugin=plugin, kwargs_handlers=handlers
    )
    if accelerator.distributed_type != DistributedType.FSDP:
        # Accelerate ignores the plugin on CPU processes, although fully_shard works on gloo.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if config.sharding == "hybrid":
        # Given to the Accelerator, CPU processes would be refused. Ranks count node by node.
        sizes = ParallelismConfig(
            dp_replicate_size=config.num_nodes, dp_shard_size=config.gpus_per_node
        )
        accelerator.state.parallelism_config = sizes
        accelerator.state.device_mesh = sizes.get_device_mesh(accelerator.device.type)
    return accelerator


def compute_dtype(config: ResolvedConfig) -> torch.dtype:
    """Return the dtype of what a run does not compute in FP8."""
    return torch.float16 if RECIPES[config.precision].scales_loss else torch.bfloat16


def prepare(
    config: ResolvedConfig,
    accelerator: Accelerator,
    model: torch.nn.Module,
    make_optimizer: MakeOptimizer,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model and optimizer ready to train, in the order that the run asks for.

    The model comes on its device and in its master dtype; `make_optimizer` is called once, on the
    model as it then is.
    """
    check_loss_head(model, config)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if config.compile:
        compile_layers(decoder_layers(model), config)

    if config.optimizer_binding == "before_conversion":
        optimizer = make_optimizer(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        _check_loading(config, model)
        tune_communication(config, model)
        return model, optimizer

    convert_to_float8(model, config)
    if config.precision_schedule:
        let_change(model)
    if keeps_weights(config):
        keep_weights(model, config)
    turn_apart(model, config)
    write_fp8_between(model, config)
    replace_loss_head(model, config)
    if config.strategy == "fsdp2":
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        model = fsdp2_prepare_model(accelerator, model)
        _check_loading(config, model)
    else:
        if RECIPES[config.precision].scales_loss:
            autocast = torch.autocast(accelerator.device.type, compute_dtype(config))
            model.forward = autocast(model.forward)
        model = accelerator.prepare_model(model)
    tune_communication(config, model)
    optimizer = make_optimizer(model)
    if config.optimizer_step == "after_backward":
        optimizer = accelerator.prepare_optimizer(optimizer)
    # Else its wrapper would look for packages on disk at each of a step's many updates.
    return model, optimizer


def keeps_weights(config: ResolvedConfig) -> bool:
    """Whether one process keeps its weights as it multiplies with them."""
    casts = applies(config, "weight_cast") or config.gradient_dtype == "compute"
    return casts and config.strategy == "none"


def _check_loading(config: ResolvedConfig, model: torch.nn.Module) -> None:
    """See that Accelerate's loading left all ranks weights of one kind.

    Gathering asks FP8 weights for their largest value over all ranks: with plain ones on other
    ranks each would wait for ever.

    Raises:
        UserError: It did not.
    """
    if not config.cpu_ram_efficient_loading or config.num_gpus == 1:
        return
    kinds = [type(getattr(p, "_local_tensor", p)).__name__ for p in model.parameters()]
    found: list[list[str]] = [[]] * config.num_gpus
    dist.all_gather_object(found, kinds)
    if any(theirs != found[0] for theirs in found):
        number, there = sum(a != b for a, b in zip(found[0], found[1], strict=True)), len(kinds)
        raise UserError(
            f"cpu_ram_efficient_loading: true left {number} of {there} weights FP8's on rank 0 and "
            "plain on others, or the reverse; set fp8_all_gather=false or leave it out"
        )


def after_update(config: ResolvedConfig, model: torch.nn.Module) -> Callable[[], None]:
    """Return what is to be done after each update, and after weights were read from a file.

    Layers that keep their weights in FP8 are given the new ones. Else, where weights are gathered
    in FP8, all scales are computed together: otherwise every weight asks all GPUs for its largest
    value before each gathering, forward and backward, hundreds of tiny all-reduces that made FP8
    slower than BF16 (docs/log.md). Accelerate does the same when it converts the model itself.
    """
    if keeps_weights(config):
        return lambda: refresh(model)
    gathers_fp8 = config.fp8_all_gather and config.strategy == "fsdp2"
    if not gathers_fp8 or config.optimizer_binding == "before_conversion":
        return lambda: None
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    casts = applies(config, "weight_cast")  # here: it looks for packages on disk

    def after() -> None:
        if not _scale_as_noted(model):
            precompute_float8_dynamic_scale_for_fsdp(model)
        if casts:
            cast_shards(model)

    return after


@torch.no_grad()
def _scale_as_noted(model: torch.nn.Module) -> bool:
    """Scale shards by what their update found largest, as torchao would; False if it did not look.

    All ranks update the same weights, so that all of them know it or none.
    """
    own = shards(model)
    weights: list[torch.Tensor] = [model.get_parameter(f"{name}.weight") for name in own]
    if not own or (largest := noted_largest(weights)) is None:
        return False
    from torchao.float8.float8_utils import amax_to_scale

    of_all = torch.stack(largest)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    scales = [*amax_to_scale(of_all, FP8).unbind()]
    before = [shard._precomputed_scale for shard in own.values()]
    if all(scale is not None for scale in before):
        torch._foreach_copy_(before, scales)  # in place, where a CUDA graph finds them
        return True
    for shard, scale in zip(own.values(), scales, strict=True):
        shard._precomputed_scale = scale
    return True


@contextmanager
def gradient_sync(model: torch.nn.Module, is_last: bool, config: ResolvedConfig) -> Iterator[None]:
    """Communicate gradients of a model from `prepare` in a step's last backward pass, or in each.

    Under DDP in the last.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or config.gradient_reduction == "each_pass")
    waits = isinstance(model, torch.nn.parallel.DistributedDataParallel) and not is_last
    with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
        yield


def parameters_outside_optimizer_pct(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> float:
    """Return the share of trainable weights that the optimizer does not hold, in percent.

    Counted by identity: a stale optimizer holds tensors of the right shape that are no longer
    the model's. Zero in any healthy run.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in trainable)
    outside = sum(p.numel() for p in trainable if id(p) not in held)
    return 100.0 * outside / total if total else 0.0
