"""Check the links of a finished site, and bring the files that its pages point at."""

from __future__ import annotations

import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fp8study.core.errors import UserError
from fp8study.report.site.config import Site


class _Anchors(HTMLParser):
    """Where a page can be entered, and where it leads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.targets: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids[value] += 1
            if name in ("href", "src") and value:
                self.targets.append(value)


def check_links(site: Site, build: Path) -> None:
    """Follow every local link of a site built in `build`; copy there what is linked to.

    Raises:
        UserError: a link leads nowhere or out of the project, or a label is used twice.
    """
    pages = {file: _Anchors(file) for file in sorted(build.glob("*.html"))}
    for file, page in pages.items():
        where = site.where(f"{file.stem}.qmd")
        for label in (label for label, count in page.ids.items() if count > 1):
            raise UserError(f"{where}: label `{label}` is used twice; give each its own.")
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            linked = build / Path(unquote(parts.path)) if parts.path else file
            if not linked.resolve().is_relative_to(build.resolve()):
                raise UserError(f"{where}: link `{target}` leaves the project; use a full URL.")
            _bring(site.root / linked.relative_to(build), linked, f"{where}: link `{target}`")
            if parts.fragment and linked in pages and parts.fragment not in pages[linked].ids:
                raise UserError(f"{where}: link `{target}` is to no label of that page; mend it.")


def _bring(source: Path, target: Path, what: str) -> None:
    if target.is_file():
        return
    if not source.is_file() or source.suffix == ".qmd":
        raise UserError(f"{what} leads nowhere; create {source.name} or correct the link.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
