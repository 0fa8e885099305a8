"""What tensors hold, and what the ranks' meters add up to."""

from __future__ import annotations

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.measure.memory import GIB, MemoryMeter, local_bytes, summarise_memory
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8

CPU = torch.device("cpu")


def test_bytes_are_elements_times_their_size() -> None:
    assert local_bytes([torch.zeros(3, 5), torch.zeros(4, dtype=torch.bfloat16), None]) == 68


def test_a_wrapped_weight_counts_what_it_holds() -> None:
    model = build_model("tiny-llama", torch.float32, CPU, seed=0)
    plain = local_bytes(model.parameters())
    fp8 = {"precision": "fp8", "fp8_all_gather": True, "strategy": "none", "fp8_emulate": True}
    convert_to_float8(model, make_config({"model": "tiny-llama"} | fp8))
    assert local_bytes(model.parameters()) == plain


def test_the_split_is_that_of_adamw() -> None:
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = MemoryMeter(CPU)
    meter.start()
    model(torch.randn(4, 64)).sum().backward()
    meter.gradients_ready(model)
    optimizer.step()
    meter.first_step_done(model, optimizer)
    meter.open_window()
    meter.close_window()
    weights = 4 * (64 * 32 + 32) / GIB
    assert meter.facts["parameters_gib"] == meter.facts["gradients_gib"] == weights
    # Two moments for each weight, and a step counter for each of the two tensors.
    assert meter.facts["optimizer_gib"] == pytest.approx(2 * weights + 8 / GIB)
    assert "steady_allocated_gib" not in meter.facts  # absent, not zero


def test_the_fullest_rank_speaks_for_all() -> None:
    ranks = [{"peak_gib": 3.0, "num_alloc_retries": 0}, {"peak_gib": 2.0, "num_alloc_retries": 4}]
    summary = summarise_memory(ranks)
    assert (summary["peak_gib"], summary["num_alloc_retries"]) == (3.0, 4)
    assert summary["ranks"] == ranks
    assert summarise_memory([{}]) == {"ranks": [{}]}
