"""How decoder layers are compiled, and that they really are.

torch's compiler never computes again what a product reads in the backward pass, since that has to
be written to memory again. For the gated activation of an MLP this is a poor rule: its factors are
kept and read in the backward pass anyway, so that writing it again costs little, and keeping it
costs as much memory as either factor. ``recompute=elementwise`` says so to the compiler, through
its own interface for passes over the joint graph of forward and backward pass. It does nothing
where a layer has no such thing: where gate and up are one product that is split, or in FP8, whose
inputs are cast again in the backward pass anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp8study.core.config import RunConfig

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_VIEWS = {
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default,
    _aten.permute.default, _aten.t.default, _aten.transpose.int,
}  # fmt: skip


def compile_options(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of ``torch.compile`` for the decoder layers of a run."""
    if config.recompute == "default":
        return {"mode": config.compile_mode}
    # torch.compile takes a mode or options, and a mode is a name for options.
    mode = list_mode_options(config.compile_mode)
    # One pass for all layers: with one each, every layer would count as compiled differently.
    return {"options": mode | {"joint_custom_post_pass": _RECOMPUTE_ELEMENTWISE}}


@contextmanager
def wholly_compiled(config: RunConfig) -> Iterator[None]:
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


class RecomputeElementwise(CustomGraphPass):
    """Marks what lies between products and is elementwise as to be computed again."""

    def __call__(self, graph: Graph) -> None:
        """Mark nodes of a joint graph of forward and backward pass, in place.

        In the backward pass a mark says nothing: what is there is not kept.
        """
        for node in graph.nodes:
            if _is_elementwise(node) and _feeds_product(node) and _comes_from_products(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> bytes:
        """Return what the compiler's cache knows this pass by."""
        digest: bytes = get_hash_for_files((__file__,))
        return digest


def _is_elementwise(node: Node) -> bool:
    if node.target is torch.ops.prims.convert_element_type.default:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _feeds_product(node: Node) -> bool:
    return any(
        user.target in _PRODUCTS or (user.target in _VIEWS and _feeds_product(user))
        for user in node.users
    )


def _comes_from_products(node: Node) -> bool:
    """Return whether a product, and nothing but products and constants, went into a node."""
    seen, waiting, found = {node}, [node], False
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source.target in _PRODUCTS:
                found = True
            elif source.target not in _VIEWS and not _is_elementwise(source):
                return False
            elif source not in seen:
                seen.add(source)
                waiting.append(source)
    return found


_RECOMPUTE_ELEMENTWISE = RecomputeElementwise()
