"""What a precision is held against: reruns, other kernels, other seeds; and unseen text by step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis.floors import (
    AGAIN,
    KERNELS,
    RANDOM,
    SEED,
    TRAINED,
    ladder_table,
    pooled_table,
    scatter_table,
    validation_curve,
)
from fp8study.analysis.runs.frames import metrics_frame
from fp8study.core.records import load_runs
from fp8study.report import rows
from tests.factories import make_record, store
from tests.table_factories import frame

STEPS = (30, 60)


def _store(results: Path, seed: int, last: float, place: str = "local", **changes: Any) -> None:
    """Store a run whose loss on unseen text falls from 6 to `last`, as does that on its own."""
    scored = [{"step": step, "loss": loss} for step, loss in zip(STEPS, (6.0, last), strict=True)]
    config = {n: changes.pop(n) for n in ("attention", "init_from") if n in changes}
    record = make_record(
        study="new-text", seed=seed, run_id=f"{seed}-{len([*results.rglob('run.json')])}",
        results={"loss_last20_mean": last, "validation_losses": scored},
        judgement={"margin_pct": changes.pop("margin", 0.25), "speed_only": False}, **changes,
    )  # fmt: skip
    record.config.update(config)
    store(results, place, record)


@pytest.fixture
def table(tmp_path: Path) -> pd.DataFrame:
    for seed in range(3):
        base = 5.0 + 0.1 * seed
        _store(tmp_path, seed, base)
        _store(tmp_path, seed, base * 1.01, precision="fp8_tensorwise")
        _store(tmp_path, seed, base * (1.001 + 0.0001 * seed), attention="flash")
        _store(tmp_path, seed, base * 0.999, compile=False)
        _store(tmp_path, seed, base * 1.01 * 1.002, precision="fp8_tensorwise", repeat=1)
    return validation_curve(load_runs(tmp_path), frame(tmp_path))


def test_gaps_are_followed_on_text_that_no_run_saw(table: pd.DataFrame) -> None:
    fp8 = table[table["rung"] == "FP8 tensorwise"].set_index("step")
    assert list(fp8.index) == list(STEPS)
    assert fp8["gap_pct"].to_dict() == pytest.approx({30: 0.0, 60: 1.0})
    assert (fp8["num_pairs"] == 3).all()
    assert fp8["verdict"].to_dict() == {30: "equivalent", 60: "different"}


def test_seeds_that_are_left_of_a_divergence_are_not_judged(tmp_path: Path) -> None:
    for seed in range(4):
        _store(tmp_path, seed, 5.0)
        _store(tmp_path, seed, 5.0, attention="flash")
        end = "diverged" if seed == 3 else "completed"
        _store(tmp_path, seed, 5.0, precision="fp8_tensorwise", status=end)
    verdicts = validation_curve(load_runs(tmp_path), frame(tmp_path)).groupby("rung")["verdict"]
    assert verdicts.unique().map(list).to_dict() == {
        "FP8 tensorwise": ["diverged"], KERNELS: ["equivalent"],
    }  # fmt: skip


def test_the_floor_is_told_by_what_differs(table: pd.DataFrame) -> None:
    last = table[table["step"] == 60]
    kernels = last[last["rung"] == KERNELS]
    assert sorted(kernels["gap_pct"]) == pytest.approx([-0.1, 0.11])
    assert set(kernels["precision"]) == {"bf16"}
    flash = kernels[kernels["setting"].str.contains("flash attention")].iloc[0]
    assert flash["low_95"] < 0.11 < flash["high_95"]
    (again,) = last[last["rung"] == AGAIN].to_dict("records")
    assert (again["precision"], again["num_pairs"]) == ("fp8_tensorwise", 3)
    assert again["gap_pct"] == pytest.approx(0.2)


def test_runs_that_scored_once_or_never_have_no_curve(tmp_path: Path) -> None:
    for precision in ("bf16", "fp8_rowwise"):
        store(tmp_path, "local", make_record(precision=precision))
    assert validation_curve(load_runs(tmp_path), frame(tmp_path)).empty


def _store_on(results: Path, place: str, gaps: dict[int, float], **changes: Any) -> None:
    """Store by seed an FP8 run that ends so many % above its BF16 one, at 5."""
    for seed, gap in gaps.items():
        end = 5.0 * (1 + gap / 100)
        _store(results, seed, 5.0, place, **changes)
        _store(results, seed, end, place, precision="fp8_tensorwise", **changes)


def test_machines_are_pooled_by_seed_and_compared_on_their_own(tmp_path: Path) -> None:
    _store_on(tmp_path, "reference/one", {0: 0.2, 1: 0.1})
    assert pooled_table(load_runs(tmp_path), frame(tmp_path)).empty
    _store_on(tmp_path, "reference/two", {0: -0.4, 2: 0.0})
    _store(tmp_path, 0, 5.0 * 1.003, "reference/two", attention="flash")
    table = pooled_table(load_runs(tmp_path), frame(tmp_path)).set_index("what")
    fp8 = table.loc["FP8 tensorwise"]
    assert (fp8["num_runs"], fp8["num_pairs"], fp8["machines"]) == (4, 3, "one, two")
    assert fp8["gap_pct"] == pytest.approx(0.0, abs=1e-9)  # of -0.1, 0.1 and 0
    assert fp8["high_90"] == pytest.approx(2.919986 * 0.1 / 3**0.5)  # Student's t, 2 degrees
    assert fp8["size_pct"] == pytest.approx((0.21 / 4) ** 0.5)
    assert table.loc[KERNELS, "gap_pct"] == pytest.approx(0.3)
    assert fp8["verdict"] == "equivalent" and table.loc[KERNELS, "verdict"] == "undecided"
    shown = rows.pooled(table.reset_index())
    assert shown["what"].tolist() == ["FP8 tensorwise v BF16", "BF16 by other kernels"]
    assert shown["interval"].tolist() == ["\u22120.17\u00a0to\u00a0+0.17", ""]


@pytest.mark.parametrize("margins", [(1.0, 0.25), (0.25, 1.0)])
def test_machines_that_judge_by_other_margins_give_no_verdict_together(
    margins: tuple[float, float], tmp_path: Path
) -> None:
    for name, margin in zip(("one", "two"), margins, strict=True):
        _store_on(tmp_path, f"reference/{name}", dict.fromkeys(range(4), 0.4), margin=margin)
    (fp8,) = pooled_table(load_runs(tmp_path), frame(tmp_path)).to_dict("records")
    assert (fp8["num_pairs"], fp8["verdict"]) == (4, "undecided")
    assert math.isnan(fp8["margin_pct"])


def test_what_goes_on_from_trained_weights_is_pooled_by_itself(tmp_path: Path) -> None:
    for place in ("reference/one", "reference/two"):
        _store_on(tmp_path, place, dict.fromkeys(range(3), 0.1))
        _store_on(tmp_path, place, dict.fromkeys(range(3), 0.0), init_from="a/run")
    table = pooled_table(load_runs(tmp_path), frame(tmp_path)).set_index("what")
    assert table["gap_pct"].round(6).to_dict() == {
        "FP8 tensorwise": 0.1, "FP8 tensorwise, from trained weights": 0.0,
    }  # fmt: skip


def test_other_kernels_are_a_rung_of_the_ladder(tmp_path: Path) -> None:
    for seed in range(3):
        _store(tmp_path, seed, 5.0)
        _store(tmp_path, seed, 5.005, attention="flash")
    for seed in range(2):  # kernels are compared in a seed that FP8 has not
        _store(tmp_path, seed, 5.05, precision="fp8_tensorwise")
    ladder = ladder_table(frame(tmp_path)).groupby("rung")["difference_pct"]
    assert ladder.mean()[KERNELS] == pytest.approx(0.1)
    assert ladder.mean()["FP8 tensorwise"] == pytest.approx(1.0)
    assert ladder.size()[KERNELS] == 3
    assert ladder.size()[SEED] == 6  # three of each kernel


def _store_pairs(results: Path, gaps: list[float], highest: float = 12.0, **changes: Any) -> None:
    """Store pairs with these gaps, in %, whose BF16 losses begin at 12 and rise to `highest`."""
    for seed, gap in enumerate(gaps):
        for precision, end in (("bf16", 5.0), ("fp8_tensorwise", 5.0 * (1 + gap / 100))):
            told = {"loss_start": 12.0, "loss_last20_mean": end}
            record = make_record(precision=precision, seed=seed, results=told, **changes)
            rise = highest if precision == "bf16" else 12.0
            store(results, "reference/box", record, [12.0, rise, *[end] * 20])


def test_pairs_scatter_within_arms_by_learning_rate(tmp_path: Path) -> None:
    _store_pairs(tmp_path, [0.1, 0.2, 0.3], learning_rate=1e-5, study="calm")
    _store_pairs(tmp_path, [1.1, 1.2, 1.3], learning_rate=1e-5, study="worse")
    _store_pairs(tmp_path, [-1.0, 0.0, 1.0], learning_rate=1e-3, highest=13.0, study="wild")
    _store_pairs(tmp_path, [5.0, 0.0], learning_rate=1e-2, study="few")
    _store_pairs(tmp_path, [5.0, 0.0, 3.0], study="again", data={"epochs": 1.5})
    table = scatter_table(metrics_frame(load_runs(tmp_path)), frame(tmp_path))
    calm, wild = table.to_dict("records")
    assert (calm["learning_rate"], calm["num_arms"], calm["num_pairs"]) == (1e-5, 2, 6)
    assert calm["scatter_pct"] == pytest.approx(0.1)  # of each study by itself
    assert (calm["num_risen"], calm["num_runs"], calm["num_to_decide"]) == (0, 12, 4)
    assert (wild["learning_rate"], wild["scatter_pct"]) == (1e-3, pytest.approx(1.0))
    assert (wild["num_risen"], wild["num_runs"]) == (3, 6)
    assert wild["num_to_decide"] > 100
    assert len(wild["run_ids"].split()) == 6
    _store_pairs(tmp_path, [0.1, 0.2, 0.3], learning_rate=1e-3, config={"init_from": "a/run"})
    table = scatter_table(metrics_frame(load_runs(tmp_path)), frame(tmp_path))
    assert table.loc[table["learning_rate"] == 1e-3, "starts_from"].tolist() == [TRAINED, RANDOM]
