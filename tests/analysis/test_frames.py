"""The frame of all runs, and the names of arms and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8study.analysis.runs.frames import (
    ALL_STUDIES,
    METRIC_COLUMNS,
    RUN_COLUMNS,
    cost_table,
    metrics_frame,
    runs_frame,
)
from fp8study.analysis.runs.naming import setting_label
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.core.config import make_config
from fp8study.core.records import load_runs
from tests.factories import make_record, store
from tests.study_factories import make_document_a, make_results
from tests.table_factories import frame, store_pair


def test_frame_is_typed_and_an_empty_one_has_the_same_columns(tmp_path: Path) -> None:
    full, empty = frame(make_results(tmp_path)), runs_frame([])
    assert list(full) == list(empty) == list(RUN_COLUMNS)
    assert full.dtypes.to_dict() == empty.dtypes.to_dict()
    assert str(full["num_gpus"].dtype) == "Int64"
    assert str(full["tokens_per_second_per_gpu"].dtype) == "float64"


def test_metrics_have_one_row_per_step(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    metrics = metrics_frame(load_runs(tmp_path))
    assert list(metrics) == list(METRIC_COLUMNS)
    assert (metrics.groupby("run_id").size() == 400).all()
    assert list(metrics_frame([])) == list(METRIC_COLUMNS)


def test_names_of_arms_leave_out_what_tells_none_apart(tmp_path: Path) -> None:
    """Layers kept out of FP8 are named per arm only if the arms of a study disagree on them."""
    first = {"optimizer_binding": "before_conversion", "skip": ["first", "lm_head"]}
    for study in ("same", "mixed"):
        store(tmp_path, "local", make_record(study=study, **first))
        fp8 = {"study": study, "precision": "fp8_rowwise"}
        store(tmp_path, "local", make_record(skip=["first", "lm_head"], **fp8))
    store(tmp_path, "local", make_record(study="mixed", precision="fp8_tensorwise"))
    runs = shorten_arms(frame(tmp_path)).set_index(["study", "precision"]).sort_index()
    assert runs.loc[("same", "bf16"), "arm"] == "BF16"
    assert runs.loc[("same", "fp8_rowwise"), "arm"] == "FP8 rowwise"
    assert runs.loc[("same", "fp8_rowwise"), "kept_in_bf16"] == "first lm_head"
    assert runs.loc[("mixed", "fp8_rowwise"), "arm"] == "FP8 rowwise, skips first lm_head"
    assert runs["kept_in_bf16"].notna().sum() == 1
    assert shorten_arms(runs_frame([])).empty


def test_unknown_share_outside_the_optimizer_is_labelled_too(tmp_path: Path) -> None:
    stale = {"optimizer_binding": "before_conversion"}
    store_pair(tmp_path, stale | {"model": "x"})
    store(
        tmp_path, "local", make_record(None, precision="fp8_tensorwise", run_id="unknown", **stale)
    )
    runs = frame(tmp_path).set_index("run_id")
    assert "share of parameters not trained unknown" in runs.loc["unknown", "arm"]
    assert not runs.loc["fp8", "stale"]


def test_settings_name_the_path_and_what_is_unusual_for_it() -> None:
    def label(**values: object) -> str:
        return setting_label(make_config(values).to_dict()).partition("FP32 masters")[2]

    assert label() == ""
    assert label(path="tuned") == ", tuned"
    assert label(max_grad_norm=1.0) == ", gradients clipped at 1"
    assert label(optimizer_state="fp8") == ", FP8 optimizer states"
    assert label(optimizer_step="in_backward") == ", updates in backward"
    assert label(path="tuned", loss_head="plain") == ", tuned, plain loss head"
    assert label(path="tuned", num_gpus=4, reshard_after_forward=False) == ", tuned, resharding off"
    cold = setting_label(make_config({"compile_cache": "fresh"}).to_dict())
    assert ", compiled, cold cache, FP32 masters" in cold
    assert setting_label({"strategy": "none"}) == "not sharded"  # older than any switch
    refused = {"strategy": "none", "precision": "fp9"}
    assert setting_label(refused) == "not sharded"
    older = make_config({"path": "tuned", "num_gpus": 4}).to_dict()
    del older["allocator"]
    assert setting_label(older).endswith(", tuned, earlier form")
    assert setting_label(older | {"loss_head": "plain"}).endswith(", plain loss head, earlier form")


def test_runs_of_other_optimizer_states_are_never_compared(tmp_path: Path) -> None:
    for number, state in enumerate((None, "fp32", "bf16", "fp8")):
        record = make_record(run_id=f"run-{number}")
        record.config.update({"optimizer_state": state} if state else {})
        store(tmp_path, "local", record)
    runs = frame(tmp_path)
    for key in ("arm_key", "pair_key", "effect_key", "switch_key", "kernel_key"):
        # A record from before the field is one with FP32 states.
        assert runs[key].nunique() == 3, key
        assert runs.loc[0, key] == runs.loc[1, key]


def test_runs_that_shared_a_gpu_are_seeds_and_partners_of_those_that_did_not(
    tmp_path: Path,
) -> None:
    for number, shared in enumerate((2, 1, None)):
        record = make_record(run_id=f"run-{number}", seed=number)
        record.config.update({"runs_per_gpu": shared} if shared else {})
        store(tmp_path, "local", record)
    runs = frame(tmp_path)
    assert runs["arm_key"].nunique() == runs["partner_key"].nunique() == 1
    assert runs["pair_key"].nunique() == 3


def test_what_a_study_held_of_its_gpus_is_added_up(tmp_path: Path) -> None:
    times = {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T01:00:00+00:00"}
    before = {"launch_seconds": 100.0, "imports_seconds": 200.0, "gpu_wait_seconds": 1500.0}
    startup = {"startup": before}
    arms = [
        ("one", {"num_gpus": 4, "strategy": "fsdp2"}),
        ("two", {"runs_per_gpu": 2}),
        ("two", {"instruments": startup, "seed": 1}),
    ]
    for study, changes in arms:
        store(tmp_path, "local", make_record(study=study, **times, **changes))
    hours = cost_table(runs_frame(load_runs(tmp_path))).set_index("study")["gpu_hours"]
    assert hours.to_dict() == {"one": 4.0, "two": 1.0, ALL_STUDIES: 5.0}


@pytest.mark.parametrize(
    ("weights", "num_keys"), [(("ab", "ab"), 1), (("ab", "cd"), 2), ((None, None), 1)]
)
def test_runs_that_began_with_other_weights_are_no_pair(
    weights: tuple[str | None, ...], num_keys: int, tmp_path: Path
) -> None:
    for precision, found in zip(("bf16", "fp8_tensorwise"), weights, strict=True):
        record = make_record(precision=precision)
        record.model.update({"init_sha256": found} if found else {})
        store(tmp_path, "local", record)
    assert frame(tmp_path)["pair_key"].nunique() == num_keys
