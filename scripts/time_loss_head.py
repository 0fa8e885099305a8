"""Time the chunked loss head in BF16 alone, by tokens a chunk: `python scripts/time_loss_head.py`.

Forward and backward pass together, as a step does them. Larger chunks add the weight's gradient up
in FP32 fewer times, and need memory for more logits. Prints a table.
"""

from __future__ import annotations

import torch

from fp8study.core.presets import hf_config, text_config
from fp8study.measure.gemm_peaks import median_seconds
from fp8study.measure.memory import GIB
from fp8study.model import chunked_head

#: Models and batches, at 4,096 tokens.
SHAPES = (("llama-3.1-8b", 1), ("llama-3.1-8b", 2), ("llama-3.2-1b", 8))
LENGTH = 4096
CHUNKS = (1024, 2048, 4096, 8192, 16_384)


def row(model: str, batch: int, chunk: int) -> dict[str, object]:
    """Return ms of both passes and the GiB that they allocate beside their arguments."""
    settings = text_config(hf_config(model))
    tokens, device = batch * LENGTH, torch.device("cuda")
    hidden_ND, weight_VD = (
        torch.randn(rows, settings.hidden_size, device=device, dtype=torch.bfloat16)
        .mul_(0.02)
        .requires_grad_()
        for rows in (tokens, settings.vocab_size)
    )
    targets_N = torch.randint(settings.vocab_size, (tokens,), device=device)
    chunked_head.CHUNK = chunk

    def both() -> None:
        loss = chunked_head.chunked_cross_entropy(hidden_ND, weight_VD, targets_N, compiles=True)
        torch.autograd.grad(loss, (hidden_ND, weight_VD))

    both()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(both, device)
    peak = (torch.cuda.max_memory_allocated() - before) / GIB
    return {"model": model, "batch": batch, "chunk": chunk, "ms": round(1e3 * seconds, 3),
            "gib": round(peak, 2)}  # fmt: skip


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; run it where one is")
    for model, batch in SHAPES:
        for chunk in CHUNKS:
            if chunk <= batch * LENGTH:
                found = row(model, batch, chunk)
                print(*(f"{name}={value}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
