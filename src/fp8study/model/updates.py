"""Which weights are updated, and when: after the backward pass, or in it.

Adam needs a weight's own gradient and nothing else. Updating each decoder layer as soon as its
gradients are complete, and freeing them, gives the same weights, but the FP32 gradients of only
one layer are ever alive: that saves up to four bytes a parameter at the peak of a step. Under
FSDP2 the updates run on the stream that reduces gradients, beside the rest of the backward pass.

With gradient accumulation all gradients have to be kept until the last micro-step, so nothing is
saved; the weights are the same there too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.presets import check_patterns
from fp8study.core.recipes import RECIPES
from fp8study.model.build import decoder_layers
from fp8study.model.fsdp import copying, peers
from fp8study.model.local import local_tensor

#: Called with parameters whose gradients are complete, just before their update.
Look = Callable[[Iterable[torch.nn.Parameter]], None]


def parameter_groups(config: ResolvedConfig, model: torch.nn.Module) -> list[Any]:
    """Return what an optimizer is made of: parameters, or groups to be updated together.

    ``in_backward`` has one group a decoder layer, and one for each other parameter.

    Raises:
        UserError: As `trained_parameters`.
    """
    trained = trained_parameters(config, model)
    if config.optimizer_step == "after_backward":
        return trained
    layers = enumerate(decoder_layers(model))
    layer_of = {id(p): number for number, layer in layers for p in layer.parameters()}
    groups: dict[int, list[torch.nn.Parameter]] = {}
    for parameter in trained:
        groups.setdefault(layer_of.get(id(parameter), id(parameter)), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def untrained_weights(config: ResolvedConfig, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights that the run's ``untrained`` leaves out of its optimizer on purpose.

    Document A's single-GPU FP8 run loses most of its weights because conversion replaces them.
    Leaving the same weights out in BF16, where nothing is converted, shows what that loss does
    without FP8. As in the stale run, they still get gradients, which nobody clears or uses. DDP's
    prefix of names is no part of a pattern.

    Raises:
        UserError: A pattern matches no linear layer.
    """
    weights = {
        name.removeprefix("module."): module.get_parameter("weight")
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    check_patterns("untrained", config.untrained, weights)
    return [
        weight
        for name, weight in weights.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.untrained)
    ]


def trained_parameters(config: ResolvedConfig, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters for the optimizer: all of them, unless a fault is planted.

    Raises:
        UserError: As `untrained_weights`.
    """
    left_out = {id(weight) for weight in untrained_weights(config, model)}
    return [p for p in model.parameters() if id(p) not in left_out]


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, as torch does; of narrow ones in FP32, where whole."""
    if not gradients or any(isinstance(gradient, DTensor) for gradient in gradients):
        return get_total_norm(gradients)
    alike = _by_dtype(gradients)  # of one dtype they are read together
    norms = [torch._foreach_norm(some, dtype=torch.float32) for some in alike]
    return torch.linalg.vector_norm(torch.stack([norm for some in norms for norm in some]))


def _norm_by_kernel(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of whole gradients, each read by one launch; on CPUs by torch."""
    if not gradients or not gradients[0].is_cuda:
        return _total_norm(gradients)
    from fp8study.model import kernels

    sums_SP = gradients[0].new_empty((len(gradients), peers.PROGRAMS), dtype=torch.float32)
    for gradient, sums_P in zip(gradients, sums_SP, strict=True):
        kernels.squares(gradient.contiguous(), sums_P)
    return sums_SP.sum().sqrt()


def _by_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        of_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [*of_dtype.values()]


@dataclass(eq=False)
class AfterBackward:
    """Updates all weights together, after the last backward pass of a step."""

    config: ResolvedConfig
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    """Made of `parameter_groups`."""
    after: Callable[[], None]
    """Called once all weights are updated."""

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        # Accelerate's wrapper keeps what is set on it to itself.
        self.adamw: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        scales = RECIPES[self.config.precision].scales_loss
        self._scaler = torch.amp.GradScaler(device.type, enabled=scales)
        self._num_skipped, self._is_infinite = (torch.zeros((), device=device) for _ in range(2))

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the backward pass begins with: in FP16 the loss times a large number."""
        return self._scaler.scale(loss)

    @property
    def was_skipped(self) -> bool:
        """Whether the last step changed nothing, since a gradient overflowed."""
        return self._scaler.is_enabled() and bool(self._is_infinite)

    def scaling(self) -> dict[str, float]:
        """Return a record's ``instruments.loss_scaling``; nothing where no loss is scaled."""
        if not self._scaler.is_enabled():
            return {}
        return {"num_skipped": int(self._num_skipped), "scale": self._scaler.get_scale()}

    def scaler_state(self) -> dict[str, float]:
        """Return what `go_on` needs, alike on all ranks; nothing where no loss is scaled."""
        return self._scaler.state_dict() | self.scaling()

    def go_on(self, scaler_state: dict[str, float]) -> None:
        """Scale the next loss, and count skipped steps, as the run did that left this state."""
        self._scaler.load_state_dict(scaler_state)
        self._num_skipped.fill_(scaler_state["num_skipped"])

    def expect(self, wants_norm: bool, look: Look | None = None) -> None:
        """Announce that the next backward pass completes the gradients.

        `finish` shall return their norm, which reads them all, if this `wants_norm`; `look` is
        shown the gradients before they are used.
        """
        self._wants_norm, self._look = wants_norm or self.config.max_grad_norm is not None, look
        peers.squares.take()  # of a step whose norm nobody asked for

    def finish(self) -> torch.Tensor | None:
        """Bring the update to its end and free the gradients; call after the backward pass.

        Returns the norm before clipping, over all weights and ranks, if it was wanted.
        """
        copying.later.let_go()
        self._unscale()
        norm = self._norm() if self._wants_norm else None
        if self._look is not None:
            self._look(self.model.parameters())
        if norm is not None and self.config.clipping == "in_update":
            self._scale_in_update(norm)
        self._scaler.step(self.adamw)
        self._scaler.update()
        self.optimizer.zero_grad()
        self.after()
        return norm

    def _unscale(self) -> None:
        """Bring scaled gradients back to their size, and see whether one is infinite on any rank.

        torch adds that up over the ranks of a sharded gradient.
        """
        self._scaler.unscale_(self.adamw)
        if self._scaler.is_enabled():
            found = self._scaler._found_inf_per_device(self.adamw).values()
            self._is_infinite = torch.stack([*found]).amax()
            self._num_skipped += self._is_infinite

    def _norm(self) -> torch.Tensor:
        if (square := peers.squares.take()) is not None:  # ``gradient_norm=as_summed``
            dist.all_reduce(square)
            return square.sqrt()
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        parameters = [p for p in held if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        find = _total_norm if self.config.gradient_norm == "separate" else _norm_by_kernel
        norm = find(gradients)
        largest = self.config.max_grad_norm
        if largest is not None and self.config.clipping != "in_update":
            torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _scale_in_update(self, norm: torch.Tensor) -> None:
        """Let the next update divide the gradients by what `clip_grads_with_norm_` would have.

        torch's fused optimizers divide by ``grad_scale`` as they read, for loss scaling. They write
        the quotient back, so that what is saved is one reading of every gradient and a kernel.
        """
        assert self.config.max_grad_norm is not None
        self.adamw.grad_scale = ((norm.float() + 1e-6) / self.config.max_grad_norm).clamp(min=1.0)


@dataclass(eq=False)
class InBackward(AfterBackward):
    """Updates each group of weights as soon as the last of its gradients is complete.

    The learning rate must be set before the backward pass.

    Raises:
        UserError: The model is in DDP's hands.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            raise UserError(
                "optimizer_step: 'in_backward' cannot be kept: Accelerate has wrapped the model in "
                "DDP, which puts gradients back; start strategy=none as one process, no torchrun"
            )
        self._groups = list(self.optimizer.param_groups)
        self._group_of = {id(p): n for n, g in enumerate(self._groups) for p in g["params"]}
        self._expects = False
        for parameter in self.model.parameters():
            if parameter.requires_grad and id(parameter) in self._group_of:
                # FSDP2 calls these hooks too, once a sharded gradient is reduced.
                source = getattr(parameter, "gradient_of", parameter)  # see kept_weights
                source.register_post_accumulate_grad_hook(partial(self._arrived, parameter))

    def expect(self, wants_norm: bool, look: Look | None = None) -> None:
        """As `AfterBackward.expect`: from here on, gradients that arrive are complete."""
        self._expects, self._wants_norm, self._look = True, wants_norm, look
        self._norms: list[torch.Tensor] = []
        self._num_missing = [sum(p.requires_grad for p in g["params"]) for g in self._groups]

    def finish(self) -> torch.Tensor | None:
        """As `AfterBackward.finish`; what is left are layers that got part of their gradients."""
        copying.later.let_go()
        for number, missing in enumerate(self._num_missing):
            if missing:
                self._update(number)
        self._expects = False
        if self._look is not None:  # weights outside the optimizer
            self._look(p for p in self.model.parameters() if id(p) not in self._group_of)
        self.after()
        return self._norm() if self._wants_norm else None

    def _arrived(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        if not self._expects:
            return  # an earlier micro-step
        number = self._group_of[id(parameter)]
        self._num_missing[number] -= 1
        if self._num_missing[number] == 0:
            self._update(number)

    def _update(self, number: int) -> None:
        group = self._groups[number]
        gradients = [local_tensor(p.grad) for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        if self._look is not None:
            self._look(group["params"])
        if self._wants_norm:
            self._norms.append(_total_norm(gradients))
        del gradients
        all_groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group]  # the rest waits for its turn
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = all_groups
        for parameter in group["params"]:
            parameter.grad = None

    def _norm(self) -> torch.Tensor:
        norm = get_total_norm(self._norms)
        if not isinstance(self.model, FSDPModule) or dist.get_world_size() == 1:
            return norm
        square = norm.square()  # of this rank's shards
        dist.all_reduce(square)
        return square.sqrt()


def make_updates(
    config: ResolvedConfig,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    after: Callable[[], None],
) -> AfterBackward:
    """Return the updates that the run asks for; see `AfterBackward` for the arguments."""
    chosen = InBackward if config.optimizer_step == "in_backward" else AfterBackward
    return chosen(config, model, optimizer, after)
