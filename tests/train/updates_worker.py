"""Train in both ways of updating and write down how far the weights differ.

    python -m tests.train.updates_worker OUT.json                           strategy=none
    torchrun --nproc-per-node N -m tests.train.updates_worker OUT.json      strategy=fsdp2

Everything runs in one group of processes: starting one takes far longer than three tiny steps.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from fp8study.core.config import make_config
from fp8study.model import chunked_head, sharding
from fp8study.model.fsdp.patches import shards
from tests.train.exchange_comparisons import PASSES, gathering, norming, passes, reducing
from tests.train.three_steps import largest_difference, mean_difference, tiny, train

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
