"""Time attention kernels alone on a GPU, forward and backward: `python scripts/time_attention.py`.

torch's own by cuDNN and by FlashAttention 2, and FlashAttention 4 where `flash-attn-4` is
installed, which `attention=flash4` uses. Shapes are those of a model's decoder layer; queries, keys
and values lie as its projections write them. TFLOP/s count what causal attention needs, half of the
square: 2 GEMMs forward and 5 backward. Prints a table, and writes it where ``--out`` says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8study.core.presets import hf_config, text_config
from fp8study.measure.gemm_peaks import median_seconds

#: Models and batches, at 4,096 tokens.
SHAPES = (("llama-3.1-8b", 1), ("llama-3.1-8b", 2), ("llama-3.2-1b", 8), ("qwen3-14b", 2))
LENGTH = 4096

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torchs(backend: SDPBackend) -> Attention:
    """Return torch's attention by one kernel; B: batch, S: tokens, H: heads, D: a head's size."""

    def attend(q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            output_BHSD = torch.nn.functional.scaled_dot_product_attention(
                q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2), v_BSHD.transpose(1, 2),
                is_causal=True, enable_gqa=True,
            )  # fmt: skip
        return output_BHSD.transpose(1, 2)

    return attend


def kernels() -> dict[str, Attention]:
    """Return the kernels by name."""
    found = {
        "cudnn": torchs(SDPBackend.CUDNN_ATTENTION),
        "flash 2": torchs(SDPBackend.FLASH_ATTENTION),
    }
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        print(f"without FlashAttention 4: {error}")
        return found

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        output = flash_attn_func(*tensors, causal=True)
        return output[0] if isinstance(output, tuple) else output

    return found | {"flash 4": attend}


def times(shape: tuple[int, int, int, int], attend: Attention) -> tuple[float, float, torch.Tensor]:
    """Return ms of a forward and a backward pass, and the output with all gradients.

    `shape`: batch, heads of queries, heads of keys, a head's size.
    """
    batch, num_heads, num_keys, size = shape
    torch.manual_seed(0)
    tensors = [
        torch.randn(batch, LENGTH, n, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n in (num_heads, num_keys, num_keys)
    ]
    output = attend(*tensors)
    gradient = torch.randn(output.shape, device="cuda", dtype=torch.bfloat16)  # laid out alike

    def forward() -> None:
        attend(*tensors)

    def both() -> None:
        torch.autograd.grad(attend(*tensors), tensors, gradient)

    alone, together = (1e3 * median_seconds(run, output.device) for run in (forward, both))
    found = torch.autograd.grad(output, tensors, gradient)
    values = torch.cat([output.detach().flatten(), *(x.flatten() for x in found)])
    return alone, together - alone, values


def rows() -> Iterator[dict[str, object]]:
    """Yield a row for each shape and kernel; ``off_pct`` is held to the first kernel."""
    attentions = kernels()
    for model, batch in SHAPES:
        settings = text_config(hf_config(model))
        heads, keys = settings.num_attention_heads, settings.num_key_value_heads
        size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        tflop = 2e-12 * batch * heads * size * LENGTH**2 / 2
        first = None
        for name, attend in attentions.items():
            try:
                forward, backward, values = times((batch, heads, keys, size), attend)
            except Exception as error:  # a kernel that refuses a shape is a result
                yield {"model": model, "batch": batch, "kernel": name, "error": str(error)[:200]}
                continue
            first = values if first is None else first
            off = (values - first).float().norm() / first.float().norm()
            yield {
                "model": model, "batch": batch, "kernel": name,
                "forward_ms": round(forward, 4), "backward_ms": round(backward, 4),
                "forward_tflops": round(2e3 * tflop / forward),
                "backward_tflops": round(5e3 * tflop / backward),
                "off_pct": round(100 * float(off), 3),
            }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; run it where one is")
    found = []
    for row in rows():
        found.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    if arguments.out:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}
        arguments.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
