"""The rule that says what to train in, and what it is asked about."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis import decision
from fp8study.analysis.decision import advise, decision_table, judged_losses
from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.naming import fp8_part
from fp8study.core.records import UNSTEADY
from fp8study.report import speed_rows
from fp8study.report.page import load_report
from tests.analysis.test_leads import store_leads
from tests.factories import make_record, store
from tests.table_factories import frame


@pytest.mark.parametrize(
    ("low", "high", "loss", "gathers", "action"),
    [
        (math.nan, math.nan, None, False, decision.MORE),
        (5, 20, None, False, decision.CHECK),
        (5, 20, "equivalent", False, decision.FP8),
        (5, 20, "different", False, decision.WORSE),
        (5, 20, decision.LOWER, False, decision.FP8),
        (5, 20, "diverged", False, decision.WORSE),
        (-5, 20, "equivalent", False, decision.MORE),
        (1, 20, None, False, decision.MORE),
        (-1, 2, None, False, decision.LITTLE),
        (-9, -2, None, False, decision.BF16),
        (-9, -2, None, True, decision.TRY),
    ],
)
def test_the_rule(low: float, high: float, loss: str | None, gathers: bool, action: str) -> None:
    assert advise(low, high, loss, gathers) == action
    assert action in decision.TO_TRAIN_IN


def decide(results: Path) -> dict[str, object]:
    runs = frame(results)
    (row,) = decision_table(leads_table(runs), judged_losses(loss_gap_table(runs), runs)).to_dict(
        "records"
    )
    return row


def store_losses(results: Path, gap: float, num_seeds: int = 3, **changes: Any) -> None:
    """Store pairs of runs whose losses are about a `gap` apart, nats; `changes`: `store_gaps`."""
    store_gaps(results, [gap + 0.0001 * seed for seed in range(num_seeds)], **changes)


def store_gaps(
    results: Path, gaps: Sequence[float], place: str = "local", fp8: dict[str, Any] | None = None,
    **changes: Any,
) -> None:  # fmt: skip
    """Store a pair of runs for each gap of their losses, nats; `fp8` are fields of FP8's alone."""
    for seed, gap in enumerate(gaps):
        for precision in ("bf16", "fp8_tensorwise"):
            record = make_record(
                seed=seed, precision=precision,
                run_id=f"{precision}-{changes.get('learning_rate')}-{seed}",
                results={"loss_last20_mean": 5.0 + 0.1 * seed + gap * (precision != "bf16"),
                         "tokens_per_second_per_gpu": None},
                **{"study": "losses"} | changes,
                **({"config": fp8} if fp8 and precision != "bf16" else {}),
            )  # fmt: skip
            store(results, place, record)


@pytest.mark.parametrize(
    ("gap", "batch", "action"),
    [
        (0.0, 1, decision.FP8),
        (0.5, 1, decision.WORSE),
        (-0.5, 1, decision.FP8),
        (0.0, 2, decision.CHECK),
    ],
)
def test_only_a_loss_in_the_same_setting_decides(
    gap: float, batch: int, action: str, tmp_path: Path
) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, gap, micro_batch_size=batch)
    row = decide(tmp_path)
    assert row["action"] == action
    assert row["loss_study"] == "losses"
    assert row["loss_is_same"] == (batch == 1)


@pytest.mark.parametrize("norm", [None, 1.0])
def test_a_loss_of_clipped_gradients_decides_where_they_are_clipped(
    norm: float | None, tmp_path: Path
) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22, max_grad_norm=norm)
    store_losses(tmp_path, 0.0, max_grad_norm=1.0)
    row = decide(tmp_path)
    assert row["loss_is_same"] == (norm == 1.0)
    assert row["action"] == (decision.FP8 if norm else decision.CHECK)


@pytest.mark.parametrize(
    ("frequencies", "gap", "action"),
    [(7.0, 0.0, decision.FP8), (5.13, 0.0, decision.CHECK), (4.0, 0.0, decision.CHECK),
     (4.0, 0.5, decision.WORSE), (4.0, -0.5, decision.CHECK)],
)  # fmt: skip
def test_a_loss_of_which_bf16_learnt_nothing_shows_nothing_but_harm(
    frequencies: float, gap: float, action: str, tmp_path: Path
) -> None:
    """Its own is 5.1 on average."""
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, gap, data={"unigram_loss": frequencies})
    assert decide(tmp_path)["action"] == action


@pytest.mark.parametrize(
    ("gpu", "action"), [("NVIDIA H200", decision.FP8), ("NVIDIA H100 80GB HBM3", decision.CHECK)]
)
def test_a_loss_of_another_machine_decides_if_its_gpu_is_the_same(
    gpu: str, action: str, tmp_path: Path
) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, place="reference/elsewhere", machine={"gpu_name": gpu})
    assert decide(tmp_path)["action"] == action


def test_of_two_losses_as_near_the_machines_own_counts(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.5, place="reference/elsewhere")
    assert decide(tmp_path)["action"] == decision.WORSE
    store_losses(tmp_path, 0.0)
    assert decide(tmp_path)["action"] == decision.FP8


def test_another_recipe_or_model_is_no_evidence(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, model="llama-3.1-8b")
    row = decide(tmp_path)
    assert row["action"] == decision.CHECK
    assert row["loss_verdict"] != row["loss_verdict"]


def test_another_recipe_hides_no_way_to_gather_that_is_untried(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 0.7, 0.71, 0.72, num_gpus=4, fp8_all_gather=True)
    rowwise = {"precision": "fp8_rowwise", "beside_those": True}
    store_leads(tmp_path, 1, 0.5, 0.51, 0.52, num_gpus=4, **rowwise)
    assert decide(tmp_path)["action"] == decision.TRY


def test_more_seeds_or_a_divergence_at_another_rate_displace_no_verdict(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, num_seeds=4, learning_rate=2e-5)
    store_gaps(tmp_path, [0.5, -0.5, 0.5, -0.5, 0.5], learning_rate=1e-4)
    runs = frame(tmp_path)
    judged = decision.judged_losses(loss_gap_table(runs), runs)
    lost = judged[judged["learning_rate"] == 1e-4].assign(learning_rate=3e-3, verdict="diverged")
    row = leads_table(runs).assign(fp8_part=judged["fp8_part"].iloc[0]).iloc[0].to_dict()
    for losses in (judged, pd.concat([judged, lost], ignore_index=True)):
        for asked, rate in ((None, 2e-5), (1e-5, 2e-5), (2e-5, 2e-5), (5e-5, 1e-4)):
            assert decision.nearest_loss(row, losses, asked)["loss_rate"] == rate
    found = decision.nearest_loss(row, pd.concat([judged, lost], ignore_index=True), 2e-5)
    assert (found["loss_rate_above"], found["loss_verdict_above"]) == (3e-3, "diverged")


def test_the_better_recipe_is_the_one_that_is_judged(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 0.7, 0.71, 0.72, num_gpus=4, fp8_all_gather=True)
    assert decide(tmp_path)["action"] == decision.TRY
    store_leads(tmp_path, 1, 1.10, 1.11, 1.12, num_gpus=4, study="without")
    row = decide(tmp_path)
    assert (row["action"], row["arm"]) == (decision.CHECK, "FP8 tensorwise, BF16 all-gather")


def test_what_surely_leads_comes_before_what_may_lead_by_more(tmp_path: Path) -> None:
    for hour, lead in enumerate((1.25, 1.36), start=1):
        late = {"skip": ["lm_head", "*.o_proj"], "warnings": [UNSTEADY]}  # an interval of its own
        store_leads(tmp_path, hour, lead, **late)
    assert decide(tmp_path)["action"] == decision.MORE  # two sessions that were apart
    for hour, lead in enumerate((1.20, 1.29, 1.24, 1.31), start=3):
        store_leads(tmp_path, hour, lead)
    row = decide(tmp_path)
    assert (row["action"], row["arm"]) == (decision.CHECK, "FP8 tensorwise")


@pytest.mark.parametrize(
    ("rates", "action"),
    [((3e-4, 3e-3, 3e-2), decision.CHECK), ((3e-4, 3e-2), decision.WORSE)],
    ids=["sweep", "two runs of one's own"],
)
def test_a_rate_at_which_a_sweep_breaks_is_no_verdict_on_the_loss(
    rates: tuple[float, ...], action: str, tmp_path: Path
) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    for rate, precision in itertools.product(rates, ("bf16", "fp8_tensorwise")):
        is_lost = rate > 1e-2 and precision != "bf16"
        record = make_record(
            study="sweep", precision=precision, learning_rate=rate, run_id=f"{precision}-{rate}",
            status="diverged" if is_lost else "completed",
            results={"loss_last20_mean": None if is_lost else 5.0},
        )  # fmt: skip
        store(tmp_path, "local", record)
    assert decide(tmp_path)["action"] == action


@pytest.mark.parametrize(
    "part", [{"precision_schedule": ["fp8_tensorwise:5", "bf16"]}, {"skip": []}]
)
def test_other_layers_or_steps_in_fp8_are_another_setting(part: Any, tmp_path: Path) -> None:
    """A run that ends in BF16 was taken for one in FP8, as its precision is called the same."""
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, fp8=part)
    row = decide(tmp_path)
    assert row["action"] == decision.CHECK
    assert row["loss_is_same"] != 1


def test_whether_a_trained_model_goes_on_in_fp8_decides_no_pre_training(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, config={"init_from": "a/run"})
    assert decide(tmp_path)["action"] == decision.CHECK
    assert not isinstance(decide(tmp_path)["loss_verdict"], str)
    store_losses(tmp_path, 0.0, study="anew")
    assert decide(tmp_path)["action"] == decision.FP8


@pytest.mark.parametrize(("timed", "judged"), [(["lm_head"], []), ([], ["lm_head"])])
def test_a_loss_with_the_loss_head_in_fp8_answers_for_one_without(
    timed: list[str], judged: list[str], tmp_path: Path
) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0)
    runs = frame(tmp_path)
    losses = decision.judged_losses(loss_gap_table(runs), runs).assign(path="tuned")
    losses = losses.assign(fp8_part=fp8_part({"skip": judged}))
    for path in ("tuned", "plain"):  # on the plain path its head is another
        row = decide(tmp_path) | {"path": path, "fp8_part": fp8_part({"skip": timed})}
        found = decision.nearest_loss(row, losses.assign(path=path))
        assert found["loss_is_same"] == (path == "tuned" and not judged)


def test_of_two_studies_elsewhere_the_larger_one_counts(tmp_path: Path) -> None:
    """Not the conclusive one: of many studies some are equivalent by chance."""
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, place="reference/elsewhere")
    assert decide(tmp_path)["action"] == decision.FP8
    gaps = [0.02 * (-1) ** seed for seed in range(5)]
    store_gaps(tmp_path, gaps, place="reference/another", study="wider")
    row = decide(tmp_path)
    assert (row["action"], row["loss_study"]) == (decision.CHECK, "wider")


@pytest.mark.parametrize(("low", "high", "is_open"), [(1e-5, 1e-4, True), (1e-4, 1e-5, False)])
def test_a_rate_that_was_left_open_above_one_that_was_decided_is_told(
    low: float, high: float, is_open: bool, tmp_path: Path
) -> None:
    """Seeds that agree at the first rate, and that scatter at the second."""
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    for rate, scatter in ((low, 0.0001), (high, 0.05)):
        gaps = [scatter * (-1) ** seed for seed in range(4)]
        store_gaps(tmp_path, gaps, learning_rate=rate)
    row = decide(tmp_path)
    assert (row["action"], row["loss_rate"]) == (decision.FP8, low)
    assert (row["loss_rate_above"] == high) == is_open
    (said,) = speed_rows.decisions(load_report(tmp_path).decisions)["loss"]
    assert ("open\u00a0at" in said) == is_open


@pytest.mark.parametrize(
    ("gap", "batch", "action", "above"),
    [(0.5, 1, decision.CHECK, 1e-4), (0.0, 1, decision.FP8, None), (0.5, 2, decision.FP8, None)],
)
def test_a_loss_that_is_worse_at_a_higher_rate_of_the_same_setting_is_to_be_checked(
    gap: float, batch: int, action: str, above: float | None, tmp_path: Path
) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, num_seeds=4, learning_rate=1e-5)
    store_losses(tmp_path, gap, learning_rate=1e-4, micro_batch_size=batch)
    row = decide(tmp_path)
    assert row["action"] == action
    assert row["loss_rate_above"] == above or (above is None and math.isnan(row["loss_rate_above"]))
    (said,) = speed_rows.decisions(load_report(tmp_path).decisions)["loss"]
    assert ("worse\u00a0at" in said) == (above is not None)


@pytest.mark.parametrize(
    ("verdict", "above", "asked", "holds"),
    [
        ("equivalent", None, 1e-5, True), ("equivalent", None, 2e-5, True),
        ("equivalent", None, 5e-5, False), ("equivalent", "different", None, False),
        ("equivalent", "different", 2e-5, True), ("different", None, 1e-5, False),
        ("different", None, 3e-4, True), ("undecided", None, 2e-5, False),
        (decision.LOWER, None, 1e-5, True), (decision.LOWER, None, 3e-4, False),
        (decision.LOWER, "different", None, False),
    ],
)  # fmt: skip
def test_what_is_equal_is_so_at_lower_rates_and_what_is_not_at_higher_ones(
    verdict: str, above: str | None, asked: float | None, holds: bool
) -> None:
    gap = -0.5 if verdict == decision.LOWER else 0.5
    found = "different" if verdict == decision.LOWER else verdict
    loss = {"loss_is_same": True, "loss_counts": True, "loss_verdict": found, "loss_rate": 2e-5,
            "loss_verdict_above": above, "loss_gap_pct": gap}  # fmt: skip
    assert decision.loss_of(loss, asked) == (verdict if holds else None)


def test_a_check_at_the_rate_that_is_asked_about_decides_there(tmp_path: Path) -> None:
    """Though one at a lower rate has as many pairs and comes first."""
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    store_losses(tmp_path, 0.0, learning_rate=2e-5)
    runs = frame(tmp_path)
    row = leads_table(runs).iloc[0].to_dict()

    def asked(rate: float) -> str | None:
        judged = decision.judged_losses(loss_gap_table(frame(tmp_path)), frame(tmp_path))
        return decision.loss_of(decision.nearest_loss(row, judged, rate), rate)

    assert [asked(rate) for rate in (2e-5, 3e-4)] == ["equivalent", None]
    store_losses(tmp_path, 0.0, study="checks", learning_rate=3e-4)
    assert [asked(rate) for rate in (2e-5, 3e-4)] == ["equivalent", "equivalent"]
