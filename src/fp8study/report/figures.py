"""Figures and tables as a page carries them: a picture that scales, and its data to download."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from fp8study.report.table import raw_html

#: Wider than this a picture made for a phone would shout.
_MOST_REM = 38


def svg(figure: Figure) -> bytes:
    """Write a figure as SVG, the same bytes each time."""
    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "fp8study"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def shown(figure: Figure, alt: str) -> Markdown:
    """Show a figure with a text that stands in for it; it scales with the page."""
    data = base64.b64encode(svg(figure)).decode()
    style = f"width: 100%; max-width: {_MOST_REM}rem;"
    return raw_html(
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(alt)}" style="{style}">'
    )


def download(table: pd.DataFrame, name: str, words: str = "Data as CSV") -> str:
    """Return a link, as Markdown, that saves a table as the file `name`.csv."""
    keys = [column for column in table.columns if str(column).endswith("_key")]
    text = table.drop(columns=keys).to_csv(index=False, float_format="%.6g")
    data = base64.b64encode(text.encode()).decode()
    return f'<a download="{name}.csv" href="data:text/csv;base64,{data}">{words}</a>'


def save(figure: Figure, path: Path) -> None:
    """Write a figure to an SVG file, for pages outside the report."""
    path.write_bytes(svg(figure))
