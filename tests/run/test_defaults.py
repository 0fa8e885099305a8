"""What a run leaves open, filled for the machine at hand."""

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
