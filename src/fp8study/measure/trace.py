"""What one training step did, read from a profiler's trace: its GEMMs, transfers and waits.

Reads the Chrome trace format that `torch.profiler` exports, so a stored trace can be read again
anywhere. Operators carry the shapes and dtypes of their inputs; kernels carry their times; the
"External id" that the two share says which operator launched which kernel.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Operator → position of its two factors among the inputs.
_GEMM_FACTORS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::_scaled_mm_v2": (0, 1),
    "aten::_grouped_mm": (0, 1),
    "aten::_scaled_grouped_mm": (0, 1),
}

#: The profiler's names of dtypes → ours; anything else keeps its own.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "unsigned char": "uint8",
    "signed char": "int8",
    # NCCL's kernels name them once more.
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Byte": "uint8",
    "Half": "float16",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}
_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int": 4, "bfloat16": 2, "float16": 2,
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "Long": 8, "Double": 8,
}  # fmt: skip

#: Collective operators → our name, and which of two tensors is the whole one.
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
}


_COPIES = ("aten::copy_", "aten::_chunk_cat", "aten::split_with_sizes_copy")


@dataclass(frozen=True)
class Interval:
    """Something that took time on the GPU, µs on the trace's clock."""

    start: float
    end: float


def read_trace(path: Path) -> dict[str, Any]:
    """Summarise the trace of one step.

    Args:
        path: ``.json`` or ``.json.gz``, exported by `torch.profiler` with shapes recorded.

    Returns:
        ``gemm``: a list of the GEMMs by dtypes of their factors, with ``num``,
        ``tflop`` and (on a GPU) ``time_ms`` and the ``kernels`` that did most of it;
        ``fp8_gemm_flops_pct`` and ``fp8_gemm_time_pct``; ``communication``: a list by collective
        and dtype with ``num`` and ``gib``, the size of the whole tensor (gathered, or not yet
        scattered) on one rank. On a GPU also ``step_ms`` from the first to the last kernel,
        ``by_kind_ms`` (see `kind_of`), ``exposed_communication_ms`` (while nothing else ran) and
        ``idle_ms`` (while nothing ran at all).

    Raises:
        ValueError: The file is no trace.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as stream:
        content = json.load(stream)
    return summarise_events(content["traceEvents"])


def summarise_events(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the events of a trace, as `read_trace`."""
    ops: list[Mapping[str, Any]] = []
    kernels: list[Mapping[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category == "cpu_op":
            ops.append(event)
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    by_id = {event["args"].get("External id"): event for event in ops if "args" in event}
    launched_by = [by_id.get(k.get("args", {}).get("External id")) for k in kernels]
    summary: dict[str, Any] = {"num_kernels": len(kernels)}
    summary |= _gemms(ops, kernels, launched_by)
    summary["communication"] = _communication(ops, kernels)
    if kernels:
        summary |= _times(kernels, launched_by)
    return summary


def dtype_name(name: str) -> str:
    """Return torch's name of a dtype for the profiler's or NCCL's."""
    return _DTYPES.get(name, name)


def _factors(op: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the dtypes and the FLOPs of a GEMM, or None for any other operator."""
    places = _GEMM_FACTORS.get(op.get("name", ""))
    arguments = op.get("args", {})
    shapes, dtypes = arguments.get("Input Dims", []), arguments.get("Input type", [])
    if places is None or len(shapes) <= max(places):
        return None
    left, right = (shapes[place] for place in places)
    if len(left) < 2 or len(right) < 2:
        return None
    names = " × ".join(dtype_name(dtypes[place]) for place in places)
    return names, 2 * math.prod(left) * right[-1]


def _gemms(
    ops: list[Mapping[str, Any]],
    kernels: list[Mapping[str, Any]],
    launched_by: list[Mapping[str, Any] | None],
) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    starts = [op["ts"] for op in ops if _factors(op) is not None]
    for op in ops:
        # Where there is no kernel for grouped GEMMs, each is made of plain ones inside of it.
        inside = (op["ts"] < start <= op["ts"] + op["dur"] for start in starts)
        is_made_of_others = "grouped" in op["name"] and any(inside)
        if (product := _factors(op)) is not None and not is_made_of_others:
            row = rows.setdefault(product[0], {"dtypes": product[0], "num": 0, "tflop": 0.0})
            row["num"] += 1
            row["tflop"] += product[1] / 1e12
    names: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel, launcher in zip(kernels, launched_by, strict=True):
        product = _factors(launcher) if launcher is not None else None
        if product is not None and kernel["cat"] == "kernel":
            names[product[0]][_short(kernel["name"])] += kernel["dur"] / 1000
    for dtypes, row in rows.items():
        if kernels:
            by_name = names[dtypes]
            row["time_ms"] = sum(by_name.values())
            row["kernels"] = sorted(by_name, key=lambda name: -by_name[name])[:3]
    listed = sorted(rows.values(), key=lambda row: -row["tflop"])
    return {
        "gemm": listed,
        "fp8_gemm_flops_pct": _fp8_share(listed, "tflop"),
        "fp8_gemm_time_pct": _fp8_share(listed, "time_ms") if kernels else None,
    }


def _fp8_share(rows: list[dict[str, Any]], column: str) -> float | None:
    total = sum(row[column] for row in rows)
    fp8 = sum(row[column] for row in rows if "float8" in row["dtypes"])
    return 100 * fp8 / total if total else None


def _short(kernel_name: str) -> str:
    """Cut a templated kernel's name where its parameters begin to say nothing more."""
    return kernel_name if len(kernel_name) <= 100 else kernel_name[:97] + "…"


def _communication(
    ops: list[Mapping[str, Any]], kernels: list[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Count collectives from NCCL's kernels, which know every dtype; on CPUs from operators."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}

    def add(collective: str, dtype: str, num_elements: int) -> None:
        new = {"collective": collective, "dtype": dtype, "num": 0, "gib": 0.0}
        row = rows.setdefault((collective, dtype), new)
        row["num"] += 1
        row["gib"] += num_elements * _BYTES.get(dtype, 4) / 2**30

    for kernel in kernels:
        facts = kernel.get("args", {})
        if name := facts.get("Collective name"):
            sizes = (facts.get("In msg nelems", 0), facts.get("Out msg nelems", 0))
            add(_collective(name), dtype_name(str(facts.get("dtype"))), max(map(int, sizes)))
    if not rows:
        for op in ops:
            if op.get("name") in _COLLECTIVES:
                collective, place = _COLLECTIVES[op["name"]]
                dims, dtype = op["args"]["Input Dims"][place], op["args"]["Input type"][place]
                tensors = dims if dims and isinstance(dims[0], list) else [dims]
                listed = dtype in ("TensorList", "GenericList")
                for tensor in tensors:
                    add(collective, "unknown" if listed else dtype_name(dtype), math.prod(tensor))
    return sorted(rows.values(), key=lambda row: -row["gib"])


def _collective(name: str) -> str:
    """Return one name for a collective, which NCCL's metadata write in several ways."""
    plain = name.strip("_").removesuffix("_base").replace("_", "")
    known = {"allgather": "all_gather", "reducescatter": "reduce_scatter",
             "allreduce": "all_reduce"}  # fmt: skip
    return next((ours for theirs, ours in known.items() if plain.startswith(theirs)), name)


def kind_of(kernel: Mapping[str, Any], launcher: Mapping[str, Any] | None) -> str:
    """Return what a kernel is for.

    One of ``gemm_fp8``, ``gemm_bf16``, ``gemm_other``, ``attention``, ``optimizer``, ``loss``,
    ``communication``, ``fused`` (made by the compiler: casts, scales, norms, activations),
    ``copy`` (copies and casts outside the compiled layers, FSDP2's packing of weights and
    gradients among them) and ``other``.
    """
    name, op = kernel["name"], (launcher or {}).get("name", "")
    if "nccl" in name.lower():
        return "communication"
    if launcher is not None and (product := _factors(launcher)) is not None:
        if "float8" in product[0]:
            return "gemm_fp8"
        return "gemm_bf16" if product[0] == "bfloat16 × bfloat16" else "gemm_other"
    if "attention" in op or "flash" in name or "sdpa" in name:
        return "attention"
    if "adam" in op or "adam" in name.lower():
        return "optimizer"
    if "softmax" in op or "nll_loss" in op or "cross_entropy" in op:
        return "loss"
    if name.startswith("triton_"):
        return "fused"
    if kernel.get("cat") != "kernel" or op in _COPIES:
        return "copy"
    return "other"


def _times(
    kernels: list[Mapping[str, Any]], launched_by: list[Mapping[str, Any] | None]
) -> dict[str, Any]:
    by_kind: dict[str, float] = defaultdict(float)
    compute, everything = [], []
    for kernel, launcher in zip(kernels, launched_by, strict=True):
        kind = kind_of(kernel, launcher)
        by_kind[kind] += kernel["dur"] / 1000
        interval = Interval(kernel["ts"], kernel["ts"] + kernel["dur"])
        everything.append(interval)
        if kind != "communication":
            compute.append(interval)
    step_ms = (max(i.end for i in everything) - min(i.start for i in everything)) / 1000
    busy_ms, compute_ms = union_ms(everything), union_ms(compute)
    return {
        "step_ms": step_ms,
        "by_kind_ms": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "exposed_communication_ms": busy_ms - compute_ms,
        "idle_ms": step_ms - busy_ms,
    }


def union_ms(intervals: Iterable[Interval]) -> float:
    """Return how long at least one of the intervals lasted, ms."""
    total, reached = 0.0, -math.inf
    for interval in sorted(intervals, key=lambda i: i.start):
        total += max(0.0, interval.end - max(interval.start, reached))
        reached = max(reached, interval.end)
    return total / 1000
