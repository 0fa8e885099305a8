"""The report renderer: one rich page read closely, and what it refuses."""

import re
from pathlib import Path

import pytest

from fp8study.report.site import render_site
from tests.report.small_site import STILL, make_site

REPORT = Path(__file__).parents[2] / "report"


@pytest.fixture(scope="module")
def html(rich: Path) -> str:
    return (rich / "index.html").read_text()


def test_renders_every_page_and_leaves_nothing_else(rich: Path) -> None:
    assert rich.name == "_site"
    assert sorted(path.name for path in rich.rglob("*.html")) == ["index.html", "other.html"]
    assert [path.name for path in rich.parent.iterdir() if path.name.startswith("._site")] == []


def test_references_are_numbered_in_order_and_linked(html: str) -> None:
    numbers = {"tbl-a": "Table\xa01", "tbl-b": "Table\xa02", "fig-plot": "Figure\xa01"}
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


def test_figure_has_caption_and_alternative_text(html: str) -> None:
    figure = re.search(r'<figure id="fig-plot".*?</figure>', html, re.DOTALL)
    assert figure is not None
    assert '<img src="still.png" alt="Rising &quot;line&quot; &amp; dots"' in figure[0]
    assert "<figcaption>Figure\xa01: A <em>curve</em> with [brackets], see <a" in figure[0]


def test_an_image_that_is_linked_is_copied(rich: Path) -> None:
    assert (rich / "still.png").read_bytes() == STILL


def test_table_has_its_caption_above_and_scrolls_with_the_keyboard(html: str) -> None:
    for label, caption in (("tbl-a", "1: Two lines"), ("tbl-b", "2: Other")):
        table = re.search(rf'<figure id="{label}".*?</figure>', html, re.DOTALL)
        assert table is not None
        assert table[0].index(f"Table\xa0{caption}") < table[0].index("<table")
        region = re.search(r'<div class="table-scroll"[^>]*>', table[0])
        assert region is not None
        for part in ('tabindex="0"', 'role="region"', f'aria-labelledby="{label}-caption"'):
            assert part in region[0]
        assert f'<figcaption id="{label}-caption">' in table[0]
    assert "<td>a&lt;b</td>" in html


def test_code_is_hidden_and_what_it_displays_shown(html: str) -> None:
    assert "import os" not in html
    assert "<p>shown</p>\n<p><em>twice</em></p>" in html
    assert "not_run" in html


def test_footnotes_mathematics_and_contents(html: str) -> None:
    assert 'id="fn1"' in html and "<math " in html
    toc = re.search(r'<nav class="toc".*?</nav>', html, re.DOTALL)
    assert toc is not None and "Third" in toc[0]


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


def test_quarto_leaves_the_checkout_clean() -> None:
    """A real Quarto writes this file if it is not there, and the checkout would be dirty."""
    lines = (REPORT / ".gitignore").read_text().splitlines()
    assert {"/.quarto/", "**/*.quarto_ipynb"} <= set(lines)
