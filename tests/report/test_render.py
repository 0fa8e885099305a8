"""The report renderer: one rich page read closely."""

import re
from pathlib import Path

import pytest

from fp8study.report.site import render_site

CONFIG = """
project:
  type: website
  execute-dir: project
website:
  title: Test site
  navbar: {left: [{href: index.qmd, text: Start}, sub/other.qmd]}
format:
  html: {theme: cosmo, number-sections: true}
execute: {echo: false, warning: false, freeze: false}
"""

INDEX = """---
title: The *title*
jupyter: python3
---

```{python}
import sys
from IPython.display import Markdown, display
import pandas as pd
number, name = 3.14159, "fp8_row_*wise*"
```

## First {#sec-first}

Pi is `{python} f"{number:.2f}"`, raw `{python} 6 * 7`, named `{python} name`, and
`{python} Markdown("**strong**")`. Torch: `{python} "torch" in sys.modules`.
Refers ahead to @tbl-b, @fig-plot and [@fig-plot; @fig-still]; [Plot @fig-still], -@tbl-a.
See @sec-third and [other](sub/other.qmd#x) and [data](data.csv).

### Second

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
#| output: asis
print("#### Made in *asis*\\n")
```

```{python}
#| echo: true
print("shown", 1 + 1)
print("to stderr", file=sys.stderr)
```

```{python}
#| include: false
print("never shown")
```

```{python}
#| output: false
print("output hidden")
```

```{python}
#| eval: false
#| echo: true
1 / 0
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

OTHER = "---\ntitle: Other\n---\n\nBack to [start](../index.qmd#sec-first). Write \\@fig-x.\n"

STILL = b"\x89PNG\r\n\x1a\nstill"


def make_site(root: Path, index: str = INDEX, config: str = CONFIG) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "_quarto.yml").write_text(config)
    (root / "index.qmd").write_text(index)
    (root / "sub/other.qmd").write_text(OTHER)
    (root / "data.csv").write_text("a\n1\n")
    (root / "still.png").write_bytes(STILL)
    return root


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_site(tmp_path_factory.mktemp("rich") / "report")
    return render_site(root).parent


@pytest.fixture(scope="module")
def html(site: Path) -> str:
    return (site / "index.html").read_text()


def test_returns_the_index_and_renders_every_page(site: Path) -> None:
    assert site.name == "_site"
    assert sorted(path.name for path in site.rglob("*.html")) == ["index.html", "other.html"]
    leftovers = [path.name for path in site.parent.iterdir() if path.name.startswith("._site")]
    assert leftovers == []


def test_references_are_numbered_in_order_and_linked(html: str) -> None:
    numbers = {"tbl-b": "Table\xa02", "fig-plot": "Figure\xa01", "fig-still": "Figure\xa02"}
    for label, text in {**numbers, "sec-third": "Section\xa02"}.items():
        assert f'<a href="#{label}" class="quarto-xref">{text}</a>' in html
        assert html.count(f'id="{label}"') == 1
    assert '<a href="#fig-still" class="quarto-xref">Plot\xa02</a>' in html
    assert '<a href="#tbl-a" class="quarto-xref">1</a>' in html


def test_sections_are_numbered_from_the_top_level_used(html: str) -> None:
    numbers = re.findall(r'<h\d[^>]*><span class="header-section-number">([\d.]+)</span>', html)
    assert numbers == ["1", "1.1", "2", "2.0.1"]


def test_inline_code(html: str) -> None:
    # A string comes out literally, Markdown() as Markdown.
    assert "Pi is 3.14, raw 42, named fp8_row_*wise*, and" in html
    assert "<strong>strong</strong>" in html


def test_kernel_starts_without_torch(html: str) -> None:
    assert "Torch: False." in html


def test_figure_has_caption_alternative_text_and_file(site: Path, html: str) -> None:
    figure = re.search(r'<figure id="fig-plot".*?</figure>', html, re.DOTALL)
    assert figure is not None
    assert 'alt="Rising &quot;line&quot; &amp; dots"' in figure[0]
    assert "<figcaption>Figure\xa01: A <em>curve</em> with [brackets], see <a" in figure[0]
    source = re.search(r'src="([^"]+)"', figure[0])
    assert source is not None and source[1].startswith("index_files/")
    assert (site / source[1]).read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.lines" not in html


def test_still_image_is_copied(site: Path, html: str) -> None:
    assert '<img src="still.png" alt="A still"' in html
    assert '<img src="still.png" alt="Loose"' in html
    assert (site / "still.png").read_bytes() == STILL


def test_table_has_its_caption_above_and_numbers_to_the_right(html: str) -> None:
    table = re.search(r'<figure id="tbl-a".*?</figure>', html, re.DOTALL)
    assert table is not None
    assert table[0].index("Table\xa01: Two lines") < table[0].index("<table")
    assert '<td style="text-align: right;">10.0</td>' in table[0]
    assert "<td>a&lt;b</td>" in table[0]


def test_asis_output_is_markdown(html: str) -> None:
    assert re.search(r"<h4[^>]*>.*Made in <em>asis</em></h4>", html)


def test_echo_include_output_eval_and_warning(html: str) -> None:
    assert "import pandas" not in html
    assert "shown 2" in html and 'class="sourceCode python cell-code"' in html
    assert "cell-output-stdout" in html and "cell-output-stderr" not in html
    assert "never shown" not in html
    assert "output hidden" not in html
    assert "ZeroDivisionError" not in html and "not_run" in html


def test_callouts_footnotes_and_mathematics(html: str) -> None:
    text = re.sub(r"\s+", " ", html)
    title = '<div class="callout-title"> Mind the <em>gap</em> </div>'
    assert f'<div class="callout callout-warning"> {title}' in text
    assert '<div class="callout-title"> Tip </div>' in text
    assert 'id="fn1"' in html and "<math " in html
    # A callout's heading is no section: it stays out of the table of contents.
    toc = re.search(r'<nav class="toc".*?</nav>', html, re.DOTALL)
    assert toc is not None and "Third" in toc[0] and "gap" not in toc[0]


def test_links_between_pages(site: Path, html: str) -> None:
    assert 'href="sub/other.html#x"' in html
    other = (site / "sub/other.html").read_text()
    assert 'href="../index.html#sec-first"' in other
    assert 'href="../style.css"' in other and (site / "style.css").is_file()
    assert 'href="data.csv"' in html and (site / "data.csv").is_file()


def test_navigation_and_titles(html: str) -> None:
    assert '<a href="index.html" aria-current="page">Start</a>' in html
    assert '<a href="sub/other.html">Other</a>' in html
    assert "<title>The title – Test site</title>" in html
    assert '<h1 class="title">The <em>title</em></h1>' in html


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        loaded = re.findall(r'(?:src="|<link[^>]*href="|url\(|@import)[^"]*', path.read_text())
        assert not [text for text in loaded if "//" in text], path


def test_same_input_gives_the_same_bytes(site: Path, tmp_path: Path) -> None:
    # Elsewhere, so that no path of the machine can hide in the output.
    again = render_site(make_site(tmp_path / "report"), tmp_path / "out").parent
    first = {p.relative_to(site): p.read_bytes() for p in site.rglob("*") if p.is_file()}
    second = {p.relative_to(again): p.read_bytes() for p in again.rglob("*") if p.is_file()}
    assert first == second
