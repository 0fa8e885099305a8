"""What the renderer refuses, each in one line that says where."""

import re
import shutil
from pathlib import Path

import pytest

from fp8study.core.errors import UserError
from fp8study.report.site import render_site
from fp8study.report.site.config import load_site
from fp8study.report.site.links import check_links
from fp8study.report.site.pandoc import write_html
from fp8study.report.site.qmd import Prose, read_page
from tests.disks import small_disk_at
from tests.report.small_site import CONFIG, FRONT, make_site


def refusal(tmp_path: Path, body: str, config: str = CONFIG) -> str:
    root = make_site(tmp_path / "report", FRONT + body, config)
    with pytest.raises(UserError) as caught:
        render_site(root)
    assert not (root / "_site").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cell", "line", "reason"),
    [
        ("#| label: tbl-a\n#| tbl-cap: c\n\nx = 1\nraise ValueError('no\\nluck')\n",
         12, "cell `tbl-a` (code from line 11) failed with ValueError: no;"),
        ("1\nx = = 2\n", 9, "the cell (code from line 8) failed with SyntaxError: invalid syntax"),
        ("#| label: tbl-a\n#| tbl-cap: c\nx = 3\n", 10, "must show exactly one output, not 0"),
        ("from matplotlib.figure import Figure\nFigure()\n", 8, "an output of type text/plain"),
        ("print('said')\n", 8, "the code prints"),
        ("import os; os.kill(os.getpid(), 9)\n", None, "process ended with -9"),
    ],
)  # fmt: skip
def test_failing_cell_is_named_and_the_old_site_survives(
    rich: Path, tmp_path: Path, cell: str, line: int | None, reason: str
) -> None:
    root = make_site(tmp_path / "report", f"{FRONT}One.\n\n```{{python}}\n{cell}```\n")
    shutil.copytree(rich, root / "_site")
    with pytest.raises(UserError) as caught:
        render_site(root)
    message = str(caught.value)
    assert message.startswith(f"report/index.qmd:{line or ''}") and "\n" not in message
    assert reason in message
    assert (root / "_site/index.html").read_bytes() == (rich / "index.html").read_bytes()
    assert [path.name for path in root.iterdir() if path.name.startswith("._site")] == []


def test_failing_inline_code(tmp_path: Path) -> None:
    message = refusal(tmp_path, "One.\n\nTwo `{python} nobody`.\n")
    assert message.startswith("report/index.qmd:7:") and "NameError" in message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{< include x >}}\n", r":5: `\{\{<` is not supported"),
        ("$$x$$ {#eq-a}\n", "`{#eq-`"),
        ("A\n\n```{r}\n1\n```\n", r":7: cell `\{r\}`"),
        ("`{r} 1`\n", r":5: inline `\{r\}`"),
        ("```{python}\n1\n", ":5: the code block is never closed"),
        ("```{python}\n#| labell: a\n1\n```\n", "`labell` is not supported"),
        ("```{python}\n#| echo: true\n1\n```\n", "`echo` is not supported"),
        ("```{python}\n#| label: a\n1\n```\n", "label `a` is not supported"),
        ("```{python}\n#| label: fig-a\n1\n```\n", "label `fig-a` is not supported"),
        ("```{python}\n#| label: tbl-a\n1\n```\n", "needs `tbl-cap`"),
        ("```{python}\n#| label: tbl-a\n#| tbl-cap: '`{python} x`'\n1\n```\n", "inline code does"),
    ],
)
def test_wrong_or_unsupported_pages(tmp_path: Path, body: str, expected: str) -> None:
    assert re.search(expected, refusal(tmp_path, body))


def test_front_matter_is_needed_and_checked(tmp_path: Path) -> None:
    for number, (text, expected) in enumerate(
        [
            ("Text.\n", "no front matter"),
            ("---\ntitel: x\n---\n", "`titel` is not supported|`title` is missing"),
            ("---\ntitle: x\nexecute: {freeze: true}\n---\n", "`execute` is not supported"),
        ]
    ):
        root = make_site(tmp_path / str(number), text)
        with pytest.raises(UserError, match=expected):
            render_site(root)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("Line.\n\nSee @fig-lost.\n", r"index\.qmd:7: `@fig-lost` refers to no figure"),
        ("See [@fig-lost].\n", "write it without brackets"),
        ("![c](still.png)\n", "image `still.png` is not supported"),
        ("| x |\n|---|\n| 1 |\n\n: c {#tbl-a}\n", r"table in Markdown \(`tbl-a`\) is not"),
        ("::: {#tbl-a}\nonly one\n:::\n", "`tbl-a` needs a caption"),
        ("::: {layout-ncol=2}\na\n:::\n", "`layout-ncol` is not supported"),
        ("::: {.content-visible}\na\n:::\n", "`.content-visible` is not supported"),
        ("::: {.panel-tabset}\n## A\n:::\n", "`.panel-tabset` is not supported"),
    ],
)
def test_what_the_filter_refuses(tmp_path: Path, body: str, expected: str) -> None:
    site = load_site(make_site(tmp_path / "report", FRONT + body))
    page = read_page(site, "index.qmd")
    markdown = "".join(part.text for part in page.parts if isinstance(part, Prose))
    with pytest.raises(UserError, match=expected):
        write_html(page, markdown, site.config, tmp_path)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('<p id="sec-a"></p><p id="sec-a"></p>', "`sec-a` is used twice"),
        ('<a href="nowhere.csv">', "`nowhere.csv` leads nowhere"),
        ('<img src="nowhere.png">', "`nowhere.png` leads nowhere"),
        ('<a href="../outside.md">', "leaves the project"),
        ('<a href="other.html#sec-y">', "`other.html#sec-y` is to no label"),
    ],
)
def test_links_that_lead_nowhere(tmp_path: Path, body: str, expected: str) -> None:
    site = load_site(make_site(tmp_path / "report"))
    build = tmp_path / "build"
    build.mkdir()
    (build / "index.html").write_text(body)
    (build / "other.html").write_text('<p id="sec-x">')
    with pytest.raises(UserError, match=rf"report/index\.qmd: .*{expected}"):
        check_links(site, build)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("type: website", "type: book", "`project.type` is 'book'"),
        ("other.qmd]", "gone.qmd]", "`gone.qmd` does not exist"),
        ("execute-dir: project", "execute-dri: project", "`project.execute-d.."),
        ("freeze: false", "freeze: auto", "`execute.freeze` is 'auto'"),
        ("title: Test site", "title: Test site\n  navbr: {}", "`website.navbr` is not supported"),
        ("theme: cosmo", "number-sections: true", "`format.html.number-sections` is not"),
    ],
)
def test_wrong_configuration(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert re.search(expected, refusal(tmp_path, "Text.\n", CONFIG.replace(old, new)))


def test_missing_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"_quarto\.yml: no such file"):
        render_site(tmp_path)


def test_a_folder_that_is_no_site_is_left_alone(tmp_path: Path) -> None:
    root = make_site(tmp_path / "report")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    for folder in (tmp_path / "mine", tmp_path, root):
        with pytest.raises(UserError, match="output folder"):
            render_site(root, folder)
    assert (tmp_path / "mine/thesis.txt").is_file()


@pytest.mark.parametrize("where", ["page", "complaint"])
def test_a_full_disk_is_named_and_the_old_site_survives(
    tmp_path: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the page is too large, or nothing is left for the word of what was wrong."""
    fill = "open('fill', 'wb').write(bytes(10**6))"
    large = "from IPython.display import Markdown\nMarkdown('x' * 10**6)"
    cell = {"page": large, "complaint": fill}[where]
    with small_disk_at(tmp_path, "512k"):
        root = make_site(tmp_path / "report", f"{FRONT}One.\n\n```{{python}}\n{cell}\n```\n")
        (root / "_site").mkdir()
        (root / "_site" / "index.html").write_text("old")
        with pytest.raises(OSError, match="No space left on device") as caught:
            render_site(root)
        assert str(root) in caught.value.filename
        assert (root / "_site" / "index.html").read_text() == "old"
    assert "Traceback" not in capfd.readouterr().err
