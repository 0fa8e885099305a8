"""docs/results.md names the studies that wait for a GPU, with what their files say they take."""

from __future__ import annotations

import re

from fp8study.core.studies import load_study, study_names
from tests.checkout import ROOT

#: They measure any machine or setting anew, or try the pipeline.
FOR_EVERYBODY = {"bench", "bench-cpu", "check-loss", "smoke", "two-nodes"}


def rows() -> dict[str, list[str]]:
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text.split("wait for a GPU")[1], re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in lines}


def runs_done(name: str) -> int:
    """Return how many of a study's runs are in the records, on whatever machine."""
    planned = {run.run_id for run in load_study(name).runs}
    return len(
        planned & {path.parent.name for path in ROOT.glob("results/reference/*/*/*/run.json")}
    )


def gpu_minutes(name: str) -> float:
    return sum(
        run.minutes * run.config.num_gpus / (run.config.runs_per_gpu or 1)
        for run in load_study(name).runs
    )


def test_what_waits_is_told_with_what_it_takes() -> None:
    for name, (_, runs, gpus, minutes) in rows().items():
        planned = load_study(name).runs
        wide = sorted({run.config.num_gpus for run in planned})
        assert runs == f"{runs_done(name)} of {len(planned)}", name
        assert gpus == " and ".join(map(str, wide)).replace(" and ", ", ", len(wide) - 2), name
        assert int(minutes) == round(gpu_minutes(name)), name


def test_no_study_without_a_record_is_left_out() -> None:
    recorded = {path.name for path in ROOT.glob("results/reference/*/*")}
    assert {*study_names()} - recorded - FOR_EVERYBODY <= {*rows()}
