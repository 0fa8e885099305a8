"""The parts of the gap, from synthetic arms whose costs are known."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests

from fp8study.analysis import attribution as effects
from fp8study.analysis.floors import AGAIN, FAULT, SEED, ladder_table
from fp8study.analysis.losses import gap_curves, seed_spread
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import DIVERGED, paired_losses
from fp8study.core.records import load_runs
from fp8study.report.cause_plots import ladder_figure
from fp8study.report.cause_sentences import attribution, noise
from fp8study.report.plotstyle import line_styles
from fp8study.report.rows import rungs as rungs_of
from tests.factories import CPU, make_record, store
from tests.study_factories import (
    make_attribution,
    make_document_a,
    make_effective_batch,
    make_smoke,
    store_attribution_arm,
)
from tests.table_factories import frame


def table(results: Path) -> pd.DataFrame:
    return effects.effect_table(frame(results))


def row(parts: pd.DataFrame, part: str, masters: str = "BF16") -> pd.Series:
    (found,) = [r for _, r in parts.iterrows() if (r["part"], r["masters"]) == (part, masters)]
    return found


BOTH = "BF16 and FP32"


def test_every_part_has_the_cost_that_was_put_in(tmp_path: Path) -> None:
    make_attribution(tmp_path)
    parts = table(tmp_path)
    known = {
        (effects.WHOLE_GAP, "BF16"): 4.004,
        (effects.STALE, "BF16"): 4.0,
        (effects.TENSORWISE, "BF16"): 0.004,
        (effects.TENSORWISE, "FP32"): 0.004,
        (effects.ROWWISE, "BF16"): 0.003,
        (effects.ALL_GATHER, "BF16"): 0.0,
        (effects.PLANTED, "FP32"): 4.0,
        (effects.TWIN, "BF16"): 0.004,
        (effects.MASTERS, BOTH): 2.0,
        (effects.MASTERS_IN_FP8, BOTH): 0.0,
    }
    for (part, masters), cost in known.items():
        assert row(parts, part, masters)["mean"] == pytest.approx(cost, abs=0.003), part
    assert len(parts) == len(effects.parts())
    assert set(parts["num_pairs"]) == {5}
    assert effects.absent_parts(parts) == []


def test_the_parts_add_up(tmp_path: Path) -> None:
    make_attribution(tmp_path)
    parts = table(tmp_path)
    whole, stale = row(parts, effects.WHOLE_GAP), row(parts, effects.STALE)
    fp8, fine = row(parts, effects.TENSORWISE), row(parts, effects.TENSORWISE, "FP32")
    added = row(parts, effects.MASTERS_IN_FP8, BOTH)
    assert stale["mean"] + fp8["mean"] == pytest.approx(whole["mean"])
    assert fine["mean"] + added["mean"] == pytest.approx(fp8["mean"])
    assert stale["share_pct"] + fp8["share_pct"] == pytest.approx(100)


def test_the_numbers_are_those_of_the_paired_test(tmp_path: Path) -> None:
    make_attribution(tmp_path)
    runs, parts = frame(tmp_path), table(tmp_path)

    def losses(**chosen: Any) -> np.ndarray[Any, Any]:
        rows = runs
        for name, value in chosen.items():
            rows = rows[rows[name] == value]
        return rows.sort_values("seed")["loss_last20_mean"].to_numpy()

    bf16 = losses(precision="bf16", master_dtype="bf16", planted=False)
    pct = 100 * (losses(precision="fp8_rowwise") - bf16) / bf16
    found = row(parts, effects.ROWWISE)
    expected = scipy_stats.ttest_1samp(pct, 0)
    interval = expected.confidence_interval(0.95)
    assert found["mean_pct"] == pytest.approx(pct.mean())
    assert found["p_value"] == pytest.approx(expected.pvalue)
    assert (found["low_pct"], found["high_pct"]) == pytest.approx((interval.low, interval.high))
    adjusted = multipletests(parts["p_value"].astype(float), method="holm")[1]
    assert parts["p_holm"].astype(float).to_numpy() == pytest.approx(adjusted)


def test_the_margin_is_the_studys_own(tmp_path: Path) -> None:
    make_attribution(tmp_path)
    assert row(table(tmp_path), effects.WHOLE_GAP)["verdict"] == "different"
    assert row(table(tmp_path), effects.ROWWISE)["verdict"] == "equivalent"
    judged_at_99 = frame(tmp_path).assign(margin_pct=99.0)
    wide = row(effects.effect_table(judged_at_99), effects.WHOLE_GAP)
    assert (wide["verdict"], wide["margin_pct"]) == ("equivalent", 99.0)


def test_partial_records_leave_rows_out_and_say_so(tmp_path: Path) -> None:
    for seed in range(3):
        for end, arm in (
            (6.0, {"precision": "bf16"}),
            (6.1, {"precision": "fp8_rowwise"}),
            (9.9, {"precision": "bf16", "untrained": ["model.layers.*"]}),
        ):
            changes: dict[str, Any] = {"master_dtype": "bf16"} | arm
            store_attribution_arm(tmp_path, end + 0.01 * seed, seed, **changes)
    parts = table(tmp_path)
    assert parts["part"].tolist() == [effects.ROWWISE, effects.PLANTED]
    missing = effects.absent_parts(parts)
    assert "the stale optimizer (BF16 masters)" in missing
    assert not any("rowwise" in name for name in missing)
    text = attribution(parts)
    assert "is missing" in text
    assert "STUDY=attribution" in text
    assert "the stale optimizer (BF16 master weights)" in text


@pytest.mark.parametrize(
    "apart",
    [
        {"machine": {"gpu_name": "Another GPU"}},
        {"versions": {"torch": "2.0.0"}},
        {"data": {"corpus_sha256": "cd" * 32}},
        {"data": {"tokenizer_sha256": "ef" * 32}},
        {"seed": 1},
        {"study": "attribution-2"},
        {"sequence_length": 1024},
        {"learning_rate": 1e-4},
        {"skip": []},
    ],
)
def test_arms_of_different_settings_are_never_paired(apart: dict[str, Any], tmp_path: Path) -> None:
    common: dict[str, Any] = {"study": "attribution", "strategy": "none", "skip": ["lm_head"]}
    store(tmp_path, "local", make_record(run_id="bf16", **common))
    planted = common | {"untrained": ["model.layers.*"]} | apart
    store(tmp_path, "local", make_record(78.4, run_id="planted", **planted))
    assert table(tmp_path).empty


def test_arms_of_another_machines_records_are_never_paired(tmp_path: Path) -> None:
    store_attribution_arm(tmp_path, 6.0, 0, "local")
    store_attribution_arm(tmp_path, 9.0, 0, "reference/box", untrained=["model.layers.*"])
    assert table(tmp_path).empty


def test_where_nothing_is_faulty_nothing_is_taken_apart(tmp_path: Path) -> None:
    make_effective_batch(tmp_path)
    assert table(tmp_path).empty
    assert "STUDY=attribution" in attribution(table(tmp_path))


def test_one_pair_gives_a_difference_and_no_interval(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    parts = table(tmp_path)
    assert set(parts["num_pairs"]) == {1}
    assert parts[["low_pct", "p_holm", "detectable_pct"]].isna().all(axis=None)
    assert set(parts["verdict"]) == {"undecided"}
    assert "undecided" not in attribution(parts)


@pytest.mark.parametrize(
    ("stale", "healthy", "words"),
    [(10.0, 6.004, "is nearly all of it"), (10.0, 7.5, "is most of it"),
     (10.0, 9.0, "is the lesser part of it"), (5.9, 6.0, "the failure is not there")],
)  # fmt: skip
def test_words_follow_the_shares(stale: float, healthy: float, words: str, tmp_path: Path) -> None:
    fp8: dict[str, Any] = {"precision": "fp8_tensorwise", "fp8_all_gather": True}
    before = {"optimizer_binding": "before_conversion"}
    for end, arm in ((6.0, {"precision": "bf16"}), (stale, fp8 | before), (healthy, fp8)):
        store_attribution_arm(tmp_path, end, 0, **({"master_dtype": "bf16"} | arm))
    text = attribution(table(tmp_path))
    assert words in text
    assert "of which" not in text  # a part is never larger than its whole


def test_the_ladder_has_a_rung_for_each_reason(tmp_path: Path) -> None:
    make_attribution(tmp_path, seeds=3)
    store_attribution_arm(tmp_path, 6.003, 0, repeat=1, master_dtype="bf16")
    store_attribution_arm(tmp_path, 6.003, 0, repeat=2, master_dtype="bf16")
    rungs = ladder_table(frame(tmp_path))
    counts = rungs["rung"].value_counts()
    assert counts[AGAIN] == 3  # three runs of one seed
    assert counts[SEED] == 2 * 3  # three seeds, two kinds of masters; a repeat is no seed
    assert counts[FAULT] == 2 * 3
    assert counts["FP8 rowwise"] == 3
    again = rungs.loc[rungs["rung"] == AGAIN, "difference_pct"]
    assert (again == 0).sum() == 1  # the second and the third are equal to the last digit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = ladder_figure(rungs, "")
        figure.savefig(tmp_path / "ladder.png")
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["equal to the last digit"]
    assert not ladder_figure(rungs[rungs["difference_pct"] > 0], "").legends
    medians = rungs_of(rungs).set_index("rung")["median_pct"]
    assert medians[SEED] == rungs.loc[rungs["rung"] == SEED, "difference_pct"].median()
    told = noise(rungs_of(rungs))
    assert told.startswith("Precision moved the loss by less than the seed did (1 setting); a gap")
    louder = rungs_of(rungs)
    louder.loc[louder["rung"] == "FP8 rowwise", "median_pct"] = 99.0
    assert "more than the seed did in attribution on 8 × H200: FP8 rowwise." in noise(louder)
    runs = frame(tmp_path)
    assert ladder_table(runs.assign(speed_only=True)).empty  # asks for speed alone


def test_without_two_runs_of_one_arm_there_is_no_ladder(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    make_smoke(tmp_path)
    assert ladder_table(frame(tmp_path)).empty
    assert "STUDY=loss-parity" in noise(rungs_of(ladder_table(frame(tmp_path))))


def test_the_gap_along_a_run_is_that_of_its_pair(tmp_path: Path) -> None:
    make_attribution(tmp_path, seeds=3)
    stored = load_runs(tmp_path)
    runs, metrics = runs_frame(stored), metrics_frame(stored)
    along, spread = gap_curves(metrics, runs), seed_spread(metrics, runs)
    assert along["step"].min() == 20
    last = along[(along["step"] == 40) & (along["precision"] == "fp8_rowwise")]
    pairs = paired_losses(runs)
    pairs = pairs[pairs["precision"] == "fp8_rowwise"].sort_values("seed")
    base = pairs["loss_last20_mean_bf16"]
    expected = (100 * (pairs["loss_last20_mean"] - base) / base).tolist()
    assert last.sort_values("seed")["gap_pct"].tolist() == pytest.approx(expected)
    assert not along["arm"].str.contains("stale|planted").any()
    assert set(spread["num_seeds"]) == {3}
    ends = runs[(runs["precision"] == "bf16") & ~runs["stale"]].groupby("master_dtype")
    known = (100 * ends["loss_last20_mean"].std() / ends["loss_last20_mean"].mean()).tolist()
    assert sorted(spread.loc[spread["step"] == 40, "spread_pct"]) == pytest.approx(sorted(known))


def test_a_part_of_which_a_seed_diverged_is_not_equivalent(tmp_path: Path) -> None:
    make_attribution(tmp_path)
    before = effects.effect_table(frame(tmp_path))
    healthy = before[(before["part"] == effects.TENSORWISE) & (before["masters"] == "BF16")]
    assert (healthy["verdict"] != DIVERGED).all()
    runs = frame(tmp_path)
    lost = runs[
        (runs["precision"] == "fp8_tensorwise") & ~runs["stale"] & (runs["master_dtype"] == "bf16")
        & (runs["fp8_all_gather"] == True) & (runs["seed"] == 0)  # noqa: E712
    ].index  # fmt: skip
    assert len(lost)
    runs.loc[lost, "status"] = "diverged"
    after = effects.effect_table(runs)
    rows = after[(after["part"] == effects.TENSORWISE) & (after["masters"] == "BF16")]
    assert (rows["verdict"] == DIVERGED).all()
    others = after[(after["part"] == effects.ROWWISE) & (after["masters"] == "BF16")]
    assert len(others) and (others["verdict"] != DIVERGED).all()


def test_a_record_without_a_seed_takes_nothing_down(tmp_path: Path) -> None:
    make_attribution(tmp_path, seeds=3)
    whole = table(tmp_path)
    record = make_record(50.0, study="attribution", run_id="seedless")
    del record.config["seed"]
    store(tmp_path, "local", record)
    assert len(table(tmp_path)) == len(whole)


def test_pairs_that_logged_too_little_have_no_curve(tmp_path: Path) -> None:
    for precision in ("bf16", "fp8_rowwise"):
        store(tmp_path, "local", make_record(precision=precision), [9.0, 8.0, 7.0])
    assert gap_curves(metrics_frame(load_runs(tmp_path)), frame(tmp_path)).empty


def test_a_gpu_comes_first_and_a_cpu_says_so(tmp_path: Path) -> None:
    fault = {"untrained": ["model.layers.*"]}
    for machine, facts in (("local", CPU), ("reference/box", {})):
        for end, arm in ((6.0, {}), (9.0, fault)):
            store_attribution_arm(tmp_path, end, 0, machine, machine=facts, **arm)
    parts = table(tmp_path)
    assert parts["machine"].tolist() == ["box", "local"]
    assert parts["setting"].str.contains("FP8 emulated").tolist() == [False, True]
    assert "attribution on box" in attribution(parts)


def test_no_two_arms_are_drawn_alike() -> None:
    """Figure 4 of the page on failure once had two of these five in one style."""
    names = ["", ", skips nothing", ", skips a b", ", optimizer made before conversion", ", x",
             ", y"]  # fmt: skip
    arms = pd.DataFrame({"arm": [f"FP8 tensorwise{name}" for name in names] * 2})
    arms["arm"] = [f"{arm}{'!' * (i >= len(names))}" for i, arm in enumerate(arms["arm"])]
    styles = line_styles(arms.assign(precision="fp8_tensorwise", stale=False))
    assert len(styles) == len({str(style) for style in styles.values()}) == 12
