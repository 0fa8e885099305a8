"""The ledger of claims as it is read: on a page, and in a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from fp8study.analysis.claims.finding import Verdict
from fp8study.analysis.claims.ledger import Judged, settles
from fp8study.analysis.runs.pairing import together
from fp8study.core.hardware import find_peak
from fp8study.report.table import Layout
from fp8study.report.words import count, interval, machine_name, number

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
#: More studies than that are counted; ``--json`` names every run.
_MOST_NAMED = 4
COUNTS = Layout({
    "verdict": ("verdict", ""), "means": ("the claim", ""),
    **{name: (name, "d") for name in _COUNTED},
})  # fmt: skip
_MEANS = {
    Verdict.REPRODUCED: "holds in every setting that decides it",
    Verdict.PARTLY: "holds in half of them or more, or in part",
    Verdict.CONTRADICTED: "holds in fewer",
    Verdict.ARTEFACT: "comes out, but not for the document's reason",
    Verdict.UNDECIDED: "is decided by no run yet",
    Verdict.NOT_TESTABLE: "needs hardware or software that this study lacks",
}
LEDGER = Layout({
    "id": ("id", ""), "badge": ("verdict", ""),
    "claim": ("claim", ""), "their_figure": ("their figure", ""), "ours": ("ours", ""),
    "why": ("why", ""),
})  # fmt: skip


def badge(verdict: Verdict) -> str:
    return f"{SHAPES[verdict]} {verdict}"


def ours(each: Judged) -> str:
    """Write what was measured, with its interval."""
    return f"{each.claim.what}: {_figure(each)}"


def _figure(each: Judged) -> str:
    figure, claim = each.finding.figure, each.claim
    if figure is None:
        return ""
    text = f"{number(figure.value, claim.spec)} {claim.unit}".strip()
    if figure.low is None or figure.high is None:
        return text
    return f"{text} ({figure.span}: {interval(figure.low, figure.high, claim.spec)})"


def rows(ledger: Sequence[Judged]) -> pd.DataFrame:
    """Return the page's rows, in words: a claim once for all machines with the same verdict."""
    groups: dict[tuple[str, Verdict], list[Judged]] = {}
    for each in ledger:
        groups.setdefault((each.claim.id, each.finding.verdict), []).append(each)
    answers = Counter(each.claim.id for each in ledger)
    usual = {name: usual_gpu(ledger) for name, number in answers.items() if number == 1}
    return pd.DataFrame([_row(of, usual.get(name, "")) for (name, _), of in groups.items()])


def usual_gpu(ledger: Sequence[Judged]) -> str:
    """Return the GPU that answers the most claims: a row names its machines if they have others."""
    kinds = Counter(_gpu(each) for each in ledger if each.machines and not each.is_own)
    return kinds.most_common(1)[0][0] if kinds else ""


def _gpu(each: Judged) -> str:
    return each.machines.partition(" (")[0]


def _short(each: Judged) -> str:
    """Name a class of machines in a word or two."""
    if each.is_own:
        return machine_name("local")
    gpus = _gpu(each).split(" and ")
    return " and ".join(peak.name_part if (peak := find_peak(gpu)) else gpu for gpu in gpus)


def _row(of: Sequence[Judged], usual: str) -> dict[str, str]:
    claim, finding = of[0].claim, of[0].finding
    figures = []
    for each in (each for each in of if each.finding.figure):
        named = "" if _gpu(each) == usual else _short(each)
        figure = _figure(each).replace("(range of", "(of").replace("(95 % CI", "(CI")
        figures.append(f"{named} {figure}".strip())
    why = f"{_short(of[0])}: " * (len({each.finding.why for each in of}) > 1) + finding.why
    reason = filter(None, (why, settles(of[0])))
    return {
        "id": claim.id, "claim": claim.statement,
        "their_figure": claim.figure, "badge": badge(finding.verdict).replace(" ", "\u00a0", 1),
        "ours": f"{claim.what}: {'; '.join(figures)}" if figures else "",
        "why": _signs(". It would take: ".join(reason)),
        "run_ids": together(" ".join(each.finding.runs) for each in of),
    }  # fmt: skip


def based_on(each: Judged) -> str:
    """Say how many runs a finding rests on, and of which studies, or of how many."""
    studies = dict.fromkeys(name.split("/")[1] for name in each.finding.runs)
    of = ", ".join(studies) if len(studies) <= _MOST_NAMED else f"{len(studies)} studies"
    return f"{count(len(each.finding.runs), 'run')} of {of}"


def tally(ledger: Sequence[Judged]) -> pd.DataFrame:
    """Count verdicts by document: of each claim its first, one's own machine's if it has any."""
    first = {each.claim.id: each for each in reversed(ledger)}.values()
    if not first:
        return pd.DataFrame()
    found = pd.DataFrame([(badge(e.finding.verdict), e.claim.document) for e in first])
    table = pd.crosstab(found[0], found[1]).reindex([*map(badge, SHAPES)], fill_value=0)
    table = table.reindex(columns=_DOCUMENTS, fill_value=0)
    means = [_MEANS[verdict] for verdict in SHAPES]
    table = table.assign(all=table.sum(axis=1), means=means)
    return table.rename_axis("verdict").reset_index()


def ledger_text(ledger: Sequence[Judged], counts: bool = True) -> str:
    """Write the ledger for a terminal: what this machine's own runs answer comes first.

    `counts`: with the table of verdicts before it, which says nothing of a few chosen claims.
    """
    if not ledger:
        return "no such claim"
    lines = _tally_lines(ledger) if counts else []
    answered = {each.claim.id for each in ledger if each.is_own}
    own = [each for each in ledger if each.claim.id in answered]
    others = [each for each in ledger if each.claim.id not in answered]
    if own:
        mine = next(each.machines for each in own if each.is_own)
        lines += ["", f"Answered by {mine}, and beside it the reference"]
        lines += [line for each in own for line in (_entry if each.is_own else _beside)(each)]
    alone = [each for each in others if each.machines or not own]
    by_none = [each for each in others if each not in alone]
    for heading, of in (("the reference alone", alone), ("no run", by_none)):
        lines += ["", f"Answered by {heading}"] if own and of else []
        lines += [line for each in of for line in _entry(each)]
    return "\n".join(lines).lstrip("\n")


def _tally_lines(ledger: Sequence[Judged]) -> list[str]:
    lines = [f"{'':19}" + "".join(f"{name:>5}" for name in _COUNTED)]
    for row in tally(ledger).to_dict("records"):
        lines.append(f"{row['verdict']:19}" + "".join(f"{row[name]:>5}" for name in _COUNTED))
    return lines


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
