"""What `make bench` measures and puts aside, and which baseline it takes. No time is judged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.errors import UserError
from fp8study.core.records import load_runs
from fp8study.core.studies import PlannedRun, load_study
from fp8study.run import bench
from fp8study.run.bench import bench_for, find_baseline
from fp8study.run.machine import Machine
from tests.checkout import ROOT
from tests.factories import CPU, finish, make_record, store
from tests.machines import H200, machine

WITH_GPU, WITHOUT = machine(H200), Machine((), 2)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "pipelines", tmp_path / "pipelines")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("there", [WITH_GPU, WITHOUT], ids=["gpu", "cpu"])
def test_every_arm_has_three_repeats_and_a_reference(there: Machine, checkout: Path) -> None:
    study = load_study(bench_for(there))
    arms: dict[tuple[Any, ...], set[int]] = {}
    for run in study.runs:
        c = run.config
        arms.setdefault((c.model, c.num_gpus, c.path, c.precision), set()).add(c.repeat)
    assert {len(repeats) for repeats in arms.values()} == {3}
    precision, path = study.reference["precision"], study.reference["path"]
    for model, num_gpus, _, _ in arms:
        assert (model, num_gpus, path, precision) in arms
    assert len({arm[2:] for arm in arms}) > 1


def test_nothing_is_measured_that_leaves_no_arms_to_compare(checkout: Path) -> None:
    with pytest.raises(UserError, match="--set: with precision 'bench-cpu' has no arms to compare"):
        bench.run_bench(WITHOUT, {"precision": "bf16"}, None)
    assert not (checkout / "results").exists()


def test_a_finished_call_is_put_aside_and_an_unfinished_one_goes_on(checkout: Path) -> None:
    study = load_study("bench-cpu")
    local = checkout / "results" / "local"
    study.put_aside_earlier_call(study.runs)  # nothing is there
    assert not local.exists()
    finish(*study.runs[:2])
    study.put_aside_earlier_call(study.runs)
    assert len(list(local.glob("bench-cpu/*/run.json"))) == 2
    shutil.rmtree(local)
    for number in (1, 2):
        finish(*study.runs)
        study.put_aside_earlier_call(study.runs)
        assert not (local / "bench-cpu").exists()
        kept = local / "earlier" / f"bench-cpu-{number}"
        assert len(list(kept.glob("*/run.json"))) == len(study.runs)
    assert load_runs(checkout / "results") == []  # no study of its own to the report


def test_runs_of_other_settings_are_no_part_of_this_call(checkout: Path) -> None:
    finish(load_study("bench-cpu", {"num_steps": 50}).runs[0])
    study = load_study("bench-cpu")
    study.put_aside_earlier_call(study.runs)
    assert (checkout / "results" / "local" / "earlier" / "bench-cpu-1").is_dir()


def test_runs_that_cannot_be_done_here_leave_no_call_unfinished(checkout: Path) -> None:
    study = load_study("bench")
    possible = [run for run in study.runs if run.config.num_gpus == 1]
    finish(*possible)
    study.put_aside_earlier_call(possible)
    assert not (checkout / "results" / "local" / "bench").exists()


def test_a_baseline_is_of_the_same_hardware(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = checkout / "results"
    assert find_baseline("bench", WITH_GPU) is None
    store(results, "reference/h100x8", make_record(study="bench", machine={"gpu_name": "H100"}))
    assert find_baseline("bench", WITH_GPU) is None
    store(results, "reference/h200x8", make_record(study="bench"))
    assert find_baseline("bench", WITH_GPU) == results / "reference" / "h200x8" / "bench"
    newer = store(results, "reference/h200x2", make_record(study="bench"))
    (newer / "run.json").write_text('{"schema_version": 99}')
    assert find_baseline("bench", WITH_GPU) == results / "reference" / "h200x8" / "bench"
    assert f"left out: BASELINE: {newer}/run.json: schema" in capsys.readouterr().err
    store(results, "baseline", make_record(study="bench-cpu", machine=CPU))
    assert find_baseline("bench-cpu", WITHOUT) == results / "baseline" / "bench-cpu"


def test_committed_baseline_is_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes the study measures its baseline anew."""
    monkeypatch.chdir(ROOT)
    study = load_study("bench-cpu")
    there = {path.parent.name for path in (ROOT / "results/baseline/bench-cpu").glob("*/*.json")}
    assert there == {run.run_id for run in study.runs}


@pytest.mark.parametrize(
    ("reference", "words"),
    [("reference: bf16", "reference: 'bf16' is not valid; give a mapping"),
     ("reference: {precison: bf16}", "did you mean 'precision'"),
     ("reference: {precision: int4}", "'int4'")],
)  # fmt: skip
def test_a_wrong_reference_in_a_study_is_one_line(
    checkout: Path, reference: str, words: str
) -> None:
    (checkout / "pipelines/studies/mine.yaml").write_text(f"question: Does it?\n{reference}\n")
    with pytest.raises(UserError) as raised:
        load_study("mine")
    assert words in str(raised.value)


def test_a_baseline_without_any_of_the_arms_is_refused_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    measured: list[str] = []
    monkeypatch.setattr(bench, "run_study", lambda study, *_, **__: measured.append(study.name))
    monkeypatch.setattr(bench, "check_results", lambda *_: None)
    monkeypatch.setattr(bench, "compare_relative", lambda *_: None)
    bench.run_bench(WITHOUT, {}, ROOT / "results/baseline/bench-cpu")
    assert measured == ["bench-cpu"]
    with pytest.raises(UserError, match=r"^BASELINE: '.*quick' has no arm of the study 'bench-c"):
        bench.run_bench(WITHOUT, {}, ROOT / "results/reference/h200x4/quick")
    assert measured == ["bench-cpu"]


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_a_block_has_all_arms_of_a_repeat_on_the_same_gpus(num_gpus: int) -> None:
    study = load_study("bench")
    runs = bench.in_blocks(study, num_gpus).runs
    assert {run.run_id for run in runs} == {run.run_id for run in study.runs}
    blocks: dict[tuple[Any, ...], list[PlannedRun]] = {}
    for run in runs:
        c = run.config
        blocks.setdefault((c.model, c.num_gpus, c.micro_batch_size, c.repeat), []).append(run)
    assert len(blocks) == 12
    for (_, width, *_), block in blocks.items():
        assert {(run.config.path, run.config.precision) for run in block} == {
            (path, precision)
            for path in ("plain", "tuned")
            for precision in ("bf16", "fp8_tensorwise")
        }
        (gpus,) = {run.gpus for run in block}
        assert len(gpus) == (width if width <= num_gpus else 0)
        places = [runs.index(run) for run in block]
        assert max(places) - min(places) == len(block) - 1
    shares = [sum((gpu,) == run.gpus for run in runs) for gpu in range(num_gpus)]
    assert sum(shares) == 36
    assert max(shares) - min(shares) <= 4  # one block
    orders = {
        tuple((r.config.path, r.config.precision) for r in block) for block in blocks.values()
    }
    assert len(orders) > 3
