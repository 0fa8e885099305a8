"""Run the cells of a page and put what they show in their places, as Markdown."""

from __future__ import annotations

import contextlib
import io
import re
import traceback
from typing import Any

from IPython.core.displayhook import CapturingDisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from fp8study.core.errors import UserError
from fp8study.report.site.qmd import CellOptions, Code, Page, Prose

MARKUP = re.compile(r"([\\`*_{}\[\]()<>#+\-.!$@|~^\"'])")


def start_shell() -> InteractiveShell:
    """Start the IPython in which cells run; the variable IPYTHONDIR decides about its profile."""
    return InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))


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

    def _run(self, code: Code) -> None:
        """Leave a cell's value and what it displayed; its warnings go to the terminal."""
        self.outputs.clear()
        self.value = None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            result = self.shell.run_cell(code.source)
        error = result.error_before_exec or result.error_in_exec
        if error is None and printed.getvalue():
            raise UserError(f"{self._at(code.line)}: the code prints; show it as Markdown(…).")
        if error is None:
            return
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

    def _shown(self, code: Code) -> list[str]:
        self._run(code)
        for data in (output["data"] for output in self.outputs):
            if "text/markdown" not in data:
                raise UserError(
                    f"{self._at(code.line)}: an output of type {', '.join(data)} cannot be shown; "
                    "display Markdown, with tables and figures as `table.show` and `figures.shown`."
                )
        return [output["data"]["text/markdown"] for output in self.outputs]

    def _at(self, line: int) -> str:
        return f"{self.page.where}:{line}"


def _failing_line(error: BaseException) -> int:
    """Return the line of the cell, from 1, on which its exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.startswith("<ipython-input")]
    own = error.lineno if isinstance(error, SyntaxError) else None
    return next(iter(lines), own) or 1


def _floated(options: CellOptions, shown: list[str], at: str) -> str:
    """Wrap the table of a labelled cell in the div that Quarto numbers."""
    label = options.label
    if label is None:
        return "\n\n".join(shown)
    if len(shown) != 1:
        raise UserError(
            f"{at}: cell `{label}` must show exactly one output, not {len(shown)}; split the cell "
            "or change its label."
        )
    return f"::: {{#{label}}}\n\n{shown[0]}\n\n{options.tbl_cap}\n\n:::"
