"""The memory law: counted parts, constants that records give again, and records it must meet."""

import dataclasses
import functools
import statistics

import pytest
from transformers import AutoConfig

from fp8study.analysis.laws import frozen
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.memory import (
    MemoryConstants,
    fit_memory,
    predicted_memory,
)
from fp8study.analysis.laws.nearby import changed
from fp8study.analysis.laws.room import largest_batch
from fp8study.analysis.laws.shape import shape_of
from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS
from tests.checkout import ROOT


@functools.cache
def fitted_cells():
    runs = [run for run in read_runs(ROOT / "results") if frozen.fitted_to(*run)]
    assert frozen.provenance(runs) == {
        name: frozen.freezes()[-1][name] for name in ("last_run_ended", "records")
    }
    return [cell for cell in cells_of(runs) if cell.peak_gib]


def errors_pct(constants=None):
    laws = [predicted_memory(c.config, c.shape, constants).total for c in fitted_cells()]
    return [100 * (law / c.peak_gib - 1) for law, c in zip(laws, fitted_cells(), strict=True)]


def test_fitting_again_gives_the_frozen_constants():
    for name, entry in fit_memory(fitted_cells())["constants"].items():
        expected = frozen.freezes()[-1]["memory"]["constants"][name]
        if name == "logit_bytes":  # four of its cells had a value taken out since (log, 86)
            assert entry.pop("error") == pytest.approx(expected["error"], rel=2e-3)
            expected = {"value": expected["value"]}
        assert entry == pytest.approx(expected, rel=1e-3), name


def test_meets_nearly_all_cells_within_five_percent_and_most_within_one():
    # One GPU's compiled loss head under FSDP2 takes 1.6 GiB less than the law says (log, 75).
    heads = [c.config.loss_head == "compiled" and c.config.strategy == "fsdp2"
             for c in fitted_cells()]  # fmt: skip
    assert sum(heads) == 6
    missed = [abs(error) > 5 for error, head in zip(errors_pct(), heads, strict=True) if not head]
    assert all(0 < error < 10 for error, head in zip(errors_pct(), heads, strict=True) if head)
    # One BF16 run whose compiler kept less than in all runs like it: 28 KB a token and layer.
    assert sum(missed) <= 1
    assert statistics.median(map(abs, errors_pct())) < 0.5


@pytest.mark.parametrize("name", ["logit_bytes", "workspace_gib"])
def test_a_wrong_constant_would_be_seen(name):
    right = frozen.constants_of(MemoryConstants, "memory")
    wrong = dataclasses.replace(right, **{name: 3 * getattr(right, name) + 1})
    assert sum(abs(error) > 5 for error in errors_pct(wrong)) > 10


def test_counts_the_weights_of_every_preset():
    assert shape_of("llama-3.2-1b").num_parameters == 1_235_814_400
    assert shape_of("qwen3-4b").num_parameters == 4_022_468_096
    for name in PRESETS:
        assert shape_of(name).num_parameters > 0


def test_an_8b_needs_sixteen_bytes_a_weight_at_the_update():
    config = RunConfig(model="llama-3.1-8b", sequence_length=2048)
    law = predicted_memory(config, shape_of("llama-3.1-8b"))
    states = 16 * 8_030_261_248 / 2**30
    assert law.moment == "update"
    assert law.parameters + law.gradients + law.optimizer == pytest.approx(states)
    assert states < law.total < states + 3


def test_two_gpus_halve_the_states():
    one, two = (predicted_memory(RunConfig(num_gpus=n), shape_of("llama-3.2-1b")) for n in (1, 2))
    assert two.optimizer == pytest.approx(one.optimizer / 2)
    assert one.building == two.building == pytest.approx(4 * 1_235_814_400 / 2**30)


def test_gradients_between_passes_are_whole_or_a_share():
    config = RunConfig(model="llama-3.1-8b", path="tuned", num_gpus=8, micro_batch_size=2,
                       gradient_accumulation_steps=4)  # fmt: skip
    shared = dataclasses.replace(config, gradient_reduction="each_pass")
    laws = [predicted_memory(c, shape_of("llama-3.1-8b")) for c in (config, shared)]
    whole = 4 * 8_030_261_248 / 2**30
    assert [law.gradients for law in laws] == pytest.approx([whole, whole / 8])
    assert {law.moment for law in laws} == {"loss"}


@pytest.mark.parametrize(
    ("masters", "state", "num_bytes"),
    [("fp32", "fp32", 8), ("fp32", "bf16", 4), ("fp32", "fp8", 2 + 2 / 64),
     ("bf16", "fp32", 4), ("bf16", "fp8", 2 + 2 / 64)],
)  # fmt: skip
def test_optimizer_states_take_their_bytes(masters, state, num_bytes):
    config = RunConfig(master_dtype=masters, optimizer_state=state)
    law = predicted_memory(config, shape_of("llama-3.2-1b"))
    assert law.optimizer == pytest.approx(num_bytes * 1_235_814_400 / 2**30)


@pytest.mark.parametrize("largest_norm", [None, 1.0])  # fullest at the loss, and at the update
def test_kept_fp8_weights_take_two_bytes_each_unless_gradients_take_their_place(largest_norm):
    config = RunConfig(model="llama-3.1-8b", path="tuned", strategy="none",
                       precision="fp8_tensorwise", max_grad_norm=largest_norm,
                       update_kernel="torch")  # fmt: skip
    kept = dataclasses.replace(config, weight_cast="each_update")
    laws = [predicted_memory(c, shape_of("llama-3.1-8b")) for c in (config, kept)]
    assert [law.moment for law in laws] == ["update" if largest_norm else "loss"] * 2
    grown = laws[1].total - laws[0].total
    assert grown == pytest.approx(0 if largest_norm else 2 * 6_979_321_856 / 2**30)


def test_narrow_gradients_save_two_bytes_a_weight_but_of_experts():
    shape = dataclasses.replace(shape_of("llama-3.1-8b"), num_experts=8, num_active_experts=2)
    narrow = RunConfig(path="tuned", strategy="none", max_grad_norm=1.0)
    config = dataclasses.replace(narrow, gradient_dtype="master")
    wide, law = (predicted_memory(c, shape) for c in (config, narrow))
    assert wide.moment == law.moment == "update"
    assert wide.gradients - law.gradients == pytest.approx(2 * 32 * 41_943_040 / 2**30)


def test_updates_in_the_backward_pass_hold_one_layers_narrow_gradients_and_all_kept_weights():
    """A vocabulary so small that a layer's gradients are more than the embedding's."""
    shape = dataclasses.replace(shape_of("llama-3.1-8b"), vocab_size=1024, num_layers=4)
    narrow = RunConfig(path="tuned", strategy="none", sequence_length=128)
    fp8 = dataclasses.replace(narrow, precision="fp8_tensorwise", skip=("lm_head",))
    law, in_fp8 = (predicted_memory(c, shape) for c in (narrow, fp8))
    layer = 218_103_808 / 2**30
    assert law.moment == in_fp8.moment == "update"
    assert law.gradients == in_fp8.gradients == pytest.approx(2 * layer)
    assert law.copies == in_fp8.copies == pytest.approx(2 * 4 * layer)


def test_the_largest_batch_just_fits():
    config, shape = RunConfig(model="llama-3.2-1b", path="tuned"), shape_of("llama-3.2-1b")
    best = largest_batch(config, shape, capacity_gib=79.6, most=64)
    filled = [
        predicted_memory(dataclasses.replace(config, micro_batch_size=n), shape).needed
        for n in (best, best + 1)
    ]
    assert filled[0] <= 0.9 * 79.6 < filled[1]
    assert largest_batch(config, shape, capacity_gib=10, most=64) == 0


def test_refuses_a_kind_of_model_without_a_law(tmp_path):
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="gpt2, of which no law is known"):
        shape_of(str(tmp_path))


def test_kernels_of_swiglu_are_counted_only_where_a_model_can_have_them():
    values = {"model": "llama-3.1-8b", "num_gpus": 2, "precision": "fp8_tensorwise",
              "path": "tuned", "micro_batch_size": 2, "transposes": "fused"}  # fmt: skip
    shape = shape_of("llama-3.1-8b")
    other = dataclasses.replace(shape, is_swiglu=False)
    kernels, compiled = (make_config(values | {"swiglu": by}) for by in ("kernels", "compiled"))
    assert shape.is_swiglu
    assert predicted_memory(kernels, shape).total < predicted_memory(compiled, shape).total
    assert predicted_memory(kernels, other).total == predicted_memory(compiled, other).total


def test_a_run_that_would_fit_is_launched_by_kernel_where_it_cannot_be_a_graph() -> None:
    values = {"path": "tuned", "strategy": "none", "step_launch": "as_graph", "precision": "fp8"}
    config = make_config(values).resolved()
    for change in ({"master_dtype": "bf16"}, {"activation_checkpointing": True}, {"num_gpus": 4}):
        assert changed(config, change).step_launch == "by_kernel"
