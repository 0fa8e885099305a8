"""A fault on purpose: weights that the optimizer is not given.

Document A's single-GPU FP8 run loses most of its weights because conversion replaces them. Leaving
the same weights out in BF16, where nothing is converted, shows what that loss does without FP8.
As in the stale run, the weights still get gradients, which nobody clears or uses.
"""

from __future__ import annotations

import fnmatch

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.presets import check_patterns


def untrained_weights(config: ResolvedConfig, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights that the run's ``untrained`` leaves out of its optimizer on purpose.

    DDP's prefix of names is no part of a pattern.

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
