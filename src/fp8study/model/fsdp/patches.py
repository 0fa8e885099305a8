"""What FSDP2 gathers and reduces: private functions of torch and torchao, replaced.

None of them has a setting. `PATCHES` lists what is replaced, for which switch, and the
versions for which tests hold the replacement to the original. Under any other version the original
stays in place, and the run's record warns of it (`unchecked`).
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch.distributed.fsdp import FSDPModule

from fp8study.core.config import ResolvedConfig
from fp8study.core.fields import PLAIN
from fp8study.core.record_shape import INSTEAD
from fp8study.model.build import decoder_layers
from fp8study.model.compiling import compiled
from fp8study.model.float8 import to_fp8
from fp8study.model.fsdp import copying, peers
from fp8study.model.fsdp.pooling import pooled_reduce_scatter
from fp8study.model.local import stride


@dataclass(frozen=True)
class Patch:
    """A private function that a switch replaces, unless it has its plain value."""

    replaces: str
    package: str
    checked: str
    """Versions of the package for which it was checked."""


_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
PATCHES = {
    "gather_cast": Patch(
        "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather",
        "torchao", ">=0.17,<0.19",
    ),
    **dict.fromkeys(
        ("weight_cast", "swiglu", "transposes", "cast_kernels"),
        Patch("torchao.float8.float8_linear.Float8Linear.forward", "torchao", ">=0.18,<0.19"),
    ),
    "gradient_copy": Patch(
        f"{_FSDP}.foreach_reduce_scatter_copy_in", "torch", ">=2.11,<2.14"
    ),
    "gradient_pool": Patch(
        f"{_FSDP}.DefaultReduceScatter.allocate", "torch", ">=2.11,<2.14"
    ),
    "collectives": Patch(
        f"{_FSDP}.DefaultReduceScatter", "torch", ">=2.11,<2.14"
    ),
}  # fmt: skip


def unchecked(config: ResolvedConfig) -> list[str]:
    """Return the switches of a run that this installation cannot keep, one line each."""
    return [
        f"{switch}: '{getattr(config, switch)}' replaces {patch.replaces}, which was checked for "
        f"{patch.package}{patch.checked} only, not for {metadata.version(patch.package)}: "
        + INSTEAD.format(switch, PLAIN[switch])
        for switch, patch in PATCHES.items()
        if _asks(config, switch) and not applies(config, switch)
    ]


def without_copy_engines(config: ResolvedConfig) -> list[str]:
    """Return what NCCL does though a run asks for copy engines, one line each; empty if they do."""
    reason = peers.unreachable() if applies(config, "collectives") else ""
    found = [f"collectives: {reason}: {INSTEAD.format('collectives', 'nccl')}"] if reason else []
    by_nccl = bool(reason) or not applies(config, "collectives")
    if by_nccl and config.gradient_norm == "as_summed":
        instead = INSTEAD.format("gradient_norm", "separate")
        found.append(f"gradient_norm: NCCL adds gradients up, and squares nothing: {instead}")
    copies_later = config.gradient_copy == "reduce_stream" and applies(config, "gradient_copy")
    if by_nccl and copies_later:
        instead = INSTEAD.format("gradient_copy", "foreach")
        found.append(f"gradient_copy: NCCL is given gradients that lie together: {instead}")
    return found


def applies(config: ResolvedConfig, switch: str) -> bool:
    """Return whether a run asks for a switch's patch, and has a version that was checked for it."""
    patch = PATCHES[switch]
    checked, version = SpecifierSet(patch.checked), metadata.version(patch.package)
    return _asks(config, switch) and checked.contains(version, prereleases=True)


def _asks(config: ResolvedConfig, switch: str) -> bool:
    return getattr(config, switch) not in (None, PLAIN[switch])  # None: not decided yet


def tune_communication(config: ResolvedConfig, model: torch.nn.Module) -> None:
    """Do to a sharded model what ``reshard_after_forward=half`` and `PATCHES`' switches ask for."""
    if config.reshard_after_forward == "half":
        # The backward pass begins with the later layers: their weights would be freed for the
        # shortest time.
        layers = decoder_layers(model)
        for layer in layers[len(layers) // 2 :]:
            assert isinstance(layer, FSDPModule)
            layer.set_reshard_after_forward(False, recurse=False)
    if applies(config, "gather_cast"):
        _compile_casts()
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    copies = applies(config, "collectives") and not without_copy_engines(config)
    if copies or applies(config, "gradient_pool"):
        squares = config.gradient_norm == "as_summed"
        kind = _reduce_scatter(applies(config, "gradient_pool"), copies, squares)
        for module in modules:
            module.set_custom_reduce_scatter(kind())
    if copies:
        for module in modules:
            module.set_custom_all_gather(_pulling_all_gather()())
    if applies(config, "gradient_copy"):
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        copying.chunk_cat()  # keeps torch's own
        later = copies and config.gradient_copy == "reduce_stream"
        copy: Any = copying.later.put_off if later else copying.copy_together
        collectives.foreach_reduce_scatter_copy_in = copy
    else:
        copying.restore()


def _compile_casts() -> None:
    """Let torchao make FP8 shards in one kernel, for the rest of this process.

    torchao scales, clamps and casts each shard by three kernels before every gathering, through
    FP32 tensors in between: 21 bytes of memory traffic a weight, where 5 do. Its tensors do not
    survive subclassing, so the method itself is replaced.
    """
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Shard

    original = Shard.fsdp_pre_all_gather
    if original.__module__ == __name__:
        return

    def pre_all_gather(self: Any, mesh: Any) -> Any:
        scale = self._precomputed_scale
        if scale is None:  # before the first update
            return original(self, mesh)
        if hasattr(self, "fp8"):
            return (self.fp8,), (scale,)
        return (_cast(self._tensor.view(-1), scale, self._dtype).view_as(self),), (scale,)

    # FSDP2 asks for it before each gathering of each weight, and to find it takes the host 15 µs.
    pre_all_gather.__signature__ = inspect.signature(pre_all_gather)  # type: ignore[attr-defined]
    Shard.fsdp_pre_all_gather = pre_all_gather


def shards(model: torch.nn.Module) -> dict[str, Any]:
    """Return this rank's shards of weights that FSDP2 gathers in FP8, by their layers' names."""
    local = {n: getattr(getattr(m, "weight", None), "_local_tensor", None)
             for n, m in model.named_modules()}  # fmt: skip
    return {name: shard for name, shard in local.items() if hasattr(shard, "_precomputed_scale")}


@torch.no_grad()
def cast_shards(model: torch.nn.Module) -> None:
    """Cast the shards of all decoder layers for all gatherings until the next update.

    A layer's by one call: for a small model the calls before each gathering are what its steps
    wait for (docs/log.md). One byte a weight of a shard, always in the same place, where a CUDA
    graph finds it. The scales must be those of the weights.
    """
    for layer in decoder_layers(model):
        if own := [*shards(layer).values()]:
            for shard in own:
                if not hasattr(shard, "fp8"):
                    shard.fp8 = torch.empty_like(shard._tensor, dtype=shard._dtype)
            flat = [(s._tensor.view(-1), s._precomputed_scale, s.fp8.view(-1)) for s in own]
            compiled(_scale_all, dynamic=True)(flat)


def is_cast(shard: Any, num_samples: int) -> bool:
    """Return whether what `cast_shards` kept is what a shard gives by its scale, by a sample."""
    every = stride(shard, num_samples)
    now_N, kept_N = (t.view(-1)[::every] for t in (shard._tensor.detach(), shard.fp8))
    made_N = to_fp8(now_N, shard._precomputed_scale, shard._dtype)
    return torch.equal(made_N.view(torch.uint8), kept_N.view(torch.uint8))


def _scale_all(flat: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    for weight_N, scale, fp8_N in flat:
        fp8_N.copy_(to_fp8(weight_N, scale, fp8_N.dtype))


def _cast(weight_N: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Flat and of any length: one kernel for all weights.
    fp8_N: torch.Tensor = compiled(to_fp8, dynamic=True)(weight_N, scale, dtype)
    return fp8_N


@cache
def _reduce_scatter(is_pooled: bool, copies: bool, squares: bool) -> type:
    """Return the class of a reduce-scatter that does one of the first two, or both."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    base = pooled_reduce_scatter() if is_pooled else DefaultReduceScatter
    return _pulling_reduce_scatter(base, squares) if copies else base


def _pulling_reduce_scatter(base: Any, squares: bool) -> type:
    """Return a reduce-scatter that fetches gradients as they are, and adds them up in FP32.

    With `squares` it notes what the sum's add up to.

    torch casts BF16 gradients to FP32 and sends these, as NCCL adds up in what it sends. Here each
    rank fetches its shares of the others' gradients in BF16, half the bytes, and adds them up in
    FP32 in the order of the ranks: of two ranks that is the same sum to the bit.
    """

    class PullingReduceScatter(base):
        """FSDP2 asks it for the gradients' memory, then for that of their sum, then to reduce."""

        has_gradients = False

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            if self.has_gradients:
                made: torch.Tensor = super().allocate(size, dtype=dtype, device=device)
                return made
            self.has_gradients = True
            if device.type != "cuda":
                return torch.empty(size, dtype=torch.bfloat16, device=device)
            return peers.memory("gradients").room(math.prod(size), torch.bfloat16)

        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any
        ) -> None:
            self.has_gradients = False
            # Another one would be asked for if gradients were given a divisor, which none are here.
            assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM), op
            divisor = group.size() if op == dist.ReduceOp.AVG else 1
            copying.later.copy(input_tensor, group.size())
            noted = peers.squares.next_unit(output_tensor.device) if squares else None
            if input_tensor.is_cuda:
                torch.ops.fp8study.pull_gradients(output_tensor, input_tensor, divisor, noted)
                return
            received_N = torch.empty_like(input_tensor)
            dist.all_to_all_single(received_N, input_tensor, group=group)
            peers.add_up([*received_N.view(group.size(), -1).unbind()], output_tensor, divisor)
            if noted is not None:
                noted.copy_(output_tensor.square().sum())

    return PullingReduceScatter


@cache
def _pulling_all_gather() -> type:
    """Return an all-gather by which each rank fetches the others' shards, on GPUs."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class PullingAllGather(DefaultAllGather):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any,
            async_op: bool = False,
        ) -> Any:  # fmt: skip
            if not input_tensor.is_cuda:
                return super().__call__(output_tensor, input_tensor, group, async_op)
            torch.ops.fp8study.pull_weights(output_tensor, input_tensor)
            return None  # FSDP2 waits for the stream

    return PullingAllGather
