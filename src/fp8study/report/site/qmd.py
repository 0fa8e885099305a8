"""Split a .qmd page into prose, inline expressions and cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fp8study.core.errors import UserError
from fp8study.report.site.config import Options, Site, checked, load_yaml

FRONT = re.compile(r"---\s*\n(.*?\n)(?:---|\.\.\.)\s*\n", re.DOTALL)
BLOCK = re.compile(r"^( *)(`{3,}|~{3,}) *([^`\n]*)\n((?:.*\n)*?) *\2[`~]*[ ]*\n", re.MULTILINE)
OPEN_BLOCK = re.compile(r"^ *(?:`{3,}|~{3,})[^`\n]*$", re.MULTILINE)
OPTION = re.compile(r"^#\s*\| ?(.*\n)", re.MULTILINE)
INLINE = re.compile(r"(?<!`)`\{(\w+)\}[ \t]([^`]+)`(?!`)")
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
UNSUPPORTED = re.compile(r"\{\{<|\{#(?:eq|lst|thm|lem|cor|prp|cnj|def|exm|exr|vid)-")


class FrontMatter(Options):
    title: str
    subtitle: str = ""


class CellOptions(Options):
    label: str | None = None
    tbl_cap: str | None = None


@dataclass(frozen=True)
class Prose:
    """Markdown, handed to pandoc as it is."""

    text: str


@dataclass(frozen=True)
class Code:
    """A cell, or an inline expression."""

    source: str
    line: int
    """the line of the page on which `source` starts, from 1"""
    options: CellOptions | None
    """None: an inline expression"""


@dataclass(frozen=True)
class Page:
    name: str
    where: str
    source: str
    front: FrontMatter
    parts: list[Prose | Code]


def read_page(site: Site, name: str) -> Page:
    """Parse the page of this file name.

    Raises:
        UserError: the page holds something wrong or unsupported.
    """
    source = (site.root / name).read_text(encoding="utf-8").rstrip("\n") + "\n"
    where = site.where(name)
    front = FRONT.match(source)
    if front is None:
        raise UserError(f"{where}:1: no front matter; begin with `---`, `title: …` and `---`.")
    options = checked(FrontMatter, load_yaml(front[1], where), where)
    parts = list(_parts(source, front.end(), where))
    return Page(name, where, source, options, parts)


def _parts(source: str, start: int, where: str) -> Iterator[Prose | Code]:
    for block in BLOCK.finditer(source, start):
        yield from _prose(source, start, block.start(), where)
        start = block.end()
        info = block[3].strip()
        at = f"{where}:{line_of(source, block.start())}"
        if info == "{python}" and not block[1]:
            yield _cell(block[4], line_of(source, block.start(4)), at)
        elif re.match(r"\{[\w{]", info):
            raise UserError(
                f"{at}: cell `{info}` is not supported; use `{{python}}` at the start of a line, "
                "with its options as `#| key: value`."
            )
        else:
            yield Prose(block[0])
    yield from _prose(source, start, len(source), where)


def _prose(source: str, start: int, end: int, where: str) -> Iterator[Prose | Code]:
    text = source[start:end]
    if opened := OPEN_BLOCK.search(text):
        raise UserError(
            f"{where}:{line_of(source, start + opened.start())}: the code block is never closed."
        )
    bare = CODE_SPAN.sub(lambda span: " " * len(span[0]), text)
    if odd := UNSUPPORTED.search(bare):
        raise UserError(
            f"{where}:{line_of(source, start + odd.start())}: `{odd[0]}` is not supported: no "
            "shortcodes, and labels of figures, tables and sections only."
        )
    position = 0
    for match in INLINE.finditer(text):
        line = line_of(source, start + match.start())
        if match[1] != "python":
            raise UserError(f"{where}:{line}: inline `{{{match[1]}}}` is not supported.")
        yield Prose(text[position : match.start()])
        yield Code(match[2].strip(), line, None)
        position = match.end()
    yield Prose(text[position:])


def line_of(source: str, position: int) -> int:
    """Return the line of a page on which a character stands, from 1."""
    return source.count("\n", 0, position) + 1


def _cell(body: str, line: int, at: str) -> Code:
    """Parse the lines between a cell's fences, the first of which is `line` of the page."""
    yaml_text = ""
    position = 0
    while match := OPTION.match(body, position):
        yaml_text += match[1]
        position = match.end()
    options = checked(CellOptions, load_yaml(yaml_text, at), at)
    label = options.label or ""
    if "`{python}" in yaml_text:
        raise UserError(f"{at}: inline code does not run in cell options; put it in the text.")
    if label and not re.fullmatch(r"tbl-[\w-]+", label):
        raise UserError(f"{at}: label `{label}` is not supported; begin it with `tbl-`.")
    if label and not options.tbl_cap:
        raise UserError(f"{at}: cell `{label}` needs `tbl-cap`; add it.")
    source = body[position:].lstrip("\n")
    return Code(source, line + body[: len(body) - len(source)].count("\n"), options)
