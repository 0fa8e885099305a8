"""Studies through Snakemake and papermill: resume, keep going, be killed, be alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8study.core.files import locked
from tests.checkout import copy_checkout, environment, run_python, tiny_folder

STUDY = """
question: Does the pipeline work?
base: {model: tiny-llama, precision: fp8, strategy: none, sequence_length: 32, num_steps: 4,
       num_warmup_steps: 1, compile: false}
seeds: [0, 1]
"""
#: Stands before papermill, and fails at first as it does where two kernels are given one port.
LOSES_ITS_PORT_ONCE = """
import pathlib, shutil, sys
shutil.rmtree(pathlib.Path(__file__).parent)
sys.exit("RuntimeError: Kernel died before replying to kernel_info")
"""
REPRODUCE = ("-m", "fp8study.cli", "reproduce", "tiny", "--no-report")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = copy_checkout(tmp_path)
    (folder / "pipelines/studies/tiny.yaml").write_text(STUDY)
    return folder


def records(checkout: Path) -> dict[Path, dict]:
    paths = sorted((checkout / "results/local/tiny").glob("*/run.json"))
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_study_is_done_once_and_repaired_where_it_is_damaged(checkout: Path) -> None:
    done = run_python(checkout, *REPRODUCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs, 0 done, 2 to do" in done.stdout
    assert "[2/2" in done.stdout
    first = records(checkout)
    assert [r["status"] for r in first.values()] == ["completed", "completed"]
    assert all((path.parent / "run.ipynb").exists() for path in first)

    again = run_python(checkout, *REPRODUCE)
    assert again.returncode == 0
    assert "2 done, 0 to do" in again.stdout
    assert records(checkout) == first

    plan = run_python(checkout, "-m", "fp8study.cli", "plan", "tiny")
    assert "2 done, 0 to do" in plan.stdout

    damaged, whole = first
    damaged.write_text('{"run_id": "half a rec')
    (checkout / "papermill").mkdir()
    (checkout / "papermill/__init__.py").touch()
    (checkout / "papermill/__main__.py").write_text(LOSES_ITS_PORT_ONCE)
    repaired = run_python(checkout, *REPRODUCE)
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert "corrupt record" in repaired.stdout
    assert (damaged.parent / "run.corrupt1.json").exists()
    assert records(checkout)[whole] == first[whole]
    assert records(checkout)[damaged]["status"] == "completed"
    assert not (checkout / "papermill").exists()
    said = (damaged.parent / "papermill.log").read_text()
    assert said.index("Kernel died") < said.index("Output Notebook")


def test_a_failed_run_stops_no_other_and_is_tried_again(checkout: Path) -> None:
    tiny_folder(checkout / "model")
    arms = "arms: [{skip: [lm_haed], model: ./model}, {skip: [lm_head]}]\n"
    study = checkout / "pipelines/studies/tiny.yaml"
    study.write_text(STUDY.replace("seeds: [0, 1]", "seeds: [0]") + arms)
    done = run_python(checkout, *REPRODUCE)
    assert done.returncode == 2
    assert done.stderr.startswith("fp8study: reproduce: 1 of 2 runs have no result")
    assert "did you mean 'lm_head'" in done.stdout
    statuses = sorted(record["status"] for record in records(checkout).values())
    assert statuses == ["completed", "failed"]
    for path in records(checkout):  # what had begun is not begun again
        assert (path.parent / "papermill.log").read_text().count("Output Notebook") == 1
    before = records(checkout)
    plan = run_python(checkout, "-m", "fp8study.cli", "plan", "tiny")
    assert "2 runs, 1 done, 1 to do" in plan.stdout
    assert records(checkout) == before  # a plan changes nothing
    run_python(checkout, *REPRODUCE)
    assert list((checkout / "results/local/tiny").glob("*/run.failed1.json"))


@pytest.mark.usefixtures("cold_training")
def test_a_killed_pipeline_loses_no_finished_run(checkout: Path) -> None:
    study = checkout / "pipelines/studies/tiny.yaml"
    long_run = "arms: [{num_steps: 4}, {num_steps: 100000}]\n"
    study.write_text(STUDY.replace("seeds: [0, 1]", "seeds: [0]") + long_run)
    child = subprocess.Popen(
        [sys.executable, *REPRODUCE], cwd=checkout, env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    metrics = checkout / "results/local/tiny"
    while len(records(checkout)) < 1 or len(list(metrics.glob("*/metrics.jsonl"))) < 2:
        assert time.monotonic() < deadline, "the pipeline did not get going"
        assert child.poll() is None
        time.sleep(0.5)
    finished = records(checkout)
    child.send_signal(signal.SIGKILL)
    child.wait()

    lock = checkout / "results/local/.pipeline.lock"
    with locked(lock, "results"):  # waits until everything that the pipeline started is gone
        assert records(checkout) == finished
    study.write_text(study.read_text().replace("100000", "5"))
    done = run_python(checkout, *REPRODUCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs, 1 done, 1 to do" in done.stdout
    ((path, record),) = finished.items()
    assert records(checkout)[path] == record


def test_a_corpus_that_is_too_short_is_met_before_any_run(checkout: Path) -> None:
    (checkout / "short.txt").write_text("A very short story.")
    line = one_line(run_python(checkout, *REPRODUCE, "--set", "corpus=text:short.txt"))
    assert "is longer than the corpus" in line
    assert not list((checkout / "results/local/tiny").glob("*/papermill.log"))


def test_a_second_pipeline_is_refused(checkout: Path) -> None:
    with locked(checkout / "results/local/.pipeline.lock", "results"):
        line = one_line(run_python(checkout, *REPRODUCE))
    assert line.startswith("fp8study: reproduce: another pipeline is running in this checkout")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "STUDY: 'tinny' is no study (did you mean 'tiny'?)"),
        (["tiny", "--set", "precison=fp8"], "did you mean 'precision'"),
        (["tiny", "--set", "corpus=text:no.txt"], "corpus: there is no file 'no.txt'"),
        (["tiny", "--set", "strategy=ddp", "--set", "num_gpus=4096"], "num_gpus: 4096 is more"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    checkout: Path, arguments: list[str], message: str
) -> None:
    done = run_python(checkout, "-m", "fp8study.cli", "reproduce", "--no-report", *arguments)
    assert message in one_line(done)
    assert not records(checkout)


def test_results_that_cannot_be_written_are_one_line(checkout: Path) -> None:
    (checkout / "results").write_text("in the way")
    line = one_line(run_python(checkout, *REPRODUCE))
    assert line.startswith("fp8study: results: cannot write")
