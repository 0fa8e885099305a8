"""Run the cells and inline expressions of a page in one fresh kernel."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

from fp8study.core.errors import UserError
from fp8study.report.site.config import Html
from fp8study.report.site.qmd import Cell, Inline, Page, Prose

Output = dict[str, Any]

# What Quarto's own setup cell does, so that figures come out the same size in both.
SETUP = """
def _set_up_figures():
    try:
        import matplotlib.pyplot as plt
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:
        return
    plt.rcParams["figure.figsize"] = ({width}, {height})
    plt.rcParams["figure.dpi"] = {dpi}
    plt.rcParams["savefig.dpi"] = "figure"
    set_matplotlib_formats("retina")

_set_up_figures()
del _set_up_figures
"""


class _ThisPython(KernelSpecManager):
    """Start a given interpreter, whatever kernels are installed on the machine."""

    def __init__(self, python: str, ipython_dir: str) -> None:
        super().__init__()
        self._spec = KernelSpec(
            argv=[
                *(python, "-m", "ipykernel_launcher", "-f", "{connection_file}"),
                *("--HistoryManager.enabled=False", "--log-level=ERROR"),
            ],
            display_name="Python 3",
            language="python",
            env={
                # A fixed order of sets, the inline backend whatever the caller's shell says,
                # and no personal IPython profile: the same page gives the same bytes.
                "PYTHONHASHSEED": "0",
                "MPLBACKEND": "module://matplotlib_inline.backend_inline",
                "IPYTHONDIR": ipython_dir,
            },
        )

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return self._spec


def run_page(page: Page, cwd: Path, html: Html, python: str | None = None) -> list[list[Output]]:
    """Execute a page.

    Args:
        page: the parsed page.
        cwd: the folder in which its cells run.
        html: for the default size of figures.
        python: the interpreter of the kernel; None means this one.

    Returns:
        For each part of the page its Jupyter outputs; none for prose and for cells that
        are not to be evaluated.

    Raises:
        UserError: a cell or an inline expression failed, or the kernel did.
    """
    cells = [
        nbformat.v4.new_code_cell(
            SETUP.format(width=html.fig_width, height=html.fig_height, dpi=html.fig_dpi)
        )
    ]
    cells += [_to_jupyter(part) for part in page.parts]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory(prefix="fp8study-ipython-") as ipython_dir:
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=_ThisPython(python or sys.executable, ipython_dir),
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=None,
            resources={"metadata": {"path": str(cwd)}},
            # Streams arrive in chunks of any size; joined, they are the same each time.
            coalesce_streams=True,
        )
        try:
            _run_cells(client, page)
        except (DeadKernelError, RuntimeError, OSError) as error:
            raise UserError(
                f"{page.where}: the Python kernel stopped ({_one_line(str(error))}); check "
                f"that `{python or sys.executable} -m ipykernel_launcher --version` works."
            ) from error
    return [list(cell.get("outputs", [])) for cell in notebook.cells[1:]]


def _to_jupyter(part: Prose | Inline | Cell) -> NotebookNode:
    if isinstance(part, Cell) and part.eval:
        return nbformat.v4.new_code_cell(part.code)
    if isinstance(part, Inline):
        return nbformat.v4.new_code_cell(part.expression)
    return nbformat.v4.new_markdown_cell("")


def _run_cells(client: NotebookClient, page: Page) -> None:
    with client.setup_kernel():
        for index, cell in enumerate(client.nb.cells):
            if cell.cell_type != "code":
                continue
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                if index == 0:
                    raise UserError(f"{page.where}: set-up failed: {error.evalue}") from error
                raise _failure(page, page.parts[index - 1], cell, error) from error


def _failure(
    page: Page, part: Prose | Inline | Cell, cell: NotebookNode, error: CellExecutionError
) -> UserError:
    reason = f"{error.ename}: {_one_line(error.evalue)}"
    if isinstance(part, Inline):
        what = f"inline code `{part.expression}`"
        return UserError(f"{page.where}:{part.line}: {what} failed with {reason}; mend it.")
    assert isinstance(part, Cell)
    line = part.line + _failing_line(cell) - 1
    what = f"cell `{part.label}`" if part.label else "the cell"
    return UserError(
        f"{page.where}:{line}: {what} (code from line {part.line}) failed with {reason}; mend it."
    )


def _failing_line(cell: NotebookNode) -> int:
    """Return the line of the cell, from 1, on which its exception was raised."""
    for output in cell.get("outputs", []):
        traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.get("traceback", [])))
        if match := re.search(r"Cell In\s*\[\d+\], line (\d+)", traceback):
            return int(match.group(1))
    return 1


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    return lines[0] if lines else ""
