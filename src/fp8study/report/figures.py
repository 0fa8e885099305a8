"""Figures and tables as a page carries them: a picture that scales, and its data to download."""

from __future__ import annotations

import html
import io
from pathlib import Path
from urllib.parse import quote

import matplotlib as mpl
import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from fp8study.report.table import raw_html

#: Need no escape inside a quoted link.
_SAFE = " ,;:/()+=*"
#: A figure this wide is legible on a screen of 390 pixels.
PHONE_INCHES = 5.2
#: Wider than this a picture made for a phone would shout.
_MOST_REM = 38


def svg(figure: Figure) -> bytes:
    """Write a figure as SVG, the same bytes each time."""
    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "fp8study"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def shown(figure: Figure, alt: str) -> Markdown:
    """Show a figure with a text that stands in for it.

    One made for a phone scales with the page; a wider one scrolls where the screen is narrow. The
    label of a figure that says why there is none stands in for it.
    """
    picture = " ".join(svg(figure).decode().split()).replace('"', "'")
    data = quote(picture, safe=_SAFE + "'")
    scales = figure.get_figwidth() <= PHONE_INCHES
    style = f' style="width: 100%; max-width: {_MOST_REM}rem;"' if scales else ""
    text = html.escape(" ".join(str(figure.get_label() or alt).replace("**", "").split()))
    return raw_html(f'<img src="data:image/svg+xml,{data}" alt="{text}"{style}>')


def download(table: pd.DataFrame, name: str, words: str = "CSV") -> str:
    """Return a link, as Markdown, that saves a table as the file `name`.csv."""
    keys = [column for column in table.columns if str(column).endswith("_key")]
    text = table.drop(columns=keys).to_csv(index=False, float_format="%.6g")
    return f'<a download="{name}.csv" href="data:text/csv,{quote(text, safe=_SAFE)}">{words}</a>'


def save(figure: Figure, path: Path) -> None:
    """Write a figure to an SVG file, for pages outside the report."""
    path.write_bytes(svg(figure))
