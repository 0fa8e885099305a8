"""The laws held to account: what is compared with what, and that a wrong law would be seen."""

import copy
import dataclasses
import functools
from functools import partial

import pytest

from fp8study.analysis.laws import account, frozen, speed, speed_fit
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.report import predictions as words
from tests.checkout import ROOT


@functools.cache
def cells():
    """Return the cells of the first freeze."""
    return cells_of(run for run in read_runs(ROOT / "results") if frozen.fitted_to(*run, freeze=0))


def with_constants(monkeypatch, law, **factors):
    """Multiply frozen constants, those without a model too."""
    wrong = copy.deepcopy(frozen.freezes())
    for name, factor in factors.items():
        wrong[-1][law]["constants"][name]["value"] *= factor
        for values in wrong[-1][law]["without"].values():
            values[name] *= factor
    monkeypatch.setattr(frozen, "freezes", lambda: wrong)


def verdict():
    return account.lead_verdicts(account.lead_table(cells())).iloc[0]


def test_each_fitted_cell_is_predicted_without_its_model():
    table = account.lead_table(cells())
    assert set(table["test"]) == {account.LEFT_OUT}
    assert (table["predicted_pct"] != table["fitted_pct"]).all()
    assert table["fitted_pct"].sub(table["measured_pct"]).abs().mean() < 4


@pytest.mark.parametrize(
    ("law", "constant", "factor"),
    [("speed", "fp8_tflops", 1.5), ("speed", "cast_ps", 3.0), ("speed", "bf16_tflops", 0.7)],
)
def test_a_wrong_law_of_speed_would_be_seen(monkeypatch, law, constant, factor):
    right = verdict()
    with_constants(monkeypatch, law, **{constant: factor})
    wrong = verdict()
    assert wrong["mean_points"] > right["mean_points"] + account.MEAN_POINTS
    assert wrong["most_points"] > account.MOST_POINTS and not wrong["is_met"]


def test_a_wrong_law_of_memory_would_be_seen(monkeypatch):
    right = account.memory_verdicts(account.memory_table(cells())).iloc[0]
    with_constants(monkeypatch, "memory", logit_bytes=2.0)
    wrong = account.memory_verdicts(account.memory_table(cells())).iloc[0]
    assert right["num_missed"] <= 1 < 10 < wrong["num_missed"]


def test_goals_are_met_by_predictions_without_error():
    table = account.lead_table(cells()).assign(
        predicted_pct=lambda t: t["measured_pct"], error_points=0.0
    )
    assert account.lead_verdicts(table)["is_met"].all()
    table.loc[table["measured_pct"].idxmax(), "predicted_pct"] = -1.0
    assert account.lead_verdicts(table)["num_wrong_side"].iloc[0] == 1
    assert not account.lead_verdicts(table)["is_met"].any()


def test_what_a_fit_did_not_know_is_a_test_of_its_own(monkeypatch):
    early = {**frozen.freezes()[-1], "last_run_ended": "2026-11-21T04:00:00+00:00"}
    monkeypatch.setattr(frozen, "freezes", lambda: [early])
    tests = account.lead_table(cells())["test"].value_counts()
    assert tests[account.KEPT_OUT] > tests[account.LEFT_OUT] > 0


def grid():
    runs = read_runs(ROOT / "results")
    return cells_of(run for run in runs if run[0].startswith("h200x4/document-a-grid/"))


def known_to_the_second_alone():
    return [cell for cell in grid() if frozen.knows(1, cell) and not frozen.knows(0, cell)]


def test_a_withdrawn_freeze_takes_no_cell_from_those_that_did_not_know_it():
    found = {account.test_of(cell) for cell in known_to_the_second_alone()}
    assert found == {(account.KEPT_OUT, None, 2)}


def test_a_later_freeze_does_not_take_back_what_tested_an_earlier_one(monkeypatch):
    kept = [freeze | {"withdrawn": False} for freeze in frozen.freezes()[:2]]
    monkeypatch.setattr(frozen, "freezes", lambda: kept)
    found = {account.test_of(cell) for cell in known_to_the_second_alone()}
    assert found == {(account.KEPT_OUT, None, 0)}


def test_the_freeze_in_use_is_off_by_less_than_those_before_it():
    table = account.freeze_table(cells_of(read_runs(ROOT / "results")))
    used = table.iloc[-1]
    assert used["state"] == "in use" and "withdrawn" in set(table["state"])
    assert used["num_known"] and used["num_later"]
    points = sum(table[f"num_{of}"] * table[f"{of}_points"] for of in ("known", "later"))
    assert (points[:-1] > points.iloc[-1]).all()
    assert "none was better" in words.freeze_words(table)
    worse = table.assign(known_points=table["known_points"] + 10 * (table["state"] == "in use"))
    assert "an earlier one was better: bring it back" in words.freeze_words(worse)
    few = worse.assign(num_known=0, known_points=None)
    assert "is in use. The form" in words.freeze_words(few)
    none = words.freeze_words(account.freeze_table([]))
    assert none.startswith("No GPU records")


def test_where_it_misses_is_said_of_models_and_tokens():
    table = account.lead_table(cells())
    (row,) = account.lead_verdicts(table).to_dict("records")
    off = table[table["error_points"].abs() > account.MOST_POINTS]
    assert 0 < len(off) == len(row["off_models"]) < len(table)
    (said,) = words.lead_goals(table, account.lead_verdicts(table))["missed"]
    assert said.endswith(f"; up to {off['tokens'].max():,.0f} tokens")
    assert all(f"{number} {model}" in said for model, number in off["model"].value_counts().items())
    right = table.assign(error_points=0.0)
    assert words.lead_goals(right, account.lead_verdicts(right))["missed"].tolist() == ["0"]


def test_one_setting_moves_from_study_to_study_more_where_the_host_is_busy():
    sessions = account.session_table(cells_of(read_runs(ROOT / "results")))
    busy = sessions["host_pct"] > speed.HOST_PCT
    assert sessions["spread_points"][busy].mean() > 2 * sessions["spread_points"][~busy].mean()
    elsewhere = sessions["spread_points"][~busy]
    said = f", {elsewhere.mean():.1f} elsewhere (up to {elsewhere.max():.1f}; "
    assert said in words.session_words(sessions)


def test_a_gpu_is_known_by_fp8_on_it_in_two_models_that_the_newest_constants_are_of(monkeypatch):
    h100, b200 = ([dataclasses.replace(cell, gpu=name) for cell in cells()]
                  for name in ("NVIDIA H100 80GB HBM3", "NVIDIA B200"))  # fmt: skip
    known = partial(speed_fit.knows_gpu, "NVIDIA H100 80GB HBM3")
    assert known(h100) and speed_fit.knows_gpu("NVIDIA H200", [])
    assert not known([cell for cell in h100 if not cell.config.is_fp8])
    assert not known([cell for cell in h100 if "1b" in cell.config.model])
    assert not speed_fit.knows_gpu("NVIDIA B200", b200)  # an architecture that no fit is of
    monkeypatch.setattr(speed_fit, "knows", lambda freeze, cell: False)
    assert not known(h100)


def test_another_kind_of_gpu_is_predicted_by_other_models():
    h100 = [dataclasses.replace(cell, gpu="NVIDIA H100 80GB HBM3") for cell in cells()]
    table = account.lead_table(h100)
    assert set(table["test"]) == {account.OTHER_GPU} and (table["run_ids"] != "").all()
    assert (table["predicted_pct"] != table["fitted_pct"]).all()  # without its model


def test_the_law_of_speed_is_fitted_to_one_kind_of_gpu(monkeypatch):
    class Fitted(Exception):
        """Stands for a fit of seconds; holds the cells that it would be to."""

    def fit(misses, start, chosen, usual):
        raise Fitted(chosen)

    monkeypatch.setattr(speed_fit, "fit_with_errors", fit)
    h100 = [dataclasses.replace(cell, gpu="NVIDIA H100 80GB HBM3") for cell in cells()]
    fitted = []
    for chosen in (cells(), cells() + h100):
        with pytest.raises(Fitted) as found:
            speed_fit.fit_speed(chosen)
        fitted += found.value.args
    assert fitted[0] == fitted[1] and fitted[0]


def test_leads_are_of_pairs_that_differ_in_their_precision_alone():
    pairs = account.cell_pairs(cells())
    assert pairs
    for pair in pairs:
        fp8, bf16 = pair.fp8.config, pair.bf16.config
        assert fp8.is_fp8 and not bf16.is_fp8
        same = ("model", "num_gpus", "strategy", "sequence_length", "micro_batch_size", "path",
                "master_dtype", "loss_head", "optimizer_step")  # fmt: skip
        assert [getattr(fp8, n) for n in same] == [getattr(bf16, n) for n in same]


def test_runs_for_their_loss_alone_hide_none_that_was_timed():
    """They may share a cell, and came first in that of a 1B at batch 4."""
    table = account.lead_table(cells_of(read_runs(ROOT / "results")))
    compared = set(" ".join(table["run_ids"]).split())
    timed = {str(path.parent.relative_to(ROOT / "results/reference"))
             for path in ROOT.glob("results/reference/h200x2/shapes/*-fp8_*/run.json")}  # fmt: skip
    assert len(timed) == 36 and timed <= compared
