"""AdamW: torch's own, one with narrower averages, and one that reads and writes all once.

torch's own keeps them as the weights are: eight bytes a weight beside FP32 ones. torchao's keeps
them in FP8 (E4M3, one scale for each 256 numbers), computes in FP32 and rounds what it keeps; with
BF16 in place of FP8 it is the same arithmetic. What is rounded in each step can stand still: a
change of less than half a unit in the last place is lost, in BF16 below about 0.4 %, in E4M3
below 6 %.

torch's fused kernel computes in FP64 in part, reaches 71 % of an H200's memory speed and, where it
clips, writes every gradient back. `OnePassAdamW` does the same in FP32 and also finds the largest
size in each weight, of which its FP8 scale is made, and writes the weight in BF16 where a layer
keeps it so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.model.kept_weights import note_update, room_for_kept
from fp8study.model.local import plain, unwrapped
from fp8study.model.updates import parameter_groups


def make_optimizer(config: ResolvedConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the AdamW that a run asks for, over the parameters that the model now has."""
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (0.9, config.adam_beta2),
        "weight_decay": config.weight_decay,
    }
    groups = parameter_groups(config, model)
    if config.update_kernel == "one_pass":
        return OnePassAdamW(groups, **settings)
    if config.optimizer_state == "fp32":
        return torch.optim.AdamW(groups, **settings, fused=True)
    block_size = 256 if config.optimizer_state == "fp8" else 1
    optimizer: torch.optim.Optimizer = _narrow_adamw()(groups, **settings, block_size=block_size)
    return optimizer


class OnePassAdamW(torch.optim.AdamW):
    """AdamW by one kernel a weight, or a rank's shard of one; its states are named as torch's.

    Like torch's fused one it divides gradients by ``grad_scale`` if it has that attribute. What it
    launches reads a step's numbers where the weights are, so that a CUDA graph can replay it.
    """

    _given: tuple[tuple[float, ...], torch.Tensor] | None = None
    _replayed: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            if not (chosen := [p for p in group["params"] if p.grad is not None]):
                continue
            if self._replayed is None:
                self._launch(chosen, self._count(group, chosen))
            else:
                self._launch(chosen, [self._replayed] * len(chosen))

    def be_recorded(self, whether: bool = True) -> None:
        """Let each later `step` only launch, where what replays it will `count` before; or not."""
        device = self.param_groups[0]["params"][0].device
        self._replayed = torch.zeros(8, device=device) if whether else None

    @torch.no_grad()
    def count(self) -> None:
        """Count a step that is replayed, of all parameters that were ever updated.

        Raises:
            RuntimeError: They were not updated equally often.
        """
        assert self._replayed is not None, "no step was recorded"
        known = [(g, [p for p in g["params"] if p in self.state]) for g in self.param_groups]
        numbers = [each for group, some in known if some for each in self._count(group, some)]
        if any(each is not numbers[0] for each in numbers):
            raise RuntimeError("one graph cannot update weights of which some missed a step")
        self._replayed.copy_(numbers[0])

    def _count(self, group: dict[str, Any], chosen: list[torch.Tensor]) -> list[torch.Tensor]:
        """Count a step of these parameters, and return what each is updated by."""
        for parameter in chosen:
            if not (state := self.state[parameter]):
                state["step"] = torch.tensor(0.0)  # on the host, which needs it
                state["exp_avg"] = torch.zeros_like(plain(parameter))
                state["exp_avg_sq"] = torch.zeros_like(plain(parameter))
        steps = [self.state[parameter]["step"] for parameter in chosen]
        torch._foreach_add_(steps, torch.tensor(1.0))
        # Of one step, but where a gradient was missing once.
        made = {one: self._given_to(chosen[0].device, group, one) for one in set(map(float, steps))}
        return [made[float(one)] for one in steps]

    def _given_to(self, device: torch.device, group: dict[str, Any], step: float) -> torch.Tensor:
        numbers = numbers_of(group, step)
        if self._given is None or self._given[0] != numbers:
            made = torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type == "cuda")
            self._given = numbers, made.to(device, non_blocking=True)
        return self._given[1]

    def _launch(self, chosen: list[torch.Tensor], numbers: list[torch.Tensor]) -> None:
        """Update these parameters by these numbers; what they share is made once."""
        update = _update_adamw
        if chosen[0].is_cuda:
            from fp8study.model.kernels import adamw as update
        largest = torch.zeros(len(chosen), device=chosen[0].device).unbind()
        for parameter, one, numbers_8 in zip(chosen, largest, numbers, strict=True):
            state = self.state[parameter]
            assert parameter.grad is not None
            weight, gradient = unwrapped(parameter).detach(), unwrapped(parameter.grad).contiguous()
            kept = room_for_kept(parameter, gradient)
            averages = unwrapped(state["exp_avg"]), unwrapped(state["exp_avg_sq"])
            if weight.numel():  # else it is so small that it lies on other ranks alone
                update(
                    weight, gradient, averages, one, kept, getattr(self, "grad_scale", None),
                    numbers_8,
                )  # fmt: skip
            note_update(parameter, one, kept)


def numbers_of(group: dict[str, Any], step: float) -> tuple[float, ...]:
    """Return the eight numbers of a step, to be rounded to FP32 no earlier than they must be."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    return (
        rate * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2,
        rate / (1 - beta1**step), math.sqrt(1 - beta2**step), group["eps"],
    )  # fmt: skip


def _update_adamw(
    weight: torch.Tensor, gradient: torch.Tensor, averages: tuple[torch.Tensor, torch.Tensor],
    largest: torch.Tensor, kept: torch.Tensor | None, divisor: torch.Tensor | None,
    numbers_8: torch.Tensor,
) -> None:  # fmt: skip
    """Do what `fp8study.model.kernels.adamw` does, where there is no GPU."""
    decay, beta1, rest1, beta2, rest2, step_size, root, eps = numbers_8.tolist()
    g = gradient.float() if divisor is None else gradient.float() / divisor
    w, m, v = (tensor.float() for tensor in (weight, *averages))
    m, v, w = beta1 * m + rest1 * g, beta2 * v + rest2 * g * g, w - decay * w
    weight.copy_(w - step_size * m / (v.sqrt() / root + eps))
    averages[0].copy_(m)
    averages[1].copy_(v)
    largest.copy_(weight.abs().max())
    if kept is not None:
        kept.copy_(weight)


@cache
def _narrow_adamw() -> Any:
    """Make the class where it is needed: torchao takes seconds to import."""
    from torchao.optim import AdamWFp8
    from torchao.optim.adam import single_param_adam

    update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    class NarrowAdamW(AdamWFp8):
        """torchao's AdamW on each rank's own numbers; states in BF16 for blocks of one.

        Each number is updated by itself, and each block lies in one shard. torchao's own step
        compiles sharded tensors, which fails on weights that are gathered in FP8, and on BF16 ones
        with FP8 states. As in torchao, tensors of less than 4,096 numbers, or with part of a block
        left over, have states in their own format in place of FP8.
        """

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            """Update each parameter that has a gradient, by one kernel."""
            # One compilation for each shape, however many there are.
            with torch._dynamo.utils.disable_cache_limit():
                for group in self.param_groups:
                    rate = torch.as_tensor(group["lr"], dtype=torch.float32)
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._update(parameter, group, rate)

        def _update(self, parameter: Any, group: dict[str, Any], rate: torch.Tensor) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._zeros(parameter, True)
                state["exp_avg_sq"] = self._zeros(parameter, False)
            state["step"] += 1
            numbers = unwrapped(parameter).detach(), unwrapped(parameter.grad)
            averages = (unwrapped(state[name]) for name in ("exp_avg", "exp_avg_sq"))
            update(
                *numbers, state["step"], *averages, None, rate, *group["betas"],
                group["weight_decay"], group["eps"], True, False,
            )  # fmt: skip

        def _zeros(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
            if self.block_size == 1:  # sharded as the weights are, so that it can be saved
                return torch.zeros_like(plain(parameter), dtype=torch.bfloat16)
            zeros: torch.Tensor = self._new_buffer(unwrapped(parameter).detach(), signed)
            return zeros

    return NarrowAdamW
