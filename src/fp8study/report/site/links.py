"""Point links at rendered pages and bring the files that a page shows into the site."""

from __future__ import annotations

import re
import shutil
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from fp8study.core.errors import UserError
from fp8study.report.site.config import Site
from fp8study.report.site.pandoc import Node, Nodes, find, take_attribute

ELSEWHERE = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*:|//|#|$)")


def resolve_links(blocks: Nodes, site: Site, page: str, output_dir: Path) -> None:
    """Rewrite the links of a page in place, and copy what they need.

    Args:
        blocks: the page's pandoc blocks.
        site: the project.
        page: the page's path relative to the project.
        output_dir: where the site is being built.

    Raises:
        UserError: a local link or image leads nowhere, or out of the project.
    """
    for link in find(blocks, "Link"):
        link["c"][2][0] = _target(link["c"][2][0], site, page, output_dir)
    for image in find(blocks, "Image"):
        image["c"][2][0] = _target(image["c"][2][0], site, page, output_dir)
        _alternative_text(image)


def _alternative_text(image: Node) -> None:
    attr = image["c"][0]
    alt = take_attribute(attr, "fig-alt")
    if alt is not None:
        attr[2].append(["alt", alt])


def _target(target: str, site: Site, page: str, output_dir: Path) -> str:
    if ELSEWHERE.match(target):
        return target
    path_text, mark, fragment = target.partition("#")
    folder = (site.root / page).parent
    path = (folder / unquote(path_text)).resolve()
    where = site.where(page)
    if target.startswith("/") or not path.is_relative_to(site.root):
        raise UserError(
            f"{where}: link `{target}` leaves the project folder, so a site could not hold it; "
            "use a full URL or a path within the folder."
        )
    name = path.relative_to(site.root).as_posix()
    if name.endswith(".html"):
        source = name.removesuffix(".html") + ".qmd"
        name = source if source in site.pages else name
    if name.endswith(".qmd"):
        if name not in site.pages:
            raise UserError(f"{where}: link `{target}` is to no page of this site; correct it.")
        return str(PurePosixPath(path_text).with_suffix(".html")) + mark + fragment
    _bring(path, output_dir / name, f"{where}: link `{target}`")
    return target


def _bring(source: Path, target: Path, what: str) -> None:
    if target.is_file():  # a figure that a cell has just drawn
        return
    if not source.is_file():
        raise UserError(f"{what} is to no file; create {source} or correct the link.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
