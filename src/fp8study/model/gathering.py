"""What FSDP2 gathers: which layers' weights stay, and how FP8 weights are made to travel."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from fp8study.core.config import RunConfig
from fp8study.model.build import decoder_layers


def tune_gathering(config: RunConfig, model: torch.nn.Module) -> None:
    """Do what ``reshard_after_forward=half`` and ``gather_cast=compiled`` ask for.

    Args:
        config: The run.
        model: As it was sharded, before its first step.
    """
    if config.reshard_after_forward == "half":
        _keep_later_layers(model)
    if config.gather_cast == "compiled":
        _compile_casts()


def _keep_later_layers(model: torch.nn.Module) -> None:
    """Let the second half of the decoder layers keep their gathered weights until the backward.

    The backward pass begins with these layers: their weights would be freed for the shortest time.
    """
    layers = decoder_layers(model)
    for layer in layers[len(layers) // 2 :]:
        assert isinstance(layer, FSDPModule)
        layer.set_reshard_after_forward(False, recurse=False)


def _compile_casts() -> None:
    """Let torchao make FP8 shards in one kernel, for the rest of this process.

    torchao scales, clamps and casts each shard by three kernels before every gathering, through
    FP32 tensors in between: 21 bytes of memory traffic a weight, where 5 do. It has no setting for
    it, and its tensors do not survive subclassing, so the method itself is replaced. Tests hold the
    values to torchao's.
    """
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Shard

    original = Shard.fsdp_pre_all_gather
    if original.__module__ == __name__:
        return

    def pre_all_gather(self: Any, mesh: Any) -> Any:
        scale = self._precomputed_scale
        if scale is None:  # before the first update
            return original(self, mesh)
        return (_cast(self._tensor.view(-1), scale, self._dtype).view_as(self),), (scale,)

    Shard.fsdp_pre_all_gather = pre_all_gather


@torch.compile(dynamic=True)  # flat and of any length: one kernel for all weights
def _cast(weight_N: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return (weight_N.float() * scale).clamp(-largest, largest).to(dtype)
