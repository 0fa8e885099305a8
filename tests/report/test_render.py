"""The report renderer: one rich page read closely, and what it refuses."""

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

REPORT = Path(__file__).parents[2] / "report"

CONFIG = """
project:
  type: website
  execute-dir: project
  render: [index.qmd, other.qmd]
website:
  title: Test site
  description: What it is about
  favicon: still.png
  navbar: {left: [{href: index.qmd, text: Start}, {href: other.qmd, text: 'A & B'}]}
format:
  html: {theme: cosmo, html-math-method: mathml}
execute: {echo: false, freeze: false}
date: today
jupyter: python3
"""

FRONT = "---\ntitle: The *title*\n---\n\n"

INDEX = (
    FRONT
    + """
```{python}
import os, sys
from IPython.display import Markdown, display
import pandas as pd
number, name = 3.14159, "fp8_row_*wise*"
```

## First {#sec-first}

Pi is `{python} f"{number:.2f}"`, raw `{python} 6 * 7`, named `{python} name`, and
`{python} Markdown("**strong**")`. Torch: `{python} "torch" in sys.modules`.
Refers ahead to @tbl-b, @fig-plot and @fig-still.
See [other](other.qmd#sec-x) and [data](data.csv). In `{python} os.path.basename(os.getcwd())`.

```{python}
#| label: fig-plot
#| fig-cap: "A *curve* with [brackets], see @tbl-a"
#| fig-alt: 'Rising "line" & dots'
import matplotlib.pyplot as plt
plt.plot([1, 2])
```

```{python}
#| label: tbl-a
#| tbl-cap: >
#|   Two
#|   lines
pd.DataFrame({"arm": ["a<b", "c"], "ms": [1.5, 10]})
```

## Third {#sec-third}

| x | y |
|---|---|
| u | 1 |

: By hand {#tbl-b}

![Still life](still.png){#fig-still fig-alt="A still"}

```{python}
print("shown", 1 + 1)
```

::: {.callout-warning}
## Mind the *gap*
Body of the callout.
:::

::: {.callout-tip}
Untitled.
:::

Text.^[A footnote.] $a^2$ ![](still.png){fig-alt="Loose"}

A set has an order that changes from process to process: `{python} list(set("abcdefgh"))`.

```` markdown
```{python}
not_run()
```
````
"""
)

OTHER = """---
title: Other
---

## X {#sec-x}

Back to [start](index.qmd#sec-first). Write \\@fig-x. Seen: `{python} "number" in globals()`.
"""

STILL = b"\x89PNG\r\n\x1a\nstill"


def make_site(root: Path, index: str = INDEX, config: str = CONFIG) -> Path:
    root.mkdir(parents=True)
    (root / "_quarto.yml").write_text(config)
    (root / "index.qmd").write_text(index)
    (root / "other.qmd").write_text(OTHER)
    (root / "data.csv").write_text("a\n1\n")
    (root / "still.png").write_bytes(STILL)
    return root


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_site(tmp_path_factory.mktemp("rich") / "report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "86400")
        return render_site(root).parent


@pytest.fixture(scope="module")
def html(rich: Path) -> str:
    return (rich / "index.html").read_text()


def test_renders_every_page_and_leaves_nothing_else(rich: Path) -> None:
    assert rich.name == "_site"
    assert sorted(path.name for path in rich.rglob("*.html")) == ["index.html", "other.html"]
    assert [path.name for path in rich.parent.iterdir() if path.name.startswith("._site")] == []


def test_references_are_numbered_in_order_and_linked(html: str) -> None:
    numbers = {"tbl-a": "Table\xa01", "tbl-b": "Table\xa02"}
    numbers |= {"fig-plot": "Figure\xa01", "fig-still": "Figure\xa02"}
    for label, text in numbers.items():
        assert f'<a href="#{label}" class="quarto-xref">{text}</a>' in html
        assert html.count(f'id="{label}"') == 1


def test_inline_code(html: str) -> None:
    # A string comes out literally, Markdown() as Markdown.
    assert "Pi is 3.14, raw 42, named fp8_row_*wise*, and" in html
    assert "<strong>strong</strong>" in html
    assert "In report." in html
    assert "Torch: False." in html


def test_a_page_sees_nothing_of_another(rich: Path) -> None:
    assert "Seen: False" in (rich / "other.html").read_text()


def test_figure_has_caption_alternative_text_and_file(rich: Path, html: str) -> None:
    figure = re.search(r'<figure id="fig-plot".*?</figure>', html, re.DOTALL)
    assert figure is not None
    assert 'alt="Rising &quot;line&quot; &amp; dots"' in figure[0]
    assert "<figcaption>Figure\xa01: A <em>curve</em> with [brackets], see <a" in figure[0]
    source = re.search(r'src="([^"]+)"', figure[0])
    assert source is not None and source[1].startswith("index_files/")
    assert (rich / source[1]).read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.lines" not in html


def test_still_image_is_copied(rich: Path, html: str) -> None:
    assert '<img src="still.png" alt="A still"' in html
    assert '<img src="still.png" alt="Loose"' in html
    assert (rich / "still.png").read_bytes() == STILL


def test_table_has_its_caption_above_and_scrolls_with_the_keyboard(html: str) -> None:
    for label, caption in (("tbl-a", "1: Two lines"), ("tbl-b", "2: By hand")):
        table = re.search(rf'<figure id="{label}".*?</figure>', html, re.DOTALL)
        assert table is not None
        assert table[0].index(f"Table\xa0{caption}") < table[0].index("<table")
        region = re.search(r'<div class="table-scroll"[^>]*>', table[0])
        assert region is not None
        for part in ('tabindex="0"', 'role="region"', f'aria-labelledby="{label}-caption"'):
            assert part in region[0]
        assert f'<figcaption id="{label}-caption">' in table[0]
    assert "<td>a&lt;b</td>" in html


def test_code_is_hidden_and_what_it_prints_shown(html: str) -> None:
    assert "import pandas" not in html
    assert "<pre><code>shown 2</code></pre>" in html
    assert "not_run" in html


def test_callouts_footnotes_and_mathematics(html: str) -> None:
    text = re.sub(r"\s+", " ", html)
    title = '<div class="callout-title"> Mind the <em>gap</em> </div>'
    assert f'<div class="callout callout-warning"> {title}' in text
    assert '<div class="callout-title"> Tip </div>' in text
    assert 'id="fn1"' in html and "<math " in html
    # A callout's heading is no section: it stays out of the table of contents.
    toc = re.search(r'<nav class="toc".*?</nav>', html, re.DOTALL)
    assert toc is not None and "Third" in toc[0] and "gap" not in toc[0]


def test_links_navigation_and_what_the_head_tells(rich: Path, html: str) -> None:
    assert 'href="other.html#sec-x"' in html
    assert 'href="index.html#sec-first"' in (rich / "other.html").read_text()
    assert 'href="data.csv"' in html and (rich / "data.csv").is_file()
    assert '<a href="index.html" aria-current="page">Start</a>' in html
    assert '<a href="other.html">A &amp; B</a>' in html
    assert "<title>The title – Test site</title>" in html
    assert '<h1 class="title">The <em>title</em></h1>' in html
    assert '<meta name="description" content="What it is about">' in html
    assert '<meta name="date" content="1970-01-02">' in html
    assert '<link rel="icon" href="still.png">' in html


def test_nothing_is_loaded_from_the_network(rich: Path) -> None:
    for path in [*rich.rglob("*.html"), *rich.rglob("*.css")]:
        loaded = re.findall(r'(?:src="|<link[^>]*href="|url\(|@import)[^"]*', path.read_text())
        assert not [text for text in loaded if "//" in text], path


def test_same_input_gives_the_same_bytes(
    rich: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    # Elsewhere, so that no path of the machine can hide in the output.
    again = render_site(make_site(tmp_path / "report"), tmp_path / "out").parent
    first = {p.relative_to(rich): p.read_bytes() for p in rich.rglob("*") if p.is_file()}
    second = {p.relative_to(again): p.read_bytes() for p in again.rglob("*") if p.is_file()}
    assert first == second


def luminance(colour: str) -> float:
    full = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
    parts = [int(full[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_stands_out_in_light_and_in_dark(rich: Path) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", (rich / "style.css").read_text(), re.DOTALL)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w+);", scheme))
        for text in ("ink", "soft", "link"):
            for ground in ("page", "shade"):
                ends = sorted((luminance(colours[text]), luminance(colours[ground])))
                assert (ends[1] + 0.05) / (ends[0] + 0.05) > 4.5, (text, ground)


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
        ("#| label: fig-a\n#| fig-cap: c\n#| fig-alt: a\n\nx = 1\nraise ValueError('no\\nluck')\n",
         13, "cell `fig-a` (code from line 12) failed with ValueError: no;"),
        ("1\nx = = 2\n", 9, "the cell (code from line 8) failed with SyntaxError: invalid syntax"),
        ("#| label: fig-a\n#| fig-cap: c\n#| fig-alt: a\n3\n",
         11, "must show exactly one output, of type image/png, not ['text/plain']"),
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
        ("```{python}\n#| label: fig-a\n#| fig-alt: a\n1\n```\n", "needs `fig-cap`"),
        ("```{python}\n#| label: fig-a\n#| fig-cap: a\n1\n```\n", "needs `fig-alt`"),
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
        ("![c](still.png){#fig-a}\n", "image `still.png` needs `fig-alt`"),
        ("::: {#tbl-a}\nonly one\n:::\n", "`tbl-a` needs a caption"),
        ("::: {layout-ncol=2}\na\n:::\n", "`layout-ncol` is not supported"),
        ("::: {.callout-note collapse=true}\na\n:::\n", "`collapse` is not supported"),
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


def test_quarto_leaves_the_checkout_clean() -> None:
    """A real Quarto writes this file if it is not there, and the checkout would be dirty."""
    lines = (REPORT / ".gitignore").read_text().splitlines()
    assert lines == ["/.quarto/", "**/*.quarto_ipynb"]
