"""How a table is declared, and written as HTML or Markdown."""

from __future__ import annotations

import html
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from IPython.display import Markdown
from tabulate import tabulate

from fp8study.report.words import escape, in_words, machine_name, number

#: What to write for a value that no record holds.
MISSING = "–"
#: The format of a count that is worth a column only if some row has any.
IF_ANY = "if any"
#: A word of more characters may be broken: the name of a layer would push a table off the page.
_LONGEST_WORD = 20
#: A cell of more characters gets room for a few words a line.
_LONG_TEXT = 40
#: A table of more rows is searchable.
_LONG_TABLE = 15
#: The heading over the links to the runs behind each row.
_RECORDS = "records"


@dataclass(frozen=True)
class Layout:
    """How a table is shown."""

    columns: Mapping[str, tuple[str, str]]
    """Column → its heading and its format; without a format it is text. A column that is empty
    throughout is left out."""
    group: str = ""
    """Template of the line over rows that share it, from the names of columns: what two rows have
    in common is said once, and the numbers keep their place on the screen."""


def show(
    table: pd.DataFrame,
    layout: Layout,
    empty: str,
    choose: Sequence[str] = (),
) -> Markdown:
    """Write a table for a page; the line over a group of rows is their header.

    A narrow screen shows each row as a card, with the headings beside its values.
    Where the table has ``run_ids``, the last column counts the runs behind a row, partners
    included, and leads to them. A table of more than `_LONG_TABLE` rows can be filtered, sorted
    and downloaded where scripts run, and by the values of the columns to `choose` from, or as
    ``id:1`` by their first letter. See ``report/report.js``.
    """
    if table.empty:
        return _html(f"<tbody><tr><td>{html.escape(empty)}</td></tr></tbody>")
    if "machine" in table:
        table = table.assign(machine=table["machine"].map(machine_name))
    columns = _filled(table, layout)
    traced = "run_ids" in table
    lists = (name.partition(":") for name in choose)
    chosen = {name: f' data-choose="{letters}"' for name, _, letters in lists}
    head = "".join(
        _html_cell(heading, spec, "th", chosen.get(name, ""))
        for name, (heading, spec) in columns.items()
    )
    head += _html_cell(_RECORDS, "d", "th") if traced else ""
    groups = list(_groups(table, layout))
    shared, titles = _shared([title for title, _ in groups])
    parts = [f"<caption>All rows: {html.escape(shared)}</caption>"] if shared else []
    parts.append(f"<thead><tr>{head}</tr></thead>")
    for title, (_, rows) in zip(titles, groups, strict=True):
        lines = [
            "".join(
                _html_cell(text, spec, label=heading)
                for text, (heading, spec) in zip(row, columns.values(), strict=True)
            )
            for row in _texts(rows, columns)
        ]
        if traced:
            runs = map(_runs_cell, rows["run_ids"])
            lines = [f"{line}{cell}" for line, cell in zip(lines, runs, strict=True)]
        if title:
            style = "text-align: left; white-space: normal; font-weight: 600;"
            line = f'<th scope="rowgroup" colspan="{len(columns) + traced}" style="{style}">'
            lines.insert(0, f"{line}{html.escape(title)}</th>")
        parts.append("<tbody>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</tbody>")
    long = ["searchable"] * (len(table) > _LONG_TABLE)
    return _html(*parts, classes=" ".join(["dataframe", *long, "cards"]))


def markdown(table: pd.DataFrame, layout: Layout) -> str:
    """Write a table for a file; nothing of a record is taken for markup."""
    columns = _filled(table, layout)
    parts = []
    for group, rows in _groups(table, layout):
        grid = tabulate(
            [[escape(text) for text in row] for row in _texts(rows, columns)],
            headers=[heading for heading, _ in columns.values()],
            tablefmt="pipe",
            disable_numparse=True,
            colalign=["right" if spec else "left" for _, spec in columns.values()],
        )
        parts.append(f"**{escape(group)}**\n\n{grid}" if group else grid)
    return "\n\n".join(parts) + "\n"


def _filled(table: pd.DataFrame, layout: Layout) -> dict[str, tuple[str, str]]:
    return {
        name: (heading, spec)
        for name, (heading, spec) in layout.columns.items()
        if any(_cell(value, spec) != MISSING for value in table[name])
    }


def _groups(table: pd.DataFrame, layout: Layout) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield runs of rows under their line; a group that comes again has its line again."""
    titles = [
        in_words(layout.group.format(**{str(k): _cell(v, "") for k, v in row.items()}))
        for row in table.to_dict("records")
    ]
    lines = pd.Series(titles, index=table.index, dtype="object")
    for _, rows in table.groupby((lines != lines.shift()).cumsum(), sort=False):
        yield lines[rows.index[0]], rows


def _shared(titles: list[str]) -> tuple[str, list[str]]:
    """Take out of the lines over groups what all of them say, and return it with the rest."""
    parts = [re.split("[:;,] ", title) for title in titles]
    shared = [part for part in parts[0] if all(part in of for of in parts[1:])]
    rest = [", ".join(part for part in of if part not in shared) for of in parts]
    return (", ".join(shared), rest) if len(titles) > 1 and all(rest) else ("", titles)


def _texts(rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]]) -> Iterator[list[str]]:
    for row in rows[list(columns)].to_dict("records"):
        yield [_cell(row[name], spec) for name, (_, spec) in columns.items()]


def _cell(value: object, spec: str) -> str:
    if value is None or value is pd.NA or value != value or value == "":
        return MISSING
    if not spec:
        return in_words(str(value))
    if spec == IF_ANY:
        return number(value, ".0f") if value else MISSING  # type: ignore[arg-type]
    return number(value, spec)  # type: ignore[arg-type]


def _html(*parts: str, classes: str = "dataframe") -> Markdown:
    # The first class is pandas' own: renderers know how to treat it.
    body = "\n".join(parts)
    return raw(html=f'<table class="{classes}">\n{body}\n</table>')


def raw(**texts: str) -> Markdown:
    """Show a text for each format of a page, as ``html="<b>…"``, as raw blocks of Markdown.

    For an output of type HTML Quarto loads require.js and jQuery: `haveOutputType` in
    ``src/core/jupyter/widgets.ts`` of quarto-cli. In a raw block it reads HTML tables for other
    formats, too: ``src/resources/filters/normalize/astpipeline.lua``.
    """
    return Markdown("\n\n".join(f"```{{={name}}}\n{text}\n```" for name, text in texts.items()))


def run_key(path: str) -> str:
    """Return a run's short name in links, from its ``run_ids`` name: 8 hexadecimal digits."""
    return f"{zlib.crc32(path.encode()):08x}"


def runs_link(run_ids: str) -> str:
    """Return a link to the page of runs, which shows these alone, that says how many there are."""
    ids = run_ids.split()
    if not ids:
        return MISSING
    only = ".".join(map(run_key, ids))
    return f'<a href="runs.html?of={only}#{ids[0]}">{len(ids)}</a>'


def _runs_cell(ids: object) -> str:
    link = runs_link(ids if isinstance(ids, str) else "")
    return f'<td data-label="{_RECORDS}" style="text-align: right;">{link}</td>'


def _html_cell(text: str, spec: str, tag: str = "td", more: str = "", label: str = "") -> str:
    style = f"text-align: {'right' if spec else 'left'};"
    if len(text) > _LONG_TEXT:
        style += " min-width: 10em;"
    if any(len(word) > _LONGEST_WORD for word in text.split()):
        style += " overflow-wrap: anywhere; min-width: 9em;"
    more = f' scope="col"{more}' if tag == "th" else more
    if label:
        more += f' data-label="{html.escape(label)}"'
    return f'<{tag}{more} style="{style}">{html.escape(text)}</{tag}>'
