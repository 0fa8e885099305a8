"""Reading a trace: a synthetic one with every kind of event, and a real one of a CPU step."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.measure.profiling import TRACE_NAME, profiled_step
from fp8study.measure.trace import Nodes, kind_of, read_trace, summarise_events, union_ms
from tests.checkout import ROOT


def op(number: int, name: str, dims: list[Any], types: list[str]) -> dict[str, Any]:
    args = {"External id": number, "Input Dims": dims, "Input type": types}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 1, "args": args}


def kernel(number: int, name: str, start: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": dur,
            "args": {"External id": number, **args}}  # fmt: skip


E4M3, E5M2, BF16 = "c10::Float8_e4m3fn", "c10::Float8_e5m2", "c10::BFloat16"
EVENTS = [
    op(1, "aten::_scaled_mm", [[64, 32], [32, 16]], [E5M2, E4M3]),
    op(2, "aten::addmm", [[16], [64, 32], [32, 16]], [BF16, BF16, BF16]),
    op(3, "aten::_flash_attention_forward", [[1, 2]], [BF16]),
    op(4, "aten::_fused_adamw_", [[]], ["TensorList"]),
    op(5, "aten::copy_", [[4], [4]], ["float", BF16]),
    op(6, "aten::_log_softmax", [[4, 8]], ["float"]),
    kernel(1, "nvjet_sm90_qrtst", 0, 1000),
    kernel(2, "nvjet_sm90_tst", 1000, 3000),
    kernel(3, "flash_fwd", 4000, 500),
    kernel(4, "multi_tensor_apply", 4500, 250),
    kernel(5, "vectorized_elementwise", 4750, 250),
    kernel(6, "cunn_SoftMaxForward", 5000, 100),
    kernel(99, "triton_poi_fused_mul_0", 5100, 400),
    # Half hidden behind the fused kernel, half exposed; then a gap.
    kernel(98, "ncclDevKernel_AllGather", 5300, 400, **{
        "Collective name": "_allgather_base", "dtype": "Byte",
        "In msg nelems": 2**29, "Out msg nelems": 2**30}),
    kernel(97, "ncclDevKernel_ReduceScatter", 6000, 1000, **{
        "Collective name": "_reduce_scatter_base", "dtype": "Float",
        "In msg nelems": 2**28, "Out msg nelems": 2**26}),
    {"ph": "M", "name": "process_name"},
]  # fmt: skip


def test_products_are_told_apart_by_the_dtypes_of_their_factors() -> None:
    found = summarise_events(EVENTS)
    bf16, fp8 = sorted(found["gemm"], key=lambda row: row["dtypes"])
    assert fp8["dtypes"] == "float8_e5m2 × float8_e4m3fn"
    assert bf16["dtypes"] == "bfloat16 × bfloat16"
    assert fp8["tflop"] == bf16["tflop"] == pytest.approx(2 * 64 * 32 * 16 / 1e12)
    assert (fp8["time_ms"], bf16["time_ms"]) == (1, 3)
    assert fp8["kernels"] == ["nvjet_sm90_qrtst"]
    assert found["fp8_gemm_flops_pct"] == pytest.approx(50)
    assert found["fp8_gemm_time_pct"] == pytest.approx(25)


def test_a_gemm_in_fp16_is_one_that_the_report_shows() -> None:
    half = op(1, "aten::mm", [[64, 32], [32, 16]], ["c10::Half", "c10::Half"])
    assert kind_of(kernel(1, "nvjet_sm90_hsh", 0, 1), half) == "gemm_bf16"


def test_every_kernel_has_a_kind_and_no_time_is_lost() -> None:
    kinds = summarise_events(EVENTS)["by_kind_ms"]
    assert kinds == {
        "gemm_bf16": 3, "communication": 1.4, "gemm_fp8": 1, "attention": 0.5, "fused": 0.4,
        "optimizer": 0.25, "copy": 0.25, "loss": 0.1,
    }  # fmt: skip
    assert sum(kinds.values()) == pytest.approx(sum(e.get("dur", 0) for e in EVENTS[6:]) / 1000)


def test_exposed_communication_and_idle_time_are_what_nothing_covers() -> None:
    found = summarise_events(EVENTS)
    assert found["step_ms"] == pytest.approx(7)
    # The all-gather outlasts the fused kernel by 200 µs; nothing runs beside the reduce-scatter.
    assert found["exposed_communication_ms"] == pytest.approx(1.2)
    assert found["idle_ms"] == pytest.approx(0.3)


def test_collectives_are_counted_whole_and_in_their_own_dtype() -> None:
    found = {row["collective"]: row for row in summarise_events(EVENTS)["communication"]}
    assert found["all_gather"] == {
        "collective": "all_gather", "dtype": "uint8", "num": 1, "gib": 1.0
    }  # fmt: skip
    assert (found["reduce_scatter"]["dtype"], found["reduce_scatter"]["gib"]) == ("float32", 1.0)


def test_what_copy_engines_fetch_is_communication_and_what_is_added_up_is_not() -> None:
    whole, part = "fp8study::pull_gradients", [2**20]
    events = [
        op(1, whole, [[2**19], part, []], ["float", BF16, "Scalar"]) | {"ts": 100, "dur": 50},
        op(2, "aten::copy_", [[4], [4]], [BF16, BF16]) | {"ts": 120},
        op(3, "aten::copy_", [[4], [4]], [BF16, BF16]) | {"ts": 200},
        kernel(1, "barrier_kernel", 0, 100),
        kernel(2, "Memcpy DtoD (Device -> Device)", 100, 2000) | {"cat": "gpu_memcpy"},
        kernel(1, "triton_poi_fused_add_0", 2100, 300),
        kernel(3, "Memcpy DtoD (Device -> Device)", 2400, 500) | {"cat": "gpu_memcpy"},
        kernel(4, "ncclDevKernel_AllReduce", 2900, 10, **{
            "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1}),
    ]  # fmt: skip
    found = summarise_events(events)
    assert found["by_kind_ms"] == pytest.approx({"communication": 2.11, "copy": 0.5, "fused": 0.3})
    assert found["exposed_communication_ms"] == pytest.approx(2.11)
    (pulled,) = (row for row in found["communication"] if row["collective"] == "reduce_scatter")
    assert (pulled["dtype"], pulled["gib"]) == ("bfloat16", 2**21 / 2**30)


def test_overlapping_intervals_count_once() -> None:
    assert union_ms([(0, 1000), (500, 1500), (600, 700)]) == 1.5
    assert union_ms([]) == 0


def test_grouped_gemms_of_experts_count_once() -> None:
    """By themselves, or through the plain ones that they are made of."""
    grouped = op(1, "aten::_grouped_mm", [[64, 32], [4, 32, 16]], [BF16, BF16])
    plain = op(2, "aten::mm", [[16, 32], [32, 16]], [BF16, BF16]) | {"ts": 0.5}
    (alone,) = summarise_events([grouped])["gemm"]
    assert alone["tflop"] == pytest.approx(2 * 64 * 32 * 16 / 1e12)
    (made,) = summarise_events([grouped, plain])["gemm"]
    assert made["tflop"] == pytest.approx(2 * 16 * 32 * 16 / 1e12)


def test_a_gemm_that_torchaos_tensors_take_apart_counts_once() -> None:
    """As uncompiled: the outer one is told the dtypes that the tensors pass for."""
    outer = op(1, "aten::mm", [[64, 32], [32, 16]], [BF16, "float"]) | {"ts": 0, "dur": 9}
    inner = op(2, "aten::_scaled_mm", [[64, 32], [32, 16]], [E4M3, E4M3]) | {"ts": 2, "dur": 5}
    other = op(3, "aten::mm", [[64, 32], [32, 16]], [BF16, BF16]) | {"ts": 9, "dur": 1}
    found = summarise_events([outer, inner, other])
    assert [row["dtypes"] for row in found["gemm"]] == [
        "float8_e4m3fn × float8_e4m3fn", "bfloat16 × bfloat16"
    ]  # fmt: skip
    assert found["fp8_gemm_flops_pct"] == pytest.approx(50)


def test_operators_that_compute_are_told_by_their_dtypes_and_gemms_that_sum_fast() -> None:
    fast, exact = (op(n, "aten::_scaled_mm", [[8, 4], [4, 2]], [E4M3, E4M3]) for n in (1, 2))
    fast["args"]["Concrete Inputs"] = ["", "", "", "", "", "", "15", "True"]
    exact["args"]["Concrete Inputs"] = ["", "", "True", "", "", "", "15", "False"]
    moved = op(3, "aten::t", [[8, 4]], [E4M3])
    found = summarise_events([*EVENTS, fast, exact, moved, op(4, "aten::silu", [[4]], [E5M2])])
    assert found["operations"] == {
        "bfloat16": ["_flash_attention_forward"], "float32": ["_log_softmax"],
        "float8_e5m2": ["silu"],
    }  # fmt: skip
    assert {row["dtypes"]: row["num_fast"] for row in found["gemm"]} == {
        "float8_e4m3fn × float8_e4m3fn": 1, "float8_e5m2 × float8_e4m3fn": None,  # not told
        "bfloat16 × bfloat16": 0,
    }  # fmt: skip


def test_a_trace_without_products_has_no_share() -> None:
    found = summarise_events([])
    assert (found["gemm"], found["fp8_gemm_flops_pct"], found["num_kernels"]) == ([], None, 0)
    assert "step_ms" not in found


def test_a_stored_trace_reads_like_its_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": EVENTS}, stream)
    assert read_trace(path) == summarise_events(EVENTS)


def test_a_real_step_on_a_cpu_gives_its_products(tmp_path: Path) -> None:
    layer, data = torch.nn.Linear(32, 16), torch.randn(8, 32)
    steps = []

    def step() -> None:
        steps.append(1)
        layer.zero_grad()
        layer(data).sum().backward()

    found = profiled_step(step, tmp_path, is_main=True, device=torch.device("cpu"))
    assert len(steps) == 2  # one for the profiler's own start
    assert [row["dtypes"] for row in found["gemm"]] == ["float32 × float32"]
    # Forward and the weight's gradient; the input needs none.
    assert found["gemm"][0]["num"] == 2
    assert found["gemm"][0]["tflop"] == pytest.approx(2 * 2 * 8 * 32 * 16 / 1e12)
    assert (tmp_path / TRACE_NAME).exists()


def test_other_ranks_step_along_and_record_nothing(tmp_path: Path) -> None:
    steps: list[int] = []
    found = profiled_step(lambda: steps.append(1), tmp_path, False, torch.device("cpu"))
    assert (found, len(steps), list(tmp_path.iterdir())) == ({}, 2, [])


@pytest.mark.parametrize(
    ("theirs", "ours", "gib"),
    [("Long", "int64", 8), ("Half", "float16", 2), ("Float8_e4m3fn", "float8_e4m3fn", 1)],
)
def test_a_collective_has_torchs_name_and_size_of_its_dtype(
    theirs: str, ours: str, gib: float
) -> None:
    facts = {"Collective name": "allreduce", "dtype": theirs, "In msg nelems": 2**30}
    (row,) = summarise_events([kernel(1, "ncclDevKernel", 0, 1, **facts)])["communication"]
    assert (row["collective"], row["dtype"], row["gib"]) == ("all_reduce", ours, gib)


def test_on_several_nodes_a_group_that_spans_them_moves_bytes_between(tmp_path: Path) -> None:
    """Two nodes of two: rank 0 gathers from rank 1 and adds up with rank 2."""
    values = {"num_gpus": 4, "num_nodes": 2, "sharding": "hybrid"}
    config = make_config(values).resolved()
    calls = [("_allgather_base", "shards"), ("_reduce_scatter_base", "shards"),
             ("allreduce", "replicas"), ("allreduce", "shards"), ("allreduce", "all")]  # fmt: skip
    kernels = [
        kernel(90 + i, "ncclDevKernel", i, 1, **{
            "Collective name": name, "dtype": "Float", "In msg nelems": 2**28,
            "Process Group Name": group})
        for i, (name, group) in enumerate(calls)
    ]  # fmt: skip
    groups = {"shards": [0, 1], "replicas": [0, 2], "all": [0, 1, 2, 3]}
    named = [{"pg_name": name, "ranks": ranks} for name, ranks in groups.items()]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": kernels, "distributedInfo": {"pg_config": named}}))
    found = read_trace(path, config)["communication"]
    gib = {(row["collective"], row["reach"]): row["gib"] for row in found}
    assert gib == {
        ("all_gather", "inside"): 1, ("reduce_scatter", "inside"): 1,
        ("all_reduce", "inside"): 1, ("all_reduce", "between"): 2,
    }  # fmt: skip
    one_node = make_config(values | {"num_nodes": 1, "sharding": "full"}).resolved()
    assert all("reach" not in row for row in read_trace(path, one_node)["communication"])
    # Without names of groups, by what FSDP2 does.
    full = make_config(values | {"sharding": "full"}).resolved()
    for spread, reach in ((config, "inside"), (full, "between")):
        rows = summarise_events(kernels, Nodes(spread))["communication"]
        assert {row["reach"] for row in rows if row["collective"] == "all_gather"} == {reach}
        assert {row["reach"] for row in rows if row["collective"] == "all_reduce"} == {"between"}


def test_our_own_kernels_are_known_by_name() -> None:
    kernels = (ROOT / "src/fp8study/model/kernels").glob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in kernels)
    launched = set(re.findall(r"launch\(\s*(_[a-z_]+),", source))
    assert len(launched) == 12
    kinds = {name: kind_of({"name": name, "cat": "kernel"}, None) for name in launched}
    assert kinds.pop("_adamw") == "optimizer"
    assert {*kinds.values()} == {"fused"}
