"""What we replace in FSDP2: gradients copied by foreach kernels, and for which versions."""

from __future__ import annotations

import inspect
import pkgutil

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from fp8study.core.config import make_config
from fp8study.core.fields import PLAIN
from fp8study.core.record_shape import as_run
from fp8study.model.fsdp import copying, patches
from fp8study.model.fsdp.copying import copy_together
from fp8study.model.fsdp.patches import is_cast
from fp8study.model.kept_weights import FP8
from fp8study.model.swiglu import asks_for_kernels

SHAPES = [(8, 3), (4,), (12, 2, 5), (4, 7)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_every_rank_gets_the_shares_that_torch_would_give_it(
    dtype: torch.dtype, uneven: bool, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [*SHAPES, (6, 3)] if uneven else SHAPES
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if strided:
        gradients.append(torch.randn(3, 8, generator=generator).to(dtype).T)
    padded = sum(-(-g.shape[0] // 4) * 4 * g[0].numel() for g in gradients)
    expected, found = torch.full((padded,), 9.0), torch.full((padded,), 9.0)
    fsdp.foreach_reduce_scatter_copy_in(list(gradients), expected, 4)
    copy_together(list(gradients), found, 4)
    assert torch.equal(found, expected)


def test_the_foreach_kernels_do_it_where_everything_is_even(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "chunk_cat", None)  # calling it would fail
    gradients = [torch.ones(shape) for shape in SHAPES] + [torch.ones(3, 8).T]  # and a strided one
    buffer = torch.zeros(sum(g.numel() for g in gradients))
    copy_together(gradients, buffer, 4)
    assert buffer.sum() == buffer.numel()


#: For each switch that replaces something a value that asks for it.
ASKED = {"gather_cast": "compiled", "weight_cast": "each_update", "swiglu": "kernels",
         "transposes": "separate", "cast_kernels": "both_layouts", "gradient_copy": "foreach",
         "gradient_pool": "shared", "collectives": "copy_engines"}  # fmt: skip
#: Those that are for weights that are kept.
OF_KEPT = {"swiglu", "transposes", "cast_kernels"}


@pytest.mark.parametrize("switch", patches.PATCHES)
def test_under_an_unchecked_version_the_original_stays_and_the_record_says_so(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, value = patches.PATCHES[switch], ASKED[switch]
    values = {"precision": "fp8", "num_gpus": 2, "max_grad_norm": 1.0, switch: value}
    if switch in OF_KEPT | {"weight_cast"}:
        values |= {"num_gpus": 1, "strategy": "none", "weight_cast": "each_update"}
    config = make_config(values)
    assert patches.unchecked(config) == []  # the versions that tests run with are checked
    monkeypatch.setattr(patches.metadata, "version", lambda package: "99.0")
    for apply in (
        "_compile_casts",
        "pooled_reduce_scatter",
        "_pulling_reduce_scatter",
        "_pulling_all_gather",
    ):
        monkeypatch.setattr(patches, apply, None)  # calling it would fail
    patches.tune_communication(config, torch.nn.Linear(2, 2))
    assert fsdp.foreach_reduce_scatter_copy_in is not copy_together
    assert not asks_for_kernels(config)
    lines = {line.partition(":")[0]: line for line in patches.unchecked(config)}
    assert {*lines} == {switch} | ({"weight_cast"} if switch in OF_KEPT else set())
    line = lines[switch]
    assert line.startswith(f"{switch}: '{value}' replaces {patch.replaces}")
    assert f"not for 99.0: the run has {switch}={PLAIN[switch]}" in line
    assert patches.unchecked(make_config({})) == []


@pytest.mark.parametrize("reason", ["", "GPU 0 cannot read GPU 1's memory"])
def test_gpus_that_cannot_read_each_other_keep_nccl_and_the_record_says_so(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches.peers, "unreachable", lambda: reason)
    config = make_config({"path": "tuned", "num_gpus": 2}).resolved()
    lines = patches.without_copy_engines(config)
    assert lines == [f"collectives: {reason}: the run has collectives=nccl"] * bool(reason)
    values = as_run(config.to_dict(), lines)
    assert values["collectives"] == ("nccl" if reason else "copy_engines")
    asked = {"path": "tuned", "num_gpus": 2, "gradient_norm": "as_summed", "max_grad_norm": 1.0,
             "gradient_copy": "reduce_stream"}  # fmt: skip
    squaring = make_config(asked).resolved()
    values = as_run(squaring.to_dict(), patches.without_copy_engines(squaring))
    assert values["gradient_norm"] == ("separate" if reason else "as_summed")
    assert values["gradient_copy"] == ("foreach" if reason else "reduce_stream")
    if reason:
        make_config(values)  # is not refused
    plain = make_config({"path": "tuned", "num_gpus": 2, "collectives": "nccl"}).resolved()
    assert patches.without_copy_engines(plain) == []


@pytest.mark.parametrize("patch", patches.PATCHES.values())
def test_what_is_listed_is_there(patch: patches.Patch) -> None:
    owner, _, name = patch.replaces.rpartition(".")
    assert callable(getattr(pkgutil.resolve_name(owner), name))


def test_a_shard_whose_fp8_numbers_are_not_its_own_is_seen() -> None:
    weight = torch.randn(64, 32)
    scale = 448 / weight.abs().max()
    shard = WeightWithDynamicFloat8CastTensor(weight, LinearMMConfig(), FP8, scale)
    shard.fp8 = (weight * scale).to(FP8)
    assert is_cast(shard, 2048)
    weight.mul_(1.1)
    assert not is_cast(shard, 2048)


def test_fsdp_finds_how_to_call_the_compiled_cast_without_looking_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        WeightWithDynamicFloat8CastTensor, "fsdp_pre_all_gather",
        WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather,
    )  # fmt: skip
    patches._compile_casts()
    weight = torch.randn(64, 32)
    shard = WeightWithDynamicFloat8CastTensor(weight, LinearMMConfig(), FP8, torch.tensor(2.0))
    monkeypatch.setattr(inspect, "_signature_from_function", None)  # calling it would fail
    assert [*inspect.signature(shard.fsdp_pre_all_gather).parameters] == ["mesh"]


def test_a_run_that_asks_for_no_copies_of_ours_gets_torchs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchs = copying.chunk_cat()
    monkeypatch.setattr(fsdp, "foreach_reduce_scatter_copy_in", copying.later.put_off)
    patches.tune_communication(make_config({"num_gpus": 2}).resolved(), torch.nn.Linear(2, 2))
    assert fsdp.foreach_reduce_scatter_copy_in is torchs


def test_what_was_put_off_and_never_copied_is_no_gradient_of_the_next_unit() -> None:
    later, gradients = copying.Later(), [torch.ones(4, 2)]
    buffer_N = torch.zeros(8)
    later.put_off(gradients, buffer_N, 2)
    later.copy(buffer_N, 2)
    later.copy(torch.zeros(8), 2)  # nothing was put off since
    assert buffer_N.sum() == 8
    later.put_off(gradients, buffer_N, 2)
    with pytest.raises(AssertionError, match="never copied"):
        later.put_off(gradients, buffer_N, 2)
