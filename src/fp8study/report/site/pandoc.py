"""Turn a page's Markdown into its HTML: one call of pandoc, with our filter and template."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pypandoc

from fp8study.core.errors import UserError
from fp8study.report.site.config import Config
from fp8study.report.site.qmd import Page, line_of

HERE = Path(__file__).parent


def write_html(page: Page, markdown: str, config: Config, scratch: Path) -> str:
    """Return the HTML of a page from its Markdown, with what its cells show in it.

    The file of pandoc's options goes to the folder `scratch`.

    Raises:
        UserError: the filter refuses something on the page, or pandoc is missing.
    """
    # JSON is YAML, and unlike YAML's own writer never breaks a long line.
    front = json.dumps(page.front.model_dump(exclude_defaults=True))
    options = scratch / f"{page.name}.yaml"
    options.write_text(json.dumps(_options(page.name, config)), encoding="utf-8")
    try:
        done = subprocess.run(
            [pypandoc.get_pandoc_path(), f"--defaults={options}"],
            input=f"---\n{front}\n---\n\n{markdown}",
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    except OSError as error:
        raise UserError(f"pandoc is not there ({error}); pip install pypandoc_binary.") from error
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise UserError(f"{_place(page, reason)}: {reason}")
    return done.stdout


def _options(name: str, config: Config) -> dict[str, Any]:
    """What pandoc calls a defaults file; text in its metadata is literal."""
    website, html = config.website, config.format.html
    include = html.include_after_body
    nav = [
        {"href": Path(item.href).with_suffix(".html").name, "text": item.text}
        | ({"current": True} if item.href == name else {})
        for item in website.navbar.left
    ]
    metadata = {
        "site-title": website.title,
        "site-description": website.description,
        "nav": nav,
        **({"favicon": website.favicon} if website.favicon else {}),
        **({"date": _today()} if config.date else {}),
    }
    return {
        "from": "markdown",
        "to": "html5",
        "standalone": True,
        "template": str(HERE / "template.html"),
        "filters": [str(HERE / "filter.lua")],
        "html-math-method": {"method": "mathml"},
        "table-of-contents": html.toc,
        "wrap": "preserve",
        "metadata": metadata,
        "variables": {"include-after": include.text if include else "", "css": html.css or ""},
    }


def _today() -> str:
    """Return the date, in UTC, or that of SOURCE_DATE_EPOCH: the same input, the same bytes."""
    return time.strftime(
        "%Y-%m-%d", time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    )


def _place(page: Page, reason: str) -> str:
    """Name the line of the page that holds the first thing that `reason` quotes."""
    quoted = re.search(r"`([^`]+)`", reason)
    position = page.source.find(quoted[1]) if quoted else -1
    return page.where if position < 0 else f"{page.where}:{line_of(page.source, position)}"
