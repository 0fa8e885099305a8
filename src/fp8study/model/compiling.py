"""Compilation: of layers as a run asks for it, begun when it is needed, and whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fp8study.core.config import ResolvedConfig

_ATEN = torch.ops.aten
#: Operators that make a matrix in FP8 from one that is not, or in another layout.
_MAKERS = {
    torch.ops.prims.convert_element_type.default,
    _ATEN._to_copy.default,
    _ATEN.clone.default,
}
_VIEWS = {_ATEN.view.default, _ATEN.reshape.default, _ATEN.permute.default, _ATEN.t.default,
          _ATEN.transpose.int}  # fmt: skip


@cache
def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Return a function as `torch.compile` makes it, each time the same.

    For use where the function is called: as a decorator, `torch.compile` would import torch's
    compiler into every run, also those that compile nothing, which takes a second.
    """
    return torch.compile(function, dynamic=dynamic)


@contextmanager
def wholly_compiled(config: ResolvedConfig) -> Iterator[None]:
    """Stop a timed run of which torch would begin to run a part uncompiled.

    After a number of variants of one function torch compiles it no more and says so in a log only:
    the run would go on, slower, and be taken for a compiled one.

    Raises:
        RuntimeError: A limit is reached inside the block.
    """
    if not (config.compile and config.is_timed):
        yield
        return
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        try:
            yield
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(
                "compile: torch has compiled too many variants of one function and would run it "
                "uncompiled from here on; train.log names it, and what differs under "
                "TORCH_LOGS=recompiles; compile=false does without"
            ) from error


def compile_layers(layers: Iterable[torch.nn.Module], config: ResolvedConfig) -> None:
    """Have each layer compiled in place when it is first called, as a run asks for."""
    how: dict[str, Any] = {"mode": config.compile_mode}
    if config.fp8_writes == "once":  # torch takes a mode, or options
        options = torch._inductor.list_mode_options(config.compile_mode)
        how = {"options": {**options, "post_grad_custom_post_pass": _ONCE}}
    for layer in layers:
        layer.compile(**how)


class WriteFp8Once(CustomGraphPass):
    """Lets a compiled graph write each matrix in FP8 once, and not for each kernel that reads it.

    A kernel that is not the compiler's own asks for a layout, and what is not yet written is
    written for it alone: the gradient of an MLP's output up to ten times (docs/log.md, 72).
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Let all kernels read what is written for the first of them."""
        from torch._inductor.inductor_prims import force_stride_order

        for node in _fp8_matrices(graph):
            readers = [user for user in node.users if _is_for_kernels(user)]
            if sum(map(_num_kernels, readers)) > 1:
                with graph.inserting_after(node):
                    strides = node.meta["val"].stride()
                    once = graph.call_function(force_stride_order, (node, strides))
                once.meta["val"] = node.meta["val"]
                for reader in readers:
                    reader.replace_input_with(node, once)

    def uuid(self) -> Any:
        """Return what tells this pass from others in the compiler's cache."""
        return get_hash_for_files((__file__,))


#: One for all layers: torch compiles anew for options that are not equal.
_ONCE = WriteFp8Once()


def _fp8_matrices(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return what makes matrices in FP8, after those that make the same one have become one."""
    made: dict[str, torch.fx.Node] = {}
    for node in [*graph.nodes]:
        if node.target in _MAKERS | _VIEWS and _is_fp8_matrix(node.meta.get("val")):
            same = made.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
    return [node for node in made.values() if node.target in _MAKERS]


def _is_fp8_matrix(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    is_known = all(isinstance(stride, int) for stride in value.stride())
    return is_known and value.dtype.is_floating_point and value.dtype.itemsize == 1


def _num_kernels(reader: torch.fx.Node) -> int:
    """Count the kernels that read a matrix by this node, or by views of it."""
    return sum(map(_num_kernels, reader.users)) if reader.target in _VIEWS else 1


def _is_for_kernels(reader: torch.fx.Node) -> bool:
    """Whether all that reads a matrix by this node, or by views of it, are GEMMs or our kernels."""
    if reader.target in _VIEWS:
        return all(map(_is_for_kernels, reader.users))
    return str(reader.target).startswith(("aten._scaled_mm", "fp8study.", "triton_kernel_wrapper"))
