"""Figures and tables as a page carries them: a picture that scales, and its data to download."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from urllib.parse import quote

import matplotlib as mpl
import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from fp8study.report.table import raw

#: Need no escape inside a quoted link.
_SAFE = " ,;:/()+=*"
#: As wide as every figure is: on a screen of 390 pixels, a point of its text is then a pixel.
WIDTH_INCHES = 4.9
#: Drawn wider than this its text would shout.
_MOST_REM = 36
#: The room for a figure on a printed page.
_MOST_INCHES = 8.5


def svg(figure: Figure) -> bytes:
    """Write a figure as SVG, the same bytes each time, to a hundredth of a point."""
    out = io.StringIO()
    # A line may be straightened by half a point: a curve of thousands of steps has no more to show.
    with mpl.rc_context({"svg.hashsalt": "fp8study", "path.simplify_threshold": 0.5}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _smaller(out.getvalue()).encode()


def _smaller(text: str) -> str:
    """Leave out of an SVG what nobody sees: comments, ids without a link, ever finer decimals."""
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"-?\d+\.\d{3,}", _rounded, text)
    linked = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda id_: id_[0] if id_[1] in linked else "", text)
    # Glyphs are named for their letter; clips for where they lie, to the last digit of a float.
    names = {name: f"g{n}" for n, name in enumerate(re.findall(r' id="([^"]+)"', text))}
    text = re.sub(r'( id="|#)([\w-]+)', lambda id_: id_[1] + names.get(id_[2], id_[2]), text)
    place = r'(<use xlink:href="#g\d+") transform="translate\(([-\d.]+) ([-\d.]+)\)"'
    text = re.sub(place, _placed, text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return re.sub(r"<g>\n</g>\n|<g/>\n", "", text)


def _placed(use: re.Match[str]) -> str:
    # In units of the font, of which a letter is about a hundred wide.
    return f'{use[1]} x="{float(use[2]):.0f}" y="{float(use[3]):.0f}"'


def _rounded(found: re.Match[str]) -> str:
    value = float(found[0])
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def shown(figure: Figure, alt: str) -> Markdown:
    """Show a figure with a text that stands in for it, on a page and in a PDF made by typst.

    On a page it scales with the screen. The label of a figure that says why there is none stands
    in for it.
    """
    picture = " ".join(svg(figure).decode().split()).replace('"', "'")
    said = " ".join(re.sub(r"\*\*|\\\n", " ", str(figure.get_label() or alt)).split())
    data, text = quote(picture, safe=_SAFE + "'"), html.escape(said)
    style = f"width: 100%; max-width: {_MOST_REM}rem;"
    wide, high = figure.get_size_inches()
    inches = wide * min(1, _MOST_INCHES / high)
    quoted, told = (json.dumps(part, ensure_ascii=False) for part in (picture, said))
    return raw(
        html=f'<img src="data:image/svg+xml,{data}" alt="{text}" style="{style}">',
        typst=f'#image(bytes({quoted}), format: "svg", width: {inches:.2f}in, alt: {told})',
    )


def download(table: pd.DataFrame, name: str, words: str = "CSV") -> str:
    """Return a link, as Markdown, that saves a table as the file `name`.csv."""
    keys = [column for column in table.columns if str(column).endswith("_key")]
    keys += ["run_id"] if {"run_id", "run_ids"} <= set(table) else []  # the longer names hold it
    text = table.drop(columns=keys).to_csv(index=False, float_format="%.6g")
    return f'<a download="{name}.csv" href="data:text/csv,{quote(text, safe=_SAFE)}">{words}</a>'


def save(figure: Figure, path: Path) -> None:
    """Write a figure to an SVG file, for pages outside the report."""
    path.write_bytes(svg(figure))
