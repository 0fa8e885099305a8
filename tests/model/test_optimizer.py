"""AdamW with narrow states: the textbook's arithmetic, but for how the averages are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.measure.memory import local_bytes
from fp8study.model.optimizer import make_optimizer

Keep = Callable[[torch.Tensor], torch.Tensor]
ON_GPU = (
    pytest.mark.requires_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)
SETTINGS = {"strategy": "none", "adam_beta2": 0.95, "weight_decay": 0.1, "learning_rate": 0.01}


def to_bf16(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.bfloat16().float()


def to_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Round blocks of 256 to E4M3, each by a scale that brings its largest number to 448."""
    blocks = numbers.reshape(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).reshape(numbers.shape)


def made(
    rows: int, state: str, device: str = "cpu"
) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(256, rows, bias=False).to(device)
    config = make_config(SETTINGS | {"optimizer_state": state}).resolved()
    return model, make_optimizer(config, model)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(
    ("state", "keep", "rows"), [("bf16", to_bf16, 16), ("bf16", to_bf16, 3), ("fp8", to_fp8, 16)]
)
def test_only_what_is_kept_is_rounded(state: str, keep: Keep, rows: int, device: str) -> None:
    model, optimizer = made(rows, state, device)
    weight = model.weight.detach().cpu().clone()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 6):
        rate = 0.01 * step
        optimizer.param_groups[0]["lr"] = rate
        gradient = torch.randn(weight.shape, generator=generator)
        model.weight.grad = gradient.to(device, copy=True)
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient.square()
        whole = (square / (1 - 0.95**step)).sqrt() + 1e-8
        weight = weight * (1 - rate * 0.1) - rate * (mean / (1 - 0.9**step)) / whole
        mean, square = keep(mean), keep(square)
        # A number may fall to the other side of a rounding boundary, and few do.
        assert (model.weight.cpu() - weight).abs().quantile(0.99) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("state", "num_bytes"), [("fp32", 8), ("bf16", 4), ("fp8", 2 + 2 / 64)])
def test_states_take_what_their_format_says(state: str, num_bytes: float) -> None:
    model, optimizer = made(16, state)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    states = optimizer.state[model.weight]
    held = local_bytes(v for name, v in states.items() if name != "step")
    assert held == num_bytes * model.weight.numel()


@pytest.mark.slow
def test_weights_without_a_gradient_stay() -> None:
    model, optimizer = made(16, "fp8")
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert not optimizer.state
