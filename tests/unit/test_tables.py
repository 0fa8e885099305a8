import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study import effect_sentences, loss_sentences, plots, stats, tables
from fp8study.config import make_config
from fp8study.frames import setting_label
from fp8study.gaps import effective_batch_table, ways_table
from fp8study.pages import load_report
from fp8study.power import smallest_detectable
from fp8study.records import load_runs
from tests.factories import (
    CPU,
    make_broken,
    make_document_a,
    make_effective_batch,
    make_quick,
    make_record,
    make_results,
    make_smoke,
    store,
)

STALE = "stale optimizer (78.4 % of parameters not trained)"
ALL_TABLES = [
    tables.throughput_table,
    tables.loss_gap_table,
    tables.document_a_table,
    tables.provenance_table,
    tables.failures_table,
    tables.data_table,
]


def frame(results: Path) -> pd.DataFrame:
    return tables.runs_frame(load_runs(results))


def store_pair(results: Path, fp8: dict[str, Any], bf16: dict[str, Any] | None = None) -> None:
    """Store a BF16 and a tensorwise run, each with its own changes."""
    store(results, "local", make_record(run_id="bf16", **(bf16 or {})))
    changes = {"precision": "fp8_tensorwise"} | fp8
    store(results, "local", make_record(run_id="fp8", **changes))


def fp8_row(table: pd.DataFrame) -> pd.Series:
    (row,) = [row for _, row in table.iterrows() if row["precision"] != "bf16"]
    return row


def test_frame_is_typed_and_an_empty_one_has_the_same_columns(tmp_path: Path) -> None:
    full, empty = frame(make_results(tmp_path)), tables.runs_frame([])
    assert list(full) == list(empty) == list(tables.RUN_COLUMNS)
    assert full.dtypes.to_dict() == empty.dtypes.to_dict()
    assert str(full["num_gpus"].dtype) == "Int64"
    assert str(full["tokens_per_second_per_gpu"].dtype) == "float64"


def test_wrong_types_in_a_record_become_missing(tmp_path: Path) -> None:
    results = {"tokens_per_second_per_gpu": "fast", "memory_peak_gib": None}
    store(tmp_path, "local", make_record(results=results, compile="yes"))
    row = frame(tmp_path).iloc[0]
    assert pd.isna(row["tokens_per_second_per_gpu"])
    assert pd.isna(row["memory_peak_gib"])
    assert pd.isna(row["compile"])


def test_metrics_have_one_row_per_step(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    metrics = tables.metrics_frame(load_runs(tmp_path))
    assert list(metrics) == list(tables.METRIC_COLUMNS)
    assert (metrics.groupby("run_id").size() == 400).all()
    assert list(tables.metrics_frame([])) == list(tables.METRIC_COLUMNS)


@pytest.mark.parametrize("table", ALL_TABLES)
def test_no_runs_give_an_empty_table(table: Any) -> None:
    assert table(tables.runs_frame([])).empty


@pytest.mark.parametrize("table", ALL_TABLES)
def test_failures_alone_do_not_break_a_table(table: Any, tmp_path: Path) -> None:
    make_broken(tmp_path)
    assert "speedup_pct" not in table(frame(tmp_path)).dropna(axis="columns", how="all")


def test_speedup_is_over_the_paired_bf16_run(tmp_path: Path) -> None:
    make_quick(tmp_path, seeds=3)
    table = tables.throughput_table(frame(tmp_path))
    fp8 = table[table["precision"] != "bf16"]
    assert len(fp8) == 6
    strained = (fp8["model"] == "llama-3.1-8b") & (fp8["num_gpus"] == 1)
    assert fp8.loc[~strained, "speedup_pct"].to_numpy() == pytest.approx(20.0)
    assert fp8.loc[strained, "speedup_pct"].isna().all()
    assert set(table["num_runs"]) == {3}
    assert table.loc[table["precision"] == "bf16", "speedup_pct"].isna().all()


def test_speed_is_the_median_over_seeds(tmp_path: Path) -> None:
    for seed, speed in enumerate((1.0, 2.0, 900.0)):
        results = {"tokens_per_second_per_gpu": speed}
        store(tmp_path, "local", make_record(seed=seed, results=results))
    (row,) = tables.throughput_table(frame(tmp_path)).to_dict("records")
    assert row["tokens_per_second_per_gpu"] == 2.0


@pytest.mark.parametrize(
    "difference",
    [
        {"seed": 1},
        {"learning_rate": 1e-3},
        {"micro_batch_size": 2},
        {"master_dtype": "bf16"},
        {"study": "other"},
        {"machine": {"gpu_name": "Another GPU"}},
        {"versions": {"torch": "2.12.0"}},
        {"versions": {"transformers": "6.0.0"}},
        {"data": {"corpus_sha256": "cd" * 32}},
        {"data": {"tokenizer_sha256": "cd" * 32}},
        {"status": "diverged"},
    ],
)
def test_no_partner_leaves_the_comparison_blank(difference: dict[str, Any], tmp_path: Path) -> None:
    store_pair(tmp_path, {}, difference)
    runs = frame(tmp_path)
    row = fp8_row(tables.throughput_table(runs))
    assert pd.isna(row["speedup_pct"])
    assert row["note"] == "no BF16 partner"
    assert tables.loss_gap_table(runs).empty


def test_another_model_of_the_same_name_is_no_partner(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    smaller = make_record(precision="fp8_tensorwise", run_id="fp8-smaller", seed=0)
    smaller.model["num_parameters"] = 1
    store(tmp_path, "local", smaller)
    gaps = tables.loss_gap_table(frame(tmp_path))
    assert gaps["num_pairs"].tolist() == [1]
    speed = tables.throughput_table(frame(tmp_path))
    assert sorted(speed["note"]) == ["", "", "no BF16 partner"]


@pytest.mark.parametrize(
    "fp8_only",
    [
        {"fp8_all_gather": True},
        {"optimizer_binding": "before_conversion"},
        {"skip": ["lm_head", "*.0.*"]},
        {"fp8_emulate": True},
    ],
)
def test_what_exists_for_fp8_only_does_not_spoil_a_pair(
    fp8_only: dict[str, Any], tmp_path: Path
) -> None:
    store_pair(tmp_path, fp8_only)
    assert fp8_row(tables.throughput_table(frame(tmp_path)))["speedup_pct"] == pytest.approx(20)


def test_cpu_runs_get_no_speedup(tmp_path: Path) -> None:
    make_smoke(tmp_path)
    table = tables.throughput_table(frame(tmp_path))
    assert len(table) == 6
    assert table["speedup_pct"].isna().all()
    assert table["note"].str.contains("CPU").all()
    store_pair(tmp_path, {"study": "document-a", "machine": CPU}, {"study": "document-a"})
    by_document = tables.document_a_table(frame(tmp_path))
    on_cpu = by_document[by_document["device"] == "cpu"]
    assert on_cpu[["tokens_per_second_per_gpu", "speedup_pct"]].isna().all(axis=None)


@pytest.mark.parametrize(
    "strain",
    [
        {"memory_peak_gib": 130.0, "num_device_allocs": None},
        {"num_alloc_retries": 1},
        {"num_device_allocs": 1},
    ],
)
def test_nearly_full_memory_gives_no_speedup(strain: dict[str, Any], tmp_path: Path) -> None:
    store_pair(tmp_path, {}, {"results": strain})
    table = tables.throughput_table(frame(tmp_path))
    assert table["note"].tolist() == [tables.MEMORY_FULL] * 2
    assert pd.isna(fp8_row(table)["speedup_pct"])


def test_full_memory_is_no_strain_where_the_allocator_had_nothing_to_do(tmp_path: Path) -> None:
    still = {"memory_peak_gib": 130.0, "num_alloc_retries": 0, "num_device_allocs": 0}
    store_pair(tmp_path, {"results": still}, {"results": still})
    row = fp8_row(tables.throughput_table(frame(tmp_path)))
    assert (row["note"], row["speedup_pct"]) == ("", pytest.approx(20))


@pytest.mark.parametrize(
    "table", [tables.throughput_table, tables.loss_gap_table, tables.document_a_table]
)
def test_every_table_names_the_stale_optimizer(table: Any, tmp_path: Path) -> None:
    make_document_a(tmp_path)
    rows = table(frame(tmp_path))
    assert rows["stale"].sum() == 1
    (arm,) = rows.loc[rows["stale"].astype(bool), "arm"]
    assert arm == f"FP8 tensorwise, {STALE}"
    assert not rows.loc[~rows["stale"].astype(bool), "arm"].str.contains("stale").any()


def test_names_of_arms_leave_out_what_tells_none_apart(tmp_path: Path) -> None:
    """Layers kept out of FP8 are named per arm only if the arms of a study disagree on them."""
    first = {"optimizer_binding": "before_conversion", "skip": ["first", "lm_head"]}
    for study in ("same", "mixed"):
        store(tmp_path, "local", make_record(study=study, **first))
        fp8 = {"study": study, "precision": "fp8_rowwise"}
        store(tmp_path, "local", make_record(skip=["first", "lm_head"], **fp8))
    store(tmp_path, "local", make_record(study="mixed", precision="fp8_tensorwise"))
    runs = tables.shorten_arms(frame(tmp_path)).set_index(["study", "precision"]).sort_index()
    assert runs.loc[("same", "bf16"), "arm"] == "BF16"
    assert runs.loc[("same", "fp8_rowwise"), "arm"] == "FP8 rowwise"
    assert runs.loc[("same", "fp8_rowwise"), "kept_in_bf16"] == "first lm_head"
    assert runs.loc[("mixed", "fp8_rowwise"), "arm"] == "FP8 rowwise, skips first lm_head"
    assert runs["kept_in_bf16"].notna().sum() == 1
    assert tables.shorten_arms(tables.runs_frame([])).empty


def test_every_figure_names_the_stale_optimizer(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    runs, metrics = frame(tmp_path), tables.metrics_frame(load_runs(tmp_path))
    speed = tables.throughput_table(runs)
    for figure in (plots.throughput_figure(speed), plots.memory_figure(speed)):
        words = [text.get_text() for text in figure.legends[0].get_texts()]
        assert sum(STALE in word for word in words) == 1
    curves = plots.loss_curves_figure(metrics, runs)
    assert any(STALE in text.get_text() for text in curves.legends[0].get_texts())
    document_a = plots.document_a_figure(metrics, runs)
    words = [" ".join(text.get_text().split()) for text in document_a.axes[0].texts]
    assert sum(STALE in word for word in words) == 1
    assert len(words) == 6  # five arms and the uniform guess


def test_unknown_share_outside_the_optimizer_is_labelled_too(tmp_path: Path) -> None:
    stale = {"optimizer_binding": "before_conversion"}
    store_pair(tmp_path, stale | {"model": "x"})
    record = make_record(precision="fp8_tensorwise", run_id="unknown", **stale)
    record.model["parameters_outside_optimizer_pct"] = None
    store(tmp_path, "local", record)
    runs = frame(tmp_path).set_index("run_id")
    assert "share of parameters not trained unknown" in runs.loc["unknown", "arm"]
    assert not runs.loc["fp8", "stale"]


def test_document_a_arms(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    table = tables.document_a_table(frame(tmp_path))
    assert len(table) == 5
    outside = table["parameters_outside_optimizer_pct"]
    assert outside.tolist() == [0, 0, 78.4, 0, 0]
    assert table.loc[table["stale"].astype(bool), "loss_last20_mean"].item() > 9


def test_one_pair_has_no_interval(tmp_path: Path) -> None:
    store_pair(tmp_path, {"results": {"loss_last20_mean": 5.61}})
    row = tables.loss_gap_table(frame(tmp_path)).iloc[0]
    assert row["gap"] == pytest.approx(0.11)
    assert row["gap_pct"] == pytest.approx(2.0)
    assert row["interval"] == "one pair: no interval"
    assert row["verdict"] == "undecided"


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [((0.001, 0.002, 0.0), "equivalent"), ((0.5, 0.51, 0.49), "different")],
)
def test_three_pairs_have_an_interval_and_a_verdict(
    gaps: tuple[float, ...], verdict: str, tmp_path: Path
) -> None:
    for seed, gap in enumerate(gaps):
        for precision, loss in (("bf16", 5.0 + seed), ("fp8_rowwise", 5.0 + seed + gap)):
            results = {"loss_last20_mean": loss}
            record = make_record(precision=precision, seed=seed, results=results)
            store(tmp_path, "local", record)
    row = tables.loss_gap_table(frame(tmp_path)).iloc[0]
    assert row["num_pairs"] == 3
    assert row["verdict"] == verdict
    assert row["gap_pct_low_95"] < row["gap_pct_low_90"] < row["gap_pct"]
    assert row["interval"].replace("\u00a0", " ").startswith("90 %: ")


def test_the_validation_loss_is_compared_where_it_was_measured(tmp_path: Path) -> None:
    for seed, (trained, unseen) in enumerate(((2.0, 3.0), (2.1, 3.1), (2.2, None))):
        for precision, worse in (("bf16", 1.0), ("fp8_rowwise", 1.1)):
            results = {"loss_last20_mean": trained * worse, "validation_loss": unseen}
            record = make_record(
                precision=precision, seed=seed, results=results, validation_sequences=8
            )
            store(tmp_path, "local", record)
    runs = frame(tmp_path)
    row = tables.loss_gap_table(runs, loss="validation_loss").iloc[0]
    assert (row["num_pairs"], row["num_lost"], row["gap_pct"]) == (2, 1, 0.0)
    assert row["loss"] == row["loss_bf16"] == pytest.approx(3.05)
    assert tables.loss_gap_table(runs).iloc[0]["gap_pct"] == pytest.approx(10.0)


def test_settings_name_the_path_and_what_is_unusual_for_it() -> None:
    def label(**values: object) -> str:
        return setting_label(make_config(values).to_dict()).partition("FP32 masters")[2]

    assert label() == ""
    assert label(path="tuned") == ", tuned"
    assert label(max_grad_norm=1.0) == ", gradients clipped at 1"
    assert label(optimizer_step="in_backward") == ", updates in backward"
    assert label(path="tuned", loss_head="plain") == ", tuned, plain loss head"
    assert label(path="tuned", num_gpus=4, reshard_after_forward=False) == ", tuned, resharding off"
    assert setting_label({"strategy": "none"}) == "not sharded"  # older than any switch
    refused = {"strategy": "none", "precision": "fp9"}
    assert setting_label(refused) == "not sharded"
    older = make_config({"path": "tuned", "num_gpus": 4}).to_dict()
    del older["allocator"]
    assert setting_label(older).endswith(", tuned, default allocator")


def test_lost_runs_are_counted(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    lost = make_record(precision="fp8_tensorwise", seed=1, status="diverged")
    store(tmp_path, "local", lost)
    row = tables.loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["num_pairs"], row["num_lost"]) == (1, 1)


def store_repeat(results: Path, precision: str, minute: int, value: float, **changes: Any) -> None:
    """Store a run of seed 0 that ended at `minute`, with a loss and a speed of `value`."""
    measured = {"loss_last20_mean": value, "tokens_per_second_per_gpu": value}
    record = make_record(
        precision=precision,
        # The order of names is the reverse of the order in time.
        run_id=f"{precision}-{9 - minute}",
        ended_at=f"2000-01-01T00:0{minute}:00+00:00",
        results=measured,
        study="document-a",
        **changes,
    )
    store(results, "local", record)


def test_repeats_of_a_seed_count_once_and_the_newest_counts(tmp_path: Path) -> None:
    for minute, (bf16, fp8) in enumerate(((5.0, 9.0), (6.0, 9.0), (4.0, 5.0))):
        store_repeat(tmp_path, "bf16", minute, bf16)
        store_repeat(tmp_path, "fp8_rowwise", minute, fp8)
    runs = frame(tmp_path)
    row = tables.loss_gap_table(runs).iloc[0]
    assert (row["num_pairs"], row["num_lost"]) == (1, 0)
    assert (row["loss_bf16"], row["loss"]) == (4.0, 5.0)
    assert row["interval"] == "one pair: no interval"
    for table in (tables.throughput_table(runs), tables.document_a_table(runs)):
        assert table["num_runs"].tolist() == [1, 1]
        assert table["tokens_per_second_per_gpu"].tolist() == [4.0, 5.0]
        assert fp8_row(table)["speedup_pct"] == pytest.approx(25)


def test_the_speed_of_a_seed_is_the_median_over_its_repeats(tmp_path: Path) -> None:
    for repeat, (bf16, fp8) in enumerate(((5.0, 2.0), (4.0, 6.0), (3.0, 5.0))):
        store_repeat(tmp_path, "bf16", repeat, bf16, repeat=repeat)
        store_repeat(tmp_path, "fp8_rowwise", repeat, fp8, repeat=repeat)
    table = tables.throughput_table(frame(tmp_path))
    assert table["num_runs"].tolist() == [3, 3]
    assert table["tokens_per_second_per_gpu"].tolist() == [4.0, 5.0]
    assert fp8_row(table)["speedup_pct"] == pytest.approx(25)


def test_a_repeat_that_the_allocator_held_up_voids_the_seed(tmp_path: Path) -> None:
    for repeat, retries in enumerate((0, 3, 0)):
        for precision in ("bf16", "fp8_rowwise"):
            measured = {"tokens_per_second_per_gpu": 5.0, "num_alloc_retries": retries}
            store_repeat(tmp_path, precision, repeat, 5.0, repeat=repeat)
            path = next(tmp_path.rglob(f"{precision}-{9 - repeat}/run.json"))
            record = json.loads(path.read_text())
            record["results"] |= measured
            path.write_text(json.dumps(record))
    assert fp8_row(tables.throughput_table(frame(tmp_path)))["note"] == tables.MEMORY_FULL


def test_a_speed_ends_with_a_newer_divergence(tmp_path: Path) -> None:
    store_repeat(tmp_path, "bf16", 0, 4.0)
    store_repeat(tmp_path, "fp8_rowwise", 0, 5.0)
    assert len(tables.throughput_table(frame(tmp_path))) == 2
    store_repeat(tmp_path, "fp8_rowwise", 1, 5.0, status="diverged")
    assert tables.throughput_table(frame(tmp_path))["precision"].tolist() == ["bf16"]


def test_newer_divergence_is_not_hidden_by_an_older_success(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    again = {"run_id": "again", "ended_at": "2000-01-02T00:00:00+00:00"}
    store(tmp_path, "local", make_record(precision="fp8_tensorwise", status="failed", **again))
    assert tables.loss_gap_table(frame(tmp_path))["num_pairs"].tolist() == [1]
    again["run_id"] = "and-again"
    store(tmp_path, "local", make_record(precision="fp8_tensorwise", status="diverged", **again))
    row = tables.loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["num_pairs"], row["num_diverged"], row["verdict"]) == (0, 1, "diverged")


@pytest.mark.parametrize("survivors", [3, 0])
def test_survivors_of_a_divergence_are_never_equivalent(survivors: int, tmp_path: Path) -> None:
    for seed in range(survivors + 2):
        gone = seed >= survivors
        for precision, loss in (("bf16", 5.0), ("fp8_rowwise", 5.001 + 0.001 * seed)):
            lost = gone and precision != "bf16"
            store(
                tmp_path, "local",
                make_record(
                    precision=precision, seed=seed, status="diverged" if lost else "completed",
                    results={"loss_last20_mean": None if lost else loss},
                ),
            )  # fmt: skip
    (row,) = tables.loss_gap_table(frame(tmp_path)).to_dict("records")
    assert (row["num_pairs"], row["num_diverged"], row["verdict"]) == (survivors, 2, "diverged")
    assert row["judged"] == f"diverged in 2 of {survivors + 2} seeds"
    text = loss_sentences.loss_summary(load_report(tmp_path))
    assert "In 1 comparison FP8 diverged in a seed in which BF16 did not" in text
    assert "equivalent, " not in text
    assert "nan" not in text


def test_p_values_are_adjusted_over_the_healthy_arms_of_a_study(tmp_path: Path) -> None:
    costs = {"fp8_tensorwise": 0.010, "fp8_rowwise": 0.004}
    for seed in range(4):
        for precision, cost in ({"bf16": 0.0} | costs).items():
            loss = 5.0 + seed + cost * (1 + 0.3 * (-1) ** seed)
            record = make_record(precision=precision, seed=seed, results={"loss_last20_mean": loss})
            store(tmp_path, "local", record)
    table = tables.loss_gap_table(frame(tmp_path))
    assert table["p_holm"].tolist() == pytest.approx(stats.holm(table["p_value"].tolist()))
    gaps = 100 * costs["fp8_rowwise"] * pd.Series([1.3 / 5, 0.7 / 6, 1.3 / 7, 0.7 / 8])
    row = table[table["precision"] == "fp8_rowwise"].iloc[0]
    assert row["p_value"] == pytest.approx(stats.paired_t_p_value(gaps.tolist()), rel=1e-6)
    assert row["detectable_pct"] == pytest.approx(smallest_detectable(gaps.std(), 4), rel=1e-6)


def test_the_first_repeat_is_the_one_that_pairs(tmp_path: Path) -> None:
    """Whichever ends last: the order in which a pipeline finishes says nothing."""
    for repeat, hour, loss in ((0, 1, 5.0), (1, 2, 6.0), (0, 0, 9.0)):
        ended = f"2000-01-01T0{hour}:00:00+00:00"
        results = {"loss_last20_mean": loss}
        record = make_record(run_id=f"bf16-{hour}", ended_at=ended, results=results)
        record.config["repeat"] = repeat
        store(tmp_path, "local", record)
    store(
        tmp_path, "local", make_record(precision="fp8_rowwise", results={"loss_last20_mean": 5.5})
    )
    (row,) = tables.loss_gap_table(frame(tmp_path)).to_dict("records")
    assert row["loss_bf16"] == 5.0


def test_verdicts_from_failure_studies_alone_are_said_so(tmp_path: Path) -> None:
    def store_study(study: str) -> None:
        for seed in range(3):
            for precision, loss in (("bf16", 5.0), ("fp8_rowwise", 5.001 + 0.0001 * seed)):
                results = {"loss_last20_mean": loss}
                record = make_record(precision=precision, seed=seed, study=study, results=results)
                store(tmp_path, "local", record)

    words = "All of these are from studies of document A's failure"
    store_study("attribution")
    assert words in loss_sentences.loss_summary(load_report(tmp_path))
    store_study("loss-parity")
    assert words not in loss_sentences.loss_summary(load_report(tmp_path))


def test_seeds_of_two_versions_of_torchao_are_two_arms(tmp_path: Path) -> None:
    for seed in range(4):
        for precision, loss in (("bf16", 5.0), ("fp8_rowwise", 5.001)):
            versions = {"torch": "2.11.0", "torchao": "0.17.0" if seed < 2 else "0.18.0"}
            results = {"loss_last20_mean": loss}
            record = make_record(precision=precision, seed=seed, versions=versions, results=results)
            store(tmp_path, "local", record)
    assert tables.loss_gap_table(frame(tmp_path))["num_pairs"].tolist() == [2, 2]
    assert tables.throughput_table(frame(tmp_path))["num_runs"].tolist() == [4, 2, 2]


def test_a_divergence_that_bf16_shares_is_none_of_fp8s(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    for precision in ("bf16", "fp8_tensorwise"):
        store(tmp_path, "local", make_record(precision=precision, seed=1, status="diverged"))
    row = tables.loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["num_pairs"], row["num_lost"], row["num_diverged"]) == (1, 1, 0)


def test_a_batch_at_which_fp8_diverges_is_a_failure(tmp_path: Path) -> None:
    make_effective_batch(tmp_path, seeds=1)
    lone = make_record(study="effective-batch", seed=7, run_id="lone")
    store(tmp_path, "reference/h200x8", lone)
    store(
        tmp_path, "reference/h200x8",
        make_record(
            study="effective-batch", seed=7, run_id="gone", precision="fp8_tensorwise",
            status="diverged", results={"loss_last20_mean": None},
        ),
    )  # fmt: skip
    text = effect_sentences.effective_batch(
        effective_batch_table(frame(tmp_path)), ways_table(frame(tmp_path))
    )
    assert "1 diverged" in text
    assert "FP8 fails to learn in 1 setting." in text
    assert "nan" not in text


def test_run_that_failed_before_it_saw_its_data_is_lost(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    lost = make_record(precision="fp8_tensorwise", seed=1, status="failed")
    lost.data.clear()
    lost.model.clear()
    store(tmp_path, "local", lost)
    row = tables.loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["num_pairs"], row["num_lost"]) == (1, 1)


def test_reference_records_pair() -> None:
    stored = load_runs(Path(__file__).parents[2] / "results")
    runs = tables.runs_frame(run for run in stored if run.machine_label == "h200x4")
    gaps = tables.loss_gap_table(runs)
    sizes = runs["study"].value_counts()
    assert (sizes["quick"], sizes["document-a"], sizes["attribution"]) == (12, 15, 50)
    assert (sizes["instruments"], sizes["corner-arms"], sizes["precision-noise"]) == (12, 16, 4)
    assert set(gaps.loc[gaps["study"] == "attribution", "num_pairs"]) == {5}
    assert gaps.loc[gaps["study"] == "quick", "num_pairs"].tolist() == [1] * 6
    assert gaps.loc[gaps["study"] == "document-a", "num_pairs"].tolist() == [3] * 3
    assert tables.document_a_table(runs)["num_runs"].tolist() == [3] * 5


def test_document_a_figure_takes_the_final_loss_from_the_record(tmp_path: Path) -> None:
    """With log_every > 1 the last 20 logged rows reach further back than 20 steps."""
    for precision, loss in (("bf16", 5.25), ("fp8_tensorwise", None)):
        status = "completed" if loss else "diverged"
        record = make_record(
            study="document-a",
            precision=precision,
            status=status,
            results={"loss_last20_mean": loss},
        )
        store(tmp_path, "local", record, [9.0, 8.0, 7.0])
    stored = load_runs(tmp_path)
    figure = plots.document_a_figure(tables.metrics_frame(stored), tables.runs_frame(stored))
    words = [" ".join(text.get_text().split()) for text in figure.axes[0].texts]
    assert "BF16, FP32 masters: 5.25" in words
    assert "FP8 tensorwise, FP32 masters: diverged" in words


def test_failures_and_provenance_account_for_every_run(tmp_path: Path) -> None:
    runs = frame(make_results(tmp_path))
    failures = tables.failures_table(runs)
    assert sorted(failures["status"]) == [
        "diverged",
        "failed",
        "failed",
        "interrupted",
        "out_of_memory",
    ]
    assert tables.provenance_table(runs)["num_runs"].sum() == len(runs)


def test_uncommitted_changes_are_named(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record(git={"dirty": True}))
    (commit,) = tables.provenance_table(frame(tmp_path))["commit"]
    assert commit == "0123456789 + uncommitted changes"


def test_reporting_imports_no_torch() -> None:
    code = "import sys, fp8study.pages, fp8study.plots, fp8study.sentences; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_published_leads_are_computed(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text("source,setting,gpus,bf16,fp8_tensorwise,fp8_rowwise\ns,x,1,100,125,\n")
    (row,) = tables.published_table(path).to_dict("records")
    assert row["fp8_tensorwise_pct"] == pytest.approx(25)
    assert pd.isna(row["fp8_rowwise_pct"])


def test_the_margin_is_the_one_that_the_study_states(tmp_path: Path) -> None:
    for seed, gap in enumerate((0.9, 1.0, 1.1)):
        for precision, loss in (("bf16", 100.0), ("fp8_rowwise", 100.0 + gap)):
            results = {"loss_last20_mean": loss}
            store(tmp_path, "local", make_record(seed=seed, precision=precision, results=results))
    runs = frame(tmp_path)
    narrow = tables.loss_gap_table(runs, {"another": 2.0}).iloc[0]
    wide = tables.loss_gap_table(runs, {"quick": 2.0}).iloc[0]
    assert (narrow["margin_pct"], narrow["verdict"]) == (0.25, "different")
    assert (wide["margin_pct"], wide["verdict"]) == (2.0, "equivalent")
    assert wide["gap_pct_high_90"] == narrow["gap_pct_high_90"]
