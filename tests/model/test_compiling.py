"""That layers are compiled once, and wholly."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from fp8study.core.config import make_config
from fp8study.model.compiling import compile_layers, wholly_compiled
from fp8study.train.step_graph import Results
from fp8study.train.trainer import Trainer

TOKENS, HIDDEN, WIDTH = 48, 64, 192


class Block(torch.nn.Module):
    """A norm and a gated MLP, as in a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(HIDDEN)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


def test_equal_layers_are_compiled_once() -> None:
    torch._dynamo.reset()
    config = make_config({})
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.compile(backend="eager")
    counters.clear()
    with wholly_compiled(config):
        for block in blocks:
            block(torch.randn(TOKENS, HIDDEN))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("changes", "stops"), [({}, True), ({"runs_per_gpu": 2}, False), ({"compile": False}, False)]
)
def test_a_timed_run_stops_where_torch_would_compile_no_more(
    changes: dict[str, Any], stops: bool
) -> None:
    torch._dynamo.reset()
    config = make_config(changes)
    block = torch.compile(Block(), backend="eager", dynamic=False)

    def run_two_variants() -> None:
        with torch._dynamo.config.patch(recompile_limit=1), wholly_compiled(config):
            for tokens in (TOKENS, TOKENS + 1):
                block(torch.randn(tokens, HIDDEN))

    if not stops:
        run_two_variants()
        return
    with pytest.raises(RuntimeError, match=r"compile: .* variants .* compile=false"):
        run_two_variants()


@pytest.mark.parametrize(("changes", "strict"), [({}, True), ({"compile": False}, False)])
def test_every_step_of_a_trainer_is_wholly_compiled(changes: dict[str, Any], strict: bool) -> None:
    seen = []

    def by_kernel(*_: Any) -> Results:
        seen.append(torch._dynamo.config.fail_on_recompile_limit_hit)
        return torch.zeros(()), None

    trainer = MagicMock(config=make_config(changes), device=torch.device("cpu"), graph=None)
    trainer.optimizer.param_groups = []
    trainer._by_kernel = by_kernel
    Trainer.step(trainer, 3)
    assert seen == [strict]
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_layers_are_compiled_with_what_a_run_asks_for(mode: str) -> None:
    layer = MagicMock()
    compile_layers([layer], make_config({"compile_mode": mode}).resolved())
    layer.compile.assert_called_once_with(mode=mode)
