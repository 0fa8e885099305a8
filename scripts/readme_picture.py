"""Draw the README's picture from the committed records: `python scripts/readme_picture.py`.

The same function draws it in the report. Only records of results/reference are used, so that the
picture is the same in every checkout.
"""

from __future__ import annotations

from pathlib import Path

from fp8study.analysis.frames import metrics_frame, runs_frame
from fp8study.analysis.pairing import shorten_arms
from fp8study.core.records import load_runs
from fp8study.report import plots

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "document-a.png"
MACHINE = "h200x4"
STUDY = "document-a"


def main() -> None:
    """Write the picture and say where."""
    stored = [
        run
        for run in load_runs(ROOT / "results")
        if run.machine_label == MACHINE and run.record.study == STUDY
    ]
    runs = shorten_arms(runs_frame(stored))
    figure = plots.document_a_figure(metrics_frame(stored), runs)
    PICTURE.parent.mkdir(exist_ok=True)
    # Without the version of matplotlib, so that equal pictures are equal files.
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None})
    print(f"{PICTURE.relative_to(ROOT)}: {len(runs)} runs, {PICTURE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
