"""notebooks/run.ipynb through the papermill command line, as a user types it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from fp8study.core.config import FIELD_NAMES
from fp8study.core.errors import UserError
from fp8study.run.notebook import read_parameters
from tests.checkout import ROOT, copy_checkout, environment, run_python, unreadable_weights

#: Two steps of a tiny model: the notebook is tested here, not the training.
SHORT = ["-p", "num_steps", "3", "-p", "num_warmup_steps", "1", "-p", "sequence_length", "32"]
SOURCE = "notebooks/run.ipynb"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path)


def source(folder: Path = ROOT) -> str:
    return (folder / SOURCE).read_text(encoding="utf-8")


def records(checkout: Path) -> list[dict]:
    paths = sorted((checkout / "results/local").glob("*/*/run.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def test_the_notebook_is_thin_clean_and_offers_every_field() -> None:
    notebook = nbformat.read(ROOT / SOURCE, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    (parameters,) = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    assert all(len(c.source.splitlines()) <= 5 for c in cells if c is not parameters)
    names = [line.split(" = ")[0] for line in parameters.source.splitlines() if " = " in line]
    assert sorted(names) == sorted((*FIELD_NAMES, "study", "run_id"))


@pytest.mark.usefixtures("cold_training")
def test_papermill_with_an_output_path(checkout: Path) -> None:
    done = run_python(
        checkout, "-m", "papermill", SOURCE, "out.ipynb", "-p", "precision", "fp8", *SHORT
    )
    assert done.returncode == 0, done.stderr
    (record,) = records(checkout)
    assert record["status"] == "completed"
    assert record["config"]["precision"] == "fp8_tensorwise"
    executed = nbformat.read(checkout / "out.ipynb", as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("loss_last20_mean" in str(output) for output in outputs)
    assert any("completed after 3 steps" in str(output) for output in outputs)
    assert source(checkout) == source()


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nbformat.NotebookNode]:
    """A checkout, and the notebook that papermill's short form prints, of a run that paused."""
    checkout = copy_checkout(tmp_path_factory.mktemp("piped"))
    noise = ["-p", "noise_at_steps", "2", "-p", "noise_samples", "4"]
    keyboard, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "papermill", SOURCE, "-p", "precision", "fp8", *SHORT, *noise],
        cwd=checkout, env=environment(), stdin=theirs, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    os.close(keyboard)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    return checkout, nbformat.reads(done.stdout, as_version=4)


def test_the_short_form_prints_the_notebook_when_piped(
    piped: tuple[Path, nbformat.NotebookNode],
) -> None:
    """On a keyboard and into a pipe, papermill needs no output path."""
    checkout, printed = piped
    assert "completed after 3 steps" in str(printed.cells)
    assert source(checkout) == source()


def test_a_run_that_measured_noise_shows_it(piped: tuple[Path, nbformat.NotebookNode]) -> None:
    checkout, printed = piped
    (record,) = records(checkout)
    assert [point["step"] for point in record["noise"]["points"]] == [2]
    outputs = {cell.get("id"): str(cell.get("outputs", [])) for cell in printed.cells}
    assert "noise_scale" in outputs["scale"]
    assert "crossing_batch" in outputs["crossing"]


def test_the_short_form_behind_an_empty_pipe_harms_nothing(checkout: Path) -> None:
    """Here papermill takes the path for an output and reads the notebook from the pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "papermill", SOURCE, "-p", "precision", "fp8"],
        cwd=checkout, env=environment(), input="", capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode != 0
    assert source(checkout) == source()
    assert not (checkout / "results").exists()


def test_a_bad_parameter_stops_before_training(checkout: Path) -> None:
    done = run_python(checkout, "-m", "papermill", SOURCE, "out.ipynb", "-p", "precison", "fp8")
    assert done.returncode != 0
    assert "parameter 'precison' is unknown (did you mean 'precision'?)" in done.stderr
    assert not (checkout / "results").exists()


def test_what_this_machine_cannot_do_is_refused_with_the_parameters() -> None:
    with pytest.raises(UserError, match=r"^num_gpus: 4096 is more than"):
        read_parameters({"num_gpus": 4096}, before=set())


def test_a_failing_child_fails_the_notebook_after_showing_its_last_lines(checkout: Path) -> None:
    done = run_python(
        checkout, "-m", "papermill", SOURCE, "out.ipynb", *SHORT,
        "-p", "init_from", unreadable_weights(checkout / "weights"),
        "-p", "study", "broken", "-p", "run_id", "one",
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search("init_from: '.*/weights' does not fit the model", done.stderr)
    (record,) = records(checkout)
    assert (record["study"], record["run_id"], record["status"]) == ("broken", "one", "failed")
    executed = nbformat.read(checkout / "out.ipynb", as_version=4)
    summary = next(cell for cell in executed.cells if cell.get("id") == "table")
    assert "failed" in str(summary.outputs)  # the kernel survived to say so
