"""FP8 layers on a real GPU: compiled as eager, and timed for advice. About a minute."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from fp8study.core.config import make_config
from fp8study.measure.layer_times import measure_here
from fp8study.model.compiling import compile_layers
from fp8study.model.float8 import convert_to_float8
from fp8study.model.kept_weights import keep_weights
from fp8study.model.swiglu import write_fp8_between

pytestmark = [pytest.mark.requires_gpu, pytest.mark.slow]


def test_a_layer_of_an_8b_takes_less_in_fp8_and_its_gemms_reach_more() -> None:
    shared = {"model": "llama-3.1-8b", "path": "tuned", "num_gpus": torch.cuda.device_count()}
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


@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_rowwise"])
def test_compiled_fp8_layers_have_the_gradients_of_eager_ones(precision: str) -> None:
    """A compiler that stores FP8 wrongly ends no run; see `fp8study.model.kernels.cast_both`."""
    torch.manual_seed(0)
    eager = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096, bias=False), torch.nn.SiLU(),
        torch.nn.Linear(4096, 1024, bias=False),
    ).cuda()  # fmt: skip
    values = {"precision": precision, "strategy": "none", "skip": "", "fp8_emulate": False}
    convert_to_float8(eager, make_config(values).resolved())
    inputs = torch.randn(2048, 1024, device="cuda").bfloat16()
    found = []
    for net in (eager, copy.deepcopy(eager)):
        x = inputs.clone().requires_grad_()
        run = torch.compile(net) if found else net
        with torch.autocast("cuda", torch.bfloat16):
            output = run(x)
        output.backward(torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output))
        found.append([output, x.grad, *(p.grad for p in net.parameters())])
    for plain, compiled in zip(*found, strict=True):
        # 2 % apart on a CPU, where SiLU's output is rounded once less; of bytes that nothing wrote
        # one in a thousand would be 6.
        assert (plain - compiled).float().norm() < 0.05 * plain.float().norm()


@pytest.mark.parametrize("switches", [None, {}, {"cast_kernels": "both_layouts"}], ids=str)
def test_an_mlp_whose_swiglu_writes_fp8_has_torchaos_gradients(
    switches: dict[str, str] | None,
) -> None:
    """Compiled with `switches`, if any."""
    torch.manual_seed(0)
    shape = LlamaConfig(hidden_size=1024, intermediate_size=3584)
    theirs = torch.nn.Module()
    theirs.layers = torch.nn.ModuleList([LlamaMLP(shape)]).cuda()  # type: ignore[no-untyped-call]
    values = {"precision": "fp8", "strategy": "none", "skip": "", "fp8_emulate": False,
              "weight_cast": "each_update", "swiglu": "kernels",
              "gradient_accumulation_steps": 2}  # fmt: skip
    config = make_config(values | (switches or {})).resolved()
    convert_to_float8(theirs, config)
    ours = copy.deepcopy(theirs)
    keep_weights(ours, config)
    write_fp8_between(ours, config)
    inputs, found = torch.randn(2048, 1024, device="cuda").bfloat16(), []
    for net in (theirs, ours):
        (mlp,), x = net.layers, inputs.clone().requires_grad_()
        if switches is not None and net is ours:
            compile_layers([mlp], config)
        for _ in range(2):  # The first compiles, and calls the operators' descriptions to do so.
            x.grad = None
            net.zero_grad()
            with torch.profiler.profile() as seen:
                with torch.autocast("cuda", torch.bfloat16):
                    output = mlp(x)
                output.backward(torch.linspace(-1, 1, output.numel()).to(output).view_as(output))
        found.append([output, x.grad, *(p.grad for p in mlp.parameters())])
    assert any(event.name.startswith("fp8study::") for event in seen.events())
    for plain, own in zip(*found, strict=True):
        # exp differs in its last bits, and so one FP8 number in a thousand by a step.
        assert (plain - own).float().norm() < 0.01 * plain.float().norm()
