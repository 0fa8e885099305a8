"""Proof that a run trains what it says it trains.

FP8 fails silently: weights that the optimizer no longer holds, layers that were never converted,
BF16 master weights too coarse for the learning rate. Each leaves a plausible loss curve behind. So
every run looks at itself around its first optimizer step and writes down what it saw.

A step changes billions of numbers; looking at a few thousand per parameter is enough to tell
frozen from trained, needs no memory, and takes well under a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.measure.flops import Work
from fp8study.model.float8 import is_converted, part_of_mixture, why_skipped
from fp8study.model.fsdp.patches import is_cast, shards
from fp8study.model.kept_weights import is_current, keeping_layers
from fp8study.model.local import held, local_tensor, stride

#: Elements looked at in each parameter's local shard.
SAMPLES = 2048


class FirstStepAudit:
    """Looks at every trainable parameter before and after the first optimizer step.

    Call `before`, then `gradients_ready`, then step, then `after`. Weights that are left out
    of the optimizer on purpose (`planted`) are counted, and are no finding.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        planted: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        self._model = model
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        planted_ids = {id(weight) for weight in planted}
        self._planted = {n for n, p in self._parameters.items() if id(p) in planted_ids}
        self._optimizer = optimizer
        self._before: dict[str, torch.Tensor] = {}
        self._has_gradient: dict[str, torch.Tensor] = {}
        self._gradient_dtypes: set[str] = set()

    def before(self) -> None:
        """Remember a sample of every parameter, and kept weights that are not theirs already."""
        self._stale = stale_casts(self._model)
        self._before = {n: self._sample(p).clone() for n, p in self._parameters.items()}

    def gradients_ready(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Remember which gradients are non-zero; call before they are used.

        `parameters`: all of the model's, or in turns those whose gradients are complete.
        """
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = local_tensor(parameter.grad)
            # A reduction: near the memory limit there is no room for a mask of its size.
            largest = torch.linalg.vector_norm(gradient, ord=float("inf"))
            self._has_gradient[names[id(parameter)]] = largest > 0
            self._gradient_dtypes.update(_dtypes([gradient]))

    def after(self) -> dict[str, Any]:
        """Return what the step did; `fp8study.core.audit_rules` says what it means.

        Returns:
            ``num_trainable``, ``num_planted``, ``num_in_optimizer_twice``, ``outside_optimizer``
            (names, at most ten) and ``num_outside_optimizer`` (planted ones not counted),
            ``frozen`` and ``num_frozen`` (a gradient, but not one number changed and no optimizer
            state), ``stalled_pct`` (share of the sampled numbers with a gradient that the step
            left as they were) and the dtypes of master weights, gradients and optimizer state;
            as `stale_casts`, what was stale before the step, else what is after it.
        """
        times_held = Counter(id(p) for g in self._optimizer.param_groups for p in g["params"])
        all_outside = {n for n, p in self._parameters.items() if times_held[id(p)] == 0}
        outside = [n for n in self._parameters if n in all_outside - self._planted]
        cannot_move = self._planted & all_outside  # as asked for
        frozen, num_same, num_seen = [], 0, 0
        for name, parameter in self._parameters.items():
            if name in cannot_move or not self._has_gradient.get(name):
                continue
            before = self._before[name]
            same = int((self._sample(parameter) == before).sum())
            num_same += same
            num_seen += before.numel()
            if same == before.numel() and not self._optimizer.state.get(parameter):
                frozen.append(name)
        states = [v for s in self._optimizer.state.values() for k, v in s.items() if k != "step"]
        stale = self._stale if self._stale.get("num_stale_casts") else stale_casts(self._model)
        return stale | {
            "num_trainable": len(self._parameters),
            "num_planted": len(cannot_move),
            "num_in_optimizer_twice": sum(times > 1 for times in times_held.values()),
            "num_outside_optimizer": len(outside),
            "outside_optimizer": outside[:10],
            "num_frozen": len(frozen),
            "frozen": frozen[:10],
            "stalled_pct": 100 * num_same / num_seen if num_seen else None,
            "master_dtypes": _dtypes(self._parameters.values()),
            "gradient_dtypes": sorted(self._gradient_dtypes),
            "optimizer_state_dtypes": _dtypes(states),
        }

    def _sample(self, parameter: torch.Tensor) -> torch.Tensor:
        return local_tensor(parameter)[:: stride(parameter, SAMPLES)]


def stale_casts(model: torch.nn.Module) -> dict[str, Any]:
    """Return which layers multiply with a kept weight that is not their weight's.

    ``num_stale_casts`` and ``stale_casts`` (names, at most ten), by a sample of each kept weight;
    nothing where no layer keeps its weight in FP8 or BF16.
    """
    same = {name: is_current(layer, SAMPLES) for name, layer in keeping_layers(model).items()}
    kept = {name: shard for name, shard in shards(model).items() if hasattr(shard, "fp8")}
    same |= {name: is_cast(shard, SAMPLES) for name, shard in kept.items()}
    stale = [name for name, is_same in same.items() if not is_same]
    return {"num_stale_casts": len(stale), "stale_casts": stale[:10]} if same else {}


def _dtypes(tensors: Iterable[torch.Tensor]) -> list[str]:
    parts = (part for tensor in tensors for part in held(tensor))
    return sorted({str(part.dtype).removeprefix("torch.") for part in parts})


def conversion(model: torch.nn.Module, config: ResolvedConfig) -> dict[str, Any]:
    """Return which linear layers of a converted model compute in FP8 and why the others do not.

    ``num_linear``, ``num_linear_fp8``, ``skipped`` (reason to number of layers, a mixture's
    routers and fused experts among them, which are no linear layers) and
    ``unexplained`` (names of layers that should compute in FP8 but do not, at most ten).
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    fp8 = {n for n, m in linears.items() if is_converted(m)}
    reasons = {n: why_skipped(config, n, m) for n, m in linears.items() if n not in fp8}
    unexplained = [name for name, reason in reasons.items() if reason is None]
    # Routers and fused experts hold their weights themselves; torchao passes them over.
    fused = [
        part
        for name, module in model.named_modules()
        if name not in linears and next(module.parameters(recurse=False), None) is not None
        if config.is_fp8 and (part := part_of_mixture(name))
    ]
    return {
        "num_linear": len(linears),
        "num_linear_fp8": len(fp8),
        "skipped": dict(Counter(filter(None, [*reasons.values(), *fused]))),
        "num_unexplained": len(unexplained),
        "unexplained": unexplained[:10],
    }


def audited_products(step: dict[str, Any], work: Work, emulated: bool) -> dict[str, Any]:
    """Return what a profiled step says about where FP8 really ran.

    Args:
        step: From `fp8study.measure.trace.read_trace`; empty on ranks that record nothing.
        work: What the converted layers should give.
        emulated: Whether FP8 GEMMs are done in high precision, so that none is to be seen.

    Returns:
        ``matmul_dtypes`` (of both factors, as ``bfloat16 × bfloat16``), ``communication_dtypes``
        (collective to dtypes); and, unless it is emulated, ``fp8_gemm_flops_pct`` and
        ``fp8_gemm_flops_pct_expected``.
    """
    if not step:
        return {}
    dtypes: dict[str, list[str]] = {}
    for row in step["communication"]:
        dtypes.setdefault(row["collective"], []).append(row["dtype"])
    found: dict[str, Any] = {
        "matmul_dtypes": [row["dtypes"] for row in step["gemm"]],
        "communication_dtypes": dtypes,
    }
    if not emulated:
        linear = work.flops_per_token - work.attention_flops_per_token
        found["fp8_gemm_flops_pct"] = step["fp8_gemm_flops_pct"]
        found["fp8_gemm_flops_pct_expected"] = 100 * work.fp8_flops_per_token / linear
    return found
