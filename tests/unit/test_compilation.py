"""What compiled layers keep for the backward pass, and that the gradients stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from fp8study.compilation import RecomputeElementwise, compile_options, wholly_compiled
from fp8study.config import make_config

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
    with torch._dynamo.config.patch(recompile_limit=1), wholly_compiled(config):
        for block in blocks:
            block(torch.randn(TOKENS, HIDDEN))


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
    with pytest.raises(
        RuntimeError, match=r"compile: .* after compiling 1 variants .*compile=false"
    ):
        run_two_variants()
