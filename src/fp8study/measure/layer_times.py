"""What a model's own decoder layers take on this machine, for the speed law.

A few layers of the model's width, with next to no vocabulary, go forward and backward in each
precision as a run compiles and converts them. The GPU is held back while the host queues the work,
so that the host's time and the GPU's are told apart; two depths give the time of one layer. GEMMs
alone, a copy and, where there are several GPUs, an all-gather are timed beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.presets import hf_config, text_config
from fp8study.core.recipes import ARITHMETICS
from fp8study.core.records import utc_now
from fp8study.measure.gemm_peaks import ceilings_of, median_seconds
from fp8study.model.attention import imply_causal_mask, preferred_attention
from fp8study.model.build import decoder_layers
from fp8study.model.compiling import compile_layers
from fp8study.model.float8 import convert_to_float8

#: A layer's time is the difference of these depths, over their distance.
_DEPTHS = (1, 4)
_VOCABULARY = 256
_REPEATS, _WARM_UPS = 7, 3
_GATHERED_BYTES = 2**28
#: Cycles of a GPU's clock in a second, at most: what it is held back for is rather too long.
_CYCLES_PER_SECOND = 2.0e9


def measure_here(
    configs: Iterable[ResolvedConfig], say: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """Time the decoder layers of a model on the first GPU, about a minute in all.

    Args:
        configs: One run in every precision that is wanted, alike in model, batch and path.
        say: Receives a line before each part.

    Returns:
        ``at`` (UTC), ``gpu_name``, ``torch``, ``torchao``, ``model``, ``micro_batch_size``,
        ``sequence_length``, ``strategy``, ``master_dtype``, ``num_gpus``; ``layers``: precision →
        ``device_ms`` and ``host_ms`` of one decoder layer, forward and backward; ``gemm_tflops``:
        arithmetic → useful TFLOP/s over the layers' GEMMs; ``copy_tb_per_s``: read and written;
        ``link_gb_per_s``: what each GPU receives in an all-gather. A figure that could not be had
        is null. Without a GPU, FP8 is emulated and there are layers alone: a trial.

    Raises:
        UserError: The layers do not fit the GPU.
    """
    chosen = list(configs)
    last, is_gpu = chosen[-1], torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    found: dict[str, Any] = {
        "at": utc_now(),
        "gpu_name": torch.cuda.get_device_name(device) if is_gpu else None,
        "torch": torch.__version__, "torchao": version("torchao"), "layers": {},
    }  # fmt: skip
    names = ("model", "micro_batch_size", "sequence_length", "strategy", "master_dtype", "num_gpus")
    found |= {name: getattr(last, name) for name in names}
    for config in chosen:
        say(f"timing layers of {config.model} in {config.precision}")
        try:
            found["layers"][config.precision] = _layer_times(config, device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"--measure: {_DEPTHS[-1]} layers of '{config.model}' at batch "
                f"{config.micro_batch_size} do not fit this GPU; lower --micro-batch-size"
            ) from error
    if is_gpu:
        say(f"timing the GEMMs of {last.model}, a copy and the link")
        ceilings = ceilings_of(last)
        found["gemm_tflops"] = _converted_tflops(ceilings)
        found["copy_tb_per_s"] = ceilings["copy_tb_per_s"]
        found["link_gb_per_s"] = link_gb_per_s(last.num_gpus)
    return found


def _layer_times(config: ResolvedConfig, device: torch.device) -> dict[str, float | None]:
    """Return what one decoder layer takes of the GPU and of the host, ms."""
    model, has_weights_in_fp32 = _short_model(config, device)
    waits = imply_causal_mask(model, config)  # the host's time cannot be told where it waits
    layers = decoder_layers(model)
    torch._dynamo.reset()
    if config.compile and device.type == "cuda":
        compile_layers(layers, config)
    convert_to_float8(model, config)
    size = (config.micro_batch_size, config.sequence_length)
    ids_BT = torch.randint(_VOCABULARY, size, device=device)
    times: dict[int, tuple[float, float]] = {}
    cast = torch.autocast(device.type, torch.bfloat16) if has_weights_in_fp32 else nullcontext()

    def step() -> None:
        with cast:
            hidden_BTD = model.base_model(input_ids=ids_BT).last_hidden_state
        hidden_BTD.backward(torch.ones_like(hidden_BTD))
        model.zero_grad(set_to_none=True)

    with preferred_attention(config, device):
        for depth in _DEPTHS:
            text_config(model.config).num_hidden_layers = depth
            times[depth] = _device_and_host_ms(step, device)
    more = _DEPTHS[1] - _DEPTHS[0]
    device_ms, host_ms = ((b - a) / more for a, b in zip(*times.values(), strict=True))
    known = config.attention_mask != "checked" and waits is None
    return {"device_ms": device_ms, "host_ms": host_ms if known else None}


def _short_model(config: ResolvedConfig, device: torch.device) -> tuple[Any, bool]:
    """Build the model with few layers and words, and say whether autocast casts its weights."""
    from transformers import AutoModelForCausalLM

    chosen = hf_config(config.model)
    text = text_config(chosen)
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = _DEPTHS[-1], _VOCABULARY, None
    in_fp32 = config.strategy != "fsdp2" and config.master_dtype == "fp32"
    dtype = torch.float32 if in_fp32 else torch.bfloat16  # FSDP2 gives layers BF16 weights
    with torch.device(device):
        return AutoModelForCausalLM.from_config(chosen, dtype=dtype).train(), in_fp32


def _device_and_host_ms(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the medians of what a step takes of the GPU and of the host, ms."""
    for _ in range(_WARM_UPS):  # the first one compiles
        step()
    if device.type != "cuda":
        took = [_seconds(step) for _ in range(_REPEATS)]
        return 1e3 * statistics.median(took), 1e3 * statistics.median(took)
    torch.cuda.synchronize(device)
    longest = _seconds(step) + _seconds(partial(torch.cuda.synchronize, device))
    on_gpu, on_host = [], []
    for _ in range(_REPEATS):
        torch.cuda._sleep(int(1.5 * longest * _CYCLES_PER_SECOND))
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record()
        on_host.append(1e3 * _seconds(step))
        ends[1].record()
        torch.cuda.synchronize(device)
        on_gpu.append(ends[0].elapsed_time(ends[1]))
    return statistics.median(on_gpu), statistics.median(on_host)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _converted_tflops(ceilings: dict[str, Any]) -> dict[str, float | None]:
    """Return TFLOP/s by arithmetic over the GEMMs of the layers that a run converts."""
    rows = [row for row in ceilings["products"] if row["in_fp8"]]
    work = [row["count"] * row["in_features"] * row["out_features"] for row in rows]
    found: dict[str, float | None] = {}
    for arithmetic in ARITHMETICS:
        rates = [row["tflops"][arithmetic] for row in rows]
        whole = rows and all(rates)
        took = sum(flop / rate for flop, rate in zip(work, rates, strict=True)) if whole else None
        found[arithmetic] = sum(work) / took if took else None
    return found


def link_gb_per_s(num_gpus: int) -> float | None:
    """Return what each of the first GPUs receives from the others in NCCL's all-gather, GB/s."""
    from torch.cuda import nccl

    there = min(num_gpus, torch.cuda.device_count())
    if there < 2 or not nccl.is_available([]):
        return None
    parts = [torch.ones(_GATHERED_BYTES // there, dtype=torch.uint8, device=f"cuda:{gpu}")
             for gpu in range(there)]  # fmt: skip
    wholes = [torch.empty(there * part.numel(), dtype=torch.uint8, device=part.device)
              for part in parts]  # fmt: skip
    seconds = median_seconds(lambda: nccl.all_gather(parts, wholes), torch.device("cuda", 0))
    return (there - 1) * parts[0].numel() / seconds / 1e9
