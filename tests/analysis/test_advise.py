"""What advice rests on: records first, then laws, each number with its origin."""

import dataclasses
import functools
import json
import math
import re
import statistics

import pytest

from fp8study.analysis import decision
from fp8study.analysis.advice.evidence import BF16_HEAD
from fp8study.analysis.advice.figures import MEASURED, MODELLED, PREDICTED
from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.laws import account, speed
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.core.errors import UserError
from fp8study.core.records import read_record
from fp8study.report.advice_text import advice_text
from tests.checkout import ROOT

RESULTS = ROOT / "results" / "reference"
H100 = "NVIDIA H100 80GB HBM3"


def advice_for(*asked):
    return answer(question_for(*asked))


@functools.cache
def advice(model, num_gpus=1, sequence_length=4096, batch=1, gpu="h200-141gb", **others):
    return advice_for([], model, num_gpus, sequence_length, batch, gpu, others)


def option(found, precision, gathers=False):
    return next(o for o in found.options if (o.precision, o.gathers_fp8) == (precision, gathers))


def test_figures_of_a_cell_that_was_run_are_its_records():
    found = advice("llama-3.1-8b", 4, batch=2, update_kernel="torch")
    bf16, fp8 = option(found, "bf16"), option(found, "fp8_tensorwise", gathers=True)
    for side in (bf16, fp8):
        rate = side.tokens_per_second_per_gpu
        assert rate.kind == side.memory_gib.kind == MEASURED
        records = [read_record(RESULTS / name / "run.json") for name in rate.run_ids]
        rates = [r.results["tokens_per_second_per_gpu"] for r in records]
        assert rate.value == pytest.approx(statistics.median(rates))
        assert {r.config["precision"] for r in records} == {side.precision}
    assert fp8.lead_pct.kind == MEASURED
    assert fp8.lead_pct.low < fp8.lead_pct.value < fp8.lead_pct.high
    assert found.verdict.label == fp8.label and found.fits


def test_rates_that_are_no_pair_give_a_lead_without_an_interval():
    found = advice("llama-3.1-8b")
    bf16, rowwise = option(found, "bf16"), option(found, "fp8_rowwise")
    assert rowwise.is_apart and not option(found, "fp8_tensorwise").is_apart
    apart, base = (o.tokens_per_second_per_gpu.value for o in (rowwise, bf16))
    assert rowwise.lead_pct.value == pytest.approx(100 * (apart / base - 1))
    assert rowwise.lead_pct.kind == MEASURED and rowwise.lead_pct.low is None
    assert "; no pair with BF16, so no interval" in " ".join(advice_text(found).split())


def test_what_was_measured_at_batches_next_to_it_is_told():
    """The README's lead of a 1B on one H100 is at batch 10; advise chooses 8 there."""
    found = advice("llama-3.2-1b", batch=8, gpu="h100-80gb")
    before = " update_kernel=torch"
    # Its steps at batch 1 would be one graph today, of which none by kernel tells.
    assert [c.what for c in found.nearest] == [f"micro_batch_size=10{before}"]
    measured = advice("llama-3.2-1b", batch=10, gpu="h100-80gb", update_kernel="torch")
    assert not measured.nearest
    now = advice("llama-3.2-1b", batch=10, gpu="h100-80gb")
    assert now.verdict.lead_pct.kind == PREDICTED and not now.settings
    assert [(c.what, c.then) for c in now.nearest] == [(before[1:], measured.verdict.lead_pct)]
    assert found.nearest[0].then == measured.verdict.lead_pct
    assert f"nearest measurement, micro_batch_size=10{before}: +15." in advice_text(found)
    asked = advice("llama-3.2-1b", batch=8, gpu="h100-80gb", update_kernel="one_pass")
    (other,) = asked.nearest  # no record of that path is a single H100's at that batch
    assert other.what == "strategy=fsdp2" and other.then.value > 0
    assert not advice("llama-3.2-1b", batch=8, gpu="b200").nearest


def test_without_an_interval_more_is_to_be_measured():
    verdict = advice("llama-3.2-3b", 2, step_launch="by_kernel").verdict
    assert verdict.lead_pct.kind == MEASURED and verdict.lead_pct.low is None
    assert verdict.action == decision.MORE


def test_what_was_timed_comes_before_what_is_predicted():
    options = advice("llama-3.2-1b", 2, step_launch="by_kernel").options
    kinds = [o.lead_pct.kind == MEASURED for o in options[1:]]
    assert kinds == sorted(kinds, reverse=True) and True in kinds and False in kinds
    predicted = max(o.lead_pct.value for o in options[1:] if o.lead_pct.kind != MEASURED)
    assert predicted > options[1].lead_pct.value


def test_a_prediction_is_judged_by_the_same_rule():
    verdict = advice("llama-3.1-8b", 2, batch=2).verdict
    assert verdict.lead_pct.kind == PREDICTED and not verdict.machine
    assert verdict.action == decision.advise(verdict.lead_pct.low, verdict.lead_pct.high, None)


def test_every_number_says_where_it_is_from():
    found = json.loads(
        json.dumps(dataclasses.asdict(advice("llama-3.1-8b", 1, batch=4, gpu="h100-nvl-94gb")))
    )
    ways = found["step_parts_ms"].values()
    parts = [part for way in (*ways, found["memory_parts_gib"]) for part in way.values()]
    parts += [change["then"] for change in (*found["changes"], *found["remedies"])]
    assert found["remedies"] and found["changes"]
    assert {part["kind"] for part in parts} == {MODELLED}  # a GPU that the laws do not know


def test_a_cell_between_the_measured_ones_is_predicted_with_an_interval():
    found = advice("llama-3.2-3b", 2, batch=2)
    fp8 = option(found, "fp8_tensorwise", gathers=True)
    assert not found.beyond
    assert fp8.tokens_per_second_per_gpu.kind == fp8.lead_pct.kind == PREDICTED
    assert fp8.lead_pct.low < fp8.lead_pct.value < fp8.lead_pct.high
    assert not fp8.lead_pct.run_ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "h100-nvl-94gb"}, "scaled by datasheets"),
        ({"gpu": "h100-80gb", "num_gpus": 8}, "8 GPUs; measured on H100: 1 to 4"),
        (
            {"gpu": "h100-80gb", "sequence_length": 8192},
            "8,192 tokens a sequence: measured on H200, not on H100",
        ),
        ({"num_gpus": 64}, "64 GPUs; measured on H200: 1 to"),
        ({"sequence_length": 16384}, "16,384 tokens a sequence"),
        ({"model": "llama-3.1-70b", "num_gpus": 4}, "70.6 billion weights"),
        (
            {"gradient_accumulation_steps": 1_000_000},
            "1,000,000 passes a step; measured on H200: 1",
        ),
    ],
)
def test_what_is_beyond_the_records_is_modelled_and_says_so(changes, words):
    found = advice(**{"model": "llama-3.2-3b", **changes})
    assert any(words in line for line in found.beyond)
    kinds = {o.tokens_per_second_per_gpu.kind for o in found.options}
    assert kinds == {MODELLED}


@pytest.mark.parametrize(
    ("gpu", "batch", "busy"), [("h200", 1, True), ("h200", 8, False), ("h100-80gb", 8, False)]
)
def test_where_the_host_matters_an_interval_is_as_wide_as_errors_were_there(gpu, batch, busy):
    table = account.lead_table(cells_of(read_runs(ROOT / "results")))
    there = table[(table["test"] == account.OTHER_GPU) == (gpu != "h200")]
    ends = (speed.LATE_PCT, math.inf) if busy else (-1.0, speed.HOST_PCT)
    there = there[there["host_pct"].between(*ends)]["error_points"].abs()
    found = advice(
        "llama-3.2-1b", batch=batch, sequence_length=2048, gpu=gpu, step_launch="by_kernel"
    )
    (lead,) = {o.lead_pct for o in found.options if o.precision == "fp8_rowwise"}
    assert lead.kind == PREDICTED
    assert lead.high - lead.value == pytest.approx(there.quantile(0.9))
    assert not found.beyond and len(there) >= account.FEWEST_LEADS


def test_intervals_widen_beyond_what_was_measured():
    near, far = (advice("llama-3.2-3b", 2, batch=2), advice("llama-3.2-3b", 64, batch=2))
    width = [o.lead_pct.high - o.lead_pct.low
             for o in (option(a, "fp8_tensorwise", gathers=True) for a in (near, far))]  # fmt: skip
    assert len(far.beyond) == 2  # so many GPUs, and a network
    assert width[1] == pytest.approx(math.sqrt(3) * width[0])


def test_a_small_model_on_few_gpus_is_told_to_leave_the_gather_in_bf16():
    found = advice("llama-3.2-3b", 2, step_launch="by_kernel")
    best = found.options[1]
    assert (best.precision, best.gathers_fp8) == ("fp8_tensorwise", False)
    assert option(found, "fp8_tensorwise", gathers=True).lead_pct.value < 0


@pytest.mark.parametrize("clips", [None, 1.0])
@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.2-1b-untied", "llama-3.2-3b"])
def test_of_steps_as_one_graph_no_record_by_kernel_tells(
    model: str, num_gpus: int, clips: float | None
) -> None:
    """On two GPUs FP8 gathers in FP8 then, and leads, as it does on one."""
    found = advice(model, num_gpus, max_grad_norm=clips)
    assert found.settings == ("step_launch=as_graph",)
    assert found.verdict.lead_pct.value > 10
    timed = {("llama-3.2-1b-untied", 1), ("llama-3.2-1b-untied", 2)}
    timed |= {("llama-3.2-1b", 1), ("llama-3.2-3b", 1)}
    is_timed = (model, num_gpus) in timed and clips == 1.0
    assert found.verdict.lead_pct.kind == (MEASURED if is_timed else PREDICTED)
    is_known = (model, num_gpus, clips) == ("llama-3.2-1b", 1, None)  # that its loss is BF16's
    assert found.verdict.action == (decision.FP8 if is_known else decision.CHECK)
    gathers = ", FP8 all-gather" if num_gpus == 2 else ""
    earlier = f", {BF16_HEAD}" if is_timed and model.endswith("untied") and num_gpus == 1 else ""
    assert found.verdict.label == f"FP8 tensorwise{gathers}{earlier}"
    assert all("--set step_launch=as_graph" in command for command in found.commands)


def test_links_as_fast_as_those_measured_are_not_beyond_them() -> None:
    beyond = advice("llama-3.1-8b", 8, gpu="h100").beyond
    assert beyond and not any("links" in line for line in beyond)


def test_cards_that_pcie_joins_are_not_told_the_speed_of_nvlink() -> None:
    pcie, nvlink = (advice("llama-3.1-8b", 8, batch=1, gpu=gpu) for gpu in ("h100-pcie", "h100"))
    waits = [found.step_parts_ms["bf16"]["communication"].value for found in (pcie, nvlink)]
    assert waits[0] > 4 * waits[1]
    assert any("links between GPUs: 24 of PCIe's 64 GB/s assumed" in line for line in pcie.beyond)


def test_a_smaller_one_is_told_bf16_by_what_was_measured_either_way():
    found = advice("llama-3.2-1b", 2, step_launch="by_kernel")
    ways = [option(found, "fp8_tensorwise", gathers=gathers) for gathers in (True, False)]
    assert {way.lead_pct.kind for way in ways} == {MEASURED}
    assert all(way.lead_pct.value < -15 for way in ways)
    text = advice_text(found)
    assert "\nBF16, or try BF16 all-gather" in text and "on 2 of 4 × H200" in text
    assert (
        "another machine: Measure more, as the lead may lie on either side of 3 %. FP8 tensorwise"
        in text
    )
    assert "steps of 4 runs had not settled" in text


def test_what_was_set_is_set_in_the_check_too():
    found = advice("llama-3.2-1b", gradient_accumulation_steps=8, max_grad_norm=1)
    first, second = advice_text(found).splitlines()[:2]
    assert (
        first.endswith("batch 1 a GPU, 8 passes a step")
        and "8 sequences (32,768 tokens) a step" in second
    )
    wanted = "--set gradient_accumulation_steps=8 --set max_grad_norm=1"
    assert found.commands and all(wanted in command for command in found.commands)


def test_fp8_weights_are_gathered_from_even_shards_alone():
    assert not any(option.gathers_fp8 for option in advice("llama-3.2-1b", 3).options)
    assert any(option.gathers_fp8 for option in advice("llama-3.2-1b", 4).options)


def test_the_gpu_at_hand_is_taken_with_its_own_memory():
    found = advice_for([("NVIDIA H200", 100.0)] * 2, "llama-3.2-1b", None, 4096, 1, None)
    assert (found.gpu, found.capacity_gib, found.config["num_gpus"]) == ("NVIDIA H200", 100.0, 2)
    with pytest.raises(UserError, match="'NVIDIA Z999' is in no table"):
        advice_for([("NVIDIA Z999", 80.0)], "llama-3.2-1b", 1, 4096, 1, None)


def test_says_which_layers_are_converted_and_which_the_law_finds_not_worth_it():
    small, large = advice("llama-3.2-1b", 2), advice("llama-3.1-8b", batch=2)
    for found in (small, large):
        assert len(found.layers_saved_ms) == 7
    assert small.layers_saved_ms["self_attn.k_proj"].value < 0
    assert large.layers_saved_ms["mlp.up_proj"].value > 0
    text = advice_text(small)
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj of every" in text
    assert "lm_head stays in BF16" in text and small.kept_in_bf16 == ("lm_head",)
    for whole in (advice("llama-3.1-8b"), advice("llama-3.2-1b")):
        assert whole.kept_in_bf16 == ()  # its own, or the embedding, on one GPU
        text_of_whole = " ".join(advice_text(whole).split())
        assert "down_proj of every decoder layer, and the loss head" in text_of_whole
    assert re.search(r"lose by themselves.*k_proj \(−\d+ µs\)", text)
    assert "up_proj (" not in text


def test_what_layers_save_is_what_the_law_says_of_the_whole():
    """With every cast and GEMM in its layer, the sum is the law's own difference."""
    found = advice("llama-3.1-8b", batch=2)
    bf16, fp8 = ({n: part.value for n, part in found.step_parts_ms[name].items()}
                 for name in ("bf16", "fp8_tensorwise"))  # fmt: skip
    saved = sum(layer.value for layer in found.layers_saved_ms.values())
    whole = bf16["gemm"] - fp8["gemm"] - fp8["casts"]
    assert 32 * saved == pytest.approx(whole, rel=1e-6)


def test_without_records_there_is_no_advice(tmp_path):
    with pytest.raises(UserError, match="holds no committed records"):
        answer(question_for([], "llama-3.2-1b", 1, 4096, 1, "h100"), tmp_path)
