"""The speed law: constants that records give again, and what must follow from the counting."""

import copy
import dataclasses

import pytest

from fp8study.analysis.laws import frozen, memory
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.laws.speed import lead_pct, predicted_step
from fp8study.analysis.laws.speed_constants import SpeedConstants, on_gpu
from fp8study.analysis.laws.speed_fit import fit_speed
from fp8study.core.config import RunConfig
from fp8study.core.hardware import find_peak
from tests.checkout import ROOT

SHAPE = shape_of("llama-3.1-8b")
ONE = RunConfig(model="llama-3.1-8b", path="tuned", strategy="none")


def step(gpu=None, **changes):
    return predicted_step(dataclasses.replace(ONE, **changes), SHAPE, gpu)


@pytest.mark.slow
def test_fitting_again_gives_the_frozen_constants():
    runs = [run for run in read_runs(ROOT / "results") if frozen.fitted_to(*run)]
    found = fit_speed(cells_of(runs))
    for name, entry in found["constants"].items():
        expected = frozen.freezes()[-1]["speed"]["constants"][name]
        assert entry["value"] == pytest.approx(expected["value"], rel=0.02), name
    assert set(found["without"]) == set(frozen.freezes()[-1]["speed"]["without"])


def test_fp8_saves_gemm_time_and_pays_with_casts():
    bf16, fp8 = step(), step(precision="fp8_tensorwise")
    assert fp8.gemm < 0.6 * bf16.gemm and bf16.casts == 0 < fp8.casts
    head_in_bf16 = step(precision="fp8_tensorwise", skip=("lm_head",))
    assert 10 < lead_pct(bf16.total, head_in_bf16.total) < 30
    assert head_in_bf16.total > fp8.total
    assert step(precision="fp8_rowwise").casts > 2 * fp8.casts


def test_a_loss_head_in_fp8_saves_what_it_saved_and_takes_the_memory_it_took():
    """In each block of the study head-form."""
    runs = [run for run in read_runs(ROOT / "results") if run[1].study == "head-form"]
    cells = {(c.config.model, c.config.num_gpus, c.config.repeat, c.config.skip): c
             for c in cells_of(runs) if c.config.is_fp8}  # fmt: skip
    assert len(cells) >= 6
    for (model, num_gpus, repeat, skip), cell in cells.items():
        other = cells[model, num_gpus, repeat, ("lm_head",)]
        if not skip:
            law, before = (predicted_step(c.config, c.shape) for c in (cell, other))
            saved = other.step_ms - cell.step_ms
            assert before.total - law.total == pytest.approx(saved, abs=1.0, rel=0.1)
            assert memory.predicted_memory(cell.config, cell.shape).total == pytest.approx(
                cell.peak_gib, rel=0.011
            )


def test_the_host_decides_about_a_small_model_on_few_tokens():
    config = RunConfig(precision="fp8_tensorwise", num_gpus=4, sequence_length=2048)
    law = predicted_step(config, shape_of("llama-3.2-1b"))
    assert law.limit == "host" and law.total >= law.host > law.device


def test_where_masks_are_checked_host_and_gpu_begin_each_step_together():
    config = RunConfig(precision="fp8_tensorwise", num_gpus=4, sequence_length=8192)
    plain = predicted_step(config, shape_of("llama-3.2-1b"))
    once = dataclasses.replace(plain, host_forward=None)
    assert plain.host < plain.device < once.total < plain.total < plain.host + plain.device
    tuned = predicted_step(
        dataclasses.replace(config, attention_mask="causal"), shape_of("llama-3.2-1b")
    )
    assert tuned.total == once.total


def test_attention_is_no_faster_than_kernels_are_however_long_a_sequence():
    """FlashAttention 3 has 740 TFLOP/s on an H100 in its best forward pass (arXiv 2407.08608)."""
    flops = 7 * 32 * 128 * 32  # a token and token of the sequence: heads, their width, layers
    for length in (8_192, 131_072):
        ms = step(sequence_length=length, micro_batch_size=1).attention
        assert 400 < flops * length**2 / ms * 1e-9 < 600


def test_rates_of_the_link_and_of_copies_are_read_from_records():
    constants = frozen.constants_of(SpeedConstants, "speed")
    assert 240 < constants.link_gb_per_s < 300  # of 450 on the datasheet
    assert 4.0 < constants.copy_tb_per_s < 4.8  # of 4.8


def test_another_gpu_is_scaled_by_its_datasheet_and_kin_by_a_power_of_it():
    h200, h100 = step(), step(find_peak("NVIDIA H100 80GB HBM3"))
    c = frozen.constants_of(SpeedConstants, "speed")
    assert 0 < c.cast_power < c.memory_power < 1
    assert h100.gemm == pytest.approx(h200.gemm)  # the same matrix units
    assert h100.update == pytest.approx(h200.update * (4.8 / 3.35) ** c.memory_power)
    assert step(find_peak("NVIDIA B200")).update == pytest.approx(h200.update * 4.8 / 8)
    pcie = on_gpu(c, find_peak("NVIDIA H100 PCIe"))
    assert pcie.cast_ps == pytest.approx(c.cast_ps * max(989 / 756, (4.8 / 2) ** c.cast_power))


def test_what_a_recipe_casts_along_one_dimension_alone_costs_less_and_keeps_bf16():
    keeps, casts = {}, {}
    for name in ("bf16", "fp8_rowwise", "fp8_rowwise_gw_hp"):
        found = step(precision=name, strategy="fsdp2")
        keeps[name], casts[name] = found.elementwise, found.casts
    c = frozen.constants_of(SpeedConstants, "speed")
    assert 0 < casts["fp8_rowwise_gw_hp"] == pytest.approx(c.one_way * casts["fp8_rowwise"])
    assert keeps["bf16"] == keeps["fp8_rowwise_gw_hp"] > keeps["fp8_rowwise"]


def test_accumulation_repeats_all_but_the_update():
    before = {"max_grad_norm": 1.0, "update_kernel": "torch"}
    once, twice = step(**before), step(**before, gradient_accumulation_steps=2)
    assert twice.gemm == pytest.approx(2 * once.gemm)
    assert twice.update == pytest.approx(once.update)


def test_weights_cast_once_an_update_cost_less_the_more_passes_they_serve():
    def casts(**changes):
        fp8 = {"precision": "fp8_tensorwise", "update_kernel": "torch", **changes}
        each_pass, kept = (step(**fp8, weight_cast=c) for c in ("each_pass", "each_update"))
        return each_pass.casts - kept.casts

    assert 0 < casts() < casts(update_kernel="one_pass")
    weights = 1 / (1 - 10 / 14) * casts()  # what a pass casts of them
    assert casts(gradient_accumulation_steps=4) == pytest.approx(3 * weights + casts())


def test_one_pass_updates_take_less_and_clip_in_half_the_time():
    wide = {"gradient_dtype": "master"}
    torch, one_pass = step(update_kernel="torch"), step(**wide)
    assert one_pass.update < 0.9 * torch.update
    clipping = [
        step(max_grad_norm=1.0, update_kernel=kernel, **wide).update - without.update
        for kernel, without in (("torch", torch), ("one_pass", one_pass))
    ]
    assert clipping[1] == pytest.approx(clipping[0] / 2)


def test_narrow_gradients_spare_decoder_layers_alone_and_bf16_layers_most():
    narrow, fp8 = {"max_grad_norm": 1.0}, {"precision": "fp8_tensorwise"}
    one_pass = narrow | {"gradient_dtype": "master"}
    saved = step(**one_pass, **fp8).update - step(**narrow, **fp8).update
    c = frozen.constants_of(SpeedConstants, "speed")
    a_byte = c.one_pass * c.update_ps + c.clip_ps / 2
    assert saved == pytest.approx(2 * a_byte * 32 * 218_103_808 * 1e-9)  # not the embedding's
    # In BF16 the update writes the two bytes that it does not read, and the norm reads fewer.
    saved_bf16 = step(**one_pass).update - step(**narrow).update
    assert saved_bf16 == pytest.approx(c.clip_ps * 32 * 218_103_808 * 1e-9)
    copies = [step(**one_pass, **of).sharding - step(**narrow, **of).sharding for of in (fp8, {})]
    assert copies[1] == pytest.approx(2 * copies[0])


def test_no_speed_is_predicted_of_a_model_that_is_not_compiled():
    with pytest.raises(ValueError, match="compile=false"):
        step(compile=False)
    assert frozen.constants_of(SpeedConstants, "speed").kernel_us > 0


def test_no_fp8_on_a_gpu_without_it():
    with pytest.raises(ValueError, match="A100 has no FP8"):
        step(find_peak("NVIDIA A100-SXM4-80GB"), precision="fp8_tensorwise")
    assert step(find_peak("NVIDIA A100-SXM4-80GB")).total > step().total


def test_a_constant_that_was_not_frozen_is_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    freezes = copy.deepcopy(frozen.freezes())
    del freezes[-1]["speed"]["constants"]["launch_us"]
    monkeypatch.setattr(frozen, "freezes", lambda: freezes)
    with pytest.raises(ValueError, match="has no launch_us"):
        frozen.constants_of(SpeedConstants, "speed")
