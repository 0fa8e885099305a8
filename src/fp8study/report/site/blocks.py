"""Rewrite what pandoc does not know: callouts, tab sets and tables written as HTML."""

from __future__ import annotations

import re
from typing import Any

from fp8study.core.errors import UserError
from fp8study.report.site.pandoc import Node, Nodes, div, plain_text, read, read_inlines, walk

CALLOUTS = {
    "callout-note": "Note",
    "callout-tip": "Tip",
    "callout-important": "Important",
    "callout-warning": "Warning",
    "callout-caution": "Caution",
}
CALLOUT_ATTRIBUTES = {"title", "collapse", "icon", "appearance"}
NUMBER = re.compile(r"[+\-−±<>≤≥≈~]*\s*[\d.,]*\d[\d.,]*(e[+\-]?\d+)?\s*[%×x]?", re.IGNORECASE)
NO_VALUE = {"", "–", "—", "-", "NaN", "nan", "None", "<NA>", "n/a"}


def rewrite_blocks(blocks: Nodes, where: str) -> Nodes:
    """Rewrite the blocks of a page.

    Args:
        blocks: pandoc blocks.
        where: the page, for error messages.

    Returns:
        The blocks with callouts, tab sets and data frames as pandoc can write them.

    Raises:
        UserError: a div asks for something that is not supported.
    """

    def action(node: Node) -> Nodes | None:
        if node["t"] == "RawBlock" and 'class="dataframe"' in node["c"][1]:
            return rewrite_blocks(_data_frame(node["c"][1]), where)
        if node["t"] == "Table":
            return [_align_numbers(node)]
        if node["t"] == "Div":
            return _rewrite_div(node, where)
        return None

    return walk(blocks, action)


def _rewrite_div(node: Node, where: str) -> Nodes | None:
    (identifier, classes, pairs), content = node["c"]
    for key, _ in pairs:
        if key.startswith("layout"):
            raise UserError(f"{where}: div attribute `{key}` is not supported; remove it.")
    for name in classes:
        if name.startswith("content-") or (name.startswith("callout-") and name not in CALLOUTS):
            raise UserError(f"{where}: div class `.{name}` is not supported; remove it.")
    kind = next((name for name in classes if name in CALLOUTS), None)
    if kind is not None:
        callout = _callout(kind, dict(pairs), rewrite_blocks(content, where), where)
        callout["c"][0][0] = identifier
        return [callout]
    if "panel-tabset" in classes:
        headed = [_unlisted(block) for block in content]
        return [div(["panel-tabset"], rewrite_blocks(headed, where), identifier)]
    return None


def _callout(kind: str, options: dict[str, str], content: Nodes, where: str) -> Node:
    for key in options:
        if key not in CALLOUT_ATTRIBUTES:
            raise UserError(f"{where}: callout attribute `{key}` is not supported; remove it.")
    title: Nodes = [{"t": "Str", "c": CALLOUTS[kind]}]
    if "title" in options:
        title = read_inlines(options["title"])
    elif content and content[0]["t"] == "Header":
        title, content = content[0]["c"][2], content[1:]
    heading = div(["callout-title"], [{"t": "Plain", "c": title}])
    return div(["callout", kind], [heading, div(["callout-body"], content)])


def _unlisted(block: Node) -> Node:
    """Keep a tab's heading out of the numbering and the table of contents."""
    if block["t"] == "Header":
        block["c"][1][1] += ["unnumbered", "unlisted"]
    return block


def _data_frame(html: str) -> Nodes:
    """Read pandas' table, less its style sheet and the alignment it gives every heading."""
    blocks = read(re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL), "html")["blocks"]

    def action(node: Node) -> Nodes | None:
        if node["t"] != "Table":
            return None
        node["c"][0][2] = []
        for row in _rows(node):
            row[0][2] = []
        return [node]

    return walk(blocks, action)


def _rows(table: Node) -> Nodes:
    head, bodies, foot = table["c"][3:6]
    return [*head[1], *(row for body in bodies for row in [*body[2], *body[3]]), *foot[1]]


def _align_numbers(table: Node) -> Node:
    """Align to the right each column of numbers that says nothing about its alignment."""
    columns = table["c"][2]
    body_rows = [row for body in table["c"][4] for row in body[3]]
    for index, column in enumerate(columns):
        cells = [_cell_text(row, index, len(columns)) for row in body_rows]
        values = [cell for cell in cells if cell is not None and cell not in NO_VALUE]
        default = column[0]["t"] == "AlignDefault"
        if default and values and all(_is_number(value) for value in values):
            column[0] = {"t": "AlignRight"}
    return table


def _cell_text(row: Any, index: int, width: int) -> str | None:
    """Return a cell's text; None where merged cells make its column unknown."""
    cells = row[1]
    return plain_text(cells[index][4]).strip() if len(cells) == width else None


def _is_number(text: str) -> bool:
    """Take `1.2`, `−3 %`, `1.2 ± 0.1`, `1.2 [1.1, 1.3]` and `1–2` for numbers."""
    words = re.sub(r"[\[\]();/]|±|–|\bto\b", " ", text).split()
    return bool(words) and all(NUMBER.fullmatch(word) or word in {"%", "×"} for word in words)
