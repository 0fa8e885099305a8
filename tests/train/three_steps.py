"""Three training steps of a tiny model, as a run would do them, and how far two runs are apart."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fp8study.core.config import RunConfig
from fp8study.core.presets import PRESETS
from fp8study.model.optimizer import make_optimizer
from fp8study.model.sharding import after_update, gradient_sync, make_accelerator, prepare
from fp8study.model.updates import make_updates

NUM_STEPS = 3


def tiny(config: RunConfig, tied: bool) -> Any:
    values = PRESETS["tiny-llama"] | {
        "num_hidden_layers": 2, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "head_dim": 16, "tie_word_embeddings": tied,
    }  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float32 if config.master_dtype == "fp32" else torch.bfloat16
    settings = AutoConfig.for_model(**values)
    settings.use_cache = False
    return AutoModelForCausalLM.from_config(settings, dtype=dtype).train()


class Trained(NamedTuple):
    """What three steps came to."""

    weights: list[torch.Tensor]
    norms: list[float]
    """Of each step's gradients."""
    most_alive: float
    """The largest share of the gradients that was alive at an update."""
    between_passes: float
    """That before the last backward pass of a step."""


def train(config: RunConfig, tied: bool) -> Trained:
    """Train a tiny model as a run would."""
    config = config.resolved(on_gpu=False)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    model = tiny(config, tied)
    accelerator = make_accelerator(config, model)

    model, optimizer = prepare(config, accelerator, model, partial(make_optimizer, config))
    updates = make_updates(config, model, optimizer, after_update(config, model))
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(PartialState().process_index)
    norms, at_updates, between_passes = [], [0.0], 0.0

    def alive() -> float:
        there = sum(p.numel() for p in parameters if p.grad is not None)
        return there / sum(p.numel() for p in parameters)

    def look(_: Any) -> None:
        at_updates.append(alive())

    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for micro_step in range(config.gradient_accumulation_steps):
            is_last = micro_step == config.gradient_accumulation_steps - 1
            if is_last:
                between_passes = max(between_passes, alive())
                updates.expect(wants_norm=True, look=look)
            ids = torch.randint(0, 256, (2, 16), generator=generator)
            with gradient_sync(model, is_last, config):
                loss = model(input_ids=ids, labels=ids).loss
                (loss / config.gradient_accumulation_steps).backward()
        norm = updates.finish()
        assert norm is not None
        norms.append(float(norm))
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    weights = [getattr(w, "_tensor", w).detach().clone() for w in weights]
    return Trained(weights, norms, max(at_updates), between_passes)


def largest_difference(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))


def mean_difference(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    apart = [(a - b).abs().flatten() for a, b in zip(weights, expected, strict=True)]
    return float(torch.cat(apart).mean())
