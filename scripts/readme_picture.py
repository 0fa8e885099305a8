"""Draw the README's pictures from the committed records: `python scripts/readme_picture.py`.

The same functions draw them in the report. Only records of results/reference are used, so that the
picture is the same in every checkout.
"""

from __future__ import annotations

from pathlib import Path

from fp8study.analysis.leads import best_recipes, leads_table
from fp8study.analysis.peers import peer_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.core.records import load_runs
from fp8study.report import figures, plots, speed_plots
from fp8study.report.words import own_first

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "document-a.png"
LEADS = ROOT / "docs" / "lead.svg"
MACHINE = "h200x4"
STUDY = "document-a"


def main() -> None:
    """Write the pictures and say where."""
    draw_document_a()
    draw_leads()


def draw_leads() -> None:
    """Draw FP8's lead in every setting, as the first page of the report does."""
    stored = [run for run in load_runs(ROOT / "results") if run.machine_label != "local"]
    leads = own_first(best_recipes(leads_table(shorten_arms(runs_frame(stored)))))
    peers = peer_table(stored).dropna(subset="peer_lead_pct")
    figures.save(speed_plots.lead_figure(leads, peers, ""), LEADS)
    print(
        f"{LEADS.relative_to(ROOT)}: {len(leads)} settings, {LEADS.stat().st_size / 1024:.0f} KiB"
    )


def draw_document_a() -> None:
    """Draw the arms of document A's failure."""
    stored = [
        run
        for run in load_runs(ROOT / "results")
        if run.machine_label == MACHINE and run.record.study == STUDY
    ]
    runs = shorten_arms(runs_frame(stored))
    figure = plots.document_a_figure(metrics_frame(stored), runs, "")
    PICTURE.parent.mkdir(exist_ok=True)
    # Without the version of matplotlib, so that equal pictures are equal files.
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None})
    print(f"{PICTURE.relative_to(ROOT)}: {len(runs)} runs, {PICTURE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
