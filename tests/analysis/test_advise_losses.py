"""What `fp8study advise` says of losses, and what is no evidence of them."""

import copy
import dataclasses
import json
import math

import pandas as pd
import pytest

from fp8study.analysis.advice.answer import Advice
from fp8study.analysis.advice.figures import MEASURED, PREDICTED
from fp8study.analysis.advice.loss_evidence import nearest_losses
from fp8study.analysis.advice.question import _advisor, question_for
from fp8study.analysis.decision import CHECK, FP8
from fp8study.analysis.laws.cells import read_runs
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.runs.naming import FROM_WEIGHTS
from fp8study.core.records import read_record
from fp8study.report.advice_text import advice_text
from tests.analysis.test_advise import RESULTS, advice
from tests.checkout import ROOT


def test_loss_is_told_of_unseen_text_first_and_what_it_leaves_open():
    near, far = advice("llama-3.2-1b"), advice("qwen3-14b", 4)
    assert "llama-3.2-1b" in near.loss_evidence[0] and "validation loss" in near.loss_evidence[0]
    (run, *_) = (RESULTS / "h200x2" / "new-text").glob("llama-3.2-1b-fp8_tensorwise-*")
    seen = read_record(run / "run.json").data["num_tokens_seen"] / 1e6
    assert any(f"{seen:.3g} million tokens, " in line for line in far.loss_evidence)
    assert (
        f"training on more than {seen:.3g} million tokens with llama-3.2-1b from random weights"
        in near.loss_uncovered
    )
    assert any("qwen3-14b itself" in line for line in far.loss_uncovered)


def test_the_loss_from_trained_weights_is_told_last() -> None:
    for model, nearest in (("llama-3.2-3b", "llama-3.2-3b"), ("qwen3-4b", "llama-3.2-3b")):
        found = advice(model)
        start = f"from trained weights: {nearest} on 1 GPU, "
        assert found.loss_evidence[-1].startswith(start), found.loss_evidence
        assert not any("from trained" in line for line in found.loss_evidence[:-1])
    own = advice("llama-3.2-3b")
    assert "learning rate 1e-4, validation loss: +0.02 %" in own.loss_evidence[-1]
    assert "llama-3.2-3b from random weights at learning rates above 2e-5" in own.loss_uncovered


def test_the_loss_of_the_very_model_is_told_at_each_of_its_learning_rates():
    first, second = advice("llama-3.1-8b").loss_evidence[:2]
    assert "rate 2e-5" in first and "equivalent" in first
    assert "rate 1e-4" in second and "undecided" in second


@pytest.mark.parametrize(
    ("num_gpus", "where"), [(1, "1 GPU"), (2, "4 GPUs"), (4, "4 GPUs"), (8, "4 GPUs")]
)
def test_the_loss_on_the_nearest_number_of_gpus_comes_first(num_gpus: int, where: str) -> None:
    first = advice("llama-3.1-8b", num_gpus=num_gpus).loss_evidence[0]
    assert first.startswith(f"llama-3.1-8b on {where}, "), first


def test_going_on_is_told_on_the_nearest_number_of_gpus_and_so_are_other_trainers() -> None:
    one, eight = (advice("llama-3.1-8b", num_gpus=number) for number in (1, 8))
    told = "from trained weights at 1e-4 the loss of llama-3.1-8b is equivalent: "
    assert one.from_weights.startswith(told) and one.from_weights != eight.from_weights
    assert " ".join(one.from_weights.split()) in " ".join(advice_text(one).split())
    assert "with llama-3.1-8b: torchtitan" in eight.other_trainers
    assert "(4 GPUs, 8,192" in eight.other_trainers and "(1 GPU, 4,096" in one.other_trainers
    assert eight.other_trainers in " ".join(advice_text(eight).split())
    assert advice("qwen3-32b", num_gpus=8).other_trainers == ""  # four times as large as any


def test_how_far_an_undecided_loss_is_off_is_told_with_it() -> None:
    found = advice("llama-3.1-8b", num_gpus=4, max_grad_norm=1.0)
    assert found.verdict.action == CHECK and found.verdict.loss
    gap = f"{found.verdict.loss['loss_gap_pct']:+.2f}"
    assert f"its loss: undecided ({gap} % in training) at a learning rate of" in advice_text(found)


def test_a_run_that_changes_its_precision_is_no_evidence_of_a_loss_in_fp8() -> None:
    table = _advisor(ROOT / "results").decisions.gaps
    changes = table["arm"].str.contains("schedule")
    assert changes.any()
    table = table.assign(num_pairs=table["num_pairs"].mask(changes, 100))
    told, without = (
        nearest_losses(rows, [], shape_of("llama-3.2-1b"), "fp8_tensorwise", 1)
        for rows in (table, table[~changes])
    )
    assert told == without


@pytest.mark.parametrize("kind", ["schedule bf16:1 fp8", "skips nothing", "fast accumulation"])
def test_an_arm_that_no_run_has_by_itself_is_no_evidence(kind: str) -> None:
    table = _advisor(ROOT / "results").decisions.gaps
    other = table.assign(arm=table["arm"] + f", {kind}", num_pairs=100, gap_pct=10.0)
    told, without = (
        nearest_losses(rows, [], shape_of("llama-3.1-8b"), "fp8_tensorwise", 1)
        for rows in (pd.concat([other, table]), table)
    )
    assert told == without and not any("+10.00" in line for line in told[0])


def test_a_model_that_went_on_in_fp8_is_no_evidence_of_pre_training() -> None:
    table = _advisor(ROOT / "results").decisions.gaps
    table = table[table["setting"].notna()]  # as rows of one machine have it
    other = table.assign(setting=table["setting"] + f", {FROM_WEIGHTS}", num_pairs=100)
    told, without = (
        nearest_losses(rows, [], shape_of("llama-3.1-8b"), "fp8_tensorwise", 1)
        for rows in (pd.concat([other.assign(gap_pct=10.0), table]), table)
    )
    start = f"{FROM_WEIGHTS}: "
    assert told[0][-1].startswith(start) and "+10.00 %" in told[0][-1]
    kept = [[each for each in found[0] if not each.startswith(start)] for found in (told, without)]
    assert kept[0] == kept[1] and kept[0]
    assert told[1] == without[1]


@pytest.mark.parametrize(
    ("model", "clips", "kind", "rate"),
    [("llama-3.1-8b", 1.0, MEASURED, "2e-5"), ("llama-3.2-1b", None, PREDICTED, "5e-5")],
)
def test_a_loss_decides_up_to_the_learning_rate_at_which_it_was_tested(
    model: str, clips: float | None, kind: str, rate: str
) -> None:
    """Whether the lead there was measured or predicted."""

    def ask(**others: float) -> Advice:
        return advice(model, max_grad_norm=clips, **others)

    open_, low, high = ask(), ask(learning_rate=1e-5), ask(learning_rate=3e-4)
    json.dumps(dataclasses.asdict(open_), allow_nan=False)
    assert {found.verdict.lead_pct.kind for found in (open_, low, high)} == {kind}
    assert [found.verdict.action for found in (open_, low, high)] == [FP8, FP8, CHECK]
    assert f"its loss is equivalent to BF16's at a learning rate of {rate}" in advice_text(open_)
    assert "add --set learning_rate=RATE" in " ".join(advice_text(open_).split())
    assert "learning_rate=RATE" not in " ".join(advice_text(low).split())
    assert "its loss is equivalent" not in advice_text(high)
    assert "--set learning_rate=0.0003" in high.loss_check.command
    assert "at a learning rate of 3e-4: 12 runs" in " ".join(advice_text(high).split())


@pytest.mark.parametrize(("batch", "action"), [(2, FP8), (1, CHECK)])
def test_a_small_model_is_decided_where_its_loss_was_judged(batch: int, action: str) -> None:
    """Clipped, with its loss head in FP8, that was at batch 2."""
    found = advice("llama-3.2-1b", batch=batch, max_grad_norm=1.0, learning_rate=1e-5)
    assert (found.kept_in_bf16, found.verdict.action) == ((), action)


def test_the_loss_that_the_verdict_rests_on_is_told_first() -> None:
    found = advice("llama-3.1-8b", max_grad_norm=1.0, learning_rate=2e-5)
    loss = found.verdict.loss
    assert found.verdict.action == FP8
    assert found.loss_evidence[0].endswith(f"; {loss['loss_machine']}/{loss['loss_study']}")


def test_unclipped_one_is_told_what_is_known_of_clipped_gradients() -> None:
    found = advice("llama-3.1-8b")
    assert found.verdict.action == CHECK
    assert found.clipped == advice("llama-3.1-8b", max_grad_norm=1.0).verdict
    text = advice_text(found)
    assert "clipped, --set max_grad_norm=1: FP8. FP8 tensorwise" in text
    assert "its loss is equivalent to BF16's at a learning rate of 2e-5 in 250 steps" in text
    other = advice("llama-3.1-8b", max_grad_norm=0.5)
    assert other.clipped == found.clipped
    assert other.verdict.lead_pct == found.clipped.lead_pct  # no norm changes a step's time
    assert (found.clipped.action, other.verdict.action) == (FP8, CHECK)
    assert "max_grad_norm=1" not in [change.what for change in other.nearest]
    told = "timed, and its loss judged, with gradients clipped at 1"
    assert told in advice_text(other) and told not in text
    assert advice("llama-3.1-8b", learning_rate=3e-4).clipped is None
    assert "--set max_grad_norm=none" in found.loss_check.command


def test_what_was_timed_at_the_norm_that_is_asked_about_comes_first() -> None:
    config = question_for([], "llama-3.1-8b", 1, 4096, 1, "h200", {"max_grad_norm": 0.5}).config
    decisions = copy.copy(_advisor(ROOT / "results").decisions)
    (at_1,) = decisions.of(config, "NVIDIA H200")[:1]
    assert at_1.decision["max_grad_norm"] == 1
    same = decisions.leads["setting"].eq(at_1.decision["setting"])
    mine = decisions.leads[same & decisions.leads["machine"].eq(at_1.machine)].assign(
        machine="local", max_grad_norm=0.5,
        setting=at_1.decision["setting"].replace("clipped at 1", "clipped at 0.5"),
    )  # fmt: skip
    decisions.leads = pd.concat([decisions.leads, mine], ignore_index=True)
    found = decisions.of(config, "NVIDIA H200")
    assert {(each.machine, each.decision["max_grad_norm"]) for each in found} == {("local", 0.5)}
    assert at_1.decision["action"] == FP8
    assert decisions.verdict_of(config, at_1, None).action == CHECK


def test_a_smaller_model_than_any_is_told_so() -> None:
    table, runs = _advisor(ROOT / "results").decisions.gaps, []
    shape = dataclasses.replace(shape_of("llama-3.2-1b"), num_layers=1)
    told = nearest_losses(table, runs, shape, "fp8_tensorwise", 1)[1]
    assert told[-1] == "models of fewer than 1.2 billion weights"
    told = nearest_losses(table, runs, shape_of("qwen3-14b"), "fp8_tensorwise", 1)[1]
    assert told[-1] == "models of more than 8.0 billion weights"
    told = nearest_losses(table, runs, shape_of("llama-3.2-3b"), "fp8_tensorwise", 1)[1]
    assert not any("billion weights" in line for line in told)


def test_it_is_said_of_how_large_steps_and_how_high_rates_the_loss_is_known() -> None:
    found = advice("llama-3.1-8b", max_grad_norm=1.0)
    rates = "random weights at learning rates above 2e-5 (5e-5 and 1e-4: undecided)"
    assert f"llama-3.1-8b from {rates}" in found.loss_uncovered
    (sizes,) = (line for line in found.loss_uncovered if line.startswith("steps of more than"))
    most = int(sizes.removeprefix("steps of more than ").split()[0].replace(",", ""))
    configs = [record.config for _, record in read_runs(ROOT / "results")]
    fields = ("num_gpus", "micro_batch_size", "gradient_accumulation_steps", "sequence_length")
    assert most in {math.prod(config[name] for name in fields) for config in configs}


def test_the_loss_that_a_verdict_rests_on_is_told_with_its_length_and_what_is_above_it() -> None:
    found = advice("llama-3.1-8b", max_grad_norm=1.0)
    loss = found.verdict.loss
    assert loss["loss_study_above"] != loss["loss_study"]
    text = " ".join(advice_text(found).split())
    tokens = f"{loss['loss_tokens'] / 1e6:,.3g} million tokens of 161 billion"
    assert f"in {loss['loss_steps']} steps, {tokens} (" in text
    place = f"{loss['loss_machine_above']}/{loss['loss_study_above']}"
    assert f"undecided at 1e-4 ({place})" in text
