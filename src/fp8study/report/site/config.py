"""Read `_quarto.yml`, and refuse each option that we would not follow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8study.core.errors import UserError

PageName = Annotated[str, Field(pattern=r"^[\w-]+\.qmd$")]


class Options(BaseModel):
    """A YAML mapping in which each key must be known and of its type."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=lambda name: name.replace("_", "-"),
    )


class Project(Options):
    type: Literal["website"]
    output_dir: Literal["_site"] = "_site"
    execute_dir: Literal["project"]
    render: list[PageName] = Field(min_length=1)
    resources: list[str] = []
    """Files that only scripts and styles name; ours come with the links to them."""


class NavItem(Options):
    href: PageName
    text: str


class Navbar(Options):
    left: list[NavItem]


class Website(Options):
    title: str
    description: str = ""
    favicon: str | None = None
    navbar: Navbar


class Include(Options):
    """HTML that every page gets."""

    text: str


class Html(Options):
    toc: bool = True
    html_math_method: Literal["mathml"]
    theme: Any = None
    """Looks: for Quarto, our one style stands in for it."""
    css: str | None = None
    include_after_body: Include | None = None


class Format(Options):
    html: Html


class Execute(Options):
    """A page shows what its cells give now, and no code."""

    echo: Literal[False]
    freeze: Literal[False] = False


class Config(Options):
    """What `_quarto.yml` may say."""

    project: Project
    website: Website
    format: Format
    execute: Execute
    jupyter: Literal["python3"]
    date: Literal["today"] | None = None


@dataclass(frozen=True)
class Site:
    """A website project."""

    root: Path
    config: Config

    def where(self, file: str) -> str:
        """Name a file the way error messages do."""
        return f"{self.root.name}/{file}"


def load_site(root: Path) -> Site:
    """Read and check the project whose folder is `root`.

    Raises:
        UserError: the file is missing, or holds something wrong or unsupported.
    """
    path = root / "_quarto.yml"
    if not path.is_file():
        raise UserError(f"{path}: no such file; pass the folder of a Quarto website project.")
    where = f"{root.name}/_quarto.yml"
    config = checked(Config, load_yaml(path.read_text(encoding="utf-8"), where), where)
    pages = config.project.render
    for page in [*pages, *(item.href for item in config.website.navbar.left)]:
        if not (root / page).is_file() or page not in pages:
            raise UserError(f"{where}: page `{page}` does not exist, or is not in `render`.")
    if "index.qmd" not in pages:
        raise UserError(f"{where}: no `index.qmd` among the pages; a website needs one.")
    return Site(root, config)


def load_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping, empty where the text is; errors name its source as `where`.

    Raises:
        UserError: the text is not YAML, or not a mapping.
    """
    try:
        loaded = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: not valid YAML ({reason}); quote the value.") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{where}: expected `key: value` lines, got {loaded!r}.")
    return {str(key): value for key, value in loaded.items()}


_Model = TypeVar("_Model", bound=Options)


def checked(model: type[_Model], options: dict[str, Any], where: str) -> _Model:
    """Return `options` as a model, or raise a `UserError` for the first that is wrong."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        texts = {"extra_forbidden": "is not supported; remove it", "missing": "is missing; add it"}
        wrong = f"is {first['input']!r}: {first['msg']}"
        raise UserError(f"{where}: `{key}` {texts.get(first['type'], wrong)}.") from error
