"""Split a .qmd page into front matter, prose, inline expressions and cells."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from fp8study.core.errors import UserError
from fp8study.report.site.checks import flag, known_keys, load_yaml, text_or_none
from fp8study.report.site.config import Site, check_kernel

FRONT_KEYS = {
    *("title", "subtitle", "description", "author", "date", "lang"),
    *("jupyter", "execute", "toc", "number-sections"),
}
CELL_KEYS = {
    *("label", "echo", "include", "eval", "output", "warning", "fig-cap", "fig-alt", "tbl-cap"),
    *("code-fold", "code-summary", "fig-align"),
}

FENCE = re.compile(r"^(\s*)(`{3,}(?=[^`]*$)|~{3,})\s*(.*?)\s*$")
INLINE = re.compile(r"(?<!`)`\{(\w+)\}[ \t]([^`]+)`(?!`)")
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
OTHER_LABEL = re.compile(r"\{#(eq|lst|thm|lem|cor|prp|cnj|def|exm|exr|vid)-")


@dataclass(frozen=True)
class Prose:
    """Markdown, handed to pandoc as it is."""

    text: str


@dataclass(frozen=True)
class Inline:
    """An expression within a sentence."""

    expression: str
    line: int


@dataclass(frozen=True)
class Cell:
    """A cell and its options, named as in Quarto."""

    code: str
    line: int
    """the line of the page on which `code` starts, from 1"""
    label: str | None = None
    echo: bool | None = None
    include: bool = True
    eval: bool = True
    output: bool | str = True
    warning: bool | None = None
    fig_cap: str | None = None
    fig_alt: str | None = None
    tbl_cap: str | None = None


Part = Prose | Inline | Cell


@dataclass(frozen=True)
class Page:
    """One parsed page."""

    name: str
    where: str
    source: str
    front: dict[str, Any]
    parts: list[Part] = field(default_factory=list)


def read_page(site: Site, name: str) -> Page:
    """Parse one page of a site.

    Args:
        site: the project.
        name: the page's path relative to the project.

    Returns:
        The page.

    Raises:
        UserError: the page holds something wrong or unsupported.
    """
    source = (site.root / name).read_text(encoding="utf-8")
    where = site.where(name)
    lines = source.split("\n")
    front, start = _front_matter(lines, where)
    page = Page(name, where, source, front)
    _Splitter(page, lines).split(start)
    _check_labels(page)
    return page


def _front_matter(lines: list[str], where: str) -> tuple[dict[str, Any], int]:
    if not lines or lines[0].rstrip() != "---":
        return {}, 0
    ends = [i for i, line in enumerate(lines) if i and line.rstrip() in ("---", "...")]
    if not ends:
        raise UserError(f"{where}:1: the front matter has no closing `---`; add it.")
    text = "\n".join(lines[1 : ends[0]])
    if "`{python}" in text:
        raise UserError(f"{where}: inline code does not run in the front matter; move it below.")
    front = load_yaml(text, where)
    known_keys(front, FRONT_KEYS, where)
    check_kernel(front, where)
    return front, ends[0] + 1


class _Splitter:
    """Walk the lines once, knowing whether we are inside a code block."""

    def __init__(self, page: Page, lines: list[str]) -> None:
        self.page = page
        self.lines = lines
        self.prose: list[str] = []

    def split(self, start: int) -> None:
        index = start
        while index < len(self.lines):
            fence = FENCE.match(self.lines[index])
            if fence is None:
                self._prose_line(index)
                index += 1
                continue
            end = self._closing(index, fence.group(2))
            block = self.lines[index : end + 1]
            if self._is_cell(index, fence):
                self._flush()
                self.page.parts.append(read_cell(block[1:-1], index + 2, self.page.where))
            else:
                self.prose += [line + "\n" for line in block]
            index = end + 1
        self._flush()

    def _closing(self, index: int, fence: str) -> int:
        for i in range(index + 1, len(self.lines)):
            match = FENCE.match(self.lines[i])
            if match and match.group(2).startswith(fence) and not match.group(3):
                return i
        raise UserError(f"{self.page.where}:{index + 1}: the code block is never closed.")

    def _is_cell(self, index: int, fence: re.Match[str]) -> bool:
        info = fence.group(3)
        if not re.match(r"\{[\w{]", info):
            return False
        if info != "{python}" or fence.group(1):
            raise UserError(
                f"{self.page.where}:{index + 1}: cell `{info}` is not supported; use "
                "`{python}` at the start of a line, with its options as `#| key: value`."
            )
        return True

    def _prose_line(self, index: int) -> None:
        line = self.lines[index]
        where = f"{self.page.where}:{index + 1}"
        bare = CODE_SPAN.sub("", line)
        if "{{<" in bare:
            raise UserError(f"{where}: shortcodes `{{{{< … >}}}}` are not supported.")
        if match := OTHER_LABEL.search(bare):
            raise UserError(f"{where}: labels `{match.group(1)}-` are not supported.")
        position = 0
        for match in INLINE.finditer(line):
            if match.group(1) != "python":
                raise UserError(f"{where}: inline `{{{match.group(1)}}}` is not supported.")
            self.prose.append(line[position : match.start()])
            self._flush()
            self.page.parts.append(Inline(match.group(2).strip(), index + 1))
            position = match.end()
        self.prose.append(line[position:] + "\n")

    def _flush(self) -> None:
        if self.prose:
            self.page.parts.append(Prose("".join(self.prose)))
        self.prose = []


def read_cell(body: list[str], line: int, where: str) -> Cell:
    """Parse the lines between a cell's fences, the first of which is `line` of the page."""
    count = 0
    while count < len(body) and re.match(r"#\s*\|", body[count]):
        count += 1
    at = f"{where}:{line}"
    yaml_text = "\n".join(re.sub(r"^#\s*\| ?", "", text) for text in body[:count])
    options = load_yaml(yaml_text, at)
    known_keys(options, CELL_KEYS, at)
    output = options.get("output", True)
    if output not in (True, False, "asis"):
        raise UserError(f"{at}: `output` must be true, false or asis, not {output!r}.")
    cell = Cell(
        code="\n".join(body[count:]).strip("\n"),
        line=line + count + next((i for i, text in enumerate(body[count:]) if text), 0),
        label=text_or_none(options, "label", at),
        echo=flag(options, "echo", at, True) if "echo" in options else None,
        include=flag(options, "include", at, True),
        eval=flag(options, "eval", at, True),
        output=output,
        warning=flag(options, "warning", at, True) if "warning" in options else None,
        fig_cap=text_or_none(options, "fig-cap", at),
        fig_alt=text_or_none(options, "fig-alt", at),
        tbl_cap=text_or_none(options, "tbl-cap", at),
    )
    _check_caption(cell, at)
    return cell


def _check_caption(cell: Cell, at: str) -> None:
    label = cell.label or ""
    if label and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", label):
        raise UserError(f"{at}: label `{label}` may hold only letters, digits, `-`, `_` and `.`.")
    for value in (cell.fig_cap, cell.fig_alt, cell.tbl_cap):
        if value and "`{python}" in value:
            raise UserError(f"{at}: inline code does not run in cell options; put it in the text.")
    needed = {"fig-": ("fig-cap", cell.fig_cap), "tbl-": ("tbl-cap", cell.tbl_cap)}
    for prefix, (option, value) in needed.items():
        if label.startswith(prefix) and value is None:
            raise UserError(f"{at}: cell `{label}` needs `{option}`; add `#| {option}: …`.")


def _check_labels(page: Page) -> None:
    seen: dict[str, int] = {}
    for cell in [part for part in page.parts if isinstance(part, Cell) and part.label]:
        label = str(cell.label)
        if label in seen:
            raise UserError(
                f"{page.where}:{cell.line}: label `{label}` was already used at line "
                f"{seen[label]}; give each cell its own."
            )
        seen[label] = cell.line
