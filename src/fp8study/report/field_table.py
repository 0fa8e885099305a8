"""The fields as tables, for ``docs/configuration.md``, the notebooks and a terminal."""

from __future__ import annotations

import itertools
import math
import textwrap
import typing

from fp8study.core.field_types import Group, shown, type_name
from fp8study.core.fields import DEFAULTS, FIELDS, MANY, TYPES


def field_rows() -> list[tuple[str, str, str, str, str]]:
    """Return group, name, type with range, default and meaning of every field, group by group.

    The default of a field that others decide where nothing is said is ``decided``.
    """
    rows = []
    for name, field in FIELDS.items():
        kind = type_name(TYPES[name])
        if field.one_of:
            kind = "|".join(map(str, field.one_of))
        elif field.low > -math.inf:
            most = "or more" if field.high >= MANY else f"to {field.high:.10g}"
            kind += f", {field.low:g} {most}"
        value = DEFAULTS[name] if field.plain is None else field.plain
        default = "decided" if value is None and field.decide else shown(value) or "none"
        rows.append((field.group, name, kind, default, field.meaning))
    return sorted(rows, key=lambda row: typing.get_args(Group).index(row[0]))


def field_table() -> str:
    """Return all fields for reading in a terminal, 80 columns wide."""
    lines: list[str] = []
    for group, rows in itertools.groupby(field_rows(), key=lambda row: row[0]):
        lines += ["", group.upper()]
        for _, name, kind, default, meaning in rows:
            lines.append(f"  {name} ({kind}; default {default})")
            lines += textwrap.wrap(meaning, 80, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines[1:])
