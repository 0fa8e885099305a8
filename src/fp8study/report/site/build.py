"""Build a whole site beside the old one, then put it in its place."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from fp8study.core.errors import UserError
from fp8study.report.site.blocks import rewrite_blocks
from fp8study.report.site.checks import flag
from fp8study.report.site.config import Html, Site, load_site, read_execute
from fp8study.report.site.crossref import CrossReferences
from fp8study.report.site.execute import Output, run_page
from fp8study.report.site.links import ELSEWHERE, resolve_links
from fp8study.report.site.outputs import PageMarkdown
from fp8study.report.site.pandoc import Node, plain_text, read, read_inlines, run
from fp8study.report.site.qmd import Cell, Inline, Page, read_page

HERE = Path(__file__).parent
SHOWN_KEYS = ("title", "subtitle", "description", "author", "date", "lang")


def render_site(
    project_dir: Path, output_dir: Path | None = None, python: str | None = None
) -> Path:
    """Render every page of a Quarto website project.

    The site is built in a folder beside `output_dir` and moved into its place at the end, so
    a render that fails leaves the site of the last one untouched.

    Args:
        project_dir: the folder that holds `_quarto.yml`.
        output_dir: where the site goes; None means the project's own `output-dir`.
        python: the interpreter that runs the cells; None means this one.

    Returns:
        The path of `index.html`.

    Raises:
        UserError: something in the project is wrong, unsupported or fails.
    """
    site = load_site(project_dir.resolve())
    target = (output_dir or site.output_dir).resolve()
    _check_target(site, target)
    # Reading every page first finds a slip in the last page before the first one is run.
    pages = [read_page(site, name) for name in site.pages]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        build = Path(scratch) / "new"
        build.mkdir()
        shutil.copyfile(HERE / "style.css", build / "style.css")
        titles = {page.name: _plain_title(page) for page in pages}
        for page in pages:
            _PageRenderer(site, page, titles, build, python).render()
        _swap(build, target, Path(scratch) / "old")
    return target / "index.html"


def _check_target(site: Site, target: Path) -> None:
    if site.root.is_relative_to(target):
        raise UserError(f"output folder {target} holds the project itself; choose another.")
    if target.is_file():
        raise UserError(f"output folder {target} is a file; choose another.")
    if target.is_dir() and any(target.iterdir()) and not (target / "index.html").is_file():
        raise UserError(f"output folder {target} is no rendered site; empty it or choose another.")


def _swap(new: Path, target: Path, old: Path) -> None:
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise


@dataclass
class _PageRenderer:
    """Carry one page from its source to its HTML."""

    site: Site
    page: Page
    titles: dict[str, str]
    build: Path
    python: str | None

    def __post_init__(self) -> None:
        where, front = self.page.where, self.page.front
        self.execute = read_execute(front, self.site.execute, where)
        self.html: Html = replace(
            self.site.html,
            toc=flag(front, "toc", where, self.site.html.toc),
            number_sections=flag(front, "number-sections", where, self.site.html.number_sections),
        )
        self.target = self.build / Path(self.page.name).with_suffix(".html")

    def render(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        markdown = PageMarkdown(self.page, self.execute, self.build).build(self._outputs())
        # JSON is YAML, and unlike YAML's own writer never breaks a long line.
        header = json.dumps({k: self._shown(k) for k in SHOWN_KEYS if k in self.page.front})
        document = read(f"---\n{header}\n---\n\n{markdown}")
        blocks = rewrite_blocks(document["blocks"], self.page.where)
        references = CrossReferences(self.page.where, self.page.source, self.html.number_sections)
        blocks = references.resolve(references.number(blocks))
        resolve_links(blocks, self.site, self.page.name, self.build)
        document["blocks"] = blocks
        document["meta"] |= _meta(self._variables(document["meta"]))
        self.target.write_text(self._write(document), encoding="utf-8")

    def _outputs(self) -> list[list[Output]]:
        parts = self.page.parts
        if not self.execute.enabled:
            if inline := next((part for part in parts if isinstance(part, Inline)), None):
                raise UserError(
                    f"{self.page.where}:{inline.line}: inline code needs `execute.enabled: true`."
                )
            return [[] for _ in parts]
        if not any(isinstance(part, Cell | Inline) for part in parts):
            return [[] for _ in parts]
        folder = (self.site.root / self.page.name).parent
        cwd = self.site.root if self.site.execute_in_project else folder
        return run_page(self.page, cwd, self.html, self.python)

    def _shown(self, key: str) -> Any:
        value = self.page.front[key]
        if isinstance(value, date):
            return value.isoformat()
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str | int | float) for name in names):
            raise UserError(f"{self.page.where}: `{key}` must be a text, not {value!r}.")
        if key == "date" and value in ("today", "now", "last-modified"):
            raise UserError(
                f"{self.page.where}: `date: {value}` would change the page with each render; "
                "write the date."
            )
        return value

    def _variables(self, meta: dict[str, Node]) -> dict[str, Any]:
        title = plain_text(meta.get("title"))
        own = title and title != self.site.title
        return {
            "description-meta": plain_text(meta.get("description")),
            "pagetitle": f"{title} – {self.site.title}" if own else self.site.title,
            "site-title": self.site.title,
            "home": self._relative("index.html"),
            "style": self._relative("style.css"),
            "nav": [self._nav_entry(item.href, item.text) for item in self.site.nav],
        }

    def _nav_entry(self, href: str, text: str | None) -> dict[str, Any]:
        text = text or self.titles.get(href) or href
        if ELSEWHERE.match(href):
            return {"href": href, "text": text}
        if href not in self.site.pages:
            where = self.site.where("_quarto.yml")
            raise UserError(f"{where}: navigation entry `{href}` is no page of the site.")
        link = self._relative(str(Path(href).with_suffix(".html")))
        return {"href": link, "text": text, "current": href == self.page.name}

    def _relative(self, path: str) -> str:
        return Path(os.path.relpath(self.build / path, self.target.parent)).as_posix()

    def _write(self, document: Node) -> str:
        arguments = [f"--template={HERE / 'template.html'}", "--mathml", "--wrap=preserve"]
        if self.html.toc:
            arguments += ["--toc", f"--toc-depth={self.html.toc_depth}"]
        if self.html.embed_resources:
            arguments += ["--embed-resources", f"--resource-path={self.target.parent}"]
        return run(json.dumps(document), "json", "html5", arguments)


def _plain_title(page: Page) -> str:
    title = str(page.front.get("title") or "").strip()
    return plain_text(read_inlines(title)) if title else ""


def _meta(values: dict[str, Any]) -> dict[str, Node]:
    """Turn plain values into pandoc metadata, as literal text."""
    return {key: _wrap(value) for key, value in values.items()}


def _wrap(value: Any) -> Node:
    if isinstance(value, bool):
        return {"t": "MetaBool", "c": value}
    if isinstance(value, list):
        return {"t": "MetaList", "c": [_wrap(item) for item in value]}
    if isinstance(value, dict):
        return {"t": "MetaMap", "c": _meta(value)}
    return {"t": "MetaString", "c": str(value)}
