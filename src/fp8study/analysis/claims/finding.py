"""What a claim is, what a finding on it is, and the list of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pandas as pd

from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.runs.pairing import together


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
class Figure:
    """What was measured, beside the document's figure."""

    value: float
    low: float | None = None
    high: float | None = None
    span: str = ""
    """What `low` and `high` are: ``95 % CI``, or ``range of 7``, the smallest and the largest."""


@dataclass(frozen=True)
class Finding:
    """The answer of one test."""

    verdict: Verdict
    why: str
    """One sentence, made of the numbers that it rests on."""
    figure: Figure | None = None
    runs: tuple[str, ...] = ()
    """``machine/study/run_id``; none where arithmetic or a check of the package decides."""


@dataclass(frozen=True)
class Claim:
    """One claim of a document; ``claims.yaml`` says what its fields are."""

    id: str
    statement: str
    figure: str
    says: str
    what: str
    missing: str = ""
    unit: str = "%"
    spec: str = ".1f"
    published: Mapping[str, Any] = field(default_factory=dict)
    settles: str = ""
    needs: str = ""
    pooled: bool = False

    @property
    def document(self) -> str:
        return self.id[0]

    def found(
        self, verdict: Verdict, figure: Figure | None, *tables: pd.DataFrame, **values: Any
    ) -> Finding:
        """Return a finding that rests on the rows of `tables`; `values` go into its reason."""
        return Finding(
            verdict, self.says.format(**{**self.published, **values}), figure, behind(*tables)
        )

    def open(self, *tables: pd.DataFrame, **values: Any) -> Finding:
        """Return that the records do not say."""
        why = self.missing.format(**{**self.published, **values})
        return Finding(Verdict.UNDECIDED, why, runs=behind(*tables))


def behind(*tables: pd.DataFrame) -> tuple[str, ...]:
    """Name the runs that the rows of tables rest on."""
    columns = ("run_ids", "run_ids_before")
    texts = [table[name] for table in tables for name in columns if name in table]
    return tuple(together(pd.concat(texts)).split()) if texts else ()


Test = Callable[[Tables, Claim], Finding]
#: Id of a claim → its test.
TESTS: dict[str, Test] = {}


def judges(*ids: str) -> Callable[[Test], Test]:
    """Enter a function as the test of the claims with these ids."""

    def enter(test: Test) -> Test:
        TESTS.update(dict.fromkeys(ids, test))
        return test

    return enter
