"""Layers timed for advice, on a real GPU: about a minute."""

from __future__ import annotations

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.measure.layer_times import measure_here

pytestmark = [
    pytest.mark.requires_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_layer_of_an_8b_takes_less_in_fp8_and_its_gemms_reach_more() -> None:
    shared = {"model": "llama-3.1-8b", "path": "tuned", "num_gpus": torch.cuda.device_count()}
    shared["strategy"] = "fsdp2" if torch.cuda.device_count() > 1 else "none"
    configs = [
        make_config(shared | {"precision": name, "fp8_all_gather": False}).resolved()
        for name in ("bf16", "fp8_tensorwise", "fp8_rowwise")
    ]
    found = measure_here(configs, print)
    layers, rates = found["layers"], found["gemm_tflops"]
    assert layers["fp8_tensorwise"]["device_ms"] < layers["bf16"]["device_ms"]
    assert 0 < layers["bf16"]["host_ms"] < layers["fp8_tensorwise"]["host_ms"]
    assert rates["fp8_tensorwise"] > 1.3 * rates["bf16"] > 0
    assert found["copy_tb_per_s"] > 0.3
    assert (found["link_gb_per_s"] is None) == (torch.cuda.device_count() == 1)
