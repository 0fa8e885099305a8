"""What the cells of ``notebooks/run.ipynb`` call, so that the notebook itself stays thin."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display
from matplotlib.figure import Figure

from fp8study.core.config import FIELD_NAMES, REFUSED, RunConfig
from fp8study.core.errors import UserError, nearest
from fp8study.core.files import own_results
from fp8study.core.records import RunRecord, read_metrics, read_record
from fp8study.run.defaults import config_for
from fp8study.run.launch import RunFailed, check_possible, launch
from fp8study.run.machine import this_machine

#: Parameters of the notebook that are not part of the experiment.
_PLACE = ("study", "run_id")


def read_parameters(namespace: Mapping[str, Any], before: set[str]) -> RunConfig:
    """Turn the notebook's parameters into a configuration.

    papermill only warns of a parameter that the notebook does not know, and the run would
    train the default; here such a name is an error.

    Args:
        namespace: The notebook's globals.
        before: The names that were there before the parameters cell.

    Raises:
        UserError: A name is unknown or a value invalid.
    """
    ignored = before | {"In", "Out", "before"}
    given = {n: v for n, v in namespace.items() if n not in ignored and not n.startswith("_")}
    known = FIELD_NAMES + _PLACE
    for name in given:
        if name not in known and name not in REFUSED:
            raise UserError(
                f"parameter '{name}' is unknown{nearest(name, known)}; known: {', '.join(known)}"
            )
    machine = this_machine()
    chosen = {name: value for name, value in given.items() if name not in _PLACE}
    config = config_for(machine, chosen)
    check_possible(config, machine)
    return config


@dataclass(frozen=True)
class NotebookRun:
    run_dir: Path
    record: RunRecord
    failure: RunFailed | None

    def check(self) -> None:
        """Fail the notebook if the run failed; a diverged or out-of-memory run is a result."""
        if self.failure is not None:
            raise self.failure


def train(config: RunConfig, study: str = "adhoc", run_id: str | None = None) -> NotebookRun:
    """Train in child processes, showing one live progress line.

    The results go to the folder of the `study`, there to `run_id`: by default the time and the
    configuration's digest.
    """
    now = time.strftime("%Y%m%dT%H%M%S")
    run_id = f"{now}-{config.digest()}" if run_id is None else str(run_id)
    for name, value in (("study", str(study)), ("run_id", run_id)):
        if not value or value.startswith(".") or "/" in value:
            raise UserError(f"{name}: '{value}' is no plain folder name; use letters and digits")
    run_dir = own_results() / str(study) / run_id
    live = display({"text/plain": "starting …"}, raw=True, display_id=True)
    shown_at = 0.0

    def show(line: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at > 0.5:
            shown_at = time.monotonic()
            live.update({"text/plain": line}, raw=True)

    failure = None
    try:
        record = launch(config, run_dir, str(study), show)
    except RunFailed as error:
        failure, record = error, read_record(run_dir / "run.json")
        print(error)
    text = f"{record.status} after {record.results['steps_completed']} steps"
    live.update({"text/plain": text}, raw=True)
    return NotebookRun(run_dir, record, failure)


def summary_table(run: NotebookRun) -> pd.DataFrame:
    """Return the run's main figures, one row each, as text with units in the names."""
    record = run.record
    rows: dict[str, Any] = {
        "run": record.run_id,
        "status": record.status,
        "detail": record.status_detail,
        "machine": record.machine.get("gpu_name") or record.machine.get("cpu_name"),
        "corpus": record.data.get("corpus"),
        "tokenizer": record.data.get("tokenizer"),
        "epochs": record.data.get("epochs"),
    }
    rows |= record.model | record.results | {"warnings": "; ".join(record.warnings)}
    shown = {
        name: f"{value:,.4g}" if isinstance(value, float) else str(value)
        for name, value in rows.items()
        if value not in (None, "")
    }
    return pd.DataFrame({"value": shown})


def loss_figure(run: NotebookRun) -> Figure:
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    metrics = pd.DataFrame(read_metrics(run.run_dir), columns=["step", "loss"])
    axes.plot(metrics["step"], metrics["loss"], linewidth=1.5)
    axes.set(
        xlabel="optimizer step", ylabel="training loss, nats per token", title=run.record.run_id
    )
    axes.spines[["top", "right"]].set_visible(False)
    plt.close(figure)  # shown once, as the cell's value
    return figure
