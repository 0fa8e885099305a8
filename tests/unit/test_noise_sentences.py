"""Words about noise follow planted numbers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fp8study import noise_layouts as layouts
from fp8study import noise_sentences as sentences
from fp8study import noise_tables as tables
from fp8study.records import StoredRun, load_runs
from tests.noise_factories import make_noise


def stored(results: Path) -> list[StoredRun]:
    return sentences.measured(load_runs(results))


def test_a_small_error_is_called_far_from_the_noise(tmp_path: Path) -> None:
    make_noise(tmp_path)
    text = sentences.answer(stored(tmp_path))
    # By construction: error 0.1·(0.5 + noise) on half of the parameters, gradients 1 + noise.
    assert "(2 points of training, 1 recipe, 2 seeds)" in text
    assert "So 1 or 2 is nowhere near it" in text
    assert "precision matters relatively more in *large* batches" in text
    assert "emulated" not in text


def test_an_error_as_large_as_the_noise_is_not(tmp_path: Path) -> None:
    make_noise(tmp_path, error_size=1.2)
    text = sentences.answer(stored(tmp_path))
    assert "nowhere near" not in text
    assert "cannot be told apart from it here" in text


def test_real_products_are_preferred_and_emulated_ones_named(tmp_path: Path) -> None:
    make_noise(tmp_path, emulated=True)
    assert sentences.answer(stored(tmp_path)).startswith(
        "**FP8 is emulated in all of these runs.**"
    )
    make_noise(tmp_path)
    assert [run.record.noise["emulated"] for run in stored(tmp_path)] == [False, False]


def test_scale_and_variance_are_read_off_the_tables(tmp_path: Path) -> None:
    make_noise(tmp_path)
    text = sentences.scale(stored(tmp_path))
    assert "sequences after 0 steps; " in text
    assert text.endswith("sequences after 50 steps.")
    # Both runs are made of the same numbers, which lie in the band.
    text = sentences.variance_law(stored(tmp_path))
    assert "2 of 2 lie where 95 % of random orders do. So it falls as 1/N" in text


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([0.8, 1.0, 1.0, 1.0], "rest lie below; chance alone leaves that many outside in 19 of"),
        ([0.8, 1.3, 1.3, 1.0], "lie on either side, and they are more than chance leaves outside"),
        ([1.3, 1.3, 1.3, 1.0], "lie above (neighbours resemble each other), and they are more"),
    ],
)
def test_a_run_outside_of_the_band_is_judged_by_chance(
    ratios: list[float], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pd.DataFrame({"scope": "all", "largest_batch": 8, "ratio_to_inverse_law": ratios})
    low, high = "ratio_to_inverse_law_low", "ratio_to_inverse_law_high"
    monkeypatch.setattr(tables, "over_runs", lambda *_: table.assign(**{low: 0.9, high: 1.1}))
    text = sentences.variance_law([])
    assert words in text
    assert f"{sum(0.9 <= r <= 1.1 for r in ratios)} of 4 lie where" in text


def test_tables_are_medians_over_seeds_with_the_range_of_all_intervals(tmp_path: Path) -> None:
    make_noise(tmp_path)
    crossing = tables.over_runs(tables.crossing_table, stored(tmp_path))
    shown = layouts.crossings(sentences.with_labels(crossing))
    assert shown[["step", "what", "num_seeds"]].values.tolist() == [
        [0, "FP8 rowwise v BF16", 2], [50, "FP8 rowwise v BF16", 2],
    ]  # fmt: skip
    whole = crossing[(crossing["scope"] == "all") & (crossing["step"] == 0)]
    assert shown["crossing_batch"][0] == pytest.approx(whole["crossing_batch"].median())
    products = layouts.products(
        sentences.with_labels(
            sentences.last_point(tables.over_runs(tables.product_table, stored(tmp_path)))
        )
    )
    row = products.iloc[0]
    assert (row["step"], row["product"], row["error_pct"]) == (50, "forward", pytest.approx(10))
    assert (row["underflow_pct"], row["saturated_pct"]) == (pytest.approx(25), 0)


def test_formats_need_no_run() -> None:
    assert "E4M3 5.88 %, E5M2 11.1 %" in sentences.formats()
    assert "BF16 0.5, FP32 1." in sentences.formats()


def test_nothing_measured_says_what_to_run() -> None:
    for say in (sentences.answer, sentences.scale, sentences.variance_law):
        assert "make reproduce STUDY=precision-noise" in say([])
