"""What an answer names where it is open: another way to do the step, or clipped gradients."""

from __future__ import annotations

import pytest

from fp8study.analysis.advice.figures import MEASURED
from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.decision import CHECK, MORE
from fp8study.analysis.laws import account
from fp8study.report.advice_text import advice_text
from tests.analysis.test_advise_asked import ask


def test_an_open_answer_names_a_larger_batch_at_which_fp8_surely_pays() -> None:
    found = ask("llama-3.1-8b", 8, "h200")
    assert found.verdict.action == MORE and found.instead
    assert found.instead.what == "micro_batch_size=2" and found.instead.then.value > 0
    there = answer(question_for([], "llama-3.1-8b", 8, 4096, 2, "h200"))
    assert there.verdict.action == CHECK
    assert there.verdict.lead_pct.value == pytest.approx(found.instead.lead_pct.value)
    mine, its = (each.options[0].tokens_per_second_per_gpu.value for each in (found, there))
    assert its > mine
    text = " ".join(advice_text(found).split())
    assert "With micro_batch_size=2 FP8 should pay: tokens/s +" in text
    assert there.instead is None


@pytest.mark.parametrize("batch", [1, 2])
def test_layers_are_recomputed_only_where_that_makes_room(batch: int) -> None:
    found = answer(question_for([], "llama-3.2-1b", 8, 4096, batch, "h200"))
    assert found.verdict.action == MORE and found.instead
    assert found.instead.what == "micro_batch_size=8"
    there = answer(question_for([], "llama-3.2-1b", 8, 4096, 8, "h200"))
    assert there.verdict.lead_pct.value == pytest.approx(found.instead.lead_pct.value)


def test_where_bf16_is_slower_so_the_lead_is_over_bf16_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(account, "wider", lambda num_beyond: 1.0 + num_beyond)
    found = ask("qwen3-14b", 8, "h100-80gb")  # which has room for more with recomputed layers alone
    assert found.verdict.action == MORE and found.instead
    assert found.instead.what == "micro_batch_size=2 activation_checkpointing=true"
    there = answer(question_for([], "qwen3-14b", 8, 4096, 2, "h100-80gb",
                                {"activation_checkpointing": True}))  # fmt: skip
    rates = [[option.tokens_per_second_per_gpu.value for option in (each.options[0], each.chosen)]
             for each in (found, there)]  # fmt: skip
    (bf16, fp8), (bf16_there, fp8_there) = rates
    assert bf16_there < bf16 and fp8 < fp8_there
    lead = found.instead.lead_pct
    assert lead.value == pytest.approx(100 * (fp8_there / bf16 - 1), abs=0.1)
    assert 0 < lead.low < there.verdict.lead_pct.low and lead.value < there.verdict.lead_pct.value
    assert f") over the faster BF16, {lead.kind}" in " ".join(advice_text(found).split())


def test_an_open_answer_names_the_graph_by_which_fp8_surely_pays() -> None:
    clips = {"max_grad_norm": 1.0}
    found = answer(question_for([], "qwen3-4b", 2, 4096, 2, "h100-80gb", clips))
    assert found.verdict.action == MORE and found.instead
    assert found.instead.what == "step_launch=as_graph"
    there, by_kernel = (
        answer(question_for([], "qwen3-4b", 2, 4096, 2, "h100-80gb", clips | {"step_launch": how}))
        for how in ("as_graph", "by_kernel")
    )
    assert there.verdict.action == CHECK
    assert there.verdict.lead_pct.value == pytest.approx(found.instead.lead_pct.value)
    assert by_kernel.instead is None or "as_graph" not in by_kernel.instead.what


def test_an_open_answer_says_what_is_known_of_clipped_steps() -> None:
    found = ask("llama-3.1-8b", 4, "h200")
    assert found.verdict.action == MORE and found.clipped
    assert found.clipped.action == CHECK and found.clipped.lead_pct.kind == MEASURED
    assert "clipped, --set max_grad_norm=1: FP8, check its loss first" in " ".join(
        advice_text(found).split()
    )
