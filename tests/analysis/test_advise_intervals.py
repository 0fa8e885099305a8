"""How wide the interval of an answer is, and what that rests on."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from fp8study.analysis.advice import question
from fp8study.analysis.advice.answer import Advice
from fp8study.analysis.advice.by_law import most_pct
from fp8study.analysis.advice.figures import MEASURED, MODELLED, Quantity
from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.decision import CHECK, MORE
from fp8study.analysis.laws import account, speed
from fp8study.analysis.laws.beyond import beyond_table
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.here import law_of
from fp8study.analysis.laws.nearby import as_fp8, cures
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.laws.speed_fit import cell_pairs
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.files import results_dir
from fp8study.core.hardware import find_peak
from fp8study.report import predictions
from fp8study.report.advice_text import advice_text
from fp8study.report.page import load_report
from fp8study.report.words import number
from tests.analysis.test_advise_asked import ask
from tests.checkout import ROOT


def test_a_slow_network_makes_no_answer_surer() -> None:
    """What is waited for is no work of a GPU, beside which the host would be early."""
    clipped, widths = {"max_grad_norm": 1.0}, []
    for rate in (25, 50, 100, 400):
        found = answer(
            question_for([], "llama-3.1-8b", 64, 8192, 1, "h100-80gb", clipped, None, 1024, rate)
        )
        lead = next(o.lead_pct for o in found.options if o.gathers_fp8)
        assert lead and lead.high is not None and lead.low is not None
        widths.append(round(lead.high - lead.low, 9))
    assert widths == sorted(widths, reverse=True)


def test_more_gpus_than_were_timed_are_not_known_better_than_fewer() -> None:
    def widths(num_gpus: int) -> list[float]:
        leads = [o.lead_pct for o in ask("llama-3.1-8b", num_gpus, "h100-80gb").options[1:]]
        assert {lead.kind for lead in leads} == {MODELLED} and len(leads) == 4
        return [round(lead.high - lead.low, 6) for lead in leads]

    def width(num_gpus: int) -> float:
        asked = question_for([], "llama-3.1-8b", num_gpus, 4096, 2, "h100-80gb")
        lead = answer(asked).verdict.lead_pct
        assert lead.kind == MODELLED
        return round(lead.high - lead.low, 6)

    assert width(64) >= width(16) >= width(8)
    few, more, most = map(widths, (8, 16, 64))  # at batch 1 the verdict's recipe changes
    assert all(a <= b <= c for a, b, c in zip(few, more, most, strict=True))
    assert "(extrapolated, not measured), as the lead" in advice_text(
        ask("llama-3.1-8b", 8, "h100-80gb")
    )


def test_more_gpus_than_were_timed_are_known_less_well() -> None:
    found = [answer(question_for([], "llama-3.1-8b", n, 4096, 4, "h200")) for n in (4, 5)]
    few, many = (
        next(option.lead_pct for option in each.options if option.label == "FP8 rowwise")
        for each in found
    )
    assert many.high - many.value == pytest.approx(math.sqrt(2) * (few.high - few.value))
    text = " ".join(advice_text(found[1]).split())
    assert (
        "points; nine of ten predictions were closer where the GPU is the limit, widened 1.4 times"
        in text
    )


def test_no_interval_speaks_of_fewer_than_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "wider", lambda num_beyond: 20.0)
    found = answer(question_for([], "llama-3.2-1b", 4, 256, 1, "h100-80gb"))
    lows = [option.lead_pct.low for option in found.options if option.lead_pct]
    assert min(lows) == -100
    assert all(option.tokens_per_second_per_gpu.low >= 0 for option in found.options)


@pytest.mark.parametrize(("gpu", "is_elsewhere"), [("h200", False), ("h100-80gb", True)])
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
    within = f"nine of ten within {' to '.join(dict.fromkeys(ends))}"
    is_few = leads["num_cells"].sum() < account.FEWEST_LEADS  # where nine of ten mean nothing
    assert (within in text) != is_few and ("too few to say" in text) == is_few
    told = f"{leads['num_cells'].sum()} leads"
    elsewhere = f"{told} on H100s off by"
    assert (elsewhere in text) == is_elsewhere and told in text
    missed = f"({sizes['num_missed'].sum()} of {sizes['num_cells'].sum()} by more than 5 %)"
    assert missed in text


def test_an_architecture_without_a_record_gets_no_interval() -> None:
    found = ask("llama-3.2-1b", 8, "b200")
    assert all(option.tokens_per_second_per_gpu.low is None for option in found.options)
    assert all(lead.low is lead.high is None for o in found.options if (lead := o.lead_pct))
    assert found.verdict.action == MORE
    text = " ".join(advice_text(found).split())
    assert "how far that may be off is unknown: no Blackwell GPU is in the records" in text
    assert "leads on H100s off by" not in text  # that says nothing of a Blackwell's


def test_laws_that_nothing_tested_say_so() -> None:
    found = ask("llama-3.2-1b", 1, "rtx-4090-24gb")
    text = advice_text(dataclasses.replace(found, law_errors=()))
    assert "predictions so far (page Predictions): untested on another GPU" in text


def _are_off_by(points: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the laws be off by no more than this on all that they were tested on."""
    off = dict.fromkeys((False, True), account.NineOfTen((points, points), (points, points)))
    monkeypatch.setattr(question._advisor(results_dir()), "nine_of_ten", off)


@pytest.mark.parametrize("num_gpus", [8, 64])
def test_a_lead_is_known_no_better_than_where_it_was_measured_next_to_it(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _are_off_by(3.0, monkeypatch)
    found = ask("llama-3.2-3b", num_gpus, "h200")
    option = next(o for o in found.options if o.label == "FP8 tensorwise, FP8 all-gather")
    beside, lead = option.beside, option.lead_pct
    assert (beside.num_gpus, beside.micro_batch_size) == (2, 1)
    by_kernel = ask("llama-3.2-3b", 2, "h200", {"step_launch": "by_kernel"}).options
    (there,) = (o for o in by_kernel if o.label == option.label)
    assert beside.lead_pct.value == pytest.approx(there.lead_pct.value, abs=0.1)
    assert beside.lead_pct.kind == MEASURED and beside.lead_pct.run_ids
    assert beside.off_points > 20
    wider = account.wider(len(found.beyond))
    ends = lead.value - lead.low, lead.high - lead.value
    assert min(ends) == pytest.approx(wider * beside.off_points)
    assert (max(ends) == pytest.approx(min(ends))) == (num_gpus == 8)  # or a slower network


def test_what_was_measured_next_to_a_prediction_is_said_with_what_the_interval_is_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(found: Advice) -> str:
        return " ".join(advice_text(found).split())

    text = said(ask("llama-3.2-1b", 3, "h200"))
    assert re.search(
        r"BF16 all-gather, measured next to it: −18.2 % on 2 GPUs, batch 1, where the law says −\d",
        text,
    )
    assert "measured next to it" not in advice_text(ask("llama-3.2-1b", 2, "h200"))
    beside = said(answer(question_for([], "llama-3.1-8b", 2, 4096, 2, "h200")))
    assert (
        "nearest measurement, micro_batch_size=1 update_kernel=torch fp8_all_gather=false" in beside
    )
    assert "closer where the host is busy" in said(ask("llama-3.2-3b", 3, "h200"))
    longer = answer(question_for([], "llama-3.2-1b", 4, 16384, 1, "h200"))
    assert "points; nine of ten predictions were closer where the GPU" in said(longer)
    _are_off_by(3.0, monkeypatch)
    found = ask("llama-3.2-3b", 8, "h200")
    option = next(o for o in found.options if o.label == "FP8 tensorwise, FP8 all-gather")
    assert option.interval_from == "where it was measured next to this"


def test_another_path_gather_or_a_far_batch_is_not_next_to_a_run() -> None:
    far = answer(question_for([], "llama-3.2-1b", 4, 4096, 16, "h200"))
    assert all(option.beside is None for option in far.options)
    elsewhere = ask("llama-3.2-1b", 4, "h100-nvl-94gb")
    assert all(option.beside is None for option in elsewhere.options)
    found = {o.label: o.beside for o in ask("llama-3.2-3b", 8, "h200").options}
    fp8, bf16 = (found[f"FP8 tensorwise, {name} all-gather"] for name in ("FP8", "BF16"))
    assert fp8.lead_pct.value < -40 < 0 < bf16.lead_pct.value
    assert found["BF16"] is found["FP8 rowwise"] is None


def test_neighbours_are_known_alike() -> None:
    """Between where the GPU decides and where the host is late, errors grow without a step."""
    errors = account.NineOfTen(sure=(3.0, 7.0), late=(17.0, 24.0))
    assert errors.at(0.0) == errors.at(speed.HOST_PCT) == (3.0, 7.0)
    assert errors.at(speed.LATE_PCT) == errors.at(200.0) == (17.0, 24.0)
    middle = (speed.HOST_PCT + speed.LATE_PCT) / 2
    assert errors.at(middle) == pytest.approx((10.0, 15.5))
    found = [answer(question_for([], "llama-3.1-8b", 8, tokens, 2, "h100-80gb"))
             for tokens in (3584, 4096)]  # fmt: skip
    assert {each.verdict.action for each in found} == {CHECK}


def test_a_network_that_is_named_is_not_a_range() -> None:
    """A lead reaches to half of the network that is assumed, and no farther than the one named."""

    def lead(**network: float) -> Quantity:
        asked = question_for([], "llama-3.1-8b", 64, 4096, 1, "h200", **network)
        options = answer(asked).options
        return next(o.lead_pct for o in options if o.label == "FP8 tensorwise, BF16 all-gather")

    assumed, half, full = lead(), lead(network=200.0), lead(network=400.0)
    assert half.value < full.value == assumed.value
    assert assumed.high == full.high and full.low > assumed.low == pytest.approx(half.low)
    text = advice_text(answer(question_for([], "llama-3.1-8b", 64, 4096, 1, "h200")))
    said = " ".join(text.split())
    assert "8 nodes, joined by 400 Gb/s for each GPU and 14 µs a hop: assumed" in said
    assert "with the network as it is assumed and half of that" in said
    assert re.search(r"--network 200: \+\d % \(.\d+ to \+\d+\), modelled", said)


@pytest.mark.parametrize(
    ("num_gpus", "rate", "words"),
    [(16, 3000.0, "--network: 3000 is outside 1 to 1600"), (16, math.nan, "--network: nan is out"),
     (8, 400.0, "--network: 8 GPUs are of one node; leave it out")],
)  # fmt: skip
def test_a_network_that_cannot_be_is_refused(num_gpus: int, rate: float, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        question_for([], "llama-3.1-8b", num_gpus, 4096, 1, "h200", network=rate)
    with pytest.raises(UserError, match=r"^--network: 72 GPUs are joined by NVLink; leave it out$"):
        question_for([], "llama-3.1-8b", 72, 4096, 1, "gb200", network=400.0)


def test_no_interval_of_a_lead_passes_what_fp8_can_give() -> None:
    cells = cells_of(read_runs(ROOT / "results"))
    for pair in cell_pairs(cells):  # what was measured stays below it
        law = law_of(pair.fp8.shape, find_peak(pair.fp8.gpu), None)
        rates = [each.config.tokens_per_step / each.step_ms for each in (pair.bf16, pair.fp8)]
        most = most_pct(law(pair.bf16.config), law(pair.fp8.config))
        assert 100 * (rates[1] / rates[0] - 1) <= most
    asked = question_for([], "llama-3.1-8b", 64, 4096, None, "h100", global_batch_size=1024)
    law, bf16 = law_of(shape_of("llama-3.1-8b"), asked.gpu, None), asked.config
    for option in answer(asked).options[1:]:
        most = most_pct(law(bf16), law(as_fp8(bf16, option.precision, option.gathers_fp8)))
        assert option.lead_pct.value < option.lead_pct.high <= most


def test_nodes_have_as_many_gpus_as_are_asked_about() -> None:
    def asked(num_gpus: int, gpu: str, gpus_per_node: int | None = None) -> ResolvedConfig:
        return question_for(
            [], "llama-3.1-8b", num_gpus, 4096, 1, gpu, gpus_per_node=gpus_per_node
        ).config

    assert [asked(8, "h100").num_nodes, asked(8, "h100", 4).num_nodes] == [1, 2]
    assert [asked(12, "h100", 4).num_nodes, asked(16, "gb200").num_nodes] == [3, 4]
    with pytest.raises(UserError, match=r"^--gpus-per-node: 6 is none of 1, 2, 4, 8, 16; give"):
        asked(12, "h100", 6)


def test_more_gpus_that_would_have_room_are_in_nodes_as_asked_about() -> None:
    asked = question_for([], "llama-3.1-8b", 2, 4096, 1, "l40s", gpus_per_node=2)
    found = cures(asked.config, shape_of("llama-3.1-8b"), asked.capacity_gib, False, 2)
    more = [way for _, way, _ in found if way.num_gpus > 2]
    assert more and {way.gpus_per_node for way in more} == {2}


def test_a_gpu_that_was_never_timed_is_told_beside_the_answer() -> None:
    said = advice_text(answer(question_for([], "qwen3-14b", 8, 4096, None, "h100-pcie")))
    first, *_ = said.split("\n\nMemory")
    assert "h100-pcie-80gb: times of an NVIDIA H200, scaled by datasheets" in " ".join(
        first.split()
    )
    said = advice_text(answer(question_for([], "qwen3-14b", 8, 4096, None, "h200")))
    assert "scaled by datasheets" not in said


def test_another_task_is_told_as_it_is_answered() -> None:
    found = answer(question_for([], "llama-3.1-8b", 64, 8192, None, "h100", global_batch_size=512))
    told = next(each for each in found.changes if each.what.startswith("sequence_length=2048"))
    direct = answer(
        question_for([], "llama-3.1-8b", 64, 2048, None, "h100", global_batch_size=2048)
    )
    assert told.then == direct.verdict.lead_pct


def test_leads_beyond_what_was_measured_lie_in_their_intervals() -> None:
    found = beyond_table(cells_of(read_runs(ROOT / "results")))
    far = found[found["num_beyond"] > 0]
    assert far["num_leads"].sum() >= 50 and far["num_beyond"].max() >= 2
    # Nine of ten, by the errors of others alone; and one in twenty of them for being wider.
    assert far["num_within"].sum() >= 0.9 * far["num_leads"].sum()
    gained = far["num_within"].sum() - far["num_unwidened"].sum()
    assert gained >= 0.05 * far["num_leads"].sum()
    said = predictions.beyond_words(found)
    assert f"hold {far['num_within'].sum()} of {far['num_leads'].sum()} leads" in said
    assert predictions.beyond_words(beyond_table([])) == ""
