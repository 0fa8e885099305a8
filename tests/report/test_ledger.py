"""The page of claims: a claim once for all machines that say the same of it."""

from dataclasses import replace

import pytest

from fp8study.analysis.claims.finding import Figure, Finding, Verdict
from fp8study.analysis.claims.ledger import Judged, all_claims
from fp8study.report import ledger


def judged(machines: str, verdict: Verdict, value: float) -> Judged:
    claim = next(claim for claim in all_claims() if claim.id == "A19")
    label = machines.partition("(")[2].rstrip(")")
    finding = Finding(verdict, f"as {label} says", Figure(value), (f"{label}/study/{value}",))
    return Judged(claim, machines, finding, is_own="local" in label)


H200 = judged("NVIDIA H200 (h200x4)", Verdict.CONTRADICTED, -11)
H100 = judged("NVIDIA H100 (h100x1)", Verdict.CONTRADICTED, -15)


def test_machines_that_agree_share_a_row() -> None:
    (row,) = ledger.rows([H200, H100]).to_dict("records")
    assert ": H200 \u221211" in row["ours"] and "; H100 \u221215" in row["ours"]
    assert row["why"] == "H200: as h200x4 says"
    assert row["run_ids"] == "h200x4/study/-11 h100x1/study/-15"


def test_gpus_that_answer_together_are_all_named() -> None:
    both = judged("NVIDIA H100 80GB HBM3 and NVIDIA H200 (h100x1, h200x1)", Verdict.PARTLY, 3)
    usual = [replace(H200, claim=claim) for claim in all_claims()[:3]]
    assert ": H100 and H200 +3" in ledger.rows([*usual, both])["ours"].tolist()[-1]


def test_machines_that_differ_have_a_row_each() -> None:
    other = replace(H100, finding=replace(H100.finding, verdict=Verdict.PARTLY))
    table = ledger.rows([H200, other])
    assert table["badge"].tolist() == ["✗\u00a0contradicted", "◐\u00a0partly"]
    assert ": H200 \u221211" in table["ours"][0] and ": H100 \u221215" in table["ours"][1]


@pytest.mark.parametrize("machines", ["NVIDIA H100 (h100x1)", "this machine, NVIDIA H200 (local)"])
def test_a_machine_goes_without_saying_only_where_it_is_the_usual_one(machines: str) -> None:
    usual = [replace(H200, claim=claim) for claim in all_claims()[:3]]
    table = ledger.rows([*usual, judged(machines, Verdict.PARTLY, 3)])
    assert not table["ours"][:3].str.contains("H200").any()
    assert (": H100 " if "h100x1" in machines else "your machine") in table["ours"][3]


@pytest.mark.parametrize(("num", "said"), [(4, "s0, s1, s2, s3"), (5, "5 studies")])
def test_runs_of_many_studies_are_counted(num: int, said: str) -> None:
    each = judged("NVIDIA H100 (h100x1)", Verdict.CONTRADICTED, -15)
    runs = tuple(f"h100x1/s{study}/run" for study in range(num))
    finding = replace(each.finding, runs=runs)
    assert ledger.based_on(replace(each, finding=finding)) == f"{num} runs of {said}"
