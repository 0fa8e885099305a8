"""Fit the laws of memory and speed to committed records, and freeze their constants.

Run it in the checkout's root. Records that come later then test what was frozen, and those that
came since the last freeze go on testing that one.

    python scripts/freeze_laws.py [MACHINE/STUDY ...]    studies that are kept out, to test the fit
"""

from __future__ import annotations

import argparse

from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.frozen import PATH, freezes, provenance, study_of
from fp8study.analysis.laws.memory import fit_memory
from fp8study.analysis.laws.speed_fit import fit_speed
from fp8study.core.files import results_dir
from fp8study.core.records import write_json


def main(kept_out: list[str]) -> None:
    """Add a freeze to ``constants.json`` beside the laws."""
    runs = [run for run in read_runs(results_dir()) if study_of(run[0]) not in kept_out]
    cells = cells_of(runs)
    laws = {"memory": fit_memory(cells), "speed": fit_speed(cells)}
    earlier = freezes()
    earlier[-1]["memory"].pop("without")  # nobody asks an earlier freeze what memory is without
    write_json(PATH, {"freezes": [*earlier, provenance(runs) | laws]})
    print(PATH)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("kept_out", nargs="*", metavar="MACHINE/STUDY")
    named = parser.parse_args().kept_out
    unknown = {*named} - {study_of(name) for name, _ in read_runs(results_dir())}
    if unknown:
        parser.error(f"no records of {', '.join(sorted(unknown))}; name a study as h200x4/scaling")
    main(named)
