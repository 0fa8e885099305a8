"""What a run leaves open, filled for the machine at hand."""

import warnings
from typing import Any

import pytest

from fp8study.run.defaults import config_for, study_for
from fp8study.run.machine import Machine
from tests.machines import H200, machine

ON_TWO = {"num_gpus": 2, "sequence_length": 4096, "precision": "fp8_tensorwise"}
ON_EIGHT = ON_TWO | {"num_gpus": 8}
BY_KERNEL = {"step_launch": "by_kernel"}
TWO, FOUR, EIGHT = (machine(*[H200] * number) for number in (2, 4, 8))


@pytest.mark.parametrize(
    ("fields", "gathers"),
    [
        ({"model": "llama-3.2-1b", "path": "tuned"}, False),
        ({"model": "llama-3.2-1b", "path": "tuned", "micro_batch_size": 8}, True),
        ({"model": "llama-3.2-1b", "path": "tuned", "fp8_all_gather": True}, True),
        ({"model": "llama-3.2-1b", "path": "plain"}, True),
        ({"model": "tiny-llama", "path": "tuned", "compile": False}, True),
    ],
)
def test_the_tuned_path_gathers_in_fp8_where_the_law_finds_it_faster(
    fields: dict[str, Any], gathers: bool
) -> None:
    assert config_for(EIGHT, ON_EIGHT | fields).fp8_all_gather is gathers


@pytest.mark.parametrize(
    ("model", "batch", "of_fp8", "kernel"),
    [
        ("llama-3.2-1b", 1, {}, "torch"),  # small steps, in BF16 too
        ("llama-3.2-1b", 1, {"weight_cast": "each_pass"}, "torch"),
        ("llama-3.2-1b", 1, {"fp8_all_gather": True, "weight_cast": "each_update"}, "torch"),
        ("llama-3.2-1b", 1, {"swiglu": "kernels", "weight_cast": "each_update"}, "torch"),
        ("llama-3.2-1b", 1, {"precision_schedule": "bf16:10,fp8_tensorwise"}, "torch"),
        ("llama-3.2-1b", 2, {"skip": "lm_head,*.mlp.*"}, "torch"),
        ("llama-3.2-3b", 1, {"skip": "lm_head,*.self_attn.*"}, "torch"),
        ("llama-3.1-8b", 1, {}, "one_pass"),
        ("llama-3.1-8b", 2, {}, "one_pass"),
        ("llama-3.1-8b", 2, {"weight_cast": "each_pass"}, "one_pass"),
    ],
)
def test_both_precisions_update_shards_alike_and_in_one_pass_unless_steps_are_small(
    model: str, batch: int, of_fp8: dict[str, Any], kernel: str
) -> None:
    values = ON_EIGHT | {"path": "tuned", "model": model, "micro_batch_size": batch}
    for precision, own in (("bf16", {}), ("fp8_tensorwise", of_fp8)):
        found = config_for(EIGHT, values | {"precision": precision} | own)
        assert found.update_kernel == kernel
        asked = {"update_kernel": "one_pass"}
        own = {n: v for n, v in own.items() if n == "skip"}
        found = config_for(EIGHT, values | {"precision": precision} | own | asked)
        assert found.update_kernel == "one_pass"
    plain = {"path": "plain", "precision": "bf16"}
    assert config_for(EIGHT, values | plain).update_kernel == "torch"


@pytest.mark.parametrize(("there", "collectives"), [(TWO, "copy_engines"), (FOUR, "nccl")])
def test_two_gpus_and_four_launch_small_steps_as_a_graph_in_both_precisions(
    there: Machine, collectives: str
) -> None:
    values = ON_TWO | {"path": "tuned", "model": "llama-3.2-1b", "num_gpus": len(there.gpus)}
    for own in (
        {},
        {"precision": "bf16"},
        {"skip": "lm_head,*.mlp.*"},
        {"precision": "fp8_rowwise"},
    ):
        found = config_for(there, values | own)
        wanted = ("as_graph", "one_pass", collectives)
        assert (found.step_launch, found.update_kernel, found.collectives) == wanted
        assert found.fp8_all_gather is (found.precision == "fp8_tensorwise")
        asked = config_for(there, values | own | {"step_launch": "by_kernel"})
        assert (asked.step_launch, asked.update_kernel) == ("by_kernel", "torch")
    assert config_for(there, values | {"model": "llama-3.1-8b"}).step_launch == "by_kernel"
    assert config_for(EIGHT, values | {"num_gpus": 8}).step_launch == "by_kernel"


@pytest.mark.parametrize(("asked", "collectives"), [({}, "copy_engines"), (BY_KERNEL, "nccl")])
def test_copy_engines_go_with_all_but_small_steps_by_kernel(
    asked: dict[str, Any], collectives: str
) -> None:
    for precision in ("bf16", "fp8_tensorwise"):
        values = ON_TWO | {"path": "tuned", "model": "llama-3.2-1b", "precision": precision}
        assert config_for(machine(H200, H200), values | asked).collectives == collectives


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"micro_batch_size": 1}, "one_pass"),
        ({"micro_batch_size": 2}, "torch"),  # fits with no FP8 weights kept
        ({"micro_batch_size": 2, "precision": "bf16"}, "torch"),  # as its FP8 partner
        ({"micro_batch_size": 1, "precision": "bf16"}, "one_pass"),
        ({"micro_batch_size": 2, "weight_cast": "each_update"}, "one_pass"),  # as was asked
        ({"micro_batch_size": 2, "gradient_dtype": "compute"}, "one_pass"),
        ({"micro_batch_size": 2, "transposes": "separate"}, "one_pass"),
        ({"micro_batch_size": 2, "max_grad_norm": 1.0, "gradient_norm": "by_kernel"}, "one_pass"),
        ({"micro_batch_size": 4}, "one_pass"),  # fits in no way
        ({"micro_batch_size": 2, "path": "plain"}, "torch"),
    ],
)
def test_the_tuned_path_keeps_fp8_weights_where_they_fit(
    fields: dict[str, Any], kernel: str
) -> None:
    alone = {"model": "llama-3.1-8b", "precision": "fp8", "path": "tuned", "strategy": "none"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert config_for(machine(H200), alone | fields).update_kernel == kernel
    said = [str(each.message).partition(",")[0] for each in told]
    changes = kernel == "torch" and fields.get("path") != "plain"
    assert said == ["update_kernel: torch"] * changes


@pytest.mark.parametrize(
    "own",
    [{"transposes": "separate"}, {"cast_kernels": "both_layouts"},
     {"max_grad_norm": 1.0, "gradient_norm": "as_summed"}],
    ids=str,
)  # fmt: skip
def test_small_steps_keep_the_path_that_a_switch_rests_on(own: dict[str, Any]) -> None:
    values = ON_TWO | BY_KERNEL | {"path": "tuned", "model": "llama-3.2-1b"}
    assert config_for(machine(H200, H200), values).update_kernel == "torch"
    found = config_for(machine(H200, H200), values | own)
    assert found.update_kernel == "one_pass"
    assert own.items() <= found.to_dict().items()


def test_default_run_is_tiny_without_a_gpu_and_real_with_one() -> None:
    cpu, gpu = config_for(Machine((), 2), {}), config_for(machine(H200), {})
    assert (cpu.model, cpu.corpus, cpu.compile) == ("tiny-llama", "synthetic", False)
    assert (gpu.model, gpu.corpus, gpu.compile) == ("llama-3.2-1b", "tinystories", True)
    assert cpu.precision == gpu.precision == "fp8_tensorwise"
    assert (study_for(Machine((), 2)), study_for(machine(H200))) == ("smoke", "machine")


def test_chosen_fields_win_over_the_defaults_unless_they_are_none() -> None:
    config = config_for(Machine((), 2), {"num_steps": 20, "precision": "bf16", "model": None})
    assert (config.num_steps, config.precision, config.model) == (20, "bf16", "tiny-llama")
