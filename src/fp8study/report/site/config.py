"""Read `_quarto.yml` into checked dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fp8study.core.errors import UserError
from fp8study.report.site.checks import (
    flag,
    known_keys,
    load_yaml,
    number,
    only_false,
    section,
    text_or_none,
)

# Options that change looks or interactivity only: our one style stands in for all of them.
LOOKS_ONLY = {
    "anchor-sections",
    "code-copy",
    "code-fold",
    "code-summary",
    "code-tools",
    "css",
    "fig-align",
    "fig-responsive",
    "grid",
    "html-math-method",
    "link-external-newwindow",
    "page-layout",
    "smooth-scroll",
    "theme",
    "toc-location",
    "toc-title",
}


@dataclass(frozen=True)
class Execute:
    """Whether cells run, and which parts of them show."""

    echo: bool = True
    warning: bool = True
    enabled: bool = True


@dataclass(frozen=True)
class Html:
    """The `format.html` options that change the content of a page."""

    toc: bool = True
    toc_depth: int = 3
    number_sections: bool = False
    embed_resources: bool = False
    fig_width: float = 7.0
    """inches, as are Quarto's"""
    fig_height: float = 5.0
    fig_dpi: float = 96.0


@dataclass(frozen=True)
class NavItem:
    """One entry of the navigation bar."""

    href: str
    text: str | None
    """None: the title of the page"""


@dataclass(frozen=True)
class Site:
    """A whole website project."""

    root: Path
    output_dir: Path
    execute_in_project: bool
    pages: tuple[str, ...]
    """paths of the .qmd files relative to `root`, with forward slashes"""
    title: str
    nav: tuple[NavItem, ...]
    html: Html
    execute: Execute

    def where(self, page: str) -> str:
        """Name a file the way error messages do."""
        return f"{self.root.name}/{page}"


def load_site(root: Path) -> Site:
    """Read and check a project.

    Args:
        root: the folder that holds `_quarto.yml`.

    Returns:
        The site.

    Raises:
        UserError: the file is missing, or holds something wrong or unsupported.
    """
    path = root / "_quarto.yml"
    where = f"{root.name}/_quarto.yml"
    if not path.is_file():
        raise UserError(f"{path}: no such file; pass the folder of a Quarto website project.")
    top = load_yaml(path.read_text(encoding="utf-8"), where)
    known_keys(top, {"project", "website", "format", "execute", "jupyter", "lang"}, where)
    check_kernel(top, where)
    project = section(top, "project", where)
    known_keys(project, {"type", "output-dir", "execute-dir", "render"}, where)
    if project.get("type") != "website":
        raise UserError(f"{where}: `project.type` is {project.get('type')!r}; set it to website.")
    if project.get("execute-dir", "file") not in ("project", "file"):
        raise UserError(f"{where}: `project.execute-dir` must be project or file.")
    output_dir = root / (text_or_none(project, "output-dir", where) or "_site")
    website = section(top, "website", where)
    known = {"title", "description", "navbar", "sidebar", "search", "page-navigation"}
    known_keys(website, known, where)
    nav = _nav(website, where)
    pages = _pages(project.get("render"), nav, root, output_dir, where)
    return Site(
        root=root,
        output_dir=output_dir,
        execute_in_project=project.get("execute-dir") == "project",
        pages=pages,
        title=text_or_none(website, "title", where) or root.name,
        nav=nav,
        html=_html(top, where),
        execute=read_execute(top, Execute(), where),
    )


def check_kernel(options: Mapping[str, Any], where: str) -> None:
    """Raise a `UserError` where `jupyter` asks for a kernel other than python3."""
    if options.get("jupyter", "python3") != "python3":
        raise UserError(f"{where}: `jupyter: {options['jupyter']}` must be `jupyter: python3`.")


def read_execute(options: Mapping[str, Any], base: Execute, where: str) -> Execute:
    """Return `base` with the changes made under the key `execute`."""
    execute = section(options, "execute", where)
    known_keys(execute, {"echo", "warning", "enabled", "freeze", "cache", "error"}, where)
    only_false(execute, ("freeze", "cache", "error"), where)
    return replace(
        base,
        echo=flag(execute, "echo", where, base.echo),
        warning=flag(execute, "warning", where, base.warning),
        enabled=flag(execute, "enabled", where, base.enabled),
    )


def _html(top: Mapping[str, Any], where: str) -> Html:
    formats = section(top, "format", where) if top.get("format") != "html" else {}
    known_keys(formats, {"html"}, where)
    html = section(formats, "html", where)
    known = {"toc", "toc-depth", "number-sections", "embed-resources"}
    known |= {"fig-width", "fig-height", "fig-dpi"}
    known_keys(html, known | LOOKS_ONLY, where)
    base = Html()
    return Html(
        toc=flag(html, "toc", where, base.toc),
        toc_depth=int(number(html, "toc-depth", where, base.toc_depth)),
        number_sections=flag(html, "number-sections", where, base.number_sections),
        embed_resources=flag(html, "embed-resources", where, base.embed_resources),
        fig_width=number(html, "fig-width", where, base.fig_width),
        fig_height=number(html, "fig-height", where, base.fig_height),
        fig_dpi=number(html, "fig-dpi", where, base.fig_dpi),
    )


def _nav(website: Mapping[str, Any], where: str) -> tuple[NavItem, ...]:
    navbar = section(website, "navbar", where)
    known_keys(navbar, {"left", "title", "search", "background", "foreground"}, where)
    sidebar = section(website, "sidebar", where)
    known_keys(sidebar, {"contents", "title", "style", "search", "collapse-level"}, where)
    items: dict[str, NavItem] = {}
    for entry in [*(navbar.get("left") or []), *(sidebar.get("contents") or [])]:
        item = _nav_item(entry, where)
        items.setdefault(item.href, item)
    return tuple(items.values())


def _nav_item(entry: Any, where: str) -> NavItem:
    if isinstance(entry, str):
        return NavItem(entry, None)
    if not isinstance(entry, dict):
        raise UserError(f"{where}: navigation entry {entry!r} must be a file or a mapping.")
    known_keys(entry, {"href", "file", "text"}, where)
    href = entry.get("href") or entry.get("file")
    if not isinstance(href, str):
        raise UserError(f"{where}: navigation entry {entry!r} needs `href`.")
    return NavItem(href, text_or_none(entry, "text", where))


def _pages(
    render: Any, nav: tuple[NavItem, ...], root: Path, output_dir: Path, where: str
) -> tuple[str, ...]:
    nav_pages = [str(PurePosixPath(n.href)) for n in nav if n.href.endswith(".qmd")]
    if render is None:
        pages = [page for page in nav_pages if "://" not in page]
        pages += [page for page in _all_pages(root, output_dir) if page not in pages]
    elif isinstance(render, list) and all(isinstance(page, str) for page in render):
        pages = [str(PurePosixPath(page)) for page in render]
    else:
        raise UserError(f"{where}: `project.render` must be a list of files, not {render!r}.")
    for page in [*pages, *nav_pages]:
        if any(mark in page for mark in "*!") or not page.endswith(".qmd"):
            raise UserError(f"{where}: `{page}` is not a .qmd file; list the pages one by one.")
        if not (root / page).is_file():
            raise UserError(f"{where}: page `{page}` does not exist; create or unlist it.")
        if page not in pages:
            raise UserError(f"{where}: `{page}` is in the navigation but not in `project.render`.")
    if "index.qmd" not in pages:
        raise UserError(f"{where}: no `index.qmd` among the pages; a website needs one.")
    return tuple(dict.fromkeys(pages))


def _all_pages(root: Path, output_dir: Path) -> list[str]:
    found = [path for path in sorted(root.rglob("*.qmd")) if output_dir not in path.parents]
    names = [path.relative_to(root) for path in found]
    # Quarto, too, leaves out what starts with `_` or `.`.
    return [n.as_posix() for n in names if not any(part[0] in "_." for part in n.parts)]
