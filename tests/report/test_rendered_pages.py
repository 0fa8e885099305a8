"""The real pages on synthetic records of every kind: whole, short, and of these records."""

import re

import pytest

from scripts.count_words import count_words
from tests.report.pages import NAMES, plain

STALE = "stale optimizer (78.4 % of parameters not trained)"

pytestmark = pytest.mark.slow


def test_report_renders_without_torch_and_network(site: dict[str, str]) -> None:
    assert site.keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_page_has_no_python_leftovers(site: dict[str, str], name: str) -> None:
    text = plain(site[name])
    for leftover in (
        "Traceback",
        "<NA>",
        "&lt;NA&gt;",
        " nan ",
        "None ",
        "Axes",
        "UserWarning",
        "@fig",
        "@tbl",
    ):
        assert leftover not in text, leftover


def test_stale_run_is_labelled_wherever_it_is_shown(site: dict[str, str]) -> None:
    assert STALE in plain(site["attribution"])
    for name in ("index", "performance", "quality"):
        assert "stale" not in plain(site[name])


def test_answer_is_computed(site: dict[str, str]) -> None:
    text = plain(site["index"])
    assert "8 × H200: " in text
    assert "+20.0 %" in text
    assert "measure more" in text
    # One sits near the memory limit of one GPU.
    assert "1 lead left out, as memory was nearly full" in text
    assert "What would a synthetic run decide?" in plain(site["runs"])
    assert "the stale optimizer made the failure" in plain(site["attribution"])


def test_failed_runs_and_their_reasons_are_shown(site: dict[str, str]) -> None:
    for status in ("failed", "interrupted", "out_of_memory", "diverged"):
        assert f"synthetic: {status} | with a bar" in plain(site["runs"])


def test_the_pages_are_short(site: dict[str, str]) -> None:
    """Half of what once stood there; the page of runs holds data."""
    pages = {name: count_words(page) for name, page in site.items() if name != "runs"}
    assert 3_000 < sum(text for text, _ in pages.values()) < 5_500
    assert max(text for text, _ in pages.values()) < 1_000


def test_every_image_has_an_alternative(site: dict[str, str]) -> None:
    images = re.findall(r"<img[^>]*>", "".join(site.values()))
    assert len(images) >= 12
    assert all(re.search(r'alt="[^"]{40,}"', image) for image in images)


def test_attribution_says_what_its_records_say(site: dict[str, str]) -> None:
    text = plain(site["attribution"])
    assert "attribution on 8 × H200" in text
    assert "The stale optimizer is nearly all of it (99.9 %)" in text
    assert "masters" not in text
    assert "So the fault makes the failure, whatever the precision." in text
    assert "in 7 ways to an effective batch of 1 to 4: 7 equivalent." in text
    assert "No run was done again with its seed: run make reproduce STUDY=loss-parity" in text
    assert "Not measured there" not in text


def test_noise_page_answers_from_its_records(site: dict[str, str]) -> None:
    text = plain(site["precision-noise"])
    assert "of the sampling noise at an effective batch of 1, and the batch at which" in text
    assert "after training (2 seeds); equal at" in text
    law = "1/N, within chance: 2 of 2 runs in the band of 95 %, of up to 4 sequences."
    assert law in text
    assert "8 sequences of 10 tokens a point, at most 50 steps" in text
    assert "emulated in all of these runs" not in text
