"""What a claim is, what a finding on it is, and the list of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fp8study.analysis.claims.tables import Tables


class Verdict(StrEnum):
    """What the records say of a claim."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    CONTRADICTED = "contradicted"
    ARTEFACT = "artefact"
    """The figure is reproduced, its explanation is not."""
    NOT_TESTABLE = "not testable here"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Claim:
    """One claim of a document."""

    id: str
    statement: str
    """In our words."""
    figure: str
    """The document's, as it is read."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """The document's figures, as its test takes them."""
    settles: str = ""
    """Which runs would settle it, and what they cost."""
    needs: str = ""
    """What it takes that is not here; with it, no evidence means `Verdict.NOT_TESTABLE`."""

    @property
    def document(self) -> str:
        return self.id[0]


@dataclass(frozen=True)
class Figure:
    """What was measured, beside the document's figure."""

    what: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    span: str = ""
    """What `low` and `high` are: ``95 % CI``, or ``range of 7``, the smallest and the largest."""
    spec: str = ".1f"
    """How its numbers are written."""


@dataclass(frozen=True)
class Finding:
    """The answer of one test."""

    verdict: Verdict
    why: str
    """One sentence, made of the numbers that it rests on."""
    figure: Figure | None = None
    runs: tuple[str, ...] = ()
    """``machine/study/run_id``; none where arithmetic or a check of the package decides."""


Test = Callable[[Tables, Claim], Finding]
#: Id of a claim → its test.
TESTS: dict[str, Test] = {}


def judges(*ids: str) -> Callable[[Test], Test]:
    """Enter a function as the test of the claims with these ids."""

    def enter(test: Test) -> Test:
        TESTS.update(dict.fromkeys(ids, test))
        return test

    return enter


def undecided(why: str, runs: tuple[str, ...] = ()) -> Finding:
    """Say that the records do not say."""
    return Finding(Verdict.UNDECIDED, why, runs=runs)
