"""Updates in the backward pass where not every weight gets a gradient every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8study.core.config import RunConfig, make_config
from fp8study.model.updates import AfterBackward, InBackward, make_updates, parameter_groups


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        x = x + self.always(x)
        return x + self.sometimes(x) if whole else x


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(8, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, whole)
        out: torch.Tensor = self.head(x)
        return out


def config(**changes: Any) -> RunConfig:
    return make_config({"strategy": "none", "optimizer_step": "in_backward"} | changes).resolved()


def made(run: RunConfig) -> tuple[Tiny, torch.optim.Optimizer, AfterBackward | InBackward]:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(parameter_groups(run, model), lr=0.1, fused=True)
    return model, optimizer, make_updates(run, model, optimizer, lambda: None)


def train(run: RunConfig, pattern: list[tuple[bool, bool]]) -> tuple[Tiny, list[float]]:
    """Do steps of two micro-steps; the pattern says in which of them whole layers take part."""
    model, _, updates = made(run)
    generator, norms = torch.Generator().manual_seed(1), []
    for step in pattern:
        for micro_step, whole in enumerate(step):
            if micro_step == 1:
                updates.expect(wants_norm=True)
            model(torch.randn(5, 8, generator=generator), whole).square().mean().backward()
        norm = updates.finish()
        assert norm is not None
        norms.append(float(norm))
        assert all(p.grad is None for p in model.parameters())
    return model, norms


@pytest.mark.parametrize(
    "pattern", [[(True, True)] * 3, [(True, False), (False, True), (False, False), (True, True)]]
)
def test_layers_with_part_of_their_gradients_are_updated_all_the_same(
    pattern: list[tuple[bool, bool]],
) -> None:
    expected, norms = train(config(optimizer_step="after_backward"), pattern)
    model, own_norms = train(config(), pattern)
    assert own_norms == pytest.approx(norms, rel=1e-6)
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_each_layer_is_updated_before_the_one_below_it_has_gradients() -> None:
    model, optimizer, updates = made(config())
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4, 4, 1, 1]
    seen: list[list[bool]] = []

    def look(parameters: Any) -> None:
        if list(parameters):
            seen.append([b.always.weight.grad is not None for b in model.layers])  # type: ignore[union-attr]

    updates.expect(wants_norm=False, look=look)
    model(torch.randn(5, 8), True).sum().backward()
    head, *layers = seen
    assert head == [False] * 3
    assert layers == [[False, False, True], [False, True, False], [True, False, False]]
    assert updates.finish() is None


def test_the_rate_of_every_group_is_that_of_the_schedule() -> None:
    model, optimizer, updates = made(config())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    updates.expect(wants_norm=False)
    model(torch.randn(5, 8), True).sum().backward()
    updates.finish()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("when", ["in_backward", "after_backward"])
def test_what_follows_an_update_is_done_once_all_weights_are_new(when: str) -> None:
    run = config(optimizer_step=when)
    model, optimizer, _ = made(run)
    moved: list[bool] = []
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def after() -> None:
        now = [p for p in model.parameters() if p.requires_grad]
        moved.append(all(not torch.equal(a, b) for a, b in zip(before, now, strict=True)))

    updates = make_updates(run, model, optimizer, after)
    updates.expect(wants_norm=False)
    model(torch.randn(5, 8), True).sum().backward()
    updates.finish()
    assert moved == [True]


def test_a_failing_update_leaves_the_optimizer_whole() -> None:
    model, optimizer, updates = made(config())
    optimizer.register_step_pre_hook(_fail)
    updates.expect(wants_norm=False)
    with pytest.raises(RuntimeError, match="no update"):
        model(torch.randn(5, 8), True).sum().backward()
    assert len(optimizer.param_groups) == 5


def _fail(*_: Any) -> None:
    raise RuntimeError("no update")


def test_clipping_scales_the_gradients_before_the_update() -> None:
    run = config(optimizer_step="after_backward", max_grad_norm=1e-3)
    model, _, updates = made(run)
    seen: list[float] = []

    def look(parameters: Any) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        seen.append(float(torch.nn.utils.get_total_norm(grads)))

    updates.expect(wants_norm=False, look=look)
    model(torch.randn(5, 8), True).sum().backward()
    norm = updates.finish()
    assert norm is not None
    assert float(norm) > 1
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


@pytest.mark.parametrize("max_norm", [0.05, 1e6])  # one clips, one does not
def test_the_update_itself_clips_as_a_pass_before_it_would(max_norm: float) -> None:
    moments, norms = [], []
    for clipping in ("separate", "in_update"):
        run = config(optimizer_step="after_backward", max_grad_norm=max_norm, clipping=clipping)
        model, optimizer, updates = made(run)
        updates.expect(wants_norm=False)
        model(torch.ones(5, 8), True).sum().backward()
        norm = updates.finish()
        assert norm is not None
        norms.append(float(norm))
        # Adam's step forgets the gradients' scale, its first moment does not.
        moments.append(
            [optimizer.state[p]["exp_avg"] for p in model.parameters() if p in optimizer.state]
        )
    assert norms[0] == norms[1] > 1
    for own, other in zip(*moments, strict=True):
        assert torch.allclose(own, other, rtol=1e-5)
    total = float(torch.nn.utils.get_total_norm(moments[1])) / (1 - 0.9)
    assert total == pytest.approx(min(norms[0], max_norm), rel=1e-4)


def test_a_step_with_an_infinite_gradient_is_skipped_and_halves_the_scale() -> None:
    run = config(precision="fp16", optimizer_step="after_backward")
    model, _, updates = made(run)
    weight = model.head.weight
    before, seen = weight.detach().clone(), []
    for factor in (1.0, float("inf"), 1.0):
        updates.expect(wants_norm=True)
        updates.scaled(factor * model(torch.ones(5, 8), True).sum()).backward()
        norm = updates.finish()
        assert norm is not None
        seen.append((updates.was_skipped, torch.equal(weight, before), bool(norm.isfinite())))
        before = weight.detach().clone()
    assert seen == [(False, False, True), (True, True, False), (False, False, True)]
    assert updates.scaling() == {"num_skipped": 1, "scale": 2.0**15}


def test_gradients_have_their_own_size_after_a_scaled_backward_pass() -> None:
    norms = []
    for precision in ("bf16", "fp16"):
        model, _, updates = made(config(precision=precision, optimizer_step="after_backward"))
        updates.expect(wants_norm=True)
        updates.scaled(model(torch.ones(5, 8), True).sum()).backward()
        norms.append(updates.finish())
    assert norms[0] == norms[1]
    assert made(config())[2].scaling() == {}
