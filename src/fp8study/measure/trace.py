"""What one training step did, read from a profiler's trace: its GEMMs, transfers and waits.

Reads the Chrome trace format that `torch.profiler` exports, so a stored trace can be read again
anywhere. Operators carry the shapes and dtypes of their inputs; kernels carry their times; the
"External id" that the two share says which operator launched which kernel.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig

#: Operator → position of its two factors among the inputs.
_GEMM_FACTORS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_scaled_mm_v2"), (0, 1)),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), (1, 2)),
}

#: C++'s and NCCL's names of dtypes, in small letters → torch's; other names are the same.
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64",
    "long int": "int64", "byte": "uint8", "unsigned char": "uint8", "signed char": "int8",
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

#: The same of `fp8study.model.fsdp.peers`, which are no kernels of NCCL's.
_PULLED = {"fp8study::pull_weights": ("all_gather", 0),
           "fp8study::pull_gradients": ("reduce_scatter", 1)}  # fmt: skip

#: Operators that move or cast numbers and compute nothing.
_MOVES = frozenset(
    "_reshape_alias _to_copy _unsafe_view alias as_strided cat chunk clone contiguous copy_ detach "
    "empty_like empty_strided expand fill_ flatten narrow new_empty permute reshape resize_ select "
    "slice split split_with_sizes squeeze t to transpose unsqueeze view view_as".split()
)

#: Kernels of `fp8study.model.kernels`, but for the optimizer's.
_FUSED = ("_cast", "_cast_and_turn", "_transpose", "_gated_largest", "_gated_cast",
          "_gradients_largest", "_gradients_cast", "_gradients_cast_and_turn", "_add_two",
          "_squares", "_logits_gradient")  # fmt: skip

_COPIES = ("aten::copy_", "aten::_chunk_cat", "aten::split_with_sizes_copy")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Nodes:
    """Which collectives of a run on several nodes stay inside of one."""

    config: ResolvedConfig
    groups: Mapping[str, list[int]] = field(default_factory=dict)
    """Ranks by the name of their process group, as a trace tells them. Ranks count node by node."""

    def reach(self, collective: str, group: str | None = None) -> str:
        """Return ``between`` of a collective whose group spans nodes, else ``inside``.

        CPU operators do not name their group: FSDP2 gathers and scatters among its shards, and what
        is left, summing among replicas or over all, spans nodes.
        """
        size = self.config.gpus_per_node
        if group is not None and group in self.groups:
            spans = len({rank // size for rank in self.groups[group]}) > 1
        else:
            among_shards = collective in ("all_gather", "reduce_scatter")
            spans = not among_shards or self.config.num_shards > size
        return "between" if spans else "inside"


def read_trace(path: Path, config: ResolvedConfig | None = None) -> dict[str, Any]:
    """Summarise one step's ``.json`` or ``.json.gz``, exported with shapes recorded.

    Args:
        path: The trace.
        config: Of the run; without one, or on one node, nothing is said of nodes.

    Returns:
        ``gemm``: a list of the GEMMs by dtypes of their factors, with ``num``, ``num_fast`` (that
        sum with fewer bits than FP32 on the way; None if the trace does not say), ``tflop`` and (on
        a GPU) ``time_ms`` and the ``kernels`` that did most of it; ``fp8_gemm_flops_pct`` and
        ``fp8_gemm_time_pct``;
        ``operations``: by dtype the operators that took tensors of it, but for GEMMs and what only
        moves or casts; ``communication``: a list by collective, dtype and, on several
        nodes, ``reach`` (see `Nodes`), with ``num`` and ``gib``, the size of the whole tensor
        (gathered, or not yet scattered) on one rank. On a GPU also ``step_ms`` from the first to
        the last kernel, ``by_kind_ms`` (see `kind_of`), ``exposed_communication_ms`` (while nothing
        else ran) and ``idle_ms`` (while nothing ran at all).

    Raises:
        ValueError: The file is no trace.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as stream:
        trace = json.load(stream)
    nodes = None
    if config is not None and config.num_nodes > 1:
        groups = trace.get("distributedInfo", {}).get("pg_config", [])
        nodes = Nodes(config, {group["pg_name"]: group["ranks"] for group in groups})
    return summarise_events(trace["traceEvents"], nodes)


def summarise_events(events: Iterable[Event], nodes: Nodes | None = None) -> dict[str, Any]:
    """Summarise the events of a trace, as `read_trace`."""
    events = list(events)
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_id = {op["args"].get("External id"): op for op in ops if "args" in op}
    pulls = [op for op in ops if op.get("name") in _PULLED]
    launches = [
        (k, _or_pull(by_id.get(k.get("args", {}).get("External id")), pulls)) for k in kernels
    ]
    summary: dict[str, Any] = {"num_kernels": len(kernels)}
    summary |= _gemms(ops, launches)
    summary["operations"] = _operations(ops)
    summary["communication"] = _communication(ops, kernels, nodes)
    return summary | (_times(launches) if kernels else {})


def _or_pull(launcher: Event | None, pulls: Sequence[Event]) -> Event | None:
    """Return what launched a kernel; of what was asked for inside of a pull, the pull."""
    if launcher is None:
        return None
    thread, start = (launcher.get("pid"), launcher.get("tid")), launcher["ts"]
    around = (
        pull for pull in pulls
        if (pull.get("pid"), pull.get("tid")) == thread
        and pull["ts"] <= start < pull["ts"] + pull["dur"]
    )  # fmt: skip
    return next(around, launcher)


def _dtype_name(name: str) -> str:
    """Return torch's name of a dtype for the profiler's or NCCL's."""
    plain = name.removeprefix("c10::").lower()
    return _DTYPES.get(plain, plain)


def _factors(op: Event) -> tuple[str, int] | None:
    """Return the dtypes and the FLOPs of a GEMM, or None for any other operator."""
    places = _GEMM_FACTORS.get(op.get("name", ""))
    arguments = op.get("args", {})
    shapes, dtypes = arguments.get("Input Dims", []), arguments.get("Input type", [])
    if places is None or len(shapes) <= max(places):
        return None
    left, right = (shapes[place] for place in places)
    if len(left) < 2 or len(right) < 2:
        return None
    names = " × ".join(_dtype_name(dtypes[place]) for place in places)
    return names, 2 * math.prod(left) * right[-1]


def _sums_fast(op: Event) -> bool | None:
    """Whether an FP8 GEMM may sum in the tensor cores' own registers, by the last of its switches.

    None where the trace does not tell them.
    """
    if "scaled" not in op["name"]:
        return False
    values = op["args"].get("Concrete Inputs", [])
    switches = [value for value in values if value in ("True", "False")]
    return switches[-1] == "True" if switches else None


def _operations(ops: list[Event]) -> dict[str, list[str]]:
    """Return the operators that compute, GEMMs aside, by the dtypes that they were given."""
    found: dict[str, set[str]] = defaultdict(set)
    for op in ops:
        name = op.get("name", "")
        if name.startswith("aten::") and name not in _GEMM_FACTORS and name[6:] not in _MOVES:
            for dtype in op.get("args", {}).get("Input type", []):
                found[_dtype_name(dtype)].add(name[6:])
    floats = (dtype for dtype in sorted(found) if "float" in dtype)
    return {dtype: sorted(found[dtype]) for dtype in floats}


def _gemms(ops: list[Event], launches: list[tuple[Event, Event | None]]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for op, dtypes, flops in _innermost(ops):
        row = rows.setdefault(dtypes, {"dtypes": dtypes, "num": 0, "num_fast": 0, "tflop": 0.0})
        row["num"] += 1
        told = (row["num_fast"], _sums_fast(op))
        row["num_fast"] = None if None in told else sum(told)
        row["tflop"] += flops / 1e12
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel, launcher in launches:
        if kernel["cat"] == "kernel" and launcher is not None and (found := _factors(launcher)):
            times[found[0]][_short(kernel["name"])] += kernel["dur"] / 1000
    if launches:
        for dtypes, row in rows.items():
            row["time_ms"] = sum(times[dtypes].values())
            row["kernels"] = _falling(times[dtypes])[:3]
    listed = sorted(rows.values(), key=lambda row: -row["tflop"])
    return {
        "gemm": listed,
        "fp8_gemm_flops_pct": _fp8_share(listed, "tflop"),
        "fp8_gemm_time_pct": _fp8_share(listed, "time_ms") if launches else None,
    }


def _innermost(ops: list[Event]) -> Iterator[tuple[Event, str, int]]:
    """Yield the GEMMs that are made of no other, with the dtypes of their factors and their FLOPs.

    Without compilation torchao's tensors take a plain GEMM apart into an FP8 one inside of it, and
    where there is no kernel for grouped GEMMs each is made of plain ones.
    """
    gemms = [(op, *found) for op in ops if (found := _factors(op)) is not None]
    starts: dict[object, list[float]] = defaultdict(list)
    for op in sorted((op for op, *_ in gemms), key=lambda op: op["ts"]):
        starts[op.get("pid"), op.get("tid")].append(op["ts"])
    for op, dtypes, flops in gemms:
        own = starts[op.get("pid"), op.get("tid")]
        later = bisect.bisect_right(own, op["ts"])
        if later == len(own) or own[later] >= op["ts"] + op["dur"]:
            yield op, dtypes, flops


def _fp8_share(rows: list[dict[str, Any]], column: str) -> float | None:
    total = sum(row[column] for row in rows)
    fp8 = sum(row[column] for row in rows if "float8" in row["dtypes"])
    return 100 * fp8 / total if total else None


def _falling(times: Mapping[str, float]) -> list[str]:
    """Return the names, that of the longest time first."""
    return sorted(times, key=lambda name: -times[name])


def _short(kernel_name: str) -> str:
    """Cut a templated kernel's name where its parameters begin to say nothing more."""
    return kernel_name if len(kernel_name) <= 100 else kernel_name[:97] + "…"


def _communication(
    ops: list[Event], kernels: list[Event], nodes: Nodes | None
) -> list[dict[str, Any]]:
    """Count collectives from NCCL's kernels, which know every dtype, or else from operators."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}

    def add(collective: str, dtype: str, num_elements: int, group: str | None = None) -> None:
        key = {"collective": collective, "dtype": dtype}
        key |= {"reach": nodes.reach(collective, group)} if nodes else {}
        row = rows.setdefault((*key.values(),), key | {"num": 0, "gib": 0.0})
        row["num"] += 1
        row["gib"] += num_elements * getattr(torch, dtype, torch.float32).itemsize / 2**30

    for kernel in kernels:
        facts = kernel.get("args", {})
        if name := facts.get("Collective name"):
            sizes = (facts.get("In msg nelems", 0), facts.get("Out msg nelems", 0))
            dtype, group = _dtype_name(str(facts.get("dtype"))), facts.get("Process Group Name")
            add(_collective(name), dtype, max(map(int, sizes)), group)
    known = _PULLED if rows else _COLLECTIVES | _PULLED
    for op in ops:
        if op.get("name") in known:
            collective, place = known[op["name"]]
            dims, dtype = op["args"]["Input Dims"][place], op["args"]["Input type"][place]
            tensors = dims if dims and isinstance(dims[0], list) else [dims]
            listed = dtype in ("TensorList", "GenericList")
            for tensor in tensors:
                add(collective, "unknown" if listed else _dtype_name(dtype), math.prod(tensor))
    return sorted(rows.values(), key=lambda row: -row["gib"])


def _collective(name: str) -> str:
    """Return one name for a collective, which NCCL's metadata writes in several ways."""
    plain = name.strip("_").removesuffix("_base").replace("_", "")
    known = {"allgather": "all_gather", "reducescatter": "reduce_scatter",
             "allreduce": "all_reduce"}  # fmt: skip
    return next((ours for theirs, ours in known.items() if plain.startswith(theirs)), name)


def kind_of(kernel: Event, launcher: Event | None) -> str:
    """Return what a kernel is for.

    One of ``gemm_fp8``, ``gemm_bf16`` (every other GEMM), ``attention``, ``optimizer``, ``loss``,
    ``communication``, ``fused`` (by Triton: casts, scales, transposes, norms, activations),
    ``copy`` (copies and casts outside the compiled layers, FSDP2's packing of weights and
    gradients among them) and ``other``.
    """
    launcher = launcher or {}
    name, op, dtypes = kernel["name"], launcher.get("name", ""), (_factors(launcher) or ("",))[0]
    signs = {
        # A pull copies and waits; what it adds up is a kernel of Triton's.
        "communication": "nccl" in name.lower()
        or (op in _PULLED and not name.startswith("triton_")),
        "gemm_fp8": "float8" in dtypes,
        "gemm_bf16": bool(dtypes),  # and what is of FP16 or FP32
        "attention": "attention" in op or "flash" in name or "sdpa" in name,
        "optimizer": "adam" in op or "adam" in name.lower(),
        "loss": any(part in op for part in ("log_softmax", "nll_loss", "cross_entropy")),
        "fused": name.startswith("triton_") or name in _FUSED,
        "copy": kernel.get("cat") != "kernel" or op in _COPIES,
    }
    return next((kind for kind, is_it in signs.items() if is_it), "other")


def _times(launches: list[tuple[Event, Event | None]]) -> dict[str, Any]:
    by_kind: dict[str, float] = defaultdict(float)
    spans: list[tuple[float, float]] = []
    compute: list[tuple[float, float]] = []
    for kernel, launcher in launches:
        kind = kind_of(kernel, launcher)
        by_kind[kind] += kernel["dur"] / 1000
        spans.append((kernel["ts"], kernel["ts"] + kernel["dur"]))
        if kind != "communication":
            compute.append(spans[-1])
    step_ms = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1000
    busy_ms = union_ms(spans)
    return {
        "step_ms": step_ms,
        "by_kind_ms": {kind: by_kind[kind] for kind in _falling(by_kind)},
        "exposed_communication_ms": busy_ms - union_ms(compute),
        "idle_ms": step_ms - busy_ms,
    }


def union_ms(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasted, ms; each is its start and its end, µs."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1000
