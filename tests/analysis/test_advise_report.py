"""Advice says what the report's first page says."""

import math

import pytest

from fp8study.analysis import decision
from fp8study.analysis.advice.advise import Advisor
from fp8study.analysis.advice.asked import Question
from fp8study.analysis.advice.evidence import Decisions
from fp8study.analysis.advice.figures import MEASURED, PREDICTED
from fp8study.analysis.advice.question import _advisor
from fp8study.analysis.laws.cells import read_runs, recorded_config
from fp8study.core.hardware import find_peak
from fp8study.report.advice_text import advice_text
from fp8study.report.page import load_report
from tests.checkout import ROOT


@pytest.fixture(scope="module")
def advisor():
    results = ROOT / "results"
    nothing = Decisions([])
    whole = _advisor(results)
    nothing.gaps = whole.decisions.gaps
    return Advisor(read_runs(results), nothing, whole.peers)


@pytest.fixture(scope="module", params=["h100x1", "h200x1", "h200x2", "h200x4"])
def of_machine(request):
    """The first page's decisions of one machine, and all its runs by name.

    Steps by kernel that are one graph today are as they were timed, which is what is asked.
    """
    report = load_report(ROOT / "results")
    decisions = decision.decision_table(
        report.leads, decision.judged_losses(report.loss_gaps, report.runs)
    )
    rows = decisions[decisions["machine"] == request.param].to_dict("records")
    assert rows
    return rows, dict(read_runs(ROOT / "results", f"reference/{request.param}"))


def test_advice_says_what_the_first_page_says_row_by_row(of_machine, advisor):
    rows, runs = of_machine
    # Another machine's losses count, not its speeds.
    advisor.decisions = Decisions(read_runs(ROOT / "results"))
    leads = advisor.decisions.leads
    advisor.decisions.leads = leads[leads["machine"] == rows[0]["machine"]]
    num_void = 0
    for row in rows:
        records = [runs[name] for name in row["run_ids"].split()]
        record = next(r for r in records if r.config["precision"] == "bf16")
        gpu = find_peak(row["gpu_name"])
        capacity = record.machine["gpu_memory_gib"]
        found = advisor.advise(Question(recorded_config(record), gpu, row["gpu_name"], capacity))
        verdict, lead = found.verdict, found.verdict.lead_pct
        if math.isnan(row["lead_pct"]):  # timed, but not in pairs that count
            assert verdict.num_void and lead.kind == PREDICTED
            num_void += 1
            continue
        best = next(o for o in found.options if o.label == verdict.label)
        assert (verdict.action, verdict.machine) == (row["action"], row["machine"])
        assert best.precision == row["precision"] and best.lead_pct == lead
        ends = [math.nan if end is None else end for end in (lead.low, lead.high)]
        figures = [lead.value, *ends, best.memory_gib.value, best.tokens_per_second_per_gpu.value]
        names = ("lead_pct", "ci_low_pct", "ci_high_pct", "memory_peak_gib",
                 "tokens_per_second_per_gpu")  # fmt: skip
        assert figures == pytest.approx([row[name] for name in names], nan_ok=True)
        assert lead.kind == MEASURED and set(lead.run_ids) == set(row["run_ids"].split())
        if lead.low is None:
            assert found.instead is None
        is_open = row["action"] == decision.MORE and not math.isnan(row["ci_low_pct"])
        why = ", as the lead may lie on either side of 3 %" * is_open
        answer = f"{row['action'][0].upper()}{row['action'][1:]}{why}. {verdict.label}: tokens/s "
        assert f"\n{answer}" in advice_text(found)
    assert num_void <= 1 < len(rows)


def test_records_of_ones_own_come_first(of_machine):
    rows, runs = of_machine
    row = rows[0]
    own = [("local/" + name.partition("/")[2], record) for name, record in runs.items()]
    both = Decisions([*runs.items(), *own])
    record = next(r for n, r in runs.items()
                  if n in row["run_ids"].split() and r.config["precision"] == "bf16")  # fmt: skip
    found = both.of(recorded_config(record), row["gpu_name"])
    assert [each.machine for each in found] == ["local", row["machine"]]
