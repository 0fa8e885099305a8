"""Turn cells with their outputs into Markdown, the way Quarto's Jupyter engine does."""

from __future__ import annotations

import ast
import base64
import re
from dataclasses import dataclass
from pathlib import Path

from fp8study.core.errors import UserError
from fp8study.report.site.config import Execute
from fp8study.report.site.execute import Output
from fp8study.report.site.qmd import Cell, Inline, Page, Prose

# The first of these that an output offers is shown, as in Quarto's HTML format.
PREFERENCE = (
    *("text/html", "text/markdown", "image/svg+xml", "image/png", "text/latex", "text/plain"),
)
IMAGES = {"image/svg+xml": "svg", "image/png": "png"}
# The values of plotting calls, which a notebook prints beside the figure.
PLOT_VALUES = ("<matplotlib", "[<matplotlib", "<seaborn", "<Axes", "array([<Axes", "Text(")


@dataclass(frozen=True)
class _Piece:
    """One output as Markdown."""

    kind: str
    """image, display or text"""
    markdown: str


class PageMarkdown:
    """Put a page together again, writing its figures under `output_dir`."""

    def __init__(self, page: Page, execute: Execute, output_dir: Path) -> None:
        self.page = page
        self.execute = execute
        self.page_dir = (output_dir / page.name).parent
        self.figures = f"{Path(page.name).stem}_files/figure-html"

    def build(self, outputs: list[list[Output]]) -> str:
        """Return the Markdown of the page.

        Args:
            outputs: for each part of the page its outputs.

        Raises:
            UserError: an output that cannot be shown, or not as its label says.
        """
        text = []
        for index, (part, outs) in enumerate(zip(self.page.parts, outputs, strict=True)):
            if isinstance(part, Prose):
                text.append(part.text)
            elif isinstance(part, Inline):
                text.append(self._inline(part, outs))
            elif part.include:
                text.append(self._cell(part, outs, part.label or f"cell-{index + 1}"))
        return "".join(text)

    def _inline(self, part: Inline, outputs: list[Output]) -> str:
        for output in outputs:
            data = output.get("data", {}) if output["output_type"] == "execute_result" else {}
            if "text/markdown" in data:
                return str(data["text/markdown"])
            if "text/plain" in data:
                return _plain_value(str(data["text/plain"]))
        raise UserError(
            f"{self.page.where}:{part.line}: inline code `{part.expression}` gives no text; "
            "use an expression that has a value."
        )

    def _cell(self, cell: Cell, outputs: list[Output], name: str) -> str:
        blocks = []
        if self.execute.echo if cell.echo is None else cell.echo:
            blocks.append(_fenced(cell.code, "{.python .cell-code}"))
        if cell.output is not False:
            pieces = self._pieces(cell, outputs, name)
            blocks += _floated(cell, pieces, f"{self.page.where}:{cell.line}")
        body = "\n\n".join(blocks)
        if not body or cell.output == "asis":
            return f"\n{body}\n\n"
        plain_label = cell.label and not cell.label.startswith(("fig-", "tbl-"))
        identifier = f"#{cell.label} " if plain_label else ""
        return f"\n::: {{{identifier}.cell}}\n\n{body}\n\n:::\n\n"

    def _pieces(self, cell: Cell, outputs: list[Output], name: str) -> list[_Piece]:
        warning = self.execute.warning if cell.warning is None else cell.warning
        has_image = any("image/png" in output.get("data", {}) for output in outputs)
        pieces: list[_Piece] = []
        for output in outputs:
            if output["output_type"] == "stream":
                if output["name"] == "stdout" or warning:
                    pieces.append(_stream(cell, output))
                continue
            data = output.get("data", {})
            only_text = set(data) == {"text/plain"}
            if has_image and only_text and data["text/plain"].startswith(PLOT_VALUES):
                continue
            images = sum(piece.kind == "image" for piece in pieces)
            pieces.append(self._display(cell, output, f"{name}-output-{images + 1}"))
        return pieces

    def _display(self, cell: Cell, output: Output, name: str) -> _Piece:
        data = output.get("data", {})
        mime = next((mime for mime in PREFERENCE if mime in data), None)
        if mime is None:
            raise UserError(
                f"{self.page.where}:{cell.line}: an output of type {', '.join(data)} cannot be "
                "shown; display text, Markdown, HTML, PNG or SVG."
            )
        value = data[mime]
        if mime in IMAGES:
            file = f"{self.figures}/{name}.{IMAGES[mime]}"
            path = self.page_dir / file
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = base64.b64decode(value) if mime == "image/png" else value.encode("utf-8")
            path.write_bytes(raw)
            size = output.get("metadata", {}).get(mime, {})
            return _Piece("image", _image(cell, file, size))
        if mime == "text/html":
            return _Piece("display", _fenced(value, "{=html}"))
        if mime == "text/plain":
            return _Piece("text", _verbatim(cell, value, "cell-output-display"))
        return _Piece("display", value)


def _plain_value(text: str) -> str:
    """Show a string without its quotes and literally, any other value as it prints."""
    if text[:1] not in ("'", '"'):
        return text
    try:
        value = str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text
    return re.sub(r"([\\`*_{}\[\]()<>#+\-.!$@|~^\"'])", r"\\\1", " ".join(value.split()))


def _stream(cell: Cell, output: Output) -> _Piece:
    if cell.output == "asis" and output["name"] == "stdout":
        return _Piece("display", output["text"])
    return _Piece("text", _verbatim(cell, output["text"], f"cell-output-{output['name']}"))


def _verbatim(cell: Cell, text: str, kind: str) -> str:
    if cell.output == "asis":
        return text
    # Colour codes mean nothing in HTML.
    clean = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).rstrip("\n")
    return f"::: {{.cell-output .{kind}}}\n\n{_fenced(clean, '')}\n\n:::"


def _fenced(text: str, info: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{info}\n{text.rstrip()}\n{fence}"


def _attribute(key: str, value: object) -> str:
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def _image(cell: Cell, file: str, size: dict[str, int]) -> str:
    attributes = [_attribute(key, size[key]) for key in ("width", "height") if key in size]
    numbered = (cell.label or "").startswith("fig-")
    if not numbered:
        attributes.append(_attribute("fig-alt", cell.fig_alt or cell.fig_cap or ""))
    caption = "" if numbered else (cell.fig_cap or "")
    return f"![{caption}]({file}){{{' '.join(attributes)}}}"


def _floated(cell: Cell, pieces: list[_Piece], where: str) -> list[str]:
    """Wrap the figure or table of a labelled cell in the div that Quarto numbers."""
    label = cell.label or ""
    if not label.startswith(("fig-", "tbl-")) or not cell.eval:
        return [piece.markdown for piece in pieces]
    kind, caption = ("image", cell.fig_cap) if label[:3] == "fig" else ("display", cell.tbl_cap)
    floats = [piece for piece in pieces if piece.kind == kind]
    if len(floats) != 1:
        thing = "image" if kind == "image" else "HTML or Markdown table"
        raise UserError(
            f"{where}: cell `{label}` must display exactly one {thing}, not {len(floats)}; "
            "split the cell or change its label."
        )
    alt = f" {_attribute('fig-alt', cell.fig_alt)}" if kind == "image" and cell.fig_alt else ""
    div = f"::: {{#{label}{alt}}}\n\n{floats[0].markdown}\n\n{caption}\n\n:::"
    return [div if piece is floats[0] else piece.markdown for piece in pieces]
