"""What a run leaves open, filled for the machine at hand."""

import warnings
from typing import Any

import pytest

from fp8study.run.defaults import config_for
from tests.machines import H200, machine

ON_TWO = {"num_gpus": 2, "sequence_length": 4096, "precision": "fp8_tensorwise"}


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
    assert config_for(machine(H200, H200), ON_TWO | fields).fp8_all_gather is gathers


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"model": "llama-3.2-1b"}, "torch"),  # waits for its host, in BF16 too
        ({"model": "llama-3.2-1b", "update_kernel": "one_pass"}, "one_pass"),
        ({"model": "llama-3.2-1b", "weight_cast": "each_update"}, "one_pass"),
        ({"model": "llama-3.1-8b", "micro_batch_size": 2}, "one_pass"),
        ({"model": "llama-3.1-8b", "micro_batch_size": 2, "path": "plain"}, "torch"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_shards_are_updated_in_one_pass_where_their_host_is_not_the_limit(
    fields: dict[str, Any], kernel: str, precision: str
) -> None:
    values = ON_TWO | {"path": "tuned", "precision": precision} | fields
    if precision == "bf16":
        values.pop("weight_cast", None)
        kernel = "torch" if "weight_cast" in fields else kernel
    assert config_for(machine(H200, H200), values).update_kernel == kernel


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"micro_batch_size": 1}, "one_pass"),
        ({"micro_batch_size": 2}, "torch"),  # fits with no FP8 weights kept
        ({"micro_batch_size": 2, "weight_cast": "each_update"}, "one_pass"),  # as was asked
        ({"micro_batch_size": 2, "gradient_dtype": "compute"}, "one_pass"),
        ({"micro_batch_size": 2, "transposes": "separate"}, "one_pass"),
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
    assert said == ["update_kernel: torch"] * (fields == {"micro_batch_size": 2})
