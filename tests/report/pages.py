"""The names of the report's pages, and what of a page is read."""

import re
from pathlib import Path

import yaml

REPORT = Path(__file__).parents[2] / "report"
NAMES = [Path(name).stem for name in
         yaml.safe_load((REPORT / "_quarto.yml").read_text())["project"]["render"]]  # fmt: skip


def plain(markup: str) -> str:
    """The text of a page or of a part of it."""
    return " ".join(re.sub(r"<[^>]+>", " ", markup).split())
