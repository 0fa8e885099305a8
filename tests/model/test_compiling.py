"""What compiled layers keep for the backward pass, and that the gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch.fx import Graph, Node
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from fp8study.core.config import make_config
from fp8study.model import compiling as compilation
from fp8study.model.compiling import RecomputeElementwise, compile_options, wholly_compiled
from fp8study.train.trainer import Trainer

aten = torch.ops.aten
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


def train(recompute: str) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
    """Return the shapes of what one pass keeps besides weights, and all gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block()
    block.compile(**compile_options(make_config({"recompute": recompute})))
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    step: Any = y.grad_fn
    weights = {p.data_ptr() for p in block.parameters()}
    kept = [tuple(t.shape) for t in step.saved_tensors if t.data_ptr() not in weights]
    y.square().sum().backward()
    gradients = [p.grad for p in (*block.parameters(), x)]
    return kept, [g for g in gradients if g is not None]


def test_only_the_gated_activation_is_made_again_and_no_gradient_moves() -> None:
    kept, expected = train("default")
    kept_less, gradients = train("elementwise")
    assert kept.count((TOKENS, WIDTH)) == 3  # gate, up, and their product
    assert kept_less.count((TOKENS, WIDTH)) == 2
    assert len(kept_less) == len(kept) - 1  # casts of weights and the norm's output stay
    assert len(gradients) == 5
    for own, other in zip(gradients, expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_mode_is_kept_beside_the_pass(mode: str) -> None:
    plain = compile_options(make_config({"compile_mode": mode}))
    assert plain == {"mode": mode}
    tuned = compile_options(make_config({"compile_mode": mode, "recompute": "elementwise"}))
    options = dict(tuned.pop("options"))
    assert tuned == {}
    assert isinstance(options.pop("joint_custom_post_pass"), RecomputeElementwise)
    assert options == ({"triton.cudagraphs": True} if mode == "reduce-overhead" else {})


@pytest.mark.parametrize("recompute", ["default", "elementwise"])
def test_equal_layers_are_compiled_once(recompute: str) -> None:
    torch._dynamo.reset()
    config = make_config({"recompute": recompute})
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.compile(**compile_options(config))
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

    def micro_step(blocks: Any, is_last: bool) -> torch.Tensor:
        seen.append(torch._dynamo.config.fail_on_recompile_limit_hit)
        return torch.zeros(())

    trainer = MagicMock(config=make_config(changes), device=torch.device("cpu"), steps=[None])
    trainer.order.block_ids.return_value, trainer.tokens = [0], np.zeros(5000, np.int32)
    trainer.optimizer.param_groups = []
    trainer._micro_step = micro_step
    Trainer.step(trainer, 3)
    assert seen == [strict]
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


def marked(build: Callable[[Graph, list[Node]], Node]) -> set[str]:
    """Return the names of the marked nodes of a graph."""
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("x", "a", "b", "c")]
    graph.output(build(graph, inputs))
    RecomputeElementwise()(graph)
    return {node.name for node in graph.nodes if "recompute" in node.meta}


def test_what_lies_between_products_is_marked_and_nothing_else() -> None:
    call = Graph.call_function

    def gated(graph: Graph, inputs: list[Node]) -> Node:
        x, a, b, c = inputs
        gate, up = call(graph, aten.mm.default, (x, a)), call(graph, aten.bmm.default, (x, b))
        silu = call(graph, aten.silu.default, (gate,))
        both = call(graph, aten.mul.Tensor, (silu, up))
        flat = call(graph, aten.view.default, (both, [2, 2]))
        return call(graph, aten.mm.default, (call(graph, aten.t.default, (flat,)), c))

    def with_input(graph: Graph, inputs: list[Node]) -> Node:
        x, a, _, c = inputs
        total = call(graph, aten.add.Tensor, (call(graph, aten.mm.default, (x, a)), x))
        return call(graph, aten.mm.default, (total, c))

    def normed(graph: Graph, inputs: list[Node]) -> Node:
        x, a, _, c = inputs
        product = call(graph, aten.mm.default, (x, a))
        mean = call(graph, aten.mean.default, (product,))
        scaled = call(graph, aten.mul.Tensor, (product, mean))
        return call(graph, aten.mm.default, (scaled, c))

    def cast(graph: Graph, inputs: list[Node]) -> Node:
        x, a, *_ = inputs
        weight = call(graph, torch.ops.prims.convert_element_type.default, (a, torch.bfloat16))
        return call(graph, aten.mm.default, (x, weight))

    def last(graph: Graph, inputs: list[Node]) -> Node:
        return call(graph, aten.silu.default, (call(graph, aten.mm.default, tuple(inputs[:2])),))

    assert marked(gated) == {"mul_tensor"}
    for build in (with_input, normed, cast, last):
        assert marked(build) == set(), build.__name__


def test_another_version_of_the_pass_is_another_key_of_the_cache() -> None:
    assert RecomputeElementwise().uuid() == get_hash_for_files((compilation.__file__,))
