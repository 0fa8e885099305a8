"""Run the cells of a page and put what they show in their places, as Markdown."""

from __future__ import annotations

import contextlib
import io
import re
import traceback
from dataclasses import dataclass
from typing import Any

from IPython.core.displayhook import CapturingDisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from fp8study.core.errors import UserError
from fp8study.report.site.qmd import CellOptions, Code, Page, Prose

# The first of these that an output offers is shown, as in Quarto's HTML format.
PREFERENCE = ("text/html", "text/markdown", "text/plain")
MARKUP = re.compile(r"([\\`*_{}\[\]()<>#+\-.!$@|~^\"'])")


def start_shell() -> InteractiveShell:
    """Start the IPython in which cells run; the variable IPYTHONDIR decides about its profile."""
    return InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))


@dataclass(frozen=True)
class _Shown:
    """One output as Markdown."""

    mime: str
    markdown: str


class PageRun:
    """One page in a shell that no other page has used."""

    def __init__(self, page: Page, shell: InteractiveShell) -> None:
        self.page = page
        self.shell = shell
        self.shell.display_pub = CapturingDisplayPublisher()
        self.outputs: list[dict[str, Any]] = self.shell.display_pub.outputs
        self.value: Any = None
        self.capture = CapturingDisplayHook(shell, self.outputs)
        self.shell.display_trap.hook = self._take_value

    def _take_value(self, value: Any) -> None:
        """Stand in for what prints a cell's value."""
        self.value = value
        self.capture(value)

    def markdown(self) -> str:
        """Run the page in the current folder and return its Markdown.

        Raises:
            UserError: a cell fails, or shows something else than its label says.
        """
        return "".join(map(self._part, self.page.parts))

    def _part(self, part: Prose | Code) -> str:
        if isinstance(part, Prose):
            return part.text
        if part.options is None:
            return self._inline(part)
        return f"\n{_floated(part.options, self._shown(part), self._at(part.line))}\n\n"

    def _run(self, code: Code) -> str:
        """Return what a cell printed; leave its value and what it displayed."""
        self.outputs.clear()
        self.value = None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            result = self.shell.run_cell(code.source)
        error = result.error_before_exec or result.error_in_exec
        if error is None:
            return printed.getvalue()
        what = f"inline code `{code.source}`"
        if code.options is not None:
            label = code.options.label
            what = f"{f'cell `{label}`' if label else 'the cell'} (code from line {code.line})"
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        at = self._at(code.line + _failing_line(error) - 1)
        raise UserError(f"{at}: {what} failed with {reason}; mend it.") from error

    def _inline(self, code: Code) -> str:
        """Show a text literally, Markdown as such, and any other value as it prints."""
        self._run(code)
        value = self.value
        if value is None:
            raise UserError(
                f"{self._at(code.line)}: inline code `{code.source}` gives no text; "
                "use an expression that has a value."
            )
        if isinstance(value, str):
            return MARKUP.sub(r"\\\1", " ".join(value.split()))
        data = self.outputs[-1]["data"]
        return str(data.get("text/markdown", data["text/plain"]))

    def _shown(self, code: Code) -> list[_Shown]:
        printed = self._run(code)
        shown = [_Shown("text/plain", _fenced(printed, ""))] if printed.strip() else []
        for data in (output["data"] for output in self.outputs):
            mime = next((mime for mime in PREFERENCE if mime in data), "")
            if not mime or "<Figure" in data.get("text/plain", ""):
                raise UserError(
                    f"{self._at(code.line)}: an output of type {', '.join(data)} cannot be shown; "
                    "display text, Markdown or HTML, and a figure as an <img> with its data."
                )
            is_markdown, info = mime == "text/markdown", "{=html}" * (mime == "text/html")
            shown.append(_Shown(mime, data[mime] if is_markdown else _fenced(data[mime], info)))
        return shown

    def _at(self, line: int) -> str:
        return f"{self.page.where}:{line}"


def _failing_line(error: BaseException) -> int:
    """Return the line of the cell, from 1, on which its exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.startswith("<ipython-input")]
    own = error.lineno if isinstance(error, SyntaxError) else None
    return next(iter(lines), own) or 1


def _fenced(text: str, info: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{info}\n{text.rstrip()}\n{fence}"


def _floated(options: CellOptions, shown: list[_Shown], at: str) -> str:
    """Wrap the table of a labelled cell in the div that Quarto numbers."""
    label = options.label
    if label is None:
        return "\n\n".join(one.markdown for one in shown)
    wanted = ["text/html", "text/markdown"]
    if len(shown) != 1 or shown[0].mime not in wanted:
        raise UserError(
            f"{at}: cell `{label}` must show exactly one output, of type {' or '.join(wanted)}, "
            f"not {[one.mime for one in shown]}; split the cell or change its label."
        )
    return f"::: {{#{label}}}\n\n{shown[0].markdown}\n\n{options.tbl_cap}\n\n:::"
