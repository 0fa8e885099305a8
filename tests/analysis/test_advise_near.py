"""What an answer tells of settings near the one that is asked about."""

from __future__ import annotations

from typing import Any

import pytest

from fp8study.analysis.advice.answer import NEXT_TO_THIS, Advice
from fp8study.analysis.advice.evidence import BF16_HEAD
from fp8study.analysis.advice.figures import MEASURED, MODELLED
from fp8study.analysis.advice.question import answer, question_for
from fp8study.report.advice_text import advice_text


def ask(model: str, num_gpus: int, batch: int | None, gpu: str, **others: Any) -> Advice:
    values = {"max_grad_norm": 1.0, **others}
    return answer(question_for([], model, num_gpus, 4096, batch, gpu, values))


def test_a_neighbour_in_todays_form_is_told_where_the_answer_is_of_earlier_kernels() -> None:
    asked = "llama-3.2-1b-untied", 4, 1, "h100-80gb"
    found, unclipped = ask(*asked), ask(*asked, max_grad_norm=None)
    assert found.verdict.num_pairs and found.verdict.label.endswith(BF16_HEAD)
    near = {change.what: change.then for change in found.nearest}
    assert near["max_grad_norm=none"] == unclipped.verdict.lead_pct
    assert unclipped.verdict.is_as_today and not unclipped.nearest


def test_an_interval_is_as_wide_as_the_law_was_off_of_gradients_clipped_otherwise() -> None:
    found = ask("llama-3.2-1b-untied", 4, 1, "h100-80gb")
    (now,) = (o for o in found.options if o.label == "FP8 tensorwise, FP8 all-gather")
    assert now.beside is not None and not now.beside.clips_alike
    assert now.interval_from == NEXT_TO_THIS
    assert now.lead_pct is not None and now.lead_pct.high is not None
    assert now.lead_pct.high - now.lead_pct.value == pytest.approx(now.beside.off_points)


@pytest.mark.parametrize(
    ("model", "num_gpus", "batch", "said"),
    [
        ("llama-3.1-8b", 8, None, "num_gpus=4 max_grad_norm=none"),  # the README's question
        ("qwen3-4b", 1, 1, "max_grad_norm=none, another form of the path"),
        ("llama-3.2-3b", 1, 2, "num_gpus=2 micro_batch_size=1"),
    ],
)
def test_where_nothing_like_it_was_timed_the_setting_least_apart_is_told_with_all_in_which_it_is(
    model: str, num_gpus: int, batch: int | None, said: str
) -> None:
    found = ask(model, num_gpus, batch, "h100-80gb")
    assert not found.verdict.num_pairs
    near = found.nearest[0]
    assert near.what == said and near.then.kind == MEASURED


def test_sharding_on_one_gpu_and_other_optimizer_states_are_told_as_apart() -> None:
    (near,) = ask("llama-3.2-1b", 16, 8, "h100-80gb", max_grad_norm=None).nearest
    assert near.what == "num_gpus=1 strategy=fsdp2"
    (near,) = ask("llama-3.2-1b", 2, None, "h100-80gb", optimizer_state="bf16").nearest
    assert near.what == "micro_batch_size=1 optimizer_state=fp32"


def test_a_graph_on_as_many_gpus_as_none_was_timed_on_is_beyond_what_was_measured() -> None:
    found = ask("llama-3.2-1b", 4, 1, "h200")
    assert found.config["step_launch"] == "as_graph"
    assert "steps as one CUDA graph on 4 GPUs: never timed on H200" in found.beyond
    assert found.verdict.lead_pct is not None and found.verdict.lead_pct.kind == MODELLED
    assert not any("CUDA graph" in line for line in ask("llama-3.2-1b", 1, 1, "h200").beyond)


def test_above_four_gpus_it_is_said_that_the_loss_head_stays_in_bf16() -> None:
    four, eight = (advice_text(ask("llama-3.1-8b", n, None, "h100-80gb")) for n in (4, 8))
    said = "on more than 4 GPUs the loss head stays in BF16"
    assert said in eight and said not in four
    tied = ask("llama-3.2-1b", 8, None, "h100-80gb")  # which never has it in FP8 on several
    assert said not in advice_text(tied)


def test_a_small_steps_lead_by_kernel_is_told_beside_what_its_graph_should_give() -> None:
    found = ask("llama-3.2-1b", 4, 1, "h200")
    assert (found.config["step_launch"], found.verdict.lead_pct.kind) == ("as_graph", MODELLED)
    told = {change.what: change.then for change in found.nearest}
    assert told["step_launch=by_kernel"].value < 0
