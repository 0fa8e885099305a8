"""What only a GPU can show of the tuned path: its kernels, and what it keeps alive."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from transformers import LlamaConfig, LlamaForCausalLM

from fp8study.core.config import RunConfig, make_config
from fp8study.model import chunked_head
from fp8study.model.attention import imply_causal_mask, preferred_attention
from fp8study.model.build import build_model, decoder_layers
from fp8study.model.chunked_head import chunked_cross_entropy
from fp8study.model.fsdp import patches
from fp8study.model.loss_head import replace_loss_head
from fp8study.model.updates import make_updates, parameter_groups

DEVICE = torch.device("cuda")
VOCAB = 128256

pytestmark = pytest.mark.requires_gpu


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("adds", [None, False])  # as this torch can; as one that cannot
def test_chunks_are_summed_in_fp32(
    compiles: bool, adds: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if adds is not None:
        monkeypatch.setattr(chunked_head, "_adds_into_fp32", lambda *_: adds)
    torch.manual_seed(0)
    hidden = torch.randn(1000, 256, device=DEVICE)
    weight = torch.randn(4096, 256, device=DEVICE) / 16
    targets = torch.randint(0, 4096, (1000,), device=DEVICE)
    targets[::7] = -100

    def gradients(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (hidden, weight)]
        loss = head(*leaves)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x @ w.T).float(), targets)

    def chunked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(x, w, targets, compiles)

    monkeypatch.setattr(chunked_head, "CHUNK", 128)
    exact = gradients(plain, torch.float64)
    theirs, ours = gradients(plain, torch.bfloat16), gradients(chunked, torch.bfloat16)
    for reference, a, b in zip(exact, theirs, ours, strict=True):
        assert distance(b, reference) <= 1.5 * distance(a, reference) + 1e-5


def _peak_gib(head: str, num_tokens: int) -> float:
    """Return what the head of a 1B model adds to memory at its worst."""
    config = make_config({"model": "llama-3.2-1b", "loss_head": head}).resolved()
    model = build_model("llama-3.2-1b", torch.bfloat16, torch.device("meta"), seed=0)
    model.lm_head = torch.nn.Linear(2048, VOCAB, bias=False, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=DEVICE)
    hidden = torch.randn(1, num_tokens, 2048, device=DEVICE, dtype=torch.bfloat16)
    hidden.requires_grad_()
    if head == "plain":

        def loss() -> torch.Tensor:
            logits = model.lm_head(hidden)
            return model.loss_function(logits=logits, labels=ids, vocab_size=VOCAB)
    else:
        replace_loss_head(model, config)

        def loss() -> torch.Tensor:
            return model.lm_head(hidden, ids)

    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        loss().backward()
        model.lm_head.weight.grad = hidden.grad = None
    return (torch.cuda.max_memory_allocated() - start) / 2**30


def test_memory_of_the_chunked_head_hardly_grows_with_the_tokens() -> None:
    """At few tokens the compiled head needs less: summing weight gradients in FP32 costs a copy."""
    if torch.cuda.mem_get_info()[0] < 32 * 2**30:
        pytest.skip("needs 32 GiB of free GPU memory")
    few, many = 4096, 16384
    plain, compiled, chunked = (_peak_gib(head, many) for head in ("plain", "compiled", "chunked"))
    assert chunked < compiled < plain
    added_logits = (many - few) * VOCAB * 2 / 2**30
    assert chunked - _peak_gib("chunked", few) < added_logits / 2


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU that casts to FP8",
)
def test_the_compiled_cast_gives_the_same_bytes() -> None:
    weight = torch.randn(1000, 4096, device=DEVICE)
    scale = torch.finfo(torch.float8_e4m3fn).max / weight.abs().max()
    theirs = hp_tensor_and_scale_to_float8(weight, scale, torch.float8_e4m3fn)
    ours = patches._cast(weight.view(-1), scale, torch.float8_e4m3fn).view_as(weight)
    assert torch.equal(ours.view(torch.uint8), theirs._data.view(torch.uint8))


@pytest.mark.parametrize("attention", ["flash", "cudnn", "flash4"])
@pytest.mark.parametrize(("size", "compiles"), [(64, False), (64, True), (128, True)])
def test_the_preferred_attention_kernel_runs(attention: str, size: int, compiles: bool) -> None:
    if attention == "flash4":
        pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    torch._dynamo.reset()
    model, plain = (_of_heads(size) for _ in range(2))
    if compiles:
        for layer in decoder_layers(model):
            layer.compile()
    ids = torch.randint(0, 2048, (2, 256), device=DEVICE)
    with preferred_attention(make_config({"attention": attention}).resolved(), DEVICE):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    names = {event.key for event in seen.key_averages()}
    op = f"_scaled_dot_product_{attention.removesuffix('4')}_attention"
    assert any(op in name for name in names), names
    assert any("flash_attncute" in name for name in names) == (attention == "flash4"), names
    with sdpa_kernel(SDPBackend.MATH):
        expected = plain(input_ids=ids, labels=ids).loss
        expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    for found, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(found.grad, other.grad) < 0.05


def _of_heads(size: int) -> Any:
    """Return a model of two layers whose heads are so wide, two for each of keys, in BF16."""
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=size,
    )  # fmt: skip
    return LlamaForCausalLM(settings).to(DEVICE, torch.bfloat16)


def _trained(config: RunConfig, num_tokens: int = 64) -> tuple[list[torch.Tensor], float]:
    """Return the weights after four steps, and the last step's peak in GiB."""
    gc.collect()  # not while we measure: what earlier tests left in cycles
    model = build_model(config.model, torch.float32, DEVICE, seed=0)
    optimizer = torch.optim.AdamW(parameter_groups(config, model), lr=1e-3, fused=True)
    updates = make_updates(config, model, optimizer, lambda: None)
    ids = torch.randint(0, 2048, (2, num_tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(DEVICE)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        updates.expect(wants_norm=False)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        updates.finish()
    peak = (torch.cuda.max_memory_allocated() - start) / 2**30
    return [p.detach() for p in model.parameters()], peak


def test_updates_in_the_backward_pass_give_the_same_weights() -> None:
    values = {"model": "tiny-llama", "strategy": "none"}
    after, _ = _trained(make_config(values).resolved())
    inside, _ = _trained(make_config(values | {"optimizer_step": "in_backward"}).resolved())
    start = build_model("tiny-llama", torch.float32, DEVICE, seed=0).parameters()
    for before, a, b in zip(start, after, inside, strict=True):
        # Not to the bit: some of a GPU's sums have no fixed order, and of a gradient that is next
        # to nothing Adam makes a whole step. One update lost of four would be a distance of 0.3.
        assert distance(b - before, a - before) < 0.1


def test_updates_in_the_backward_pass_never_hold_all_gradients(tmp_path: Path) -> None:
    """A model whose few tokens need nothing but gradients and BF16 copies of the weights."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048}  # fmt: skip
    LlamaConfig(architectures=["LlamaForCausalLM"], **shape).save_pretrained(tmp_path)
    values = {"model": str(tmp_path), "strategy": "none"}
    weights, after = _trained(make_config(values).resolved(), num_tokens=8)
    _, inside = _trained(
        make_config(values | {"optimizer_step": "in_backward"}).resolved(), num_tokens=8
    )
    gradients = 4 * sum(w.numel() for w in weights) / 2**30
    copies, layer = gradients / 2, gradients / 8
    assert after > 0.95 * gradients
    assert inside < copies + 1.5 * layer


def _step_without_waiting(config: RunConfig) -> None:
    """Do two steps; raise a RuntimeError if the host waits for the GPU in the second."""
    model = build_model("tiny-llama", torch.float32, DEVICE, seed=0)
    assert imply_causal_mask(model, config) is None  # no objection
    replace_loss_head(model, config)
    optimizer = torch.optim.AdamW(parameter_groups(config, model), lr=1e-3, fused=True)
    updates = make_updates(config, model, optimizer, lambda: None)
    ids_BT = torch.randint(0, 2048, (2, 64), device=DEVICE)

    def step() -> None:
        updates.expect(wants_norm=False)
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        updates.finish()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_on_one_gpu_does_not_wait_for_it() -> None:
    tuned = {"path": "tuned", "strategy": "none", "compile": False}
    _step_without_waiting(make_config(tuned).resolved())
    _step_without_waiting(make_config(tuned | {"max_grad_norm": 1.0}).resolved())
    with pytest.raises(RuntimeError, match="synchroniz"):
        _step_without_waiting(make_config(tuned | {"attention_mask": "checked"}).resolved())


@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])  # one clips, one does not
def test_the_update_itself_clips_as_a_pass_before_it_would(
    max_norm: float, master_dtype: str
) -> None:
    moments = []
    for clipping in ("separate", "in_update"):
        values = {"strategy": "none", "max_grad_norm": max_norm, "clipping": clipping}
        config = make_config(values | {"master_dtype": master_dtype}).resolved()
        torch.manual_seed(0)
        dtype = torch.float32 if master_dtype == "fp32" else torch.bfloat16
        model = torch.nn.Linear(64, 64, device=DEVICE, dtype=dtype)
        optimizer = torch.optim.AdamW(parameter_groups(config, model), lr=0.1, fused=True)
        updates = make_updates(config, model, optimizer, lambda: None)
        updates.expect(wants_norm=False)
        model(torch.ones(8, 64, device=DEVICE, dtype=dtype)).sum().backward()
        updates.finish()
        # Adam's step forgets the gradients' scale, its first moment does not.
        moments.append([optimizer.state[p]["exp_avg"].float() for p in model.parameters()])
    for own, other in zip(*moments, strict=True):
        assert torch.allclose(own, other, rtol=1e-5 if master_dtype == "fp32" else 2e-2)
