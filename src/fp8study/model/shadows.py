"""Stand-ins of a model in training that compute in other precisions on the same weights.

To compare precisions at one point of a run, everything but the arithmetic must be equal. So the
model is rebuilt without storage, and the rebuilt modules are pointed at shared weights:

``fp32``
    the master weights themselves (no copy), multiplied in FP32;
``bf16`` and the FP8 recipes
    one copy of them rounded to BF16, shared by all of these. That is what FSDP2's mixed precision
    hands to every layer, so a BF16 stand-in computes what a BF16 run under FSDP2
    computes, and an FP8 one what an FP8 run there computes with its all-gather in BF16. One
    process without FSDP2 trains under autocast instead, which keeps the residual stream in FP32;
    its FP8 layers see the same dtypes but the weights, which it casts from FP32. With shared
    BF16 weights the two sides of a comparison differ in FP8 alone, and
    ``fp8_rowwise_gw_hp``, which cannot multiply FP32 weights with BF16 inputs, can be measured.

Nothing is compiled: torch.compile fuses, which changes the rounding between operations.
"""

from __future__ import annotations

import dataclasses

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.fields import PLAIN_TODAY
from fp8study.core.recipes import FP8_RECIPES
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8, is_converted
from fp8study.model.local import local_tensor


class Shadows:
    """A trained model in every precision; it holds one BF16 copy of the weights and no other.

    Made anew for each point: sharding may move the master weights to new storage.
    """

    def __init__(self, config: ResolvedConfig, trained: torch.nn.Module) -> None:
        # On one process a parameter's shard is all of it.
        masters = {n: local_tensor(p).view(p.shape) for n, p in trained.named_parameters()}
        rounded = {name: t.to(torch.bfloat16) for name, t in masters.items()}
        frozen = {name for name, p in trained.named_parameters() if not p.requires_grad}
        self._weights = {
            kind: {n: torch.nn.Parameter(t, requires_grad=n not in frozen) for n, t in of.items()}
            for kind, of in (("fp32", masters), ("bf16", rounded))
        }
        self.names = [name for name in masters if name not in frozen]
        self.models: dict[str, torch.nn.Module] = {}
        # The strategy under which all recipes are allowed; nothing is sharded here.
        unsharded = dataclasses.replace(
            config, strategy="fsdp2", fp8_all_gather=False, **PLAIN_TODAY
        )
        for precision in ("fp32", "bf16", *FP8_RECIPES):
            model = rebuilt(config.model, trained, self._weights[_weights_of(precision)])
            if precision in FP8_RECIPES:
                convert_to_float8(model, dataclasses.replace(unsharded, precision=precision))
            self.models[precision] = model
        fp8_layers = {
            f"{name}.weight"
            for name, module in self.models[FP8_RECIPES[0]].named_modules()
            if is_converted(module)
        }
        self.is_fp8 = [name in fp8_layers for name in self.names]
        """Which of the parameters an FP8 layer multiplies with, in the order of `names`."""

    def trainable(self, precision: str) -> list[torch.nn.Parameter]:
        """Return the weights that gradients are taken of, in the order of `names`."""
        return [self._weights[_weights_of(precision)][name] for name in self.names]

    def gradient(
        self, precision: str, ids_T: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Differentiate the training loss of one packed sequence, int64[T] on the model's device.

        Returns one gradient per trainable parameter, in the dtype of the computing weights, and
        the loss, a scalar on the device.
        """
        loss = self.models[precision](input_ids=ids_T[None], labels=ids_T[None]).loss
        gradients = torch.autograd.grad(loss, self.trainable(precision), materialize_grads=True)
        return gradients, loss.detach()


def _weights_of(precision: str) -> str:
    return "fp32" if precision == "fp32" else "bf16"


def rebuilt(
    name: str, trained: torch.nn.Module, weights: dict[str, torch.nn.Parameter]
) -> torch.nn.Module:
    """Build model `name` without storage; give it these whole weights and the trained buffers."""
    with torch.random.fork_rng():  # building seeds the generators
        model = build_model(name, torch.float32, torch.device("meta"), seed=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:  # tied weights share one name, so they stay tied
                module._parameters[key] = weights[names[id(parameter)]]
    for path, buffer in trained.named_buffers():
        owner, _, key = path.rpartition(".")
        model.get_submodule(owner)._buffers[key] = buffer
    return model
