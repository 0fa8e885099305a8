"""What advice makes of memory that FP8 has to spare, or takes for the weights that it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.laws.here import law_of
from fp8study.analysis.laws.nearby import larger_alone
from fp8study.analysis.laws.room import HEADROOM
from fp8study.analysis.laws.shape import shape_of
from fp8study.report.advice_text import advice_text
from tests.checkout import ROOT


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def ask(model: str, batch: int, gpu: str = "h200") -> Any:
    return answer(question_for([], model, 1, 4096, batch, gpu))


def test_fp8_that_fits_as_it_was_updated_before_is_answered_for_so() -> None:
    found = ask("llama-3.1-8b", 2)
    assert found.config["update_kernel"] == "torch" and found.settings == ("update_kernel=torch",)
    assert found.fp8_fits and not found.fits and found.larger is None
    assert "It does not fit in BF16; FP8 tensorwise does." in advice_text(found)
    assert all("--set update_kernel=torch" in command for command in found.commands)
    assert ask("llama-3.1-8b", 1).config["update_kernel"] == "one_pass"


def test_an_update_that_was_asked_for_is_answered_for() -> None:
    """Records of the path before, which a 4B has, answer where nothing was asked."""
    given = {"update_kernel": "one_pass"}
    open_, asked = (
        answer(question_for([], "qwen3-4b", 1, 4096, 1, "h200", of)) for of in (None, given)
    )
    assert open_.config["update_kernel"] == "torch" and open_.verdict.machine
    assert open_.todays_lead.value == pytest.approx(asked.verdict.lead_pct.value)
    assert asked.config["update_kernel"] == "one_pass" and not asked.verdict.machine
    assert asked.todays_lead is None
    full = answer(question_for([], "llama-3.1-8b", 1, 4096, 2, "h200", given))
    assert full.config["update_kernel"] == "one_pass"


def test_a_batch_for_which_fp8_alone_has_room_is_told() -> None:
    found = ask("llama-3.1-8b", 1)
    assert found.larger.what == "micro_batch_size=2 update_kernel=torch"
    assert found.larger.then.value > found.verdict.lead_pct.value
    said = " ".join(advice_text(found).split())
    assert f"FP8 alone has room for {found.larger.what}: tokens/s +" in said
    assert "over BF16 at batch 1, predicted" in said


def test_none_is_told_where_bf16_has_room_too_or_little_is_gained() -> None:
    assert ask("llama-3.2-1b", 1).larger is None  # either precision fits at what a pass may have
    question = question_for([], "llama-3.2-3b", 1, 4096, 7, "h200")  # 8 fits in FP8 alone
    shape = shape_of("llama-3.2-3b")
    law = law_of(shape, question.gpu, None)
    assert larger_alone(question.config, shape, law, question.capacity_gib, 32768) is None


def test_the_larger_batch_fits_and_bf16s_would_not() -> None:
    at_one, room = ask("llama-3.1-8b", 1), 1 - HEADROOM
    larger = ask("llama-3.1-8b", 2)
    (fp8,) = (option for option in larger.options if option.label == "FP8 tensorwise")
    rates = [found.tokens_per_second_per_gpu.value for found in (at_one.options[0], fp8)]
    told = at_one.larger.then
    assert told.low < 100 * (rates[1] / rates[0] - 1) < told.high
    assert fp8.memory_gib.value <= room * at_one.capacity_gib < larger.options[0].memory_gib.value
