"""Layers that keep their weights in FP8 against torchao's, which cast them in every pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fp8study.core.config import make_config
from fp8study.model.float8 import convert_to_float8, is_converted
from fp8study.model.kept_weights import (
    is_current,
    keep_weights,
    keeping_layers,
    note_update,
    refresh,
    turn_apart,
)
from fp8study.model.optimizer import OnePassAdamW


class Net(torch.nn.Module):
    """Two layers; the second's input is made anew in a compiled backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.RMSNorm(32), torch.nn.Linear(32, 48)
        self.down = torch.nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return out


class Model(torch.nn.Module):
    """What has decoder layers: one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Net()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]


class Tied(Model):
    """What multiplies with the weight of its embedding, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(48, 32)
        self.layers[0].up.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.embedding(x))


KEPT = {"precision": "fp8", "fp8_emulate": True, "strategy": "none", "skip": "",
        "weight_cast": "each_update"}  # fmt: skip
#: What `keep_weights` can be asked for where one backward pass makes a step's gradients.
WAYS: list[dict[str, Any]] = [
    KEPT | {"transposes": "separate"},
    KEPT | {"update_kernel": "one_pass", "gradient_dtype": "compute", "transposes": "separate"},
    {"precision": "bf16", "fp8_emulate": False, "weight_cast": "each_pass",
     "update_kernel": "one_pass", "gradient_dtype": "compute"},
    KEPT | {"update_kernel": "one_pass", "gradient_dtype": "compute", "skip": "*.down"},
]  # fmt: skip


def nets(
    dtype: torch.dtype = torch.float32, kind: type[Model] = Model, **changes: Any
) -> tuple[Model, Model]:
    """Return torchao's layers and ours, with the same weights; ours give back no memory."""
    torch.manual_seed(0)
    theirs = kind().to(dtype)
    config = make_config(KEPT | {"gradient_accumulation_steps": 2} | changes).resolved()
    convert_to_float8(theirs, config)
    ours = copy.deepcopy(theirs)
    keep_weights(ours, config)
    return theirs, ours


def trained(net: Model, after: Callable[[], None], passes: int = 2) -> list[torch.Tensor]:
    """Return outputs, gradients and weights of three steps of some passes each."""
    generator, found = torch.Generator().manual_seed(1), []
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    if passes == 1:
        optimizer = OnePassAdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(passes):
            x_BTD = torch.randn(2, 8, 32, generator=generator).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                output_BTD = net(x_BTD)
            output_BTD.square().mean().backward()
            assert x_BTD.grad is not None
            found += [output_BTD.detach(), x_BTD.grad]
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        after()
    return found + [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_compute_and_train_to_the_bit_as_torchaos_do(
    compiles: bool, dtype: torch.dtype
) -> None:
    theirs, ours = nets(dtype)
    torch._dynamo.reset()
    for net in (theirs, ours):
        if compiles:
            net.compile(backend="aot_eager", fullgraph=True)
    expected, found = trained(theirs, lambda: None), trained(ours, lambda: refresh(ours))
    assert len(found) == 3 * (4 + 4) + 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    stale = nets(dtype)[1]
    assert not torch.equal(trained(stale, lambda: None)[-1], expected[-1])


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("values", WAYS, ids=lambda v: "-".join(map(str, v.values())))
def test_they_do_in_steps_of_one_pass_whose_gradients_stay_narrow(
    values: dict[str, Any], compiles: bool
) -> None:
    theirs, ours = nets(**values, gradient_accumulation_steps=1)
    torch._dynamo.reset()
    for net in (theirs, ours):
        if compiles:
            net.compile(backend="aot_eager", fullgraph=True)
    expected, found = (trained(net, lambda net=net: refresh(net), 1) for net in (theirs, ours))
    assert len(found) == 3 * (2 + 4) + 4
    assert all(torch.equal(a.float(), b) for a, b in zip(found, expected, strict=True))
    narrow = values.get("gradient_dtype") == "compute"
    wide = {torch.float32: 4 - 2 * narrow, torch.bfloat16: 2 * narrow}
    dtypes = [g.dtype for g in found[2:6]]
    assert {dtype: dtypes.count(dtype) for dtype in wide} == wide
    assert all(is_current(layer, 100) for layer in keeping_layers(ours).values())


@pytest.mark.parametrize("values", WAYS[1:3], ids=lambda v: v["precision"])
def test_a_weight_of_two_modules_has_the_gradient_of_both(values: dict[str, Any]) -> None:
    found = []
    for net in nets(kind=Tied, **values, gradient_accumulation_steps=1):
        with torch.autocast("cpu", torch.bfloat16):
            net(torch.arange(16).view(2, 8)).square().mean().backward()
        found.append([p.grad for p in net.parameters()])
    assert [g.dtype for g in found[1] if g is not None].count(torch.bfloat16) == 1
    assert all(torch.equal(a, b.float()) for a, b in zip(*found, strict=True))


def _graphs(net: Model) -> list[torch.fx.Graph]:
    """Return the graphs of the forward and the backward pass as a compiler would be given them."""
    seen: list[torch.fx.Graph] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph.graph)
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition
    )
    net.compile(backend=backend, fullgraph=True)
    net(torch.randn(2, 8, 32).requires_grad_()).sum().backward()
    return seen


def test_no_pass_reads_a_weight_or_looks_twice_for_an_inputs_scale() -> None:
    found = []
    for net in nets():
        forward, backward = _graphs(net)
        inputs = [n.meta["val"] for n in backward.find_nodes(op="placeholder")]
        weights = [x for x in inputs if x.dtype == torch.float32 and x.numel() == 32 * 48]
        scales = [sum(n.target is torch.ops.aten.max.default for n in graph.nodes)
                  for graph in (forward, backward)]  # fmt: skip
        found.append((len(weights), scales))
    # Forward, torchao's look for the largest of two inputs and two weights; backward, of two
    # gradients and again of both inputs.
    assert found == [(2, [4, 4]), (0, [2, 2])]


def test_a_largest_weight_that_was_noted_holds_until_the_weight_changes() -> None:
    _, net = nets()
    for layer in keeping_layers(net).values():
        note_update(layer.weight, torch.tensor(448.0))
    refresh(net)
    assert [float(layer.fp8_scale) for layer in keeping_layers(net).values()] == [1.0, 1.0]
    with torch.no_grad():
        net.get_parameter("layers.0.up.weight").detach().mul_(2)  # as a checkpoint is read
    refresh(net)
    assert all(is_current(layer, 100) for layer in keeping_layers(net).values())


def test_kept_weights_make_room_for_gradients_and_come_back() -> None:
    theirs, ours = nets(gradient_accumulation_steps=1)
    layers = keeping_layers(ours).values()
    found = [trained(ours, lambda: refresh(ours), 1), trained(theirs, lambda: None, 1)]
    assert torch.equal(found[0][-1], found[1][-1])
    ours(torch.randn(2, 8, 32)).sum().backward()
    kept = [t for layer in layers for t in (layer.fp8_rows_MK, layer.fp8_columns_KM)]
    assert [t.untyped_storage().nbytes() for t in kept] == [0, 0, 0, 0]
    refresh(ours)
    assert all(is_current(layer, 100) for layer in layers)


@pytest.mark.parametrize("part", ["fp8_scale", "fp8_rows_MK", "fp8_columns_KM", "weight"])
def test_any_part_that_is_not_the_weights_is_seen(part: str) -> None:
    _, net = nets()
    layer = keeping_layers(net)["layers.0.up"]
    assert is_current(layer, 2048)
    with torch.no_grad():
        getattr(layer, part).copy_(getattr(layer, part).float() * 1.1)
    assert not is_current(layer, 2048)


def test_a_weight_kept_in_bf16_is_made_anew_where_another_was_read() -> None:
    _, net = nets(**WAYS[2], gradient_accumulation_steps=1)
    trained(net, lambda: refresh(net), 1)
    layers = keeping_layers(net)
    with torch.no_grad():
        layers["layers.0.up"].weight.mul_(2)  # as a checkpoint is read
    assert [is_current(layer, 100) for layer in layers.values()] == [False, True]
    refresh(net)
    assert all(is_current(layer, 100) for layer in layers.values())


@pytest.mark.parametrize(("transposes", "kind"), [("fused", "Float8Linear"),
                                                  ("separate", "OwnFloat8Linear")])  # fmt: skip
def test_layers_that_are_gathered_in_fp8_turn_where_that_is_asked(
    transposes: str, kind: str
) -> None:
    values = {"path": "tuned", "num_gpus": 2, "precision": "fp8", "fp8_emulate": True}
    config = make_config(values | {"transposes": transposes, "skip": ()}).resolved()
    model = Model()
    convert_to_float8(model, config)
    turn_apart(model, config)
    kinds = [type(module).__name__ for module in model.modules() if is_converted(module)]
    assert kinds == [kind] * 2
    assert not keeping_layers(model)
