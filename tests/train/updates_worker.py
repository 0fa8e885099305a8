"""Train in both ways of updating and write down how far the weights differ.

    python updates_worker.py OUT.json                               strategy=none
    torchrun --nproc-per-node N updates_worker.py OUT.json          strategy=fsdp2

Everything runs in one group of processes: starting one takes far longer than three tiny steps.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fp8study.core.config import RunConfig, make_config
from fp8study.core.presets import PRESETS
from fp8study.model import chunked_head, sharding, swiglu
from fp8study.model.fsdp import copying, patches, peers
from fp8study.model.fsdp.patches import shards
from fp8study.model.optimizer import make_optimizer
from fp8study.model.sharding import after_update, gradient_sync, make_accelerator, prepare
from fp8study.model.updates import make_updates

NUM_STEPS = 3
CHANGES: dict[str, dict[str, Any]] = {
    "": {},
    "tied": {},
    "bf16 masters": {"master_dtype": "bf16"},
    "checkpointed": {"activation_checkpointing": True},
    "resident": {"reshard_after_forward": False},
    "half": {"reshard_after_forward": "half"},
    "fp8": {"precision": "fp8"},
    "chunked": {"loss_head": "chunked"},
    "fp8 head": {"precision": "fp8_rowwise", "skip": ""},
    "chunked fp8 head": {"precision": "fp8_rowwise", "skip": "", "loss_head": "chunked"},
    "tensorwise head": {"precision": "fp8_tensorwise", "skip": ""},
    "chunked tensorwise head": {
        "precision": "fp8_tensorwise",
        "skip": "",
        "loss_head": "chunked",
    },
    "planted": {"untrained": "model.layers.0.mlp.*"},
}
ONE_PASS: dict[str, dict[str, Any]] = {
    "": {},
    "in backward": {"optimizer_step": "in_backward"},
    "clipped": {"max_grad_norm": 0.1, "clipping": "in_update"},
    "bf16 masters": {"master_dtype": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8 in backward": {"precision": "fp8", "optimizer_step": "in_backward"},
}
PASSES: dict[str, dict[str, Any]] = {
    "": {},
    "in backward": {"optimizer_step": "in_backward"},
    "copy engines": {"collectives": "copy_engines"},
    "one pass": {"update_kernel": "one_pass", "gradient_copy": "foreach"},
    "one pass in backward": {"update_kernel": "one_pass", "optimizer_step": "in_backward"},
}


def tiny(config: RunConfig, tied: bool) -> Any:
    values = PRESETS["tiny-llama"] | {
        "num_hidden_layers": 2, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "head_dim": 16, "tie_word_embeddings": tied,
    }  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float32 if config.master_dtype == "fp32" else torch.bfloat16
    settings = AutoConfig.for_model(**values)
    settings.use_cache = False
    return AutoModelForCausalLM.from_config(settings, dtype=dtype).train()


class Trained(NamedTuple):
    """What three steps came to."""

    weights: list[torch.Tensor]
    norms: list[float]
    """Of each step's gradients."""
    most_alive: float
    """The largest share of the gradients that was alive at an update."""
    between_passes: float
    """That before the last backward pass of a step."""


def train(config: RunConfig, tied: bool) -> Trained:
    """Train a tiny model as a run would."""
    config = config.resolved(on_gpu=False)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    model = tiny(config, tied)
    accelerator = make_accelerator(config, model)

    model, optimizer = prepare(config, accelerator, model, partial(make_optimizer, config))
    updates = make_updates(config, model, optimizer, after_update(config, model))
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(PartialState().process_index)
    norms, at_updates, between_passes = [], [0.0], 0.0

    def alive() -> float:
        there = sum(p.numel() for p in parameters if p.grad is not None)
        return there / sum(p.numel() for p in parameters)

    def look(_: Any) -> None:
        at_updates.append(alive())

    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for micro_step in range(config.gradient_accumulation_steps):
            is_last = micro_step == config.gradient_accumulation_steps - 1
            if is_last:
                between_passes = max(between_passes, alive())
                updates.expect(wants_norm=True, look=look)
            ids = torch.randint(0, 256, (2, 16), generator=generator)
            with gradient_sync(model, is_last, config):
                loss = model(input_ids=ids, labels=ids).loss
                (loss / config.gradient_accumulation_steps).backward()
        norm = updates.finish()
        assert norm is not None
        norms.append(float(norm))
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    weights = [getattr(w, "_tensor", w).detach().clone() for w in weights]
    return Trained(weights, norms, max(at_updates), between_passes)


def largest_difference(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))


def mean_difference(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    apart = [(a - b).abs().flatten() for a, b in zip(weights, expected, strict=True)]
    return float(torch.cat(apart).mean())


def clipping(strategy: str, num_gpus: int, **changes: Any) -> dict[str, Any]:
    """Compare gradients scaled by the update's own kernel with gradients scaled before it."""
    results = []
    for where in ("separate", "in_update"):
        values = {
            "model": "tiny-llama", "strategy": strategy, "num_gpus": num_gpus, "compile": False,
            "max_grad_norm": 0.1, "clipping": where,
        }  # fmt: skip
        results.append(train(make_config(values | changes), tied=False))
    (expected, norms, *_), (weights, own_norms, *_) = results
    return {"mean_difference": mean_difference(weights, expected), "norms": [norms, own_norms]}


def one_pass(num_gpus: int, **changes: Any) -> dict[str, Any]:
    """Compare shards updated in one pass with torch's own, and the FP8 scales that it leaves."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    scale, agreed = sharding._scale_as_noted, []

    def watched(model: torch.nn.Module) -> bool:
        done, made = scale(model), []
        for make in (lambda _: None, precompute_float8_dynamic_scale_for_fsdp):
            make(model)
            made.append([float(shard._precomputed_scale) for shard in shards(model).values()])
        agreed.append(done and made[0] == made[1])
        return done

    values = {"model": "tiny-llama", "num_gpus": num_gpus, "compile": False} | changes
    expected, norms, *_ = train(make_config(values), tied=False)
    sharding._scale_as_noted = watched
    weights, own_norms, *_ = train(make_config(values | {"update_kernel": "one_pass"}), tied=False)
    sharding._scale_as_noted = scale
    return {
        "mean_difference": mean_difference(weights, expected), "norms": [norms, own_norms],
        "scales_agree": agreed,
    }  # fmt: skip


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


def main() -> None:
    """Compare all combinations that can hold."""
    state = PartialState(cpu=True)
    chunked_head.CHUNK = 20  # of 32 tokens a process
    strategy = "fsdp2" if dist.is_initialized() else "none"
    found: dict[str, Any] = {}
    for accumulation, (name, changes) in itertools.product((1, 2), CHANGES.items()):
        if name in ("resident", "half") and strategy == "none":
            continue
        results = []
        for when in ("after_backward", "in_backward"):
            values = {
                "model": "tiny-llama", "strategy": strategy, "compile": False,
                "num_gpus": state.num_processes, "gradient_accumulation_steps": accumulation,
                "optimizer_step": when,
            }  # fmt: skip
            results.append(train(make_config(values | changes), tied=name == "tied"))
        (expected, norms, *_), (weights, own_norms, most_alive, _) = results
        start = [
            p.detach() for p in tiny(make_config(values | changes), name == "tied").parameters()
        ]
        found[f"{accumulation}-{name}"] = {
            "difference": largest_difference(weights, expected),
            "moved": sum(
                not torch.equal(a, b) for a, b in zip(weights, start, strict=True)
            ) / len(start),
            "norms": [norms, own_norms],
            "most_alive": most_alive,
        }  # fmt: skip
    for name, accumulation in itertools.product(("", "fp8", "bf16 masters"), (1, 2)):
        changes = CHANGES[name] | {"gradient_accumulation_steps": accumulation}
        case = f"clipping-{accumulation}-{name}"
        found[case] = clipping(strategy, state.num_processes, **changes)
    if state.num_processes > 1:
        for name, changes in ONE_PASS.items():
            found[f"one pass-{name}"] = one_pass(state.num_processes, **changes)
        for name, changes in PASSES.items():
            found[f"passes-{name}"] = passes(state.num_processes, **changes)
        found["gathering"] = gathering(state.num_processes)
        found["norming"] = norming(state.num_processes)
        found["reducing"] = reducing(state.num_processes)
    if state.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
