from __future__ import annotations

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.model.attention import preferred_attention
from fp8study.model.build import build_model
from fp8study.model.sharding import prepare


def preferences() -> list[int]:
    return list(torch._C._get_sdp_priority_order())


@pytest.mark.parametrize("attention", ["flash", "cudnn"])
def test_the_preferred_kernel_comes_first_and_others_may_take_over(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8study.model.attention._let_torch_decide", lambda: None)  # on a GPU
    config = make_config({"attention": attention}).resolved()
    before = preferences()
    untouched = torch.compiler.config.patch(cache_key_tag="")
    with untouched, preferred_attention(config, torch.device("cuda")):
        first = {"flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
                 "cudnn": torch.nn.attention.SDPBackend.CUDNN_ATTENTION}[attention]  # fmt: skip
        assert preferences()[0] == int(first.value)
        assert torch.backends.cuda.math_sdp_enabled()
        assert attention in torch.compiler.config.cache_key_tag
    assert preferences() == before


@pytest.mark.parametrize(("attention", "device"), [("default", "cuda"), ("cudnn", "cpu")])
def test_nothing_changes_by_default_or_without_a_gpu(attention: str, device: str) -> None:
    before = preferences()
    with preferred_attention(
        make_config({"attention": attention}).resolved(), torch.device(device)
    ):
        assert preferences() == before
        assert torch.compiler.config.cache_key_tag == ""


def test_layers_are_compiled_in_the_mode_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: modes.append(mode))
    config = make_config(
        {"model": "tiny-llama", "strategy": "none", "compile_mode": "reduce-overhead",
         "optimizer_binding": "before_conversion"}
    ).resolved()  # fmt: skip
    model = build_model("tiny-llama", torch.float32, torch.device("meta"), seed=0)

    class Passes:
        def prepare(self, *parts: object) -> tuple[object, ...]:
            return parts

    prepare(config, Passes(), model, lambda m: None)  # type: ignore[arg-type, return-value]
    assert modes == ["reduce-overhead"] * 4
