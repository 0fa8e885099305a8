"""FP8 matrices that several kernels read, in graphs as torch's compiler has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.inductor_prims import force_stride_order
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


@pytest.mark.parametrize(
    ("function", "written_once"),
    [(_read_twice, 1), (_made_twice, 1), (_turned_once, 1), (_read_once, 0)],
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
        assert all("_scaled_mm" in str(u) or "view" in str(u) or "t_" in str(u) for u in node.users)
    module.recompile()
    for one, other in zip(module(x, weight), expected, strict=True):
        assert torch.equal(one, other)


def test_layers_are_compiled_with_that_where_a_run_asks_for_it() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            fp8 = (x * 2).to(FP8)
            return _multiplied(fp8, weight) + _multiplied(fp8, weight)

    x, weight = torch.randn(32, 32), torch.randn(32, 32).to(FP8).t()
    seen = []

    def count(self: WriteFp8Once, graph: torch.fx.Graph) -> None:
        seen.append(graph)

    for writes, num_graphs in (("per_reader", 0), ("once", 1)):
        layer = Layer()
        config = make_config({"precision": "fp8", "fp8_writes": writes}).resolved()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WriteFp8Once, "__call__", count)
            compile_layers([layer], config)
            assert torch.equal(layer(x, weight), Layer()(x, weight))
        assert len(seen) == num_graphs
