"""What advice makes of memory: what fits, what would, and what FP8 has to spare or takes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.decision import CHECK, FP8, NO_ROOM
from fp8study.analysis.laws.beyond import beyond
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.here import law_of
from fp8study.analysis.laws.memory import predicted_memory
from fp8study.analysis.laws.nearby import larger_alone
from fp8study.analysis.laws.room import HEADROOM
from fp8study.analysis.laws.shape import shape_of
from fp8study.report.advice_text import advice_text
from tests.analysis.test_advise import advice
from tests.checkout import ROOT


def ask(model: str, batch: int, gpu: str = "h200") -> Any:
    return answer(question_for([], model, 1, 4096, batch, gpu))


def test_fp8_that_fits_as_it_was_updated_before_is_answered_for_so() -> None:
    found = ask("llama-3.1-8b", 2)
    assert found.config["update_kernel"] == "torch" and found.settings == ("update_kernel=torch",)
    assert found.fp8_fits and not found.fits and found.larger is None
    assert "It does not fit in BF16; FP8 tensorwise does." in advice_text(found)
    assert f"BF16 fits with {found.remedies[0].what}" in " ".join(advice_text(found).split())
    assert all("--set update_kernel=torch" in command for command in found.commands)
    assert ask("llama-3.1-8b", 1).config["update_kernel"] == "one_pass"


def test_an_update_that_was_asked_for_is_answered_for() -> None:
    """Records of the path before, which a 4B has, answer where it is asked for alone."""
    now, before = (
        answer(question_for([], "qwen3-4b", 1, 4096, 4, "h200", of))
        for of in (None, {"update_kernel": "torch"})
    )
    assert now.config["update_kernel"] == "one_pass" and not now.verdict.machine
    assert before.config["update_kernel"] == "torch" and before.verdict.machine
    assert now.nearest[0].then == before.verdict.lead_pct
    full = answer(
        question_for([], "llama-3.1-8b", 1, 4096, 2, "h200", {"update_kernel": "one_pass"})
    )
    assert full.config["update_kernel"] == "one_pass"


def test_a_batch_for_which_fp8_alone_has_room_is_told() -> None:
    found = ask("llama-3.1-8b", 1)
    assert found.larger.what == "micro_batch_size=2 update_kernel=torch"
    assert found.larger.then.value > found.verdict.lead_pct.value
    said = " ".join(advice_text(found).split())
    assert f"only FP8 has memory for {found.larger.what}: tokens/s +" in said
    assert "over BF16 at batch 1, predicted" in said


def test_fp8_that_need_recompute_nothing_is_told() -> None:
    found = answer(question_for([], "llama-3.1-8b", 8, 32768, None, "h200"))
    assert found.settings == ("activation_checkpointing=true",)  # as BF16 needs it
    assert found.larger and found.larger.what == "activation_checkpointing=false"
    kept = {"activation_checkpointing": False}
    plain = answer(question_for([], "llama-3.1-8b", 8, 32768, 1, "h200", kept))
    assert not plain.fits and plain.fp8_fits
    base = found.options[0].tokens_per_second_per_gpu.value
    faster = 100 * (plain.chosen.tokens_per_second_per_gpu.value / base - 1)
    assert found.larger.then.value == pytest.approx(faster, abs=0.5)
    assert faster > found.verdict.lead_pct.value + 20


def test_a_lead_over_a_bf16_that_cannot_run_is_told_as_that() -> None:
    text = " ".join(advice_text(ask("llama-3.1-8b", 2)).split())
    assert "its lead is over BF16 as if that fitted" in text
    assert re.search(
        r" (?:days|hours) for .* at best: [\d.,]+ in BF16, had it the memory, [\d.,]+ in FP8",
        text,
    )
    fits = advice_text(ask("llama-3.1-8b", 1))
    assert "had the memory" not in fits and "had it the memory" not in fits


def test_none_is_told_where_bf16_has_room_too_or_little_is_gained() -> None:
    assert ask("llama-3.2-1b", 1).larger is None  # either precision fits at what a pass may have
    question = question_for([], "llama-3.2-3b", 1, 4096, 7, "h200")  # 8 fits in FP8 alone
    shape = shape_of("llama-3.2-3b")
    law = law_of(shape, question.gpu, None)
    assert larger_alone(question.config, shape, law, question.capacity_gib, 32768) is None


def test_none_is_told_where_bf16_may_have_room_by_the_laws_error() -> None:
    question = question_for([], "llama-3.1-8b", 1, 4096, 1, "h200")
    shape = shape_of("llama-3.1-8b")
    law, wanted = (
        law_of(shape, question.gpu, None),
        dataclasses.replace(question.config, micro_batch_size=2),
    )
    needs = predicted_memory(wanted, shape).held / (1 - HEADROOM)  # GiB at which BF16 just fits
    tells = [
        larger_alone(question.config, shape, law, gib, 8192) is not None
        for gib in (needs * 0.99, needs * 0.94)
    ]
    assert tells == [False, True]


def test_what_a_step_of_several_passes_could_be_is_told_and_can_be_asked_about() -> None:
    def of_64(**batch: int) -> Any:
        return answer(
            question_for([], "llama-3.1-8b", 64, 4096, gpu="h100", global_batch_size=1024, **batch)
        )

    chosen, asked = of_64(micro_batch_size=None), of_64(micro_batch_size=4)
    told = "micro_batch_size=4 gradient_accumulation_steps=4"  # BF16 has room for 3, not of use
    assert chosen.larger.what == told
    assert asked.fp8_fits and not asked.fits
    assert asked.config["gradient_reduction"] == chosen.config["gradient_reduction"] == "each_pass"
    rates = [max(o.tokens_per_second_per_gpu.value for o in found.options) for found in
             (chosen, asked)]  # fmt: skip
    bf16 = chosen.options[0].tokens_per_second_per_gpu.value
    assert 100 * (rates[1] / bf16 - 1) == pytest.approx(chosen.larger.then.value)
    best = asked.remedies[0]  # as is chosen where no batch is named
    assert best.what == "--micro-batch-size 2 --set gradient_reduction=each_pass"
    assert best.lead_pct == chosen.verdict.lead_pct


def test_the_larger_batch_fits_and_bf16s_would_not() -> None:
    at_one, room = ask("llama-3.1-8b", 1), 1 - HEADROOM
    larger = ask("llama-3.1-8b", 2)
    (fp8,) = (option for option in larger.options if option.label == "FP8 tensorwise")
    rates = [found.tokens_per_second_per_gpu.value for found in (at_one.options[0], fp8)]
    told = at_one.larger.then
    assert told.low < 100 * (rates[1] / rates[0] - 1) < told.high
    assert fp8.memory_gib.value <= room * at_one.capacity_gib < larger.options[0].memory_gib.value


def test_more_gpus_come_before_weights_that_round_updates_away() -> None:
    first = advice("llama-3.1-70b", 4).remedies[0]
    assert first.what.endswith("--num-gpus 8") and "master_dtype" not in first.what


def test_what_does_not_fit_is_told_with_what_would():
    found = advice("llama-3.1-8b", 1, gpu="h100-80gb")
    assert not found.fits
    assert found.verdict.action == NO_ROOM
    (more, *_), said = found.remedies, " ".join(advice_text(found).split())
    assert more.what == "--micro-batch-size 1 --set reshard_after_forward=true --num-gpus 2"
    largest = answer(question_for([], "llama-3.1-8b", 2, 4096, None, "h100-80gb"))
    assert largest.fits and "reshard_after_forward=true" in largest.settings
    given = {"reshard_after_forward": True}
    there = answer(question_for([], "llama-3.1-8b", 2, 4096, 1, "h100-80gb", given))
    assert there.fits and more.lead_pct == there.verdict.lead_pct
    assert more.tokens_per_second_per_gpu == there.chosen.tokens_per_second_per_gpu
    told = f"{more.lead_pct.value:+.0f} % ("
    assert f"With {more.what} it does: FP8 then {told}" in said
    assert f"; {more.tokens_per_second_per_gpu.value:,.0f} tokens/s a GPU" in said
    assert f"recomputing if need be: {found.largest}" in said
    assert answer(question_for([], found.largest, 1, 4096, None, "h100-80gb")).fits
    assert shape_of(found.largest).num_parameters > 2e9  # no 1B
    batch = answer(question_for([], "llama-3.2-3b", 2, 4096, 64, "h100-80gb"))
    assert not batch.fits and not batch.fp8_fits and batch.largest == ""  # the batch is too large


def test_of_fp8_only_what_fits_is_recommended():
    found = advice("llama-3.1-8b", 2, batch=3)
    capacity = next(o.memory_gib.value for o in found.options if o.gathers_fp8) / 0.9 - 0.1
    tight = answer(dataclasses.replace(
        question_for([], "llama-3.1-8b", 2, 4096, 3, "h200"), capacity_gib=capacity))  # fmt: skip
    assert found.verdict.label == "FP8 tensorwise, FP8 all-gather"
    assert tight.verdict.label == "FP8 tensorwise, BF16 all-gather" and tight.fp8_fits
    assert "! does not fit" in advice_text(tight) and "!" not in advice_text(found)


@pytest.mark.parametrize("num_gpus", [1, 2, 16])
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_only_what_fits_is_to_be_checked(num_gpus, batch):
    found = advice("llama-3.1-8b", num_gpus, 8192, batch, "h100-80gb")
    best = next(o for o in found.options if o.label == found.verdict.label)
    fitting = [o.precision for o in (found.options[0], best) if o.fits(found.capacity_gib)]
    if num_gpus < 16:
        assert re.findall(r"precision=(\w+)", " ".join(found.commands)) == fitting
    assert bool(found.commands) == bool(fitting)
    assert ("To measure its speed" in advice_text(found)) == bool(fitting)


def test_without_a_batch_the_largest_that_fits_is_taken():
    found = advice("llama-3.2-1b", 1, batch=None, gpu="rtx-5090-32gb")
    taken = found.config["micro_batch_size"]
    larger = advice("llama-3.2-1b", 1, batch=taken + 1, gpu="rtx-5090-32gb")
    assert found.fits and not larger.fits


def test_optimizer_states_in_fp8_come_before_more_gpus_and_are_answered_for() -> None:
    found = advice("llama-3.2-1b", 1, 8192, gpu="rtx-4090")
    whats = [remedy.what for remedy in found.remedies]
    state, more = (
        next(i for i, what in enumerate(whats) if part in what)
        for part in ("--set optimizer_state=fp8", "--num-gpus")
    )
    assert state < more
    assert "known of a 1B's loss alone" in " ".join(advice_text(found).split())
    same = advice("llama-3.2-1b", 1, 8192, gpu="rtx-4090", optimizer_state="fp8")
    assert same.fits and "optimizer_state=fp8" in same.settings
    assert same.memory_parts_gib["optimizer"].value < found.memory_parts_gib["optimizer"].value / 3


def test_optimizer_states_that_a_gpu_was_not_timed_with_are_beyond_the_records() -> None:
    asked = question_for([], "llama-3.2-1b", 1, 4096, 1, "h200", {"optimizer_state": "fp8"})
    cells = cells_of(read_runs(ROOT / "results"))
    usual = [cell for cell in cells if cell.config.optimizer_state == "fp32"]
    told = [
        " ".join(
            beyond(asked.config, shape_of("llama-3.2-1b"), asked.gpu, "NVIDIA H200", False, timed)
        )
        for timed in (cells, usual)
    ]
    assert "optimizer states in FP8" not in told[0]  # study optimizer-states
    assert "optimizer states in FP8: never timed on H200" in told[1]


@pytest.mark.parametrize("state", ["bf16", "fp8"])
def test_other_optimizer_states_are_told_and_checked(state: str) -> None:
    """A loss with FP32 states says nothing of theirs, and the commands run what was asked about."""
    usual = advice("llama-3.2-1b", 1, batch=2, max_grad_norm=1.0)
    found = advice("llama-3.2-1b", 1, batch=2, max_grad_norm=1.0, optimizer_state=state)
    assert (usual.verdict.action, found.verdict.action) == (FP8, CHECK)
    assert f"optimizer_state={state}" in found.settings
    assert all(f"--set optimizer_state={state}" in command for command in found.commands)
    assert found.loss_check and f"optimizer_state={state}" in found.loss_check.command


def test_layers_are_recomputed_unasked_where_slow_links_make_small_batches_slower() -> None:
    found = advice("llama-3.1-8b", 8, batch=None, gpu="h100-pcie-80gb")
    assert found.settings == ("activation_checkpointing=true",)
    plain = advice("llama-3.1-8b", 8, batch=2, gpu="h100-pcie-80gb")
    assert plain.fits and found.config["micro_batch_size"] > 2
    rates = [
        [o.tokens_per_second_per_gpu.value for o in (each.options[0], each.chosen)]
        for each in (found, plain)
    ]
    assert rates[0][0] > rates[1][0] and rates[0][1] > 1.1 * rates[1][1]
    fast = advice("llama-3.1-8b", 8, batch=None, gpu="h100-80gb")
    assert fast.settings == () and fast.config["micro_batch_size"] == 2


def test_no_step_grows_beyond_the_largest_that_are_known_for_a_batch_that_is_chosen() -> None:
    found = advice("llama-3.1-70b", 1024, batch=None, gpu="h200-141gb")
    assert 1024 * 4096 * found.config["micro_batch_size"] <= 16 * 2**20


def test_a_remedy_keeps_the_sequences_a_step_that_were_asked_for() -> None:
    def of_1024(batch: int, **others: Any) -> Any:
        asked = [], "llama-3.1-8b", 16, 4096, batch, "h100-80gb", others, None, 1024
        return answer(question_for(*asked))

    found = of_1024(64)
    assert not found.fits  # a batch of 3 would, but is no part of 1,024
    remedy = "--micro-batch-size 2 --set gradient_reduction=each_pass"
    assert found.remedies[0].what == remedy
    assert of_1024(2, gradient_reduction="each_pass").fits


def test_no_larger_batch_is_named_where_a_step_is_to_have_no_more_sequences() -> None:
    asked = [], "llama-3.1-8b", 8, 4096, 2, "h100-80gb", {}, None
    assert answer(question_for(*asked)).larger
    assert answer(question_for(*asked, 16)).larger is None  # two for each of eight GPUs
