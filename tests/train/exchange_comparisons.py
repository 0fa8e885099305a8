"""How GPUs exchange weights and gradients: each way compared with FSDP2's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp
from torch.distributed.tensor import DTensor

from fp8study.core.config import make_config
from fp8study.model import swiglu
from fp8study.model.fsdp import copying, patches, peers
from fp8study.model.sharding import make_accelerator, prepare
from tests.train.three_steps import largest_difference, mean_difference, tiny, train

PASSES: dict[str, dict[str, Any]] = {
    "": {},
    "in backward": {"optimizer_step": "in_backward"},
    "copy engines": {"collectives": "copy_engines"},
    "one pass": {"update_kernel": "one_pass", "gradient_copy": "foreach"},
    "one pass in backward": {"update_kernel": "one_pass", "optimizer_step": "in_backward"},
}


def reducing(num_gpus: int) -> dict[str, Any]:
    """Compare gradients copied and reduced in our ways; return what has done it."""
    values = {"model": "tiny-llama", "num_gpus": num_gpus, "compile": False, "max_grad_norm": 0.1}
    tied = [
        train(make_config(values | {"loss_head": "chunked", "collectives": how}), tied=True)[0]
        for how in ("nccl", "copy_engines")
    ]
    used: list[set[str]] = []
    reduce, copy = fsdp.DefaultReduceScatter.__call__, torch._foreach_copy_

    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        used[-1].add(type(self).__name__)
        return reduce(self, *arguments, **named)

    def watched_copy(targets: Any, sources: Any) -> None:
        if targets[0].dtype == torch.float32 != sources[0].dtype:  # else weights are gathered
            used[-1].add("foreach")
        copy(targets, sources)

    exchange = dist.all_to_all_single

    def watched_exchange(received: Any, sent: Any, **named: Any) -> Any:
        used[-1].add(f"all to all, {sent.dtype}".replace("torch.", ""))
        return exchange(received, sent, **named)

    kind_of, together = patches._reduce_scatter, copying.copy_together

    def watched_kind(*how: bool) -> type:
        kind = kind_of(*how)
        used[-1].update(each.__name__ for each in kind.mro()[:-1] if "Pool" in each.__name__)
        return kind

    def watched_together(*arguments: Any) -> None:
        used[-1].add("together")
        together(*arguments)

    put_off = copying.Later.put_off

    def watched_put_off(*arguments: Any) -> None:
        used[-1].add("put off")
        put_off(*arguments)

    copying.Later.put_off = watched_put_off  # type: ignore[method-assign]
    patches._reduce_scatter = watched_kind  # type: ignore[assignment]
    copying.copy_together = watched_together
    dist.all_to_all_single = watched_exchange  # type: ignore[assignment]
    fsdp.DefaultReduceScatter.__call__ = watched  # type: ignore[method-assign]
    torch._foreach_copy_ = watched_copy  # type: ignore[assignment]
    results = []
    # The last one holds for the rest of the process.
    for changes in (
        {}, {"gradient_pool": "shared"}, {"collectives": "copy_engines"},
        {"collectives": "copy_engines", "gradient_pool": "shared"},
        {"gradient_copy": "foreach"},
        {"gradient_copy": "foreach", "collectives": "copy_engines"},
        {"gradient_copy": "reduce_stream", "collectives": "copy_engines"},
    ):  # fmt: skip
        used.append(set())
        results.append(train(make_config(values | changes), tied=False)[0])
    torch._foreach_copy_, dist.all_to_all_single = copy, exchange
    patches._reduce_scatter, copying.copy_together = kind_of, together
    expected, *others = results
    return {
        "used": [sorted(names) for names in used],
        "difference": max(largest_difference(weights, expected) for weights in others),
        "tied_difference": largest_difference(*tied),
    }


def norming(num_gpus: int) -> dict[str, Any]:
    """Compare the norm that all gradients are read for with what their sums add up to."""
    values = {
        "model": "tiny-llama", "num_gpus": num_gpus, "compile": False, "max_grad_norm": 0.1,
        "clipping": "in_update", "collectives": "copy_engines",
    }  # fmt: skip
    expected, norms, *_ = train(make_config(values), tied=False)
    take, num_taken = peers.squares.take, 0

    def counted() -> Any:
        nonlocal num_taken
        found = take()
        num_taken += found is not None
        return found

    peers.squares.take = counted  # type: ignore[method-assign]
    weights, own_norms, *_ = train(make_config(values | {"gradient_norm": "as_summed"}), tied=False)
    peers.squares.take = take  # type: ignore[method-assign]
    difference = largest_difference(weights, expected)
    return {"norms": [norms, own_norms], "num_taken": num_taken, "difference": difference}


def gathering(num_gpus: int) -> dict[str, Any]:
    """Compare weights cast by one compiled kernel, and look which layers stay gathered."""
    values = {"model": "tiny-llama", "num_gpus": num_gpus, "compile": False}
    fp8 = values | {"precision": "fp8"}
    expected, *_ = train(make_config(fp8), tied=False)
    num_casts, cast = 0, patches._cast

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal num_casts
        num_casts += 1
        return cast(*arguments)

    patches._cast = counted
    changes = {"gather_cast": "compiled", "reshard_after_forward": "half"}
    weights, *_ = train(make_config(fp8 | changes), tied=False)
    changes |= {"weight_cast": "each_update"}
    num_in_passes, num_casts = num_casts, 0
    once, *_ = train(make_config(fp8 | changes), tied=False)
    num_gated, gate = 0, swiglu._gated

    def counted_gated(*arguments: Any) -> Any:
        nonlocal num_gated
        num_gated += 1
        return gate(*arguments)

    swiglu._gated = counted_gated  # type: ignore[assignment]
    gated, *_ = train(make_config(fp8 | changes | {"swiglu": "kernels"}), tied=False)
    swiglu._gated = gate
    kept = {}
    for reshard in (True, "half", False):
        config = make_config(values | {"reshard_after_forward": reshard}).resolved()
        AcceleratorState._reset_state()
        model = tiny(config, tied=False)
        accelerator = make_accelerator(config, model)
        model, _ = prepare(config, accelerator, model, lambda m: torch.optim.SGD(m.parameters()))
        ids = torch.zeros(1, 16, dtype=torch.int64)
        model(input_ids=ids, labels=ids)
        kept[str(reshard)] = [
            not isinstance(layer.self_attn.q_proj.weight, DTensor) for layer in model.model.layers
        ]
    return {
        "num_casts": [num_in_passes, num_casts],
        "num_gated": num_gated,
        "difference": max(largest_difference(own, expected) for own in (weights, once, gated)),
        "kept": kept,
    }


def passes(num_gpus: int, **changes: Any) -> dict[str, Any]:
    """Compare gradients reduced after each backward pass with those reduced after the last."""
    results = [
        train(make_config({
            "model": "tiny-llama", "strategy": "fsdp2", "compile": False, "num_gpus": num_gpus,
            "gradient_accumulation_steps": 3, "gradient_reduction": when,
        } | (changes if when == "each_pass" else {})), tied=False)
        for when in ("last_pass", "each_pass")
    ]  # fmt: skip
    (expected, norms, _, none), (weights, own_norms, _, shares) = results
    return {
        "mean_difference": mean_difference(weights, expected),
        "norms": [norms, own_norms],
        "between_passes": [none, shares],
    }
