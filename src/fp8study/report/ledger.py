"""The ledger of claims as it is read: on a page, and in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from fp8study.analysis.claims.finding import Verdict
from fp8study.analysis.claims.ledger import Judged, settles
from fp8study.report.table import Layout
from fp8study.report.words import count, number

#: A shape beside the word, so that neither needs a colour.
SHAPES = {
    Verdict.REPRODUCED: "✓",
    Verdict.PARTLY: "◐",
    Verdict.CONTRADICTED: "✗",
    Verdict.ARTEFACT: "≠",
    Verdict.UNDECIDED: "?",
    Verdict.NOT_TESTABLE: "–",
}
_DOCUMENTS = ["A", "B", "C"]
_COUNTED = [*_DOCUMENTS, "all"]
COUNTS = Layout({"verdict": ("verdict", "")} | {name: (name, "d") for name in _COUNTED})
LEDGER = Layout({
    "id": ("id", ""), "document": ("document", ""), "badge": ("verdict", ""),
    "claim": ("claim", ""), "their_figure": ("their figure", ""), "ours": ("ours", ""),
    "why": ("why", ""), "machines": ("machines", ""),
}, cards=True)  # fmt: skip


def badge(verdict: Verdict) -> str:
    return f"{SHAPES[verdict]} {verdict}"


def ours(each: Judged) -> str:
    """Write what was measured, with its interval."""
    figure, claim = each.finding.figure, each.claim
    if figure is None:
        return ""
    text = f"{claim.what}: {number(figure.value, claim.spec)} {claim.unit}".strip()
    if figure.low is None or figure.high is None:
        return text
    ends = " to ".join(number(end, claim.spec) for end in (figure.low, figure.high))
    return f"{text} ({figure.span}: {ends})"


def rows(ledger: Sequence[Judged]) -> pd.DataFrame:
    """Return the page's rows, in words."""
    reasons = [(each.finding.why, settles(each)) for each in ledger]
    return pd.DataFrame([
        {
            "id": each.claim.id, "document": each.claim.document, "claim": each.claim.statement,
            "their_figure": each.claim.figure, "ours": ours(each),
            "badge": badge(each.finding.verdict),
            "why": _signs(". It would take: ".join(filter(None, reason))),
            "machines": ", ".join(dict.fromkeys(run.split("/")[0] for run in each.finding.runs)),
            "run_ids": " ".join(each.finding.runs),
        }
        for each, reason in zip(ledger, reasons, strict=True)
    ])  # fmt: skip


def based_on(each: Judged) -> str:
    """Say how many runs of which studies a finding rests on."""
    if not each.finding.runs:
        return "none"
    studies = dict.fromkeys(name.split("/")[1] for name in each.finding.runs)
    return f"{count(len(each.finding.runs), 'run')} of {', '.join(studies)}"


def tally(ledger: Sequence[Judged]) -> pd.DataFrame:
    """Count verdicts by document: of each claim its first, one's own machine's if it has any."""
    first = {each.claim.id: each for each in reversed(ledger)}.values()
    if not first:
        return pd.DataFrame()
    found = pd.DataFrame([(badge(e.finding.verdict), e.claim.document) for e in first])
    table = pd.crosstab(found[0], found[1]).reindex([*map(badge, SHAPES)], fill_value=0)
    table = table.reindex(columns=_DOCUMENTS, fill_value=0)
    return table.assign(all=table.sum(axis=1)).rename_axis("verdict").reset_index()


def ledger_text(ledger: Sequence[Judged]) -> str:
    """Write the ledger for a terminal: what this machine's own runs answer comes first."""
    if not ledger:
        return "no such claim"
    lines = [f"{'':19}" + "".join(f"{name:>5}" for name in _COUNTED)]
    for row in tally(ledger).to_dict("records"):
        lines.append(f"{row['verdict']:19}" + "".join(f"{row[name]:>5}" for name in _COUNTED))
    answered = {each.claim.id for each in ledger if each.is_own}
    own = [each for each in ledger if each.claim.id in answered]
    others = [each for each in ledger if each.claim.id not in answered]
    if own:
        mine = next(each.machines for each in own if each.is_own)
        lines += ["", f"Answered by {mine}, and beside it the reference"]
        lines += [line for each in own for line in (_entry if each.is_own else _beside)(each)]
        lines += ["", "Answered by the reference alone"] if others else []
    return "\n".join([*lines, *(line for each in others for line in _entry(each))])


def _beside(each: Judged) -> list[str]:
    measured = f"; {ours(each)}" if each.finding.figure else ""
    line = f"{badge(each.finding.verdict).upper()}{measured}; {each.machines}"
    return [f"     beside   {line}"]


def _entry(each: Judged) -> list[str]:
    claim, finding = each.claim, each.finding
    lines = ["", f"{claim.id}  {badge(finding.verdict).upper()}  {claim.statement}"]
    lines.append(f"     theirs   {claim.figure}")
    if finding.figure:
        lines.append(f"     ours     {ours(each)}")
    lines.append(f"     why      {_signs(finding.why)}")
    if settles(each):
        lines.append(f"     settles  {settles(each)}")
    if finding.runs:
        lines.append(f"     runs     {based_on(each)}; {each.machines}")
    return lines


def _signs(text: str) -> str:
    """Write minus signs as such."""
    return re.sub(r"(?<![\w-])-(?=\d)", "\u2212", text)
