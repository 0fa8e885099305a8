"""The ledger of claims: committed records judge each, machines stay apart, gaps are told."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fp8study.analysis.claims.finding import TESTS, Finding, Verdict
from fp8study.analysis.claims.ledger import (
    Judged,
    all_claims,
    check_choice,
    claims_table,
    judge,
    judge_claim,
    machine_classes,
    machine_gpus,
    settles,
)
from fp8study.analysis.runs.frames import run_path
from fp8study.core.errors import UserError
from fp8study.core.studies import load_study
from fp8study.report.ledger import ledger_text
from fp8study.report.page import load_report, report_of
from tests.analysis.test_claims import CASES, CLAIMS, leads, one_batch, with_stale
from tests.checkout import ROOT, committed_report
from tests.claim_factories import LARGE, SMALL, Frames, pair, tables
from tests.instrument_factories import make_instruments
from tests.noise_factories import make_noise
from tests.study_factories import make_results

YES, NO = Verdict.REPRODUCED, Verdict.CONTRADICTED
OPEN, ELSEWHERE = Verdict.UNDECIDED, Verdict.NOT_TESTABLE


@pytest.fixture(scope="module")
def ledger() -> list[Any]:
    return judge(committed_report())


def test_the_committed_records_judge_every_claim_and_could_otherwise(ledger: list[Any]) -> None:
    reference = {each.claim.id: each for each in ledger if not each.is_own}
    assert len(CLAIMS) == 49
    assert CLAIMS.keys() == TESTS.keys() == reference.keys()
    for name, each in reference.items():
        others = {verdict for claim, verdict, *_ in CASES if claim == name}
        assert others - {each.finding.verdict}, f"{name}: no test has it come out otherwise"
    open_ones = [n for n, each in reference.items() if each.finding.verdict is OPEN]
    assert len(open_ones) <= len(CLAIMS) / 4, open_ones


def test_findings_rest_on_runs_that_exist_or_say_what_it_would_take(ledger: list[Any]) -> None:
    folders = {
        "/".join(path.parent.parts[-3:])
        for path in (ROOT / "results").glob("reference/*/*/*/run.json")
    }
    for each in ledger:
        if not each.is_own:
            assert set(each.finding.runs) <= folders, each.claim.id
            labels = {name.split("/")[0] for name in each.finding.runs}
            assert all(label in each.machines for label in labels)
        if each.finding.verdict is ELSEWHERE:
            assert each.claim.needs in each.finding.why
        if each.finding.verdict is OPEN:
            assert "minute" in settles(each), each.claim.id


def test_what_would_settle_a_claim_costs_what_its_studies_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    both = dataclasses.replace(CLAIMS["A13"], settles="make STUDY=quick and STUDY=new-text")
    minutes = sum(
        run.minutes * run.config.num_gpus / run.config.runs_per_gpu
        for study in ("quick", "new-text")
        for run in load_study(study).runs
    )
    gone = dataclasses.replace(CLAIMS["A13"], settles="make STUDY=that-was-taken-out")
    cost = f", about {minutes:.0f} GPU-minutes"
    for claim, added in ((both, cost), (gone, ""), (CLAIMS["C02"], "")):
        judged = Judged(claim, "", Finding(OPEN, ""), is_own=False)
        assert settles(judged) == claim.settles + added


def test_a_claim_on_several_recipes_is_asked_of_studies_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One recipe's runs would change no word of what is found."""
    monkeypatch.chdir(ROOT)
    for path in Path("pipelines/studies").glob("*.yaml"):
        if "B01" in yaml.safe_load(path.read_text()).get("claims", ()):
            recipes = {
                run.config.precision for run in load_study(path.stem).runs if run.config.is_fp8
            }
            assert len(recipes) > 1, path.stem


def test_a_finding_without_evidence_is_no_verdict() -> None:
    arithmetic = {"A20", "A21", "A22", "C04", "C06"}
    empty = tables([])
    for name, claim in CLAIMS.items():
        found = judge_claim(claim, empty)
        assert (found.verdict in (OPEN, ELSEWHERE)) == (name not in arithmetic), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_cpu_emulates_answers_only_where_no_gpu_does(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one's own: a toy would answer before the GPUs of the reference."""
    monkeypatch.setitem(
        TESTS, "A15",
        lambda of, _: Finding(YES, "it has runs", runs=(*map(run_path, of.stored),)),
    )  # fmt: skip
    ours, theirs = Frames(pair(12)), Frames(pair(12), "h200x8")
    for run in ours.stored:
        run.record.machine["device"] = device
    alone = judge(report_of(ours.stored), ["A15"])
    beside = judge(report_of([*ours.stored, *theirs.stored]), ["A15"])
    assert [each.is_own for each in alone] == [True]
    assert [each.is_own for each in beside] == ([True, False] if device == "cuda" else [False])


def test_two_machines_are_never_pooled() -> None:
    ours = Frames(pair(12, model=SMALL) + pair(12, model=LARGE, num_gpus=2)
                  + pair(12, model=LARGE) + pair(12, num_gpus=2))  # fmt: skip
    theirs = Frames(leads(-12)(), "h100x8")
    for record in theirs.stored:
        record.record.machine["gpu_name"] = "NVIDIA H100"
    both = [each for each in judge(report_of([*theirs.stored, *ours.stored]))
            if each.claim.id == "A01"]  # fmt: skip
    assert [(each.is_own, each.finding.verdict) for each in both] == [(True, YES), (False, NO)]
    assert both[0].machines == "this machine, NVIDIA H200 (local)"
    assert both[1].machines == "NVIDIA H100 (h100x8)"
    _, mine, reference = re.split(r"Answered by this machine|beside  ", ledger_text(both))
    assert "REPRODUCED" in mine
    assert "CONTRADICTED" in reference


def test_gpus_of_one_architecture_answer_together_what_is_asked_of_losses() -> None:
    """A stale optimizer is tried on one GPU at batch 1, and on another above."""
    names = {"a": "NVIDIA H200", "b": "NVIDIA H100 80GB HBM3", "c": "NVIDIA B200", "local": "L40S"}
    rows = pd.DataFrame({"machine": [*names], "gpu_name": [*names.values()], "device": "cuda"})
    gpus = machine_gpus(rows)
    assert machine_classes(gpus, pooled=True) == {
        "this machine": ["local"], "Hopper": ["a", "b"], "Blackwell": ["c"]
    }  # fmt: skip
    assert [*machine_classes(gpus).values()] == [["local"], ["a"], ["b"], ["c"]]
    small = Frames(with_stale(40, None)(), "h200x8")
    large = Frames(one_batch(4, 40, outside=78.0, optimizer_binding="before_conversion"), "h100x8")
    for record in large.stored:
        record.record.machine["gpu_name"] = "NVIDIA H100"
    (both,) = (each for each in judge(report_of([*small.stored, *large.stored]))
               if each.claim.id == "A14")  # fmt: skip
    assert both.finding.verdict is NO
    assert both.machines == "NVIDIA H100 and NVIDIA H200 (h200x8, h100x8)"


def test_what_no_run_answers_is_not_said_to_be_the_references() -> None:
    """A wheel's user has no reference at all."""
    found = ledger_text(judge(report_of(Frames(leads(12)()).stored)))
    assert "Answered by this machine" in found and "Answered by no run" in found
    assert "by the reference alone" not in found


def test_the_table_has_plain_cells_and_one_row_a_claim(ledger: list[Any]) -> None:
    table = claims_table(ledger)
    assert not table.duplicated(["id", "machines"]).any()
    assert set(table["id"]) == {claim.id for claim in all_claims()}
    assert set(table["document"]) == {"A", "B", "C"}
    assert table[table["is_first"]]["id"].tolist() == table["id"].unique().tolist()
    counted = Counter(table[table["is_first"]]["verdict"])
    assert sum(counted.values()) < len(table)  # some are answered by several kinds of GPU
    tally = ledger_text(ledger).splitlines()[1]
    assert tally.split()[-1] == str(counted["reproduced"])
    assert not table["why"].str.contains(r"\bnan\b|None", regex=True).any()
    assert all(re.fullmatch(r"(\S+/\S+/\S+ ?)*", runs) for runs in table["run_ids"])


def test_claims_are_chosen_by_id_document_and_verdict(ledger: list[Any]) -> None:
    report = committed_report()
    some = judge(report, ["B03", "A01"])
    assert some == [each for each in ledger if each.claim.id in ("A01", "B03")]
    text = ledger_text(some, counts=False)
    assert text.startswith("A01  ") and "\n\nB03  " in text
    assert not [word for word in ("A02  ", "C01  ", "all\n") if word in text]
    assert judge(report, ["B03", "A01"], document="B") == [e for e in some if e.claim.id == "B03"]
    first = {each.claim.id: each.finding.verdict for each in reversed(ledger)}
    chosen = judge(report, verdict="contradicted")
    assert chosen == [each for each in ledger if first[each.claim.id] is NO]
    assert {each.claim.id for each in chosen} == {name for name, v in first.items() if v is NO}


@pytest.mark.parametrize(
    ("given", "meant"), [("A1", "A01"), ("b03", "B03"), ("C-04", "C04"), ("D", "")]
)
def test_an_unknown_id_is_told_the_nearest_one(given: str, meant: str) -> None:
    check_choice(None, None, ["A29", "C01"])
    hint = re.escape(f" (did you mean '{meant}'?)") * bool(meant)
    with pytest.raises(UserError, match=rf"^ID: '{given}' is no claim{hint}; give one of A01 to"):
        check_choice(None, None, ["A01", given])


def test_runs_of_a_cpu_are_judged_without_a_word_on_speed() -> None:
    records = Frames(leads(12)(), "cpu")
    for each in records.stored:
        each.record.machine.update(device="cpu", gpu_name=None)
        each.record.instruments.clear()
    found = {each.claim.id: each.finding for each in judge(report_of(records.stored))}
    assert len(found) == len(CLAIMS)
    assert found["A01"].verdict is OPEN
    assert found["A19"].verdict is OPEN


def test_failed_bare_and_odd_records_do_not_stop_the_ledger(tmp_path: Path) -> None:
    make_results(tmp_path)
    make_instruments(tmp_path)
    make_noise(tmp_path)
    found = judge(load_report(tmp_path))
    assert {each.claim.id for each in found} == CLAIMS.keys()
    assert re.search(r"\b(nan|NaN|None|inf)\b", ledger_text(found)) is None
