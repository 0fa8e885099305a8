"""notebooks/precision-noise.ipynb: thin, clean, and running on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from fp8study.core.config import FIELD_NAMES
from tests.checkout import ROOT, copy_checkout, run_python

SOURCE = "notebooks/precision-noise.ipynb"
SHORT = [
    "-p", "num_steps", "2", "-p", "num_warmup_steps", "1", "-p", "sequence_length", "32",
    "-p", "noise_at_steps", "2", "-p", "noise_samples", "4",
]  # fmt: skip


def test_the_notebook_is_thin_clean_and_offers_every_field() -> None:
    notebook = nbformat.read(ROOT / SOURCE, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert len(notebook.cells) <= 10
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    (parameters,) = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    assert all(len(c.source.splitlines()) <= 5 for c in cells if c is not parameters)
    names = [line.split(" = ")[0] for line in parameters.source.splitlines() if " = " in line]
    assert sorted(names) == sorted((*FIELD_NAMES, "study", "run_id"))


@pytest.mark.slow
def test_the_notebook_measures_and_draws(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)
    done = run_python(checkout, "-m", "papermill", SOURCE, "out.ipynb", *SHORT)
    assert done.returncode == 0, done.stderr
    (path,) = (checkout / "results/local").glob("*/*/run.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [point["step"] for point in record["noise"]["points"]] == [2]
    executed = nbformat.read(checkout / "out.ipynb", as_version=4)
    outputs = {c.get("id"): c.get("outputs", []) for c in executed.cells}
    assert "noise_scale" in str(outputs["scale"])
    assert "crossing_batch" in str(outputs["crossing"])
    for name in ("budget", "layers", "products"):
        assert any("image/png" in output.get("data", {}) for output in outputs[name]), name
    untouched = (checkout / SOURCE).read_text(encoding="utf-8")
    assert untouched == (ROOT / SOURCE).read_text(encoding="utf-8")
