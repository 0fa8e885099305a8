"""All claims, judged: which machines answer which claim, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
import yaml

# Importing them enters their tests.
from fp8study.analysis.claims import (  # noqa: F401
    cause,
    formats,
    grid,
    losses,
    payoff,
    software,
    stability,
    traffic,
)
from fp8study.analysis.claims.finding import TESTS, Claim, Finding, Verdict
from fp8study.analysis.claims.tables import Frames, Tables
from fp8study.core.errors import UserError, nearest
from fp8study.core.hardware import find_peak
from fp8study.core.studies import estimated_minutes, load_study

#: The label of what ran in this checkout.
_OWN, _OURS = "local", "this machine"


@dataclass(frozen=True)
class Judged:
    """A claim and what one class of machines says of it."""

    claim: Claim
    machines: str
    """Their GPUs, and the labels of those that the finding rests on; empty where on none."""
    finding: Finding
    is_own: bool
    """Whether it is of the runs that were made in this checkout."""


@cache
def all_claims() -> tuple[Claim, ...]:
    """Return the claims in the order of their ids."""
    text = Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8")
    return tuple(Claim(id=name, **values) for name, values in yaml.safe_load(text).items())


def machine_gpus(runs: pd.DataFrame) -> dict[str, str]:
    """Return the label of each machine with the GPUs of its runs, one's own machine first."""
    gpus = runs["gpu_name"].where(runs["device"] == "cuda", "CPU").fillna("unknown GPU")
    kinds = gpus.groupby(runs["machine"]).agg(lambda names: " and ".join(sorted({*names})))
    of_label = {str(label): gpu for label, gpu in kinds.items()}
    return dict(sorted(of_label.items(), key=lambda item: (item[0] != _OWN, item[0])))


def machine_classes(gpus: Mapping[str, str], pooled: bool = False) -> dict[str, list[str]]:
    """Group labels of machines by their GPUs, or if `pooled` by the architecture of these.

    One's own machine is always by itself. Runs of two machines are never a pair; a class only
    answers a claim with all of its machines' pairs. Returns the name of each class with its labels.
    """
    classes: dict[str, list[str]] = {}
    for label, kind in gpus.items():
        peak = find_peak(kind) if pooled else None
        name = peak.architecture if peak else kind
        classes.setdefault(_OURS if label == _OWN else name, []).append(label)
    return classes


def check_choice(document: str | None, verdict: str | None, ids: Sequence[str]) -> None:
    """Refuse a document, or a verdict, that no claim can have, and ids that none has.

    Raises:
        UserError: It names the valid ones, or for each id the nearest.
    """
    for name, value, known in (
        ("--document", document, ("A", "B", "C")),
        ("--verdict", verdict, tuple(map(str, Verdict))),
    ):
        if value is not None and value not in known:
            raise UserError(f"{name}: '{value}' is none of {', '.join(known)}; choose one")
    of = {claim.id: claim.document for claim in all_claims()}
    ends = ([name for name in of if of[name] == letter] for letter in sorted({*of.values()}))
    known_ids = ", ".join(f"{names[0]} to {names[-1]}" for names in ends)
    wrong = [
        f"ID: '{name}' is no claim{nearest(_in_two_digits(name), of)}; give one of {known_ids}"
        for name in ids
        if name not in of
    ]
    wrong += [
        f"ID: '{name}' is of document {of[name]}; leave --document {document} out"
        for name in ids
        if of.get(name, document) != document and document is not None
    ]
    if wrong:
        raise UserError("\n".join(wrong))


def _in_two_digits(name: str) -> str:
    """Write an id's number as ids do: A1 is as near to A11 as to A01 otherwise."""
    return re.sub(r"^(\D+)(\d)$", r"\g<1>0\2", name)


def judge(
    frames: Frames,
    ids: Sequence[str] = (),
    document: str | None = None,
    verdict: str | None = None,
) -> list[Judged]:
    """Judge every claim, or those of some ids, a document or a verdict, by every class of machines.

    One's own GPUs come first, then those that decide, then that of the most runs. The first is the
    verdict by which claims are chosen and counted.

    A class that has nothing to say of a claim is left out where another one has; of classes without
    a run that decides, the one with the most runs is kept, the CPU last.
    """
    gpus = machine_gpus(frames.runs)
    emulated = {"CPU", *[_OURS] * (gpus.get(_OWN) == "CPU")}
    by_gpu, by_architecture = (
        {name: Tables(frames, labels) for name, labels in machine_classes(gpus, pooled).items()}
        for pooled in (False, True)
    )
    ledger = []
    for claim in all_claims():
        if (ids and claim.id not in ids) or document not in (None, claim.document):
            continue
        tables = by_architecture if claim.pooled else by_gpu
        found = {kind: judge_claim(claim, of_class) for kind, of_class in tables.items()}
        telling = {kind: finding for kind, finding in found.items() if finding.runs}
        if real := telling.keys() - emulated:  # they speak where no GPU does
            telling = {kind: telling[kind] for kind in found if kind in real}
        if not telling:
            by_size = sorted(found, key=lambda kind: (kind in emulated, -len(tables[kind].stored)))
            telling = {kind: found[kind] for kind in by_size[:1]}
        answers = sorted(telling.items(), key=_most_telling)
        if answers and verdict not in (None, answers[0][1].verdict):
            continue
        for _, finding in answers:
            labels = dict.fromkeys(run.split("/")[0] for run in finding.runs)
            names = " and ".join(sorted({gpus[label] for label in labels}))
            own = f"{_OURS}, " if _OWN in labels else ""
            name = f"{own}{names} ({', '.join(labels)})" if labels else ""
            ledger.append(Judged(claim, name, finding, _OWN in labels))
    return ledger


def _most_telling(answer: tuple[str, Finding]) -> tuple[bool, bool, int]:
    kind, finding = answer
    is_open = finding.verdict is Verdict.UNDECIDED
    return not kind.startswith(_OURS), is_open, -len(finding.runs)


def judge_claim(claim: Claim, tables: Tables) -> Finding:
    """Judge one claim by the tables of one class of machines."""
    finding = TESTS[claim.id](tables, claim)
    if finding.verdict is Verdict.UNDECIDED and claim.needs:
        return replace(
            finding, verdict=Verdict.NOT_TESTABLE, why=f"{finding.why}; it takes {claim.needs}"
        )
    return finding


def claims_table(ledger: Sequence[Judged]) -> pd.DataFrame:
    """Return one row per claim and class of machines, with the ids of its runs.

    ``is_first``: of a claim's rows the one whose verdict counts, as `judge` orders them.
    """
    rows: list[dict[str, object]] = []
    for each in ledger:
        claim, finding = each.claim, each.finding
        figure = asdict(finding.figure) if finding.figure else {}
        rows.append({
            "id": claim.id, "document": claim.document, "claim": claim.statement,
            "their_figure": claim.figure, "machines": each.machines,
            "is_first": not rows or rows[-1]["id"] != claim.id,
            "verdict": str(finding.verdict), "what": claim.what, "unit": claim.unit,
            **{name: figure.get(name) for name in ("value", "low", "high", "span")},
            "why": finding.why, "settles": settles(each), "num_runs": len(finding.runs),
            "run_ids": " ".join(finding.runs),
        })  # fmt: skip
    return pd.DataFrame(rows)


def settles(each: Judged) -> str:
    """Say what would settle a claim that is open, and what the studies that it names cost."""
    if each.finding.verdict is not Verdict.UNDECIDED:
        return ""
    named = re.findall(r"STUDY=([\w-]+)", each.claim.settles)
    try:
        runs = [run for study in named for run in load_study(study).runs]
    except UserError:  # the page does not depend on a study that this checkout has not
        runs = []
    cost = f", about {estimated_minutes(runs, 1):.0f} GPU-minutes" if runs else ""
    return each.claim.settles + cost
