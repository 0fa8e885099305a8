"""A figure as a page carries it: small, the same each time, and true."""

import re
from urllib.parse import unquote

import pandas as pd
import pypandoc
import pytest
from matplotlib.figure import Figure

from fp8study.report import figures, plotstyle, speed_plots
from fp8study.report.plots import thin


def draw() -> Figure:
    figure = Figure(figsize=(4, 3))
    figure.subplots().plot([0.0, 1.0], [0.123456789, 3.0], label="x")
    return figure


def test_an_svg_is_small_and_the_same_each_time() -> None:
    text = figures.svg(draw()).decode()
    assert text == figures.svg(draw()).decode()
    assert "<!--" not in text and not re.search(r"\d\.\d{5}", text)
    links = {*re.findall(r'"#([\w-]+)"|url\(#([\w-]+)\)', text)}
    assert {"".join(link) for link in links} == {*re.findall(r' id="([^"]+)"', text)}


def test_an_svg_is_the_same_where_a_layout_differs_by_a_float() -> None:
    """Clips are named for where they lie: their names must not tell the last digits of that."""

    def moved(by: float) -> bytes:
        figure = draw()
        figure.axes[0].set_position((0.1 + by, 0.1, 0.8, 0.8))
        return figures.svg(figure)

    assert moved(0) == moved(1e-12) != moved(0.1)
    assert b"clip-path=" in moved(0)


def test_an_svg_keeps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> list[list[float]]:
        text = figures.svg(draw()).decode()
        paths = re.findall(r'<path d="([^"]+)" clip-path', text)
        return [[float(number) for number in re.findall(r"-?[\d.]+", path)] for path in paths]

    short = lines()
    monkeypatch.setattr(figures, "_smaller", lambda text: text)
    assert len(short) == len(lines()) > 0
    for ours, exact in zip(short, lines(), strict=True):
        assert ours == pytest.approx(exact, abs=0.005)


def test_a_curve_has_no_more_points_than_show() -> None:
    steps = pd.Series(range(1500))
    assert len(thin(steps)) == 250 and thin(steps[:200]).equals(steps[:200])


def test_a_download_names_a_run_once() -> None:
    table = pd.DataFrame({"run_id": ["r"], "run_ids": ["box/s/r"], "arm_key": ["k"], "gap": [0.5]})
    link = figures.download(table, "gaps")
    assert 'download="gaps.csv"' in link and "run_ids" in link
    assert "run_id," not in link and "arm_key" not in link


def test_a_per_cent_is_as_high_on_every_machine() -> None:
    leads = pd.DataFrame({
        "machine": ["one", "one", "two"], "model": "m", "num_gpus": 1,
        "tokens_per_gpu": [2048, 4096, 4096], "lead_pct": [-50.0, 30.0, 5.0],
        "lead_low_pct": [-51.0, 29.0, 4.0], "lead_high_pct": [-49.0, 31.0, 6.0],
    })  # fmt: skip
    none = pd.DataFrame(columns=["machine", "model", "tokens_per_gpu", "peer_lead_pct", "peer"])
    figure = speed_plots.lead_figure(leads, none, "")
    figure.draw_without_rendering()
    (low, high), (least, most) = (axis.get_ylim() for axis in figure.axes)
    first, second = (axis.get_position().height for axis in figure.axes)
    assert (high - low) / first == pytest.approx((most - least) / second, rel=0.05)
    assert low < -51 and high > 31 and least < 0 and most > 20
    assert [text.get_text() for axis in figure.axes for text in axis.texts] == ["one", "two"]


def test_text_is_legible_on_a_phone(site: dict[str, str]) -> None:
    """Nine pixels at least on a screen of 390, of which a page's margins take 32."""
    for name, page in site.items():
        for picture in re.findall(r'<img src="data:image/svg\+xml,([^"]*)"', page):
            text = unquote(picture)
            (width,) = re.findall(r"viewBox='0 0 ([\d.]+) ", text)
            sizes = [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -", text)]
            assert sizes and min(sizes) * (390 - 32) / float(width) >= 9, name


def test_a_page_and_a_pdf_each_get_their_own_picture() -> None:
    shown = figures.shown(draw(), 'A line, "x", of **+3 %**').data
    page = pypandoc.convert_text(shown, "html", format="markdown")
    assert page.count("<img ") == 1 and "#image" not in page
    pdf = pypandoc.convert_text(shown, "typst", format="markdown")
    assert pdf.startswith('#image(bytes("<?xml') and "<img" not in pdf
    assert r'alt: "A line, \"x\", of +3 %")' in pdf


def test_no_two_models_share_a_colour_by_name() -> None:
    names = [*"aabbcdefgh"]
    leads = pd.DataFrame({
        "machine": "one", "model": names, "num_gpus": 1, "tokens_per_gpu": 4096,
        "lead_pct": 5.0, "lead_low_pct": 4.0, "lead_high_pct": 6.0,
    })  # fmt: skip
    none = pd.DataFrame(columns=["machine", "model", "tokens_per_gpu", "peer_lead_pct", "peer"])

    def colours(table: pd.DataFrame) -> dict[str, str]:
        legend = speed_plots.lead_figure(table, none, "").legends[0]
        return {
            text.get_text(): mark.get_color()
            for text, mark in zip(legend.get_texts(), legend.get_lines(), strict=True)
        }

    assert [*colours(leads)] == ["a", "b", "other models", "1 GPU"]
    few = colours(leads[:7])
    assert [*few] == [*"abcde", "1 GPU"] and len(set(few.values())) == 6
    assert [*colours(leads[3:])][:6] == [*"bcdefg"]


def test_what_a_colour_says_a_shape_says_too() -> None:
    """For who prints in black and white, or does not tell colours apart."""
    leads = pd.DataFrame({
        "machine": "one", "model": [*"abcdef", "a", "a"], "num_gpus": [1] * 6 + [2, 4],
        "tokens_per_gpu": 4096, "lead_pct": 5.0, "lead_low_pct": 4.0, "lead_high_pct": 6.0,
    })  # fmt: skip
    none = pd.DataFrame(columns=["machine", "model", "tokens_per_gpu", "peer_lead_pct", "peer"])
    marks = speed_plots.lead_figure(leads, none, "").legends[0].get_lines()
    looks = [(mark.get_marker(), mark.get_fillstyle()) for mark in marks]
    assert len({shape for shape, _ in looks[:6]}) == 6
    assert len({fill for _, fill in looks[6:]}) == 3
    assert len({plotstyle.mark(name) for name in plotstyle.PALETTE}) == len(plotstyle.PALETTE)
