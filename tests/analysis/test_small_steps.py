"""Which form of the tuned path several GPUs have, by what the law says of their hosts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis.advice.commands import command
from fp8study.analysis.decision import forms_behind
from fp8study.analysis.laws.memory import predicted_memory
from fp8study.analysis.laws.nearby import EARLIER, changed
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.runs.naming import (
    BEFORE,
    COPY_ENGINES,
    GRAPH,
    IN_ONE_PASS,
    NORM_AS_SUMMED,
    SHARED_POOL,
    has_usual_path,
    unusual_switches,
)
from fp8study.analysis.small_steps import (
    AS_GRAPH,
    Form,
    are_small,
    decided_anew,
    for_small_steps,
    form_of,
    is_by_kernel_alone,
    todays_form,
)
from fp8study.core.config import make_config
from fp8study.core.hardware import find_peak
from tests.checkout import tiny_folder

SETTING = "{}, 4096 tokens, batch {}, compiled, FP32 masters, tuned"


@pytest.mark.parametrize(
    ("model", "num_gpus", "batch", "form"),
    [
        ("llama-3.1-8b", 1, 1, Form(True, False, False)),
        ("llama-3.1-8b", 2, 1, Form(True, True, False)),
        ("llama-3.1-8b", 2, 2, Form(True, True, False)),
        ("llama-3.1-8b", 4, 2, Form(True, False, False)),
        ("llama-3.2-1b", 2, 1, Form(True, True, False, True)),
        ("llama-3.2-3b", 2, 1, Form(True, True, False, True)),
        ("llama-3.2-1b", 4, 1, Form(True, False, False, True)),
        ("llama-3.2-1b", 8, 1, Form(False, False, False)),
    ],
)
def test_a_setting_has_one_form_whichever_its_runs_had(
    model: str, num_gpus: int, batch: int, form: Form
) -> None:
    setting = SETTING.format("not sharded" if num_gpus == 1 else "FSDP2", batch)
    later = f", {IN_ONE_PASS}, {COPY_ENGINES}"
    graph = f"{later}, {GRAPH}"
    pools = graph, f"{graph}, {SHARED_POOL}"
    for words in ("", f", {IN_ONE_PASS}", later, f"{later}, {NORM_AS_SUMMED}", *pools):
        row = {"model": model, "num_gpus": num_gpus, "gpu_name": "NVIDIA H200"}
        assert todays_form(pd.Series(row | {"setting": setting + words})) == form
        clipped = f"{setting}, gradients clipped at 1{words}"
        finds_norm = num_gpus == 1 or form.copy_engines
        asked = form._replace(norm=finds_norm, shared=form.graph and form.copy_engines)
        assert todays_form(pd.Series(row | {"setting": clipped})) == asked


def test_what_the_path_never_does_is_of_no_later_form() -> None:
    row = pd.Series({"model": "llama-3.1-8b", "num_gpus": 2, "gpu_name": "NVIDIA H200"})
    for setting in (
        SETTING.format("FSDP2", 2).replace("FP32", "BF16"),
        SETTING.format("FSDP2", 2).removesuffix(", tuned"),
        SETTING.format("FSDP2", 2) + ", activation checkpointing",
    ):
        row["setting"] = setting
        assert todays_form(row) == form_of(setting) == Form(False, False, False)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_steps_of_several_passes_have_no_kernel_for_the_norm_and_are_no_graph(
    num_gpus: int,
) -> None:
    setting = SETTING.format("not sharded" if num_gpus == 1 else "FSDP2", 4)
    words = f"{setting}, 4 accumulation steps, gradients clipped at 1"
    row = {"num_gpus": num_gpus, "gpu_name": "NVIDIA H200", "setting": words}
    for model in ("llama-3.2-1b", "llama-3.2-3b"):
        assert todays_form(pd.Series(row | {"model": model})) == Form(True, num_gpus == 2, False)


#: One process without FSDP2.
ALONE = {"num_gpus": 1, "strategy": "none"}
#: A norm that only the path's own update and collectives have.
ASKED = {"max_grad_norm": 1.0, "gradient_norm": "as_summed"}


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
@pytest.mark.parametrize(
    ("model", "batch", "own", "small"),
    [
        ("llama-3.2-1b", 1, {}, True),
        ("llama-3.2-3b", 1, {}, True),
        ("llama-3.2-1b", 4, {}, False),
        ("llama-3.1-8b", 1, {}, False),  # by the law 2 %
        ("llama-3.2-3b", 2, {}, False),  # 6 %
        ("llama-3.2-1b", 2, {"num_gpus": 4}, True),  # 17 %
        ("llama-3.2-1b", 1, ASKED, True),
        ("llama-3.2-1b", 1, AS_GRAPH, True),
        ("llama-3.2-1b", 2, ALONE, True),  # by the law the host is busy for 36 %
        ("llama-3.2-1b", 4, ALONE, False),
        ("llama-3.2-3b", 1, ALONE, True),
        ("llama-3.1-8b", 1, ALONE, False),  # 28 %
    ],
)
def test_steps_are_small_in_both_precisions_where_the_law_says_so_of_fp8(
    model: str, batch: int, own: dict[str, Any], small: bool, precision: str
) -> None:
    values = {"path": "tuned", "num_gpus": 2, "precision": precision, "model": model}
    config = make_config(values | {"micro_batch_size": batch} | own)
    assert are_small(config, find_peak("NVIDIA H200")) is small


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize(
    ("own", "gpu", "found"),
    [
        ({}, "NVIDIA H200", AS_GRAPH),
        ({"step_launch": "by_kernel"}, "NVIDIA H200", BEFORE),  # as was asked
        (ASKED, "NVIDIA H200", AS_GRAPH),
        (ASKED | {"step_launch": "by_kernel"}, "NVIDIA H200", {}),  # rests on the path's own choice
        ({"num_gpus": 4}, "NVIDIA H200", AS_GRAPH),
        ({"num_gpus": 4, "num_nodes": 2}, "NVIDIA H200", BEFORE),  # not measured
        ({"num_gpus": 8}, "NVIDIA H200", BEFORE),
        ({"collectives": "nccl"}, "NVIDIA H200", BEFORE),
        ({"num_gpus": 1}, "NVIDIA H200", AS_GRAPH),
        ({"num_gpus": 1, "strategy": "fsdp2"}, "NVIDIA H200", {}),  # no graph there
        (ALONE, "NVIDIA H200", AS_GRAPH),
        (ALONE | {"step_launch": "by_kernel"}, "NVIDIA H200", {}),
        (ALONE | {"update_kernel": "torch"}, "NVIDIA H200", {}),
        ({"model": "llama-3.1-8b"}, "NVIDIA H200", {}),
        ({"model": "llama-3.2-3b"}, "NVIDIA H200", AS_GRAPH),
        ({"gradient_accumulation_steps": 2}, "NVIDIA H200", BEFORE),  # no graph of that
        ({"master_dtype": "bf16"}, "NVIDIA H200", BEFORE),
    ],
    ids=str,
)
def test_small_steps_are_one_graph_where_they_can_be(
    own: dict[str, Any], gpu: str, found: dict[str, Any], precision: str
) -> None:
    values = {"path": "tuned", "num_gpus": 2, "precision": precision, "model": "llama-3.2-1b"}
    assert for_small_steps(make_config(values | own), find_peak(gpu)) == found


def test_a_graph_has_room_for_gradients_in_memory_of_their_own() -> None:
    gpu = find_peak("NVIDIA H200")
    assert gpu is not None
    config = make_config({"path": "tuned", "num_gpus": 2, "model": "llama-3.2-3b"})
    needed = predicted_memory(config, shape_of("llama-3.2-3b"))
    for memory_gb, found in ((needed.total / 0.9 + 4, BEFORE), (141.0, AS_GRAPH)):
        assert for_small_steps(config, dataclasses.replace(gpu, memory_gb=memory_gb)) == found


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_graph_is_a_form_of_the_path_with_all_that_follows(max_grad_norm: float | None) -> None:
    values = {"path": "tuned", "num_gpus": 2, "max_grad_norm": max_grad_norm}
    graph = changed(make_config(values).resolved(), AS_GRAPH).to_dict()
    clipped = [NORM_AS_SUMMED, SHARED_POOL] if max_grad_norm else []
    assert {*unusual_switches(graph)} == {IN_ONE_PASS, GRAPH, COPY_ENGINES, *clipped}
    assert has_usual_path(graph)
    assert not has_usual_path(graph | {"gradient_copy": "chunk_cat"})


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_another_batch_is_launched_as_the_path_launches_it(max_grad_norm: float | None) -> None:
    values = {"path": "tuned", "num_gpus": 2, "max_grad_norm": max_grad_norm}
    gpu = find_peak("NVIDIA H200")
    usual = make_config(values | {"model": "llama-3.2-1b", "micro_batch_size": 4}).resolved()
    assert decided_anew(usual, gpu) == usual
    small = decided_anew(dataclasses.replace(usual, micro_batch_size=1), gpu)
    pool = "shared" if max_grad_norm else "own"  # unclipped, no gradient waits for the others
    assert (small.step_launch, small.gradient_pool) == ("as_graph", pool)
    assert decided_anew(dataclasses.replace(small, micro_batch_size=4), gpu) == usual
    before = changed(dataclasses.replace(usual, micro_batch_size=1), BEFORE)
    assert decided_anew(dataclasses.replace(before, micro_batch_size=4), gpu) == changed(
        usual, BEFORE
    )  # an earlier form stays one
    assert {form.step_launch for form in (changed(small, each) for each in EARLIER)} == {
        "as_graph", "by_kernel"
    }  # fmt: skip


def test_steps_by_kernel_must_be_asked_for_where_the_path_has_a_graph() -> None:
    values = {"path": "tuned", "num_gpus": 2, "model": "llama-3.2-1b"}
    usual, gpu = make_config(values).resolved(), find_peak("NVIDIA H200")
    assert is_by_kernel_alone(usual, gpu)
    assert "--set step_launch=by_kernel" in command(usual, gpu)
    for other in (changed(usual, BEFORE), changed(usual, AS_GRAPH)):
        assert not is_by_kernel_alone(other, gpu)
        assert "by_kernel" not in command(other, gpu)
    large = make_config(values | ALONE | {"model": "llama-3.1-8b"}).resolved()
    assert not is_by_kernel_alone(large, gpu)
    assert "by_kernel" in command(large, find_peak("NVIDIA B200"))  # whose GPU is done sooner


@pytest.mark.parametrize(
    ("values", "found"),
    [({}, AS_GRAPH), ({"sliding_window": 2048}, BEFORE), ({"sliding_window": 4096}, AS_GRAPH),
     ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, BEFORE)],
    ids=str,
)  # fmt: skip
def test_a_model_of_which_no_graph_can_be_made_keeps_the_path_before(
    values: dict[str, Any], found: dict[str, Any], tmp_path: Path
) -> None:
    kind = "mistral" if "sliding_window" in values or not values else "llama"
    model = tiny_folder(
        tmp_path / "model", model_type=kind, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        vocab_size=128_256, **({"sliding_window": None} if not values else {}), **values,
    )  # fmt: skip
    config = make_config({"path": "tuned", "num_gpus": 2, "model": model})
    assert for_small_steps(config, find_peak("NVIDIA H200")) == found


def test_small_steps_by_kernel_are_further_behind_than_the_path_before_them() -> None:
    """On two GPUs the path never launched them so once it updated in one pass; on one it did."""
    for num_gpus, sharding, by_kernel in (
        (2, "FSDP2", f", {IN_ONE_PASS}, {COPY_ENGINES}"), (1, "not sharded", f", {IN_ONE_PASS}")
    ):  # fmt: skip
        row = {"model": "llama-3.2-3b", "num_gpus": num_gpus, "gpu_name": "NVIDIA H200"}
        settings = {words: SETTING.format(sharding, 1) + words
                    for words in (f"{by_kernel}, {GRAPH}", "", by_kernel)}  # fmt: skip
        graph, first, kernel = (
            forms_behind(pd.Series(row | {"setting": setting})) for setting in settings.values()
        )
        later = (first, kernel) if num_gpus == 2 else (kernel, first)
        assert 0 == graph < later[0] < later[1]


def test_a_graph_whose_gradients_have_memory_of_their_own_is_one_form_behind() -> None:
    row = {"model": "llama-3.2-3b", "num_gpus": 2, "gpu_name": "NVIDIA H200"}
    clipped = f"{SETTING.format('FSDP2', 1)}, gradients clipped at 1"
    own = f"{clipped}, {IN_ONE_PASS}, {GRAPH}, {COPY_ENGINES}, {NORM_AS_SUMMED}"
    behind = [
        forms_behind(pd.Series(row | {"setting": setting}))
        for setting in (f"{own}, {SHARED_POOL}", own, clipped)
    ]
    assert behind == [0, 1, 2]


def test_a_setting_of_several_nodes_has_the_path_of_several_nodes() -> None:
    row = {"model": "llama-3.2-1b", "num_gpus": 4, "gpu_name": "NVIDIA H200"}
    one, two = SETTING.format("FSDP2", 1), SETTING.format("FSDP2, 2 nodes", 1)
    assert todays_form(pd.Series(row | {"setting": one})).graph
    assert todays_form(pd.Series(row | {"setting": two})) == Form(False, False, False)
