"""FP8 matrices that several kernels read, in graphs as torch's compiler has them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from fp8study.core.config import make_config
from fp8study.model.compiling import WriteFp8Once, compile_layers

FP8 = torch.float8_e4m3fn


def _multiplied(fp8_NK: torch.Tensor, weight_KM: torch.Tensor) -> torch.Tensor:
    one = torch.ones(())
    return torch._scaled_mm(fp8_NK, weight_KM, one, one, out_dtype=torch.bfloat16)


def _cast(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.prims.convert_element_type(x * 2, FP8)


def _read_twice(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    fp8 = _cast(x)
    return [_multiplied(fp8, weight), _multiplied(fp8.view(32, 32), weight)]


def _made_twice(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    doubled = x * 2
    return [
        _multiplied(torch.ops.prims.convert_element_type(doubled, FP8), weight) for _ in range(2)
    ]


def _turned_once(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    fp8 = _cast(x)
    columns = [fp8.t().clone(memory_format=torch.contiguous_format).t() for _ in range(2)]
    return [_multiplied(fp8, weight), *(_multiplied(weight.t(), each) for each in columns)]


def _read_once(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    fp8 = _cast(x)
    return [_multiplied(fp8, weight), fp8.float() + 1]


def _read_by_others_too(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    fp8 = _cast(x)
    return [_multiplied(fp8, weight), _multiplied(fp8, weight), fp8.float() + 1]


@pytest.mark.parametrize(
    ("function", "written_once"),
    [
        (_read_twice, 1),
        (_made_twice, 1),
        (_turned_once, 1),
        (_read_once, 0),
        (_read_by_others_too, 1),
    ],
)
def test_kernels_read_what_was_written_for_the_first(function: Any, written_once: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(32, 32), torch.randn(32, 32).to(FP8).t()
    module = make_fx(function, tracing_mode="fake")(x, weight)
    expected = module(x, weight)
    WriteFp8Once()(module.graph)
    module.graph.lint()
    found = module.graph.find_nodes(op="call_function", target=force_stride_order)
    assert len(found) == written_once
    for node in found:
        # Whatever is no kernel reads on what the compiler has not written yet.
        names = {str(user.target) for user in node.users}
        assert names <= {"aten._scaled_mm.default", "aten.view.default", "aten.t.default"}
    module.recompile()
    for one, other in zip(module(x, weight), expected, strict=True):
        assert torch.equal(one, other)


class Layer(torch.nn.Module):
    """Three GEMMs of one matrix that is cast first."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        fp8 = (x * 2).to(FP8)
        return torch.stack([_multiplied(fp8, each) for each in weight.expand(3, 32, 32)])


@pytest.mark.parametrize(("writes", "num_written"), [("per_reader", 3), ("once", 1)])
def test_the_compilers_code_writes_it_once_where_a_run_asks_for_it(
    writes: str, num_written: int
) -> None:
    torch._dynamo.reset()
    x, weight = torch.randn(32, 32), torch.randn(32, 32).to(FP8).t()
    layer, config = Layer(), make_config({"precision": "fp8", "fp8_writes": writes}).resolved()
    compile_layers([layer], config)
    found, (code,) = run_and_get_code(layer, x, weight)
    assert torch.equal(found, Layer()(x, weight))
    assert len(re.findall(r"= empty_strided_cpu\(.*float8_e4m3fn\)", code)) == num_written


def test_equal_layers_share_what_is_compiled_for_the_first_of_them() -> None:
    torch._dynamo.reset()
    counters.clear()
    x, weight = torch.randn(32, 32), torch.randn(32, 32).to(FP8).t()
    config = make_config({"precision": "fp8", "fp8_writes": "once"}).resolved()
    for _ in range(2):
        layer = Layer()
        compile_layers([layer], config)
        layer(x, weight)
    assert counters["stats"]["unique_graphs"] == 1
