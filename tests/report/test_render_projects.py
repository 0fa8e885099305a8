"""The report renderer on small projects: where they run, and what is wrong with them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8study.core.errors import UserError
from fp8study.report.site import render_site

CONFIG = """
project:
  type: website
  execute-dir: project
website:
  title: Test site
  navbar: {left: [index.qmd, sub/other.qmd]}
execute: {freeze: false}
"""


def make_site(root: Path, index: str, config: str = CONFIG) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "_quarto.yml").write_text(config)
    (root / "index.qmd").write_text(index)
    (root / "sub/other.qmd").write_text("Text.\n")
    (root / "still.png").write_bytes(b"any")
    return root


def test_rendering_imports_no_torch() -> None:
    code = "import sys, fp8study.report.site; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("mode", "expected"), [("project", "report"), ("file", "sub")])
def test_working_folder(tmp_path: Path, mode: str, expected: str) -> None:
    config = CONFIG.replace("execute-dir: project", f"execute-dir: {mode}")
    root = make_site(tmp_path / "report", "Text.\n", config)
    (root / "sub/other.qmd").write_text(
        "In `{python} __import__('os').path.basename('' or __import__('os').getcwd())`.\n"
    )
    here = Path(os.curdir).resolve()
    site = render_site(root).parent
    assert f"In {expected}." in (site / "sub/other.html").read_text()
    assert Path(os.curdir).resolve() == here


def error_of(tmp_path: Path, body: str, config: str = CONFIG) -> str:
    root = make_site(tmp_path / "report", body, config)
    with pytest.raises(UserError) as caught:
        render_site(root)
    assert not (root / "_site").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_failing_cell_is_named_and_the_old_site_survives(tmp_path: Path) -> None:
    root = make_site(tmp_path / "report", "# Fine\n")
    before = render_site(root).read_bytes()
    cell = "```{python}\n#| label: bad-cell\nx = 1\nraise ValueError('no\\nluck')\n```\n"
    (root / "index.qmd").write_text(f"# Broken\n\n{cell}")
    with pytest.raises(UserError) as caught:
        render_site(root)
    message = str(caught.value)
    assert message.startswith("report/index.qmd:6: cell `bad-cell`")
    assert "ValueError: no" in message and "\n" not in message
    assert (root / "_site/index.html").read_bytes() == before
    assert [path.name for path in root.iterdir() if path.name.startswith("._site")] == []


def test_failing_inline_code(tmp_path: Path) -> None:
    message = error_of(tmp_path, "One.\n\nTwo `{python} nobody`.\n")
    assert message.startswith("report/index.qmd:3:") and "NameError" in message


def test_kernel_that_cannot_start(tmp_path: Path) -> None:
    root = make_site(tmp_path / "report", "```{python}\n1\n```\n")
    with pytest.raises(UserError, match="nowhere/python"):
        render_site(root, python="/nowhere/python")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("Line.\n\nSee @fig-lost.\n", r"index\.qmd:3: `@fig-lost`"),
        ("# A {#sec-a}\n\n# B {#sec-a}\n", "`sec-a` is used twice"),
        ("![c](still.png){#fig-a}\n", "`fig-alt`"),
        ("[x](nowhere.qmd)\n", "nowhere.qmd"),
        ("[x](nowhere.csv)\n", "nowhere.csv"),
        ("[x](../outside.md)\n", "leaves the project"),
        ("{{< include x >}}\n", "shortcodes"),
        ("```{r}\n1\n```\n", r"`\{r\}`"),
        ("```{python}\n1\n", "never closed"),
        ("```{python}\n#| labell: a\n1\n```\n", "`labell`"),
        ("```{python}\n#| echo: maybe\n1\n```\n", "`echo`"),
        ("```{python}\n#| label: fig-a\n1\n```\n", "`fig-cap`"),
        ("```{python}\n#| label: a\n```\n\n```{python}\n#| label: a\n```\n", "already used"),
        ("---\ntitel: x\n---\n", "`titel`"),
        ("---\nexecute: {freeze: true}\n---\n", "`freeze: true`"),
        ("---\njupyter: julia\n---\n", "julia"),
        ("::: {layout-ncol=2}\na\n:::\n", "layout-ncol"),
        ("::: {.content-visible}\na\n:::\n", "content-visible"),
        ("$$x$$ {#eq-a}\n", "`eq-`"),
    ],
)
def test_wrong_or_unsupported_pages(tmp_path: Path, body: str, expected: str) -> None:
    assert re.search(expected, error_of(tmp_path, body))


def test_label_must_match_what_the_cell_shows(tmp_path: Path) -> None:
    cell = "```{python}\n#| label: fig-a\n#| fig-cap: c\n#| fig-alt: a\nprint(1)\n```\n"
    assert "exactly one image, not 0" in error_of(tmp_path, cell)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("type: website", "type: book", "project.type"),
        ("execute-dir: project", "render: [index.qmd, gone.qmd]", "`gone.qmd` does not exist"),
        ("execute-dir: project", "render: [index.qmd]", "not in `project.render`"),
        ("execute-dir: project", "execute-dri: project", "`execute-dri`"),
        ("freeze: false", "freeze: auto", "`freeze: auto`"),
        ("title: Test site", "title: Test site\n  navbr: {}", "`navbr`"),
    ],
)
def test_wrong_configuration(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert expected in error_of(tmp_path, "Text.\n", CONFIG.replace(old, new))


def test_missing_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"_quarto\.yml: no such file"):
        render_site(tmp_path)


def test_a_folder_that_is_no_site_is_left_alone(tmp_path: Path) -> None:
    root = make_site(tmp_path / "report", "Text.\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    for folder in (tmp_path / "mine", tmp_path, root):
        with pytest.raises(UserError, match="output folder"):
            render_site(root, folder)
    assert (tmp_path / "mine/thesis.txt").is_file()
