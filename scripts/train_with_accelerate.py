r"""Train as Accelerate's documentation shows it, in BF16 or FP8, and print the speed.

    torchrun --standalone --nproc-per-node=2 scripts/train_with_accelerate.py \
        --model llama-3.1-8b --precision fp8_tensorwise --gpus 2 --batch 2 \
        --sequence-length 4096 --steps 60 --warmup-steps 30 --log-every 5

What users have without a path of their own: transformers' model with its own loss, AdamW, decoder
layers compiled, FSDP2 on several GPUs, FP8 by `AORecipeKwargs`; on random tokens that a worker
draws, gradients clipped at 1. The last line of the first rank is JSON: ``windows``, tokens per
second and GPU of every ``--log-every`` timed steps; ``memory_peak_gib`` that the allocator had
reserved; ``num_parameters``; ``untrained_pct``, the share of weights that are not the optimizer's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import (
    AORecipeKwargs,
    FullyShardedDataParallelPlugin,
    KwargsHandler,
    TorchDynamoPlugin,
)
from torch.utils.data import DataLoader, IterableDataset
from torchao.float8 import Float8LinearConfig
from transformers import AutoModelForCausalLM

from fp8study.core.presets import hf_config
from fp8study.model.sharding import parameters_outside_optimizer_pct


class RandomTokens(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size, self._length = vocab_size, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            tokens = torch.randint(self._vocab_size, (self._length,))
            yield {"input_ids": tokens, "labels": tokens}


def make_accelerator(precision: str, num_gpus: int) -> Accelerator:
    on_gpu = torch.cuda.is_available()
    handlers: list[KwargsHandler] = []
    if precision == "fp8_tensorwise":
        recipe = Float8LinearConfig(
            pad_inner_dim=True, enable_fsdp_float8_all_gather=num_gpus > 1, emulate=not on_gpu
        )
        handlers = [AORecipeKwargs(config=recipe)]
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
    )  # fmt: skip
    return Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "fp8",
        fsdp_plugin=sharding if num_gpus > 1 else None,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        if on_gpu
        else None,
        kwargs_handlers=handlers,
        cpu=not on_gpu,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train as Accelerate's documentation shows it.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=["bf16", "fp8_tensorwise"], default="bf16")
    parser.add_argument("--gpus", type=int, default=1)
    for name in ("batch", "sequence-length", "steps", "warmup-steps", "log-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    accelerator = make_accelerator(options.precision, options.gpus)
    config = hf_config(options.model)
    with torch.device(accelerator.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = RandomTokens(config.vocab_size, options.sequence_length)
    loader = DataLoader(tokens, batch_size=options.batch, num_workers=1, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # As document A's script does it, the optimizer is made before FP8: it may be stale.
    untrained = parameters_outside_optimizer_pct(model, optimizer)
    windows, began = [], time.perf_counter()
    for step, batch in zip(range(1, options.steps + 1), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % options.log_every == 0:
            loss.item()  # waits for the GPU
            now = time.perf_counter()
            if step > options.warmup_steps:
                seen = options.log_every * options.batch * options.sequence_length
                windows.append(seen / (now - began))
            began = now
    reserved = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    if accelerator.is_main_process:
        found = {
            "windows": windows, "memory_peak_gib": reserved, "num_parameters": num_parameters,
            "untrained_pct": untrained, "loss": loss.item(),
        }  # fmt: skip
        print(json.dumps(found), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
