"""MLPs whose SwiGLU writes FP8 against torchao's layers with torch's own operators between."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from fp8study.core.config import ResolvedConfig, make_config
from fp8study.model.float8 import convert_to_float8
from fp8study.model.kept_weights import keep_weights, refresh
from fp8study.model.swiglu import num_gated, write_fp8_between

KERNELS = {"precision": "fp8", "fp8_emulate": True, "strategy": "none", "skip": "",
           "weight_cast": "each_update", "swiglu": "kernels"}  # fmt: skip


class Model(torch.nn.Module):
    """What has decoder layers: two MLPs."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        shape = LlamaConfig(hidden_size=32, intermediate_size=48, **changes)
        self.layers = torch.nn.ModuleList([LlamaMLP(shape), LlamaMLP(shape)])  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(torch.nn.functional.rms_norm(x, (32,)))
        return x


def models(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Model, Model]:
    """Return torchao's layers and ours, with the same weights."""
    torch.manual_seed(0)
    theirs = Model().to(dtype)
    config = make_config(KERNELS | {"gradient_accumulation_steps": 2} | changes).resolved()
    convert_to_float8(theirs, config)
    ours = copy.deepcopy(theirs)
    keep_weights(ours, config)
    write_fp8_between(ours, config)
    return theirs, ours


def trained(model: Model, dtype: torch.dtype, compiler: Any = None) -> list[torch.Tensor]:
    """Return outputs and gradients of two steps, and the weights after them."""
    generator, found = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, backend=compiler) if compiler else model
    for _ in range(2):
        x = torch.randn(2, 16, 32, generator=generator).to(dtype).requires_grad_()
        output = run(x)
        output.square().mean().backward()
        found += [output.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
        refresh(model)
    return [*found, *[p.detach() for p in model.parameters()]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("casts_to", ["one_layout", "both_layouts"])
def test_every_number_is_torchaos(dtype: torch.dtype, casts_to: str) -> None:
    theirs, ours = models(dtype, cast_kernels=casts_to)
    pairs = zip(trained(theirs, dtype), trained(ours, dtype), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("casts_to", ["one_layout", "both_layouts"])
def test_so_it_is_compiled(casts_to: str) -> None:
    theirs, ours = models(cast_kernels=casts_to)
    compiler = aot_autograd(
        fw_compiler=lambda graph, _: graph, partition_fn=min_cut_rematerialization_partition
    )
    own = trained(ours, torch.float32, compiler)
    pairs = zip(trained(theirs, torch.float32), own, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_narrow_gradients_are_those_of_the_kept_weights() -> None:
    dtype = torch.bfloat16
    changes = {"update_kernel": "one_pass", "gradient_dtype": "compute",
               "gradient_accumulation_steps": 1}  # fmt: skip
    theirs, ours = models(**changes)
    x, found = torch.randn(16, 32, dtype=dtype), []
    for model in (theirs, ours):
        model(x).float().square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert {gradient.dtype for gradient in found[1]} == {dtype}
    assert all(torch.equal(a.to(dtype), b) for a, b in zip(*found, strict=True))


def test_an_mlp_of_another_kind_stays_the_compilers() -> None:
    def num_in(model: torch.nn.Module, **changes: Any) -> int:
        config: ResolvedConfig = make_config(KERNELS | changes).resolved()
        convert_to_float8(model, config)
        write_fp8_between(model, config)
        return num_gated(model)

    assert num_in(Model()) == 2
    assert num_in(Model(hidden_act="gelu")) == 0
    assert num_in(Model(mlp_bias=True)) == 0
    assert num_in(Model(), skip="*.down_proj") == 0
    own = Model()
    own.gate = type("GatedMLP", (torch.nn.Module,), {})()  # a model's own name for another thing
    assert num_in(own, skip="layers.*") == 0


def test_the_rest_of_a_model_stays_as_it_is() -> None:
    model = Model()
    config = make_config(KERNELS | {"skip": "layers.1.*"}).resolved()
    convert_to_float8(model, config)
    write_fp8_between(model, config)
    assert [type(layer).__name__ for layer in model.layers] == ["GatedLlamaMLP", "LlamaMLP"]
    plain = Model()
    write_fp8_between(plain, make_config({"precision": "bf16"}).resolved())
    assert {type(layer) for layer in plain.layers} == {LlamaMLP}


def test_the_compiler_writes_no_gradient_in_fp8_for_a_kernel_that_waits_for_it() -> None:
    torch._dynamo.reset()
    _, ours = models(torch.bfloat16)
    layer = torch.compile(ours.layers[0])
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)

    def trained() -> None:
        layer(x).backward(torch.randn(16, 32, dtype=torch.bfloat16))

    _, codes = run_and_get_code(trained)
    written = [re.findall(r"(\w+) = empty_strided_cpu\(\(16, 32\).*float8_e5m2", c) for c in codes]
    assert sum(map(len, written)) == 1  # what is transposed; emulation multiplies no FP8
