"""What is answered of GPUs without NVLink, of which two H200 that left theirs unused tell."""

from __future__ import annotations

import math

import pytest

from fp8study.analysis.advice.answer import Advice
from fp8study.analysis.advice.figures import Quantity
from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.communication import THROUGH_HOST
from fp8study.analysis.laws.frozen import constants_of
from fp8study.analysis.laws.nearby import as_run_on
from fp8study.analysis.laws.speed_constants import SpeedConstants, on_gpu
from fp8study.analysis.scale import links_table
from fp8study.core.errors import UserError
from fp8study.core.hardware import GPU_PEAKS, named_gpu
from fp8study.report.advice_text import advice_text
from tests.checkout import ROOT

BRIDGELESS = "h200-nvl-141gb"


def ask(gpu: str, num_gpus: int, batch: int | None, model: str = "llama-3.1-8b") -> Advice:
    asked = question_for([], model, num_gpus, 4096, batch, gpu, {"max_grad_norm": 1.0})
    return answer(asked)


def said(advice: Advice) -> str:
    return " ".join(advice_text(advice).split())


def test_the_share_of_pcie_is_that_of_the_records() -> None:
    links = links_table(cells_of(read_runs(ROOT / "results")))
    assert links["link_gb_per_s"].iloc[0] == pytest.approx(64 * THROUGH_HOST, rel=0.01)


def test_links_are_those_of_an_h200_with_nvlink_or_without() -> None:
    c = constants_of(SpeedConstants, "speed")
    rates = {gpu.name_part: on_gpu(c, gpu).link_gb_per_s for gpu in GPU_PEAKS}
    assert rates["H200"] == rates["H100"] == c.link_gb_per_s
    assert rates["B200"] == 2 * c.link_gb_per_s
    assert rates["H200 NVL"] == rates["RTX 5090"] == 24.25
    assert rates["L40S"] == rates["RTX 4090"] == 12.125
    linked = {gpu.name_part for gpu in GPU_PEAKS if gpu.has_nvlink}
    assert {"GB200", "B300", "GH200", "H800", "H20", "A100"} <= linked
    assert not linked & {"H800 PCIe", "H100 NVL", "L4", "RTX PRO 6000"}


def test_copy_engines_are_for_gpus_with_nvlink() -> None:
    config = question_for([], "llama-3.1-8b", 2, 4096, 2, BRIDGELESS).config
    assert config.collectives == "copy_engines"  # what a run of the path asks for
    assert as_run_on(config, named_gpu("h200-141gb")) is config
    found = as_run_on(config, named_gpu(BRIDGELESS))
    assert (found.collectives, found.gradient_norm, found.gradient_copy) == (
        "nccl", "separate", "foreach",
    )  # fmt: skip


def test_a_lead_measured_without_nvlink_lies_in_the_interval_of_what_is_answered() -> None:
    links = links_table(cells_of(read_runs(ROOT / "results"))).set_index(["model", "path"])
    measured = links.loc[("llama-3.1-8b", "tuned"), "measured_pct"]
    advice = ask(BRIDGELESS, 2, 2)
    lead = advice.verdict.lead_pct
    assert lead.low < measured < lead.high
    assert lead.value == pytest.approx(measured, abs=6)
    linked = ask("h200-141gb", 2, 2).verdict.lead_pct.value
    assert lead.value < linked - 10
    text = said(advice)
    assert f"llama-3.1-8b {measured:+.1f} % (2 GPUs, tuned, batch 2)" in text
    assert "links between GPUs: 24 of PCIe's 64 GB/s assumed" in text
    assert "about its leads with links as they are assumed, half and twice as fast" in text
    assert "; over NVLink" in text


def test_it_says_what_one_gpu_makes_where_two_make_less() -> None:
    advice = ask(BRIDGELESS, 2, 1)
    assert advice.alone is not None
    one, each = advice.alone.then.value, advice.options[0].tokens_per_second_per_gpu.value
    assert 2 * each < one  # as measured: each of two kept 30 % of one's
    assert f"one GPU alone makes {one:,.0f} tokens/s in BF16" in said(advice)
    assert f"communication takes {advice.communication_pct:.0f} % of a step in BF16" in said(advice)
    linked = ask("h200-141gb", 2, 1)
    assert linked.alone is None and linked.without_nvlink == ""
    assert "communication takes" not in said(linked).partition("What takes")[0]


def test_a_rate_that_is_named_is_no_range() -> None:
    def lead(links: float | None, gpu: str = BRIDGELESS) -> Quantity:
        clipped = {"max_grad_norm": 1.0}
        asked = question_for([], "llama-3.1-8b", 2, 4096, 2, gpu, clipped, links=links)
        found = answer(asked)
        said = "assumed" if links is None else f"{links:g} GB/s, as you say"
        assert any("links between GPUs" in line and said in line for line in found.beyond)
        return found.verdict.lead_pct

    assumed, named, faster = lead(None), lead(24.25), lead(200.0)
    assert named.value == pytest.approx(assumed.value)
    assert named.high - named.low < assumed.high - assumed.low
    assert faster.value > named.value + 10


@pytest.mark.parametrize(
    ("num_gpus", "links", "words"),
    [(1, 24.0, "--links: one GPU a box has none; leave it out"),
     (2, 0.5, "--links: 0.5 is outside 1 to"), (2, math.nan, "--links: nan is outside")],
)  # fmt: skip
def test_links_that_cannot_be_are_refused(num_gpus: int, links: float, words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}"):
        question_for([], "llama-3.1-8b", num_gpus, 4096, 1, BRIDGELESS, links=links)
    with pytest.raises(UserError, match=r"^--links: NVLink joins H200s, as it was measured; lea"):
        question_for([], "llama-3.1-8b", 2, 4096, 1, "h200", links=24.0)


def test_one_gpu_a_box_has_the_network_alone() -> None:
    def rate(gpu: str) -> float:
        asked = question_for([], "llama-3.1-8b", 16, 4096, 2, gpu, gpus_per_node=1)
        found = answer(asked)
        assert not any("links between GPUs" in line for line in found.beyond)
        return found.step_parts_ms["bf16"]["communication"].value

    assert rate(BRIDGELESS) == pytest.approx(rate("h200"), rel=0.2)


def test_where_the_host_is_the_limit_nothing_is_said_of_communication() -> None:
    advice = ask(BRIDGELESS, 2, 1, "qwen3-0.6b")
    assert advice.options[0].limit == "host" and advice.communication_pct == 0.0


def test_where_one_gpu_has_no_room_nothing_is_said_of_it() -> None:
    advice = ask("h100-pcie-80gb", 4, 1)
    assert advice.alone is None and advice.without_nvlink
    assert ask("h100-pcie-80gb", 1, 1, "llama-3.2-1b").without_nvlink == ""
