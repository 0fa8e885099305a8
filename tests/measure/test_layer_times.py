"""Layers timed for the law: a trial on a CPU, where FP8 is emulated, with what it says."""

from __future__ import annotations

import time

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.measure import layer_times
from fp8study.measure.layer_times import measure_here

SIZE = {"model": "tiny-llama", "path": "tuned", "sequence_length": 32, "micro_batch_size": 1}


def config(**changes):
    return make_config(SIZE | {"strategy": "none"} | changes).resolved(on_gpu=False)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_trial_without_a_gpu_times_layers_in_every_precision(one_thread: None) -> None:
    said: list[str] = []
    configs = [config(precision=name) for name in ("bf16", "fp8_tensorwise", "fp8_rowwise")]
    found = measure_here(configs, said.append)
    assert list(found["layers"]) == [each.precision for each in configs]
    assert found["layers"]["fp8_tensorwise"]["device_ms"] > 0  # emulated: many small operations
    assert found["model"] == "tiny-llama" and found["gpu_name"] is None
    assert "gemm_tflops" not in found and len(said) == 3


def test_a_layer_is_the_difference_of_two_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []

    def play(step, device):
        model = step.__closure__  # the step holds the model whose depth is set
        found = next(c.cell_contents for c in model if hasattr(c.cell_contents, "base_model"))
        depths.append(found.config.num_hidden_layers)
        step()
        return 10.0 + 2.0 * depths[-1], 5.0 + 1.0 * depths[-1]

    monkeypatch.setattr(layer_times, "_device_and_host_ms", play)
    found = layer_times._layer_times(config(precision="bf16"), torch.device("cpu"))
    assert depths == [1, 4] and found == {"device_ms": 2.0, "host_ms": 1.0}
    plain = layer_times._layer_times(config(attention_mask="checked"), torch.device("cpu"))
    assert plain["host_ms"] is None  # where the host waits for the GPU, its own time is not told


def test_the_gpu_is_held_back_until_the_host_has_queued_a_step(monkeypatch) -> None:
    asleep: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def elapsed_time(self, later: object) -> float:
            return 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", asleep.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(0.002))
    found = layer_times._device_and_host_ms(lambda: time.sleep(0.004), torch.device("cuda", 0))
    assert found[0] == 7.0 and 4.0 <= found[1] < 20.0
    assert min(asleep) >= 1.5 * 0.006 * 1.98e9  # the step and the GPU's share of it, at 1.98 GHz


@pytest.mark.parametrize(("strategy", "dtype"), [("none", "float32"), ("fsdp2", "bfloat16")])
def test_weights_are_as_the_run_computes_with_them(strategy: str, dtype: str) -> None:
    model, in_autocast = layer_times._short_model(config(strategy=strategy), torch.device("cpu"))
    assert str(next(model.parameters()).dtype) == f"torch.{dtype}"
    assert in_autocast == (strategy == "none")


def test_gemm_rates_are_of_converted_layers_weighted_by_their_time() -> None:
    rates = {"bf16": 1.0, "fp8_tensorwise": 2.0, "fp8_rowwise": None}
    rows = [
        {"in_fp8": True, "count": 1, "in_features": 16, "out_features": 16, "tflops": rates},
        {"in_fp8": True, "count": 3, "in_features": 16, "out_features": 16,
         "tflops": rates | {"bf16": 3.0}},
        {"in_fp8": False, "count": 9, "in_features": 16, "out_features": 16,
         "tflops": rates | {"bf16": 9.0}},
    ]  # fmt: skip
    found = layer_times._converted_tflops({"products": rows})
    assert found == {"bf16": pytest.approx(2.0), "fp8_tensorwise": pytest.approx(2.0),
                     "fp8_rowwise": None}  # fmt: skip


def test_no_link_is_timed_with_one_gpu() -> None:
    assert layer_times.link_gb_per_s(1) is None
