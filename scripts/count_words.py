"""Count the words of a rendered report, page by page: `python scripts/count_words.py`.

A word is whatever stands between spaces in a page's text and tables, numbers included. The page of
runs holds data and is left out of the sum.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "report" / "_site"


def count_words(page: str) -> tuple[int, int]:
    """Return the words of a page's text and those of its tables."""
    main = page.partition("<main")[2].partition(">")[2].partition("</main>")[0]
    tables = " ".join(re.findall(r"<table.*?</table>", main, flags=re.S))
    text = re.sub(r"<(table|svg|script)\b.*?</\1>", " ", main, flags=re.S)
    prose, cells = (len(html.unescape(re.sub(r"<[^>]+>", " ", t)).split()) for t in (text, tables))
    return prose, cells


def main() -> None:
    """Print a line for each page, and the sum."""
    counts = {
        file.stem: count_words(file.read_text(encoding="utf-8"))
        for file in sorted(SITE.glob("*.html"))
        if file.stem != "runs"
    }
    for name, (text, tables) in counts.items():
        print(f"{name:18}{text:6} in text {tables:6} in tables")
    print(f"{'all':18}{sum(map(sum, counts.values())):6}")


if __name__ == "__main__":
    main()
