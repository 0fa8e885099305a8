"""Which timing answers, and what else was timed is told beside it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fp8study.analysis.advice.answer import Option
from fp8study.analysis.advice.by_law import chosen
from fp8study.analysis.advice.evidence import BF16_HEAD, Decisions
from fp8study.analysis.advice.figures import MEASURED, PREDICTED, Quantity
from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.decision import CHECK, TO_TRAIN_IN
from fp8study.analysis.laws.cells import read_runs
from fp8study.analysis.runs.naming import GRAPH, NORM_AS_SUMMED
from fp8study.core.config import make_config
from fp8study.core.records import read_record
from fp8study.report.advice_text import advice_text
from fp8study.report.answer import settled
from fp8study.report.page import load_report
from tests.analysis.test_advise import RESULTS, advice
from tests.analysis.test_advise_asked import ask
from tests.analysis.test_leads import store_leads
from tests.checkout import ROOT
from tests.factories import make_record, store


def test_the_plain_path_answers_beside_a_prediction_as_on_the_first_page() -> None:
    settings = settled(load_report(ROOT / "results"))
    plain = settings[settings["is_plain"]].to_dict("records")
    assert {"llama-3.2-3b", "qwen3-4b", "qwen3-14b"} == {row["model"] for row in plain}
    for row in plain:
        found = ask(row["model"], row["num_gpus"], "h200")
        assert found.verdict.lead_pct.kind != MEASURED
        said = [TO_TRAIN_IN[action] for action in (row["action"], found.verdict.action)]
        assert said != ["bf16", "fp8"]
        near = found.nearest[-1]
        recipe = {"fp8_tensorwise": "", "fp8_rowwise": ", FP8 rowwise"}[row["precision"]]
        assert near.what == f"path=plain master_dtype={row['master_dtype']}{recipe}"
        assert near.then.value == pytest.approx(row["lead_pct"])


def test_the_same_run_with_clipped_gradients_is_told_first() -> None:
    leads = load_report(ROOT / "results").leads
    here = leads["setting"].str.endswith(NORM_AS_SUMMED) & leads["ci_low_pct"].notna()
    here &= (leads["model"] == "llama-3.1-8b") & leads["micro_batch_size"].eq(2)
    here &= leads["arm"].str.endswith("both layouts, FP8 loss head") & leads["num_gpus"].eq(2)
    assert leads.loc[here, "setting"].str.contains("gradients clipped at 1").all()
    found = answer(question_for([], "llama-3.1-8b", 2, 4096, 2, "h200"))
    assert found.verdict.lead_pct.kind != MEASURED
    assert found.nearest[0].what == "max_grad_norm=1"
    clipped = answer(question_for([], "llama-3.1-8b", 2, 4096, 2, "h200", {"max_grad_norm": 1.0}))
    assert found.nearest[0].then == clipped.verdict.lead_pct
    assert found.nearest[0].then.value in {*leads.loc[here, "lead_pct"]}


def test_beside_what_one_layout_made_stands_what_the_law_says_of_both() -> None:
    found = answer(question_for([], "llama-3.2-1b", 1, 4096, 4, "h200", {"max_grad_norm": 1.0}))
    assert found.verdict.label == "FP8 tensorwise, one layout"
    options = {o.label: o for o in found.options if o.precision == "fp8_tensorwise"}
    assert [*options] == [found.verdict.label, "FP8 tensorwise"]
    now = options["FP8 tensorwise"].lead_pct
    assert now is not None and now.kind == PREDICTED
    said = " ".join(advice_text(found).split())
    assert f"as the tuned path is now: {now.value:+.1f} % (" in said


def test_where_no_timing_holds_the_law_answers_and_the_reason_is_told() -> None:
    found = answer(question_for([], "llama-3.2-1b", 1, 4096, 8, "h200", {"max_grad_norm": 1.0}))
    assert found.verdict.lead_pct.kind == PREDICTED and found.verdict.num_void == 2
    assert found.verdict.action == CHECK
    said = " ".join(advice_text(found).split())
    assert "Not counted: 2 runs of this setting, in which torch still allocated" in said


def test_it_is_told_how_far_the_leads_of_hosts_that_disagree_are_apart() -> None:
    found = answer(question_for([], "llama-3.1-8b", 4, 4096, 1, "h200", {"max_grad_norm": 1.0}))
    now = next(o for o in found.options if o.label == "FP8 tensorwise, FP8 all-gather")
    first, second = now.pairs_pct
    both = 100 * (math.sqrt((1 + first / 100) * (1 + second / 100)) - 1)
    assert now.lead_pct.value == pytest.approx(both, abs=0.1) and second - first > 10
    said = " ".join(advice_text(found).split())
    assert f"; pairs from {first:+.1f} to {second:+.1f} %" in said
    near = [o for o in found.options if o.pairs_pct and o.pairs_pct[1] - o.pairs_pct[0] < 10]
    assert said.count("; pairs from ") == 1 and len(near) > 0


def test_an_answer_is_of_todays_kernels_where_earlier_ones_were_faster_by_chance() -> None:
    leads = load_report(ROOT / "results").leads
    here = leads["model"].eq("llama-3.2-3b") & leads["setting"].str.endswith("by kernel")
    here &= leads["machine"].eq("h200x4") & ~leads["setting"].str.contains(GRAPH)
    ours = leads[here & leads["micro_batch_size"].eq(1)].set_index("arm")["lead_pct"]
    today, earlier = (f"FP8 tensorwise, SwiGLU kernels{more}" for more in (", both layouts", ""))
    assert ours[earlier] > ours[today]
    others = {"max_grad_norm": 1.0, "step_launch": "by_kernel"}
    found = answer(question_for([], "llama-3.2-3b", 1, 4096, 1, "h200", others))
    assert found.verdict.label == f"FP8 tensorwise, {BF16_HEAD}"
    assert found.verdict.lead_pct.value == ours[today]


def test_beside_the_answer_stands_what_an_earlier_form_made_of_it_and_todays_next_to_it() -> None:
    given = ("llama-3.1-8b", 2, 4096, 1, "h200")
    found, before, clipped = (
        answer(question_for([], *given, others))
        for others in ({}, {"update_kernel": "torch"}, {"max_grad_norm": 1.0})
    )
    assert found.verdict.lead_pct.kind == PREDICTED and not found.settings
    assert before.verdict.lead_pct.kind == clipped.verdict.lead_pct.kind == MEASURED
    assert [(change.what, change.then) for change in found.nearest[:2]] == [
        ("update_kernel=torch fp8_all_gather=false", before.verdict.lead_pct),
        ("max_grad_norm=1, one layout", clipped.verdict.lead_pct),
    ]


def test_an_earlier_form_that_was_timed_is_named(tmp_path: Path) -> None:
    """Every run on one GPU has NCCL for its collectives, and none is of that form for it."""
    alone = {"model": "llama-3.2-1b", "strategy": "none", "path": "tuned", "max_grad_norm": 1.0,
             "sequence_length": 4096, "micro_batch_size": 8, "master_dtype": "fp32",
             "skip": ()}  # fmt: skip
    for repeat in (0, 1):
        for precision, rate in (("bf16", 10_000.0), ("fp8_tensorwise", 13_000.0 + repeat)):
            record = make_record(
                run_id=f"{precision}-{repeat}", repeat=repeat, precision=precision,
                results={"tokens_per_second_per_gpu": rate},
            )  # fmt: skip
            asked = record.config | alone | {"gradient_norm": "separate"}
            record.config.update(make_config(asked).resolved().to_dict())
            store(tmp_path, "reference/box", record)
    asked = question_for([], "llama-3.2-1b", 1, 4096, 8, "h200", {"max_grad_norm": 1.0})
    said = " ".join(advice_text(answer(asked, tmp_path)).split())
    unknown = "how far that may be off is unknown: too few predictions were tested"
    assert f"predicted. {unknown} nearest measurement, gradient_norm=separate: +30.0 %" in said


def test_what_is_told_beside_an_answer_keeps_the_update_that_was_asked_for() -> None:
    asked = question_for([], "llama-3.1-8b", 2, 4096, 2, "h200", {"update_kernel": "torch"})
    leads = load_report(ROOT / "results").leads
    ours = answer(asked).nearest[0]
    assert ours.what == "max_grad_norm=1"
    (lead,) = leads["lead_pct"][
        leads["run_ids"].map(lambda ids: {*ours.then.run_ids} == {*ids.split()})
    ]
    (row,) = leads[leads["lead_pct"] == lead].to_dict("records")
    assert "one pass" not in row["setting"] and row["arm"] == "FP8 tensorwise"


def test_the_readers_own_machine_answers_for_the_plain_path_first(tmp_path: Path) -> None:
    for place, lead in (("reference/h200x1", 1.3), ("local", 1.1)):
        store_leads(tmp_path, 1, lead, lead, lead, place=place)
    runs = [*read_runs(tmp_path), *read_runs(tmp_path, "local")]
    fields = {"model": "llama-3.2-1b", "num_gpus": 1, "sequence_length": 4096, "path": "tuned"}
    asked = make_config(fields | {"micro_batch_size": 1}).resolved()
    ((changed, lead),) = Decisions(runs).nearest(asked, "NVIDIA H200", as_asked=False)
    assert changed == "path=plain master_dtype=fp32" and lead.value == pytest.approx(10)


def test_the_measured_step_stands_beside_the_laws() -> None:
    for num_gpus, is_measured in ((2, True), (3, False)):
        found = ask("llama-3.2-1b", num_gpus, "h200", {"step_launch": "by_kernel"})
        text = advice_text(found)
        for option in found.options[:2]:
            step = 1e3 * 4096 / option.tokens_per_second_per_gpu.value
            assert (f"; measured {step:,.0f}\n" in text) == is_measured


def option_of(label: str, low: float, value: float, high: float) -> Option:
    figure = Quantity(1.0, PREDICTED)
    lead = Quantity(value, PREDICTED, low, high)
    return Option("fp8_tensorwise", label, False, figure, lead, figure, "")


@pytest.mark.parametrize(
    ("leads", "label"),
    [
        ({"wide": (-12.3, 11.7, 35.7), "narrow": (4.9, 11.5, 18.1)}, "narrow"),
        ({"wide": (-12.3, 11.7, 35.7), "narrow": (1.0, 7.0, 13.0)}, "narrow"),
        ({"both": (30.1, 33.4, 36.7), "pay": (24.6, 36.6, 48.7)}, "pay"),
        ({"wide": (-14.9, 17.4, 49.8), "narrow": (-13.6, -3.5, 6.6)}, "wide"),
        ({"never": (-9.0, -6.0, -3.0), "may": (-18.1, 5.9, 29.9)}, "may"),
        ({"worse": (-25.0, -13.0, -1.0), "less": (-9.0, -6.0, -3.0)}, "less"),
    ],
)
def test_the_recipe_is_the_one_that_surely_leads(
    leads: dict[str, tuple[float, float, float]], label: str
) -> None:
    assert chosen([option_of(name, *ends) for name, ends in leads.items()]).label == label


def test_neighbours_are_told_the_same() -> None:
    told = [
        answer(question_for([], "llama-3.1-8b", 4, 4096, batch, "h200")).verdict
        for batch in (2, 3, 4)
    ]
    assert {verdict.label for verdict in told} == {"FP8 tensorwise, FP8 all-gather"}
    assert {verdict.action for verdict in told} == {CHECK}


def test_measure_more_says_why() -> None:
    text = " ".join(advice_text(ask("llama-3.1-8b", 8, "h100-80gb")).split())
    assert (
        "Measure more (extrapolated, not measured), as the lead may lie on either side of 3 %."
        in text
    )


def test_a_graph_timed_before_its_gradients_shared_memory_still_answers() -> None:
    """The 8B's graphs on two GPUs were timed with gradients in memory of their own alone."""
    found = advice("llama-3.1-8b", 2, max_grad_norm=1.0, step_launch="as_graph")
    lead = found.verdict.lead_pct
    assert (found.config["gradient_pool"], lead.kind) == ("shared", MEASURED)
    records = [read_record(RESULTS / name / "run.json") for name in lead.run_ids]
    assert {record.config["gradient_pool"] for record in records} == {"own"}
    told = "timed with gradients in memory of their own"
    assert told in advice_text(found)
    small = advice("llama-3.2-1b-untied", 2, max_grad_norm=1.0)  # timed in either form
    assert (small.config["step_launch"], small.verdict.lead_pct.kind) == ("as_graph", MEASURED)
    assert told not in advice_text(small)


def test_a_recipe_that_is_known_better_is_not_named_before_a_faster_one() -> None:
    tensorwise = option_of("tensorwise", -10.0, 34.3, 78.6)
    rowwise = replace(option_of("rowwise", 15.0, 19.5, 24.0), precision="fp8_rowwise_gw_hp")
    assert chosen([tensorwise, rowwise]).label == "tensorwise"


def test_a_lead_by_the_law_goes_with_rates_by_the_law() -> None:
    """BF16's runs there do not count, and FP8's do: their rate is of another day and GPU."""
    found = answer(question_for([], "llama-3.2-1b", 1, 4096, 8, "h200", {"max_grad_norm": 1.0}))
    bf16, fp8 = found.options[0], found.chosen
    rates = [option.tokens_per_second_per_gpu for option in (bf16, fp8)]
    assert found.verdict.num_void and [each.kind for each in rates] == [PREDICTED] * 2
    lead = 100 * (rates[1].value / rates[0].value - 1)
    assert fp8.lead_pct and fp8.lead_pct.value == pytest.approx(lead)


def test_the_days_are_of_the_path_as_it_is_now_too() -> None:
    found = answer(question_for([], "llama-3.1-8b", 2, 4096, None, "h200", {"max_grad_norm": 1.0}))
    text = " ".join(advice_text(found).split())
    assert found.verdict.label.endswith("one layout")
    assert re.search(r"one layout, [\d.]+ in FP8 tensorwise, FP8 all-gather, as the path is", text)
