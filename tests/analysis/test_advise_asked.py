"""What is asked besides the model: other fields, tokens, more GPUs than were ever timed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis.advice.advise import chosen
from fp8study.analysis.advice.answer import Advice, Option
from fp8study.analysis.advice.evidence import (
    MEASURED,
    MODELLED,
    PREDICTED,
    Decisions,
    Quantity,
)
from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.decision import CHECK, MORE
from fp8study.analysis.laws import account
from fp8study.analysis.laws.cells import read_runs
from fp8study.analysis.runs.naming import NORM_AS_SUMMED
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.report import predictions
from fp8study.report.advice_text import advice_text
from fp8study.report.answer import settled
from fp8study.report.page import load_report
from fp8study.report.words import number
from tests.analysis.test_leads import store_leads
from tests.checkout import ROOT
from tests.factories import make_record, store


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def ask(model: str, num_gpus: int, gpu: str, *further: Any) -> Any:
    return answer(question_for([], model, num_gpus, 4096, 1, gpu, *further))


def test_what_would_fit_can_be_asked_about_as_it_is_written() -> None:
    first = ask("llama-3.1-8b", 1, "h100-80gb")
    assert not first.fits
    (cure,) = (c for c in first.remedies if c.what == "--set master_dtype=bf16")
    assert "check the loss first" in advice_text(first)
    again = ask("llama-3.1-8b", 1, "h100-80gb", {"master_dtype": "bf16"})
    assert again.fits
    assert again.options[0].memory_gib.value == pytest.approx(cure.then.value)
    assert "Set for it: master_dtype=bf16" in advice_text(again)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_gpus": 2}, "--set: 'num_gpus' has an option of its own; give --num-gpus"),
        ({"skip": "*.o_proj"}, "--set: 'skip' is nothing"),  # a lead of other layers
        ({"master_dtpye": "bf16"}, "one of .*master_dtype"),
        ({"master_dtype": "fp16"}, "master_dtype: 'fp16' is not valid"),
    ],
)
def test_other_fields_are_checked(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ask("llama-3.1-8b", 1, "h200", fields)


def test_days_follow_from_tokens_gpus_and_rates() -> None:
    found = ask("llama-3.1-8b", 1, "h200", None, 86400e6)
    days = 1e6 / found.options[0].tokens_per_second_per_gpu.value
    assert f"days for 86 billion tokens, at these rates: {days:,.1f} in BF16" in advice_text(found)
    size = ask("llama-3.1-8b", 1, "h200").tokens
    assert size == pytest.approx(20 * 8.03e9, rel=0.01)


@pytest.mark.parametrize("tokens", [-1.0, 0.0, 1.0, 1e40, float("nan"), float("inf")])
def test_tokens_that_nobody_trains_on_are_refused(tokens: float) -> None:
    with pytest.raises(UserError, match=r"^--tokens: .* outside 1e\+06 to 1e\+15; give a number"):
        ask("llama-3.1-8b", 1, "h200", None, tokens)


def test_more_gpus_than_were_timed_are_not_known_better_than_fewer() -> None:
    def width(num_gpus: int) -> float:
        lead = ask("llama-3.1-8b", num_gpus, "h100-80gb").verdict.lead_pct
        assert lead.kind == MODELLED
        return round(lead.high - lead.low, 6)

    assert width(64) >= width(8) >= width(4)
    assert "Not measured. By the laws: " in advice_text(ask("llama-3.1-8b", 8, "h100-80gb"))


def test_more_gpus_than_were_timed_are_known_half_as_well() -> None:
    few, many = (answer(question_for([], "llama-3.1-8b", n, 4096, 4, "h200")) for n in (4, 5))
    widths = [found.options[1].lead_pct.high - found.options[1].lead_pct.value
              for found in (few, many)]  # fmt: skip
    assert widths[1] == pytest.approx(account.WIDER * widths[0])
    text = " ".join(advice_text(many).split())
    assert "points, 2 times what nine of ten leads were within where the GPU decides" in text


def test_no_interval_speaks_of_fewer_than_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "WIDER", 10.0)
    found = answer(question_for([], "llama-3.2-1b", 4, 256, 1, "h100-80gb"))
    lows = [option.lead_pct.low for option in found.options if option.lead_pct]
    assert min(lows) == -100
    assert all(option.tokens_per_second_per_gpu.low >= 0 for option in found.options)


@pytest.mark.parametrize(("gpu", "is_elsewhere"), [("h200", False), ("rtx-4090-24gb", True)])
def test_an_advice_says_how_far_the_laws_were_off_as_the_page_does(
    gpu: str, is_elsewhere: bool
) -> None:
    stored = load_report(ROOT / "results").stored
    cells = predictions.cells([run for run in stored if run.machine_label != "local"])
    leads = account.lead_verdicts(account.lead_table(cells))
    sizes = account.memory_verdicts(account.memory_table(cells))
    leads, sizes = (of[(of["test"] == account.OTHER_GPU) == is_elsewhere] for of in (leads, sizes))
    found = ask("llama-3.2-1b", 1, gpu)
    by_test = {each.test: each for each in found.law_errors}
    assert set(by_test) == {*leads["test"], *sizes["test"]} and by_test
    for _, row in leads.iterrows():
        assert by_test[row["test"]].mean_points == pytest.approx(row["mean_points"])
        assert by_test[row["test"]].num_leads == row["num_cells"]
    for _, row in sizes.iterrows():
        assert by_test[row["test"]].mean_pct == pytest.approx(row["mean_pct"])
    text = " ".join(advice_text(found).split())
    ends = [number(leads["most_points"].agg(end), ".1f") for end in ("min", "max")]
    within = f"nine of ten within {' to '.join(dict.fromkeys(ends))} (goal: at most 6)"
    is_few = leads["num_cells"].sum() < 10
    assert is_few == is_elsewhere  # where nine of ten mean nothing
    assert (within in text) != is_few and ("too few to say" in text) == is_few
    told = f"{leads['num_cells'].sum()} leads"
    assert f"{told} on GPUs they were not fitted to" in text if is_elsewhere else told in text
    missed = f"({sizes['num_missed'].sum()} of {sizes['num_cells'].sum()} by more than 5 %)"
    assert missed in text


def test_an_architecture_without_a_record_gets_no_interval() -> None:
    found = ask("llama-3.2-1b", 8, "b200")
    assert all(option.tokens_per_second_per_gpu.low is None for option in found.options)
    assert all(lead.low is lead.high is None for o in found.options if (lead := o.lead_pct))
    assert found.verdict.action == MORE
    text = " ".join(advice_text(found).split())
    assert "has no interval: no Blackwell GPU is in the records" in text


def test_the_plain_path_answers_beside_a_prediction_as_on_the_first_page() -> None:
    settings = settled(load_report(ROOT / "results"))
    plain = settings[settings["is_plain"]].to_dict("records")
    assert {"llama-3.2-1b", "llama-3.2-3b", "qwen3-4b"} == {row["model"] for row in plain}
    for row in plain:
        found = ask(row["model"], row["num_gpus"], "h200")
        assert found.verdict.lead_pct.kind != MEASURED
        (near,) = found.nearest
        assert near.what == f"path=plain master_dtype={row['master_dtype']}"
        assert near.then.value == pytest.approx(row["lead_pct"])


def test_the_same_run_with_clipped_gradients_is_told_first() -> None:
    leads = load_report(ROOT / "results").leads
    here = leads["setting"].str.endswith(NORM_AS_SUMMED) & leads["ci_low_pct"].notna()
    (row,) = leads[here & (leads["model"] == "llama-3.1-8b")].to_dict("records")
    assert row["arm"] == "FP8 tensorwise, SwiGLU kernels" and row["num_gpus"] == 2
    assert "gradients clipped at 1" in row["setting"]
    batch = int(row["micro_batch_size"])
    found = answer(question_for([], row["model"], 2, 4096, batch, "h200"))
    assert found.verdict.lead_pct.kind != MEASURED
    assert found.nearest[0].what == "max_grad_norm=1"
    assert found.nearest[0].then.value == pytest.approx(row["lead_pct"])


def test_an_answer_names_the_form_that_it_rests_on(tmp_path: Path) -> None:
    """Every run on one GPU has NCCL for its collectives, and none is of that form for it."""
    alone = {"model": "llama-3.2-1b", "strategy": "none", "path": "tuned", "max_grad_norm": 1.0,
             "sequence_length": 4096, "master_dtype": "fp32"}  # fmt: skip
    for repeat in (0, 1):
        for precision, rate in (("bf16", 10_000.0), ("fp8_tensorwise", 13_000.0 + repeat)):
            record = make_record(
                run_id=f"{precision}-{repeat}", repeat=repeat, precision=precision,
                results={"tokens_per_second_per_gpu": rate},
            )  # fmt: skip
            asked = record.config | alone | {"gradient_norm": "separate"}
            record.config.update(make_config(asked).resolved().to_dict())
            store(tmp_path, "reference/box", record)
    batch = record.config["micro_batch_size"]
    asked = question_for([], "llama-3.2-1b", 1, 4096, batch, "h200", {"max_grad_norm": 1.0})
    said = " ".join(advice_text(answer(asked, tmp_path)).split())
    assert "without gradient_norm=separate, as the tuned path is now" in said


@pytest.mark.parametrize(
    ("model", "num_gpus", "batch", "norm"),
    [
        ("llama-3.2-1b", 2, 1, "as_summed"),  # small steps, with torch's AdamW by itself
        ("llama-3.1-8b", 2, 1, "as_summed"),  # NCCL by itself
        ("llama-3.1-8b", 1, 2, "by_kernel"),  # fits with no FP8 weights kept
    ],
)
def test_a_norm_that_is_asked_for_keeps_the_form_that_it_goes_with(
    model: str, num_gpus: int, batch: int, norm: str
) -> None:
    values = {"max_grad_norm": 1.0, "gradient_norm": norm}
    asked = question_for([], model, num_gpus, 4096, batch, "h200", values).config
    assert (asked.gradient_norm, asked.update_kernel) == (norm, "one_pass")
    own = question_for([], model, num_gpus, 4096, batch, "h200", {"max_grad_norm": 1.0}).config
    assert own.gradient_norm == "separate"


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
    assert changed["path"] == "plain" and lead.value == pytest.approx(10)


def test_laws_that_nothing_tested_say_so() -> None:
    found = ask("llama-3.2-1b", 1, "rtx-4090-24gb")
    text = advice_text(dataclasses.replace(found, law_errors=()))
    assert "laws so far (page Predictions): untested on another GPU" in text


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as error:
        ask("no-such-model", 2000, "no-such-gpu", {"skip": "*", "seed": 1}, -1.0)
    starts = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert starts == ["model", "--gpu", "--num-gpus", "--tokens", "--set", "--set"]


def test_a_batch_near_the_largest_is_answered_for_without_other_batches_beyond_it() -> None:
    found = answer(question_for([], "llama-3.2-1b", 1, 4096, 300_000_000, "h200"))
    assert not found.fits
    assert not any(c.what == "micro_batch_size=1200000000" for c in found.changes)


def test_the_table_holds_its_columns_at_any_batch() -> None:
    found = answer(question_for([], "llama-3.1-8b", 8, 4096, 10**8, "h100-80gb"))
    rows = [row for row in advice_text(found).splitlines() if row.endswith(" x!")]
    assert len(rows) == len(found.options)
    assert all(row.endswith(" >9999 x!") and len(row) <= 80 for row in rows)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 40, "num_key_value_heads": 7, "hidden_size": 5120},
         "has 40 heads and 7 key-value heads; heads must be a multiple"),
        ({"num_attention_heads": 33, "num_key_value_heads": 11}, "hidden size .* not a multiple"),
        ({"model_type": "qwen2", "num_attention_heads": 33, "num_key_value_heads": 11},
         "a hidden_size of 4096 and 33 heads; hidden_size must be a multiple"),
        ({"vocab_size": 10**12}, r"has 8.2e\+15 weights, more than 1e\+14"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_are_refused_in_a_line(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape | fields))
    with pytest.raises(UserError, match=words) as caught:
        ask(str(tmp_path), 1, "h200")
    assert str(caught.value).startswith("model: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("num_gpus", [4, 64])
def test_a_lead_is_known_no_better_than_where_it_was_measured_next_to_it(num_gpus: int) -> None:
    found = ask("llama-3.2-3b", num_gpus, "h200")
    option = next(o for o in found.options if o.label == "FP8 tensorwise, FP8 all-gather")
    beside, lead = option.beside, option.lead_pct
    assert (beside.num_gpus, beside.micro_batch_size) == (2, 1)
    (there,) = (o for o in ask("llama-3.2-3b", 2, "h200").options if o.label == option.label)
    assert beside.lead_pct.value == pytest.approx(there.lead_pct.value, abs=0.1)
    assert beside.lead_pct.kind == MEASURED and beside.lead_pct.run_ids
    assert beside.off_points > 20
    wider = account.wider(len(found.beyond))
    assert lead.high - lead.value == pytest.approx(wider * beside.off_points)
    assert lead.low == pytest.approx(2 * lead.value - lead.high)


def test_what_was_measured_next_to_a_prediction_is_said_with_what_the_interval_is_from() -> None:
    def said(found: Advice) -> str:
        return " ".join(advice_text(found).split())

    text = said(ask("llama-3.2-1b", 3, "h200"))
    assert re.search(
        r"measured next to it: −18.2 % on 2 GPUs, batch 1, where the law says −\d", text
    )
    assert "measured next to it" not in advice_text(ask("llama-3.2-1b", 2, "h200"))
    assert "within where the host is busy" in said(ask("llama-3.2-3b", 3, "h200"))
    found = ask("llama-3.2-3b", 4, "h200")
    option = next(o for o in found.options if o.label == "FP8 tensorwise, FP8 all-gather")
    assert option.interval_from == "where it was measured next to this"
    longer = answer(question_for([], "llama-3.2-1b", 4, 16384, 1, "h200"))
    assert "points, 2 times what nine of ten leads were within where the GPU" in said(longer)


def test_another_path_gather_or_a_far_batch_is_not_next_to_a_run() -> None:
    far = answer(question_for([], "llama-3.2-1b", 4, 4096, 3, "h200"))
    assert all(option.beside is None for option in far.options)
    elsewhere = ask("llama-3.2-1b", 4, "h100-80gb")
    assert all(option.beside is None for option in elsewhere.options)
    found = {o.label: o.beside for o in ask("llama-3.2-3b", 4, "h200").options}
    fp8, bf16 = (found[f"FP8 tensorwise, {name} all-gather"] for name in ("FP8", "BF16"))
    assert fp8.lead_pct.value < -40 < 0 < bf16.lead_pct.value
    assert found["BF16"] is found["FP8 rowwise"] is None


def test_the_measured_step_stands_beside_the_laws() -> None:
    for num_gpus, is_measured in ((2, True), (3, False)):
        found = ask("llama-3.2-1b", num_gpus, "h200")
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
    assert "By the laws: measure more, as the lead may lie on either side of 3 %." in text
