from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import _fa4, current_flash_attention_impl, restore_flash_attention_impl

import fp8study.model
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.model.attention import preferred_attention
from fp8study.model.build import build_model
from fp8study.model.sharding import prepare

KERNELS = "fp8study.model.kernels.flash_attention_4"


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


@pytest.fixture
def flash_4(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Install a package that looks like flash-attn-4, and leave torch as it was."""
    interface = ModuleType("flash_attn.cute.interface")

    def forward(
        q: str, k: str, v: str, qv: None = None, cu_seqlens_q: None = None,
        cu_seqlens_k: None = None, seqused_q: None = None, seqused_k: None = None,
        max_seqlen_q: None = None, max_seqlen_k: None = None, min_seqlen_k: None = None,
        page_table: None = None, softmax_scale: float | None = None, causal: bool = False,
        softcap: None = None, window_size_left: None = None, window_size_right: None = None,
        *, num_splits: int = 1, return_lse: bool = False, out: None = None,
    ) -> tuple[object, ...]:  # fmt: skip
        assert causal and return_lse and num_splits == 1
        return f"{q}{k}{v}", torch.ones(2), None, None, None

    def backward(
        q: str, k: str, v: str, out: str, dout: str, lse: torch.Tensor,
        softmax_scale: float | None = None, causal: bool = False, softcap: float = 0.0,
        window_size_left: None = None, window_size_right: None = None,
        cu_seqlens_q: None = None, cu_seqlens_k: None = None, deterministic: bool = False,
    ) -> tuple[str, str, str]:  # fmt: skip
        assert causal
        return f"d{q}", f"d{k}", f"d{v}"

    interface._flash_attn_fwd = forward  # type: ignore[attr-defined]
    interface._flash_attn_bwd = backward  # type: ignore[attr-defined]
    cute = ModuleType("flash_attn.cute")
    cute.interface = interface  # type: ignore[attr-defined]
    package = ModuleType(KERNELS.rpartition(".")[0])  # whose other modules import Triton
    package.__path__ = [str(Path(fp8study.model.__file__).with_name("kernels"))]
    for module in (ModuleType("flash_attn"), cute, package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("fp8study.model.attention._let_torch_decide", lambda: None)
    _fa4._fa4_import_module.cache_clear()
    with torch.compiler.config.patch(cache_key_tag=""):
        yield interface
    if current_flash_attention_impl():
        restore_flash_attention_impl()
    sys.modules.pop(KERNELS, None)


def test_flash_4_stands_in_for_torchs_own_until_that_is_asked_for(flash_4: ModuleType) -> None:
    is_4 = [("flash4", "FA4"), ("flash4", "FA4"), ("flash", None), ("flash4", "FA4")]
    for attention, standing_in in [*is_4, ("default", None)]:
        config = make_config({"attention": attention}).resolved()
        with preferred_attention(config, torch.device("cuda")):
            assert current_flash_attention_impl() == standing_in
            others = (
                torch.backends.cuda.cudnn_sdp_enabled,
                torch.backends.cuda.mem_efficient_sdp_enabled,
            )
            assert [each() for each in others] == 2 * [attention != "flash4"]
            if attention != "default":
                assert preferences()[0] == int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def test_torchs_adapter_finds_what_it_asks_flash_4_for(flash_4: ModuleType) -> None:
    """As `flash-attn-4` 4.0.0b36 takes arguments and gives results."""

    def asked(function: Callable[..., Any], **given: Any) -> Any:
        return function(**dict.fromkeys(inspect.signature(function).parameters) | given)

    inputs = {"query": "q", "key": "k", "value": "v", "is_causal": True}
    with preferred_attention(make_config({"attention": "flash4"}).resolved(), torch.device("cuda")):
        output, sums = asked(_fa4._fa4_run_forward, **inputs)
        assert output == "qkv" and len(sums) == 2
        found = asked(_fa4._fa4_run_backward, **inputs, grad_out="g", out=output, logsumexp=sums)
    assert found == ("dq", "dk", "dv")


def test_without_its_package_flash_4_is_refused_in_a_line(flash_4: ModuleType) -> None:
    del sys.modules["flash_attn.cute"]
    config = make_config({"attention": "flash4"}).resolved()
    with (
        pytest.raises(
            UserError, match=r"^attention: 'flash4' needs the package flash-attn-4 \(.*pip"
        ),
        preferred_attention(config, torch.device("cuda")),
    ):
        pass
