"""AdamW with narrow states, or in one pass: the textbook's arithmetic, but for what is rounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.measure.memory import local_bytes
from fp8study.model.kept_weights import noted_largest
from fp8study.model.optimizer import OnePassAdamW, make_optimizer

Keep = Callable[[torch.Tensor], torch.Tensor]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires_gpu)]
AVERAGES = ("exp_avg", "exp_avg_sq")
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
@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divisor", [None, 3.7])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_pass_is_as_near_to_exact_arithmetic_as_torchs_own(
    decay: float, divisor: float | None, device: str
) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": decay}
    start, found = torch.randn(300, 33, device=device) / 50, []
    for make in (torch.optim.AdamW, partial(torch.optim.AdamW, fused=True), OnePassAdamW):
        generator, is_exact = torch.Generator().manual_seed(1), make is torch.optim.AdamW
        weight = torch.nn.Parameter(start.double() if is_exact else start.clone())
        optimizer = make([weight], **settings)
        if divisor and not is_exact:
            optimizer.grad_scale = torch.tensor(divisor, device=device)
        for _ in range(10):
            small, gradient = torch.randn(2, 300, 33, generator=generator)
            weight.grad = (gradient * 10 ** (2 * small)).to(device, weight.dtype)
            weight.grad /= divisor if divisor and is_exact else 1
            optimizer.step()
        found.append([weight.detach(), *(optimizer.state[weight][n] for n in AVERAGES)])
    for exact, theirs, ours in zip(*found, strict=True):
        off, own_off = ((x.double() - exact).abs().max() for x in (theirs, ours))
        assert own_off <= 2 * off + 1e-8
    assert weight.largest[0] == weight.abs().max()  # type: ignore[attr-defined]


def test_a_rank_without_numbers_of_a_weight_knows_of_its_update() -> None:
    """Else it would scale FP8 weights by other collectives than the ranks beside it."""
    weight = torch.nn.Parameter(torch.empty(0, 4))
    weight.grad = torch.empty(0, 4)
    OnePassAdamW([weight], lr=0.01).step()
    assert noted_largest([weight]) == [0]


def test_what_replays_a_step_counts_it_before() -> None:
    """Here the step is done again, where a CUDA graph would only launch what it launches."""
    (model, _), (other, _) = made(16, "fp32"), made(16, "fp32")
    other.load_state_dict(model.state_dict())
    plain, replayed = (OnePassAdamW(m.parameters(), lr=0.01, fused=False) for m in (model, other))
    for step in range(4):
        for m, optimizer in ((model, plain), (other, replayed)):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            for parameter in m.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (step - 1.4))
            if optimizer is replayed and step == 2:
                optimizer.be_recorded()
            if optimizer is replayed and step >= 2:
                optimizer.count()
            optimizer.step()
        assert torch.equal(model.weight, other.weight)
    assert float(replayed.state[other.weight]["step"]) == 4


def test_weights_of_which_one_missed_a_step_are_not_replayed() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = OnePassAdamW([first, second], lr=0.01)
    for chosen in ([first], [first, second]):
        for parameter in chosen:
            parameter.grad = torch.ones(2)
        optimizer.step()
    optimizer.be_recorded()
    with pytest.raises(RuntimeError, match="missed a step"):
        optimizer.count()


def test_a_state_dict_of_torchs_own_goes_on_in_one_pass_and_back() -> None:
    model, theirs = made(16, "fp32")
    ours = OnePassAdamW(model.parameters(), lr=0.01)
    for first, second in ((theirs, ours), (ours, theirs)):
        model.weight.grad = torch.ones_like(model.weight)
        first.step()
        second.load_state_dict(first.state_dict())
    assert float(theirs.state[model.weight]["step"]) == 2


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
