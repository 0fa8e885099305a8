"""Runs that have to have certain GPUs: each GPU does its own in the study's order."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from fp8study.core.errors import UserError
from fp8study.core.studies import expanded, load_study
from fp8study.run import launch, pipeline
from fp8study.run.blocks import gpus_to_have, ordered
from fp8study.run.chosen.estimates import host_gib
from fp8study.run.machine import Machine
from fp8study.run.plan import impossible_runs, plan_text
from tests.checkout import copy_checkout
from tests.machines import H200, machine

#: Stands for papermill: holds the GPUs as a run does, and notes which and when. A narrow run ends
#: no sooner than the wide one has come: on a busy computer that may begin much later.
TRAINS_NOTHING = """
import json, os, sys, time
from pathlib import Path
import psutil
from fp8study.core.config import load_config
from fp8study.core.records import write_record
from fp8study.run.gpu_lease import lease
from tests.factories import make_record

told = dict(zip(sys.argv, sys.argv[1:]))
path, allowed = Path(told["-f"]), [int(n) for n in os.environ["FP8STUDY_GPUS"].split(",")]
config = load_config(path)
came = Path("results/local/wide-came")
if config.num_gpus == 2:
    came.touch()
with lease(config.num_gpus, allowed, poll_seconds=0.02) as held:
    start = time.time()
    while not came.exists() and time.time() < start + 100:
        time.sleep(0.02)
    time.sleep(0.5)
    begun = psutil.Process(os.getppid()).create_time()
    row = [config.repeat, held.indices, start, time.time(), begun]
path.with_name("held.json").write_text(json.dumps(row))
write_record(make_record(run_id=path.parent.name), path.parent)
"""
ARMS = [  # numbered by `repeat`, the wide one last
    *({"repeat": n, "gpus": [0]} for n in range(4)),
    *({"repeat": n, "gpus": [1]} for n in range(4, 6)),
    {"repeat": 6, "gpus": [0, 1], "num_gpus": 2},
]


@pytest.mark.slow
def test_each_gpu_does_its_runs_in_order_one_at_a_time_and_the_wide_ones_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = copy_checkout(tmp_path)
    content = {"question": "In order?", "base": {"model": "tiny-llama"}, "arms": ARMS}
    (checkout / "pipelines/studies/queued.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "papermill.py").write_text(TRAINS_NOTHING)
    parts = [tmp_path / "stub", Path(__file__).parents[2] / "src", Path(__file__).parents[2]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, parts)))
    monkeypatch.setenv("FP8STUDY_LOCKS", str(tmp_path / "locks"))
    monkeypatch.chdir(checkout)
    study = load_study("queued")
    study.write_configs()
    there = machine(H200, H200)
    lock = os.open(tmp_path / "lock", os.O_CREAT)
    pipeline._snakemake(study, Machine(there.gpus, 8), {}, list(study.runs), lock, False)

    rows = [json.loads((run.run_dir / "held.json").read_text()) for run in study.runs]
    assert [gpus for _, gpus, *_ in rows] == [arm["gpus"] for arm in ARMS]
    for gpu, queue in ((0, [0, 1, 2, 3]), (1, [4, 5])):
        held = sorted((row for row in rows if gpu in row[1]), key=lambda row: row[2])
        assert 6 in [row[0] for row in held][:2]
        # A GPU's queue begins two at a time: of those either may be first.
        begun = [row[0] for row in sorted(held, key=lambda row: row[4]) if row[0] != 6]
        assert all(abs(begun.index(run) - place) < 2 for place, run in enumerate(queue))
        assert all(one[3] <= next_[2] + 0.1 for one, next_ in itertools.pairwise(held))
    assert rows[4][2] < rows[1][3]  # GPUs do not wait for each other


def test_a_run_may_be_told_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    there = machine(H200, H200, H200)
    for told, numbers in (("2, 0", [0, 2]), ("", [0, 1, 2])):
        monkeypatch.setenv("FP8STUDY_GPUS", told)
        assert [gpu.index for gpu in launch._allowed(there)] == numbers
    for told in ("3", "0-1", "0,GPU-abc"):
        monkeypatch.setenv("FP8STUDY_GPUS", told)
        with pytest.raises(
            UserError, match=r"^FP8STUDY_GPUS: .* this machine has 0, 1, 2; name those"
        ):
            launch._allowed(there)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("shapes", [{"precision": "bf16"}, {"precision": "fp8_rowwise"}]),
        ("weight-cast", [{"weight_cast": "each_update"}, {"update_kernel": "one_pass"}]),
        ("document-b", [{"compile": False, "compile_cache": "shared"}, {"precision": "bf16"}]),
        ("new-text", [{"attention": "flash"}, {"precision": "bf16"}]),
        ("tuned-loss", [{"precision": "bf16"}]),
    ],
)
def test_runs_that_are_compared_share_a_gpu_and_gpus_share_the_work(
    name: str, blocks: list[dict[str, object]]
) -> None:
    study, there = load_study(name), machine(H200, H200)
    gpus = gpus_to_have(there, study)
    for changes in blocks:
        pairs = [
            (gpus[one.run_id], gpus[other.run_id])
            for one, other in itertools.product(study.runs, repeat=2)
            if one != other and vars(one.config) | changes == vars(other.config)
        ]
        assert pairs
        assert all(one == other for one, other in pairs)
    minutes = [sum(r.minutes for r in study.runs if gpus[r.run_id] == [n]) for n in (0, 1)]
    assert max(minutes) <= 2.01 * min(minutes)  # three seeds on two GPUs
    assert not any(gpus_to_have(machine(H200), study).values())


def test_a_plans_minutes_are_those_of_the_gpu_with_the_most_to_do() -> None:
    study = load_study("small-form")
    there = machine(H200, H200)
    gpus = gpus_to_have(there, study)
    queues = [sum(run.minutes for run in study.runs if gpus[run.run_id] == [n]) for n in (0, 1)]
    assert max(queues) > 1.3 * sum(queues) / 2  # else they would tell nothing
    assert f" to do, about {max(queues):.0f} min." in plan_text(study, there)


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_a_study_with_runs_wider_than_the_machine_has_a_plan(num_gpus: int) -> None:
    study = load_study("quick", {"corpus": "synthetic"})
    text = plan_text(study, machine(*num_gpus * [H200]))
    why = rf"cannot be run here( \([0-9a-f]{{8}}[^)]*\))?: num_gpus: 4 is more than the {num_gpus} "
    assert re.search(why, " ".join(text.split())) and " to do, about " in text


def test_runs_keep_their_gpus_after_a_break() -> None:
    study = load_study("shapes")
    gpus = gpus_to_have(machine(H200, H200), study)
    blocks = [{tuple(gpus[r.run_id]) for r in study.runs[n : n + 3]} for n in range(0, 54, 3)]
    assert blocks == [{(n % 2,)} for n in range(18)]


@pytest.mark.parametrize(
    "name",
    ["document-a-blocks", "new-text", "schedules", "skipped-layers", "weight-cast", "stability"],
)
def test_a_study_that_is_cut_off_leaves_whole_blocks(name: str) -> None:
    runs = ordered(load_study(name).runs)
    blocks = [(run.config.repeat, run.config.seed) for run in runs]
    assert blocks == sorted(blocks)
    assert runs != list(load_study(name).runs)


def test_a_study_with_a_timetable_of_its_own_keeps_it() -> None:
    content = {"question": "In order?", "arms": ARMS[::-1]}
    study = expanded("timed", content, "timed")
    assert ordered(study.runs) == list(study.runs)


def test_runs_that_share_a_gpu_share_its_queue() -> None:
    study = load_study("batch-growth")
    told, options = pipeline._on_this_machine(machine(H200, H200), study, list(study.runs), False)
    assert {"gpu_0=4", "gpu_1=4"} <= {*options}  # two train, or one alone, and as many get ready
    assert {
        (run.config.runs_per_gpu, told["gpu_shares"][run.run_id], len(told["gpus"][run.run_id]))
        for run in study.runs
    } == {(1, 2, 1), (2, 1, 1)}


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_wide_runs_take_places_in_the_queues_of_fixed_neighbours(num_gpus: int) -> None:
    study, there = load_study("document-a-blocks"), machine(*num_gpus * [H200])
    told, options = pipeline._on_this_machine(there, study, list(study.runs), False)
    wide = [run for run in study.runs if run.config.num_gpus == 2]
    groups = {tuple(told["gpus"][run.run_id]) for run in wide}
    assert groups == {(n, n + 1) for n in range(0, num_gpus, 2)}
    assert all(told["gpus"].values())  # else the narrow ones pass them
    assert {told["gpu_shares"][run.run_id] for run in wide} == {1}
    assert {f"gpu_{n}=2" for n in range(num_gpus)} <= {*options}


def test_a_named_gpu_that_is_not_there_makes_its_run_impossible() -> None:
    content = {"question": "Where?", "arms": [{"gpus": [3]}, {"gpus": [0], "repeat": 1}]}
    study = expanded("named", content, "named")
    ((run, reason),) = impossible_runs(study, machine(H200, H200)).items()
    assert run == study.runs[0]
    assert reason.startswith("gpus: [3] are not all among the 2 visible GPUs") and "leave" in reason
    assert not any(gpus_to_have(Machine((), 4), study).values())


def test_a_claim_that_nobody_makes_is_refused_before_any_run() -> None:
    content = {"question": "What?", "claims": ["A01", "A99"]}
    study = expanded("asked", content, "asked")
    with pytest.raises(UserError, match=r"asked\.yaml: claims: 'A99' is no claim.*; give ids"):
        impossible_runs(study, machine(H200))


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "words"),
    [
        ([-1], 1, r"gpus: \[-1\] are not the 1 of num_gpus=1; .* as \[0\]"),
        ([0, 1], 1, r"gpus: \[0, 1\] are not the 1 of num_gpus=1"),
        ([0], 2, r"gpus: \[0\] are not the 2 of num_gpus=2; .* as \[0, 1\]"),
        ([1, 1], 2, r"gpus: \[1, 1\] are not the 2 of num_gpus=2"),
    ],
)
def test_named_gpus_are_as_many_as_a_run_has_each_once(
    gpus: list[int], num_gpus: int, words: str
) -> None:
    arms = [{"gpus": gpus, "num_gpus": num_gpus}, {"gpus": [0], "repeat": 1}]
    study = expanded("named", {"question": "Where?", "arms": arms}, "named")
    with pytest.raises(UserError, match=f"^named: {words}"):
        impossible_runs(study, machine(H200, H200))


@pytest.mark.parametrize(("memory_in_runs", "side_by_side"), [(100, 6), (2.5, 2), (0.5, 1)])
def test_runs_on_cpus_take_turns_where_the_memory_would_not_hold_them_together(
    memory_in_runs: float, side_by_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study("smoke", {"num_gpus": 1})
    one_run = host_gib(study.runs[0].config, on_gpu=False)
    monkeypatch.setattr(pipeline, "memory_gib", lambda: memory_in_runs * one_run)
    there = Machine((), num_cpus=6)
    told, _ = pipeline._on_this_machine(there, study, list(study.runs), False)
    assert {there.num_cpus // share for share in told["gpu_shares"].values()} == {side_by_side}
