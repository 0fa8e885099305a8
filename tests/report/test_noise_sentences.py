"""Words about noise follow planted numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis.noise import tables
from fp8study.core.records import StoredRun, load_runs
from fp8study.report import noise_sentences as sentences
from fp8study.report import rows
from tests.factories import make_record, store
from tests.noise_factories import make_noise, make_noise_section


def stored(results: Path) -> list[StoredRun]:
    (runs,) = sentences.places(load_runs(results))
    return runs


def test_a_small_error_is_called_far_from_the_noise(tmp_path: Path) -> None:
    make_noise(tmp_path)
    text = sentences.answer(stored(tmp_path))
    # By construction: error 0.1·(0.5 + noise) on half of the parameters, gradients 1 + noise.
    assert "after training (2 seeds)" in text
    assert "precision matters *least* at batch 1" in text
    assert "emulated" not in text


def crossings(*ends: tuple[float, float, float], steps: Sequence[int] = (0,)) -> pd.DataFrame:
    """Invented: crossing batches with their intervals, everything else held."""
    names = ("crossing_batch", "crossing_batch_low", "crossing_batch_high")
    table = pd.DataFrame(ends, columns=names)
    held = {"ratio_at_1": 0.2, "ratio_at_1_low": 0.15, "ratio_at_1_high": 0.25}
    return table.assign(
        precision="fp8_rowwise", seed=range(len(table)),
        step=[*steps] * (len(table) // len(steps)), worst_share=0.1, ratio_without_worst=0.1,
        **held,
    )  # fmt: skip


INF = math.inf


@pytest.mark.parametrize(
    ("table", "words", "silent"),
    [
        (
            crossings((80, 60, 90), (200, 150, 300)),
            ["A batch of 1 or 2, document A's transition, is nowhere near where FP8's",
             "; equal at 80 to 200 at the start.",
             "matters *least* at batch 1"],
            ["never equal", "larger at a batch", "after training"],
        ),
        (
            crossings((9, 5, 12)),
            ["Batches of 1 and 2", "are both below", "; equal at 9 at the start."],
            ["nowhere near"],
        ),
        (
            crossings((9, 1.5, INF)),
            ["A batch of 1 or 2 cannot be told apart", "; equal at 9 at the start."],
            ["both below", "least"],
        ),
        (
            crossings((1.5, 1, 1.9)),
            ["sampling noise where document A puts the transition."],
            ["least"],
        ),
        (
            crossings((INF, 90, INF)),
            ["In all cases no systematic part of it is seen", "nowhere near"],
            ["would be equal", "least"],
        ),
        (
            crossings((100, 80, 200), (INF, 90, INF)),
            ["; equal at 100 at the start.", "In 1 of 2 cases no systematic part"],
            ["least"],
        ),
        (
            crossings((0, 0, 0), (30, 20.5, 40)),
            ["equal at 30 at the start.", "In 1 of 2 cases FP8's error is the larger at a batch"],
            ["nowhere near", "least"],
        ),
    ],
)  # fmt: skip
def test_the_verdict_follows_the_crossings(
    table: pd.DataFrame,
    words: list[str],
    silent: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_noise(tmp_path)
    monkeypatch.setattr(sentences, "fp8_rows", lambda _: table)
    text = sentences.answer(load_runs(tmp_path))
    here = "- llama-3.2-1b on tinystories, 8 × H200: "
    assert f"{here}20 % at the start (" in text
    for part in words:
        assert part in text
    for part in silent:
        assert part not in text


def test_the_start_is_told_apart_from_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_noise(tmp_path)
    table = crossings((80, 60, 90), (2000, 1500, 3000), steps=[0, 50])
    monkeypatch.setattr(sentences, "fp8_rows", lambda _: table.assign(ratio_at_1=[0.2, 0.03]))
    text = sentences.answer(load_runs(tmp_path))
    assert "20 % at the start and 3 % after training (2 seeds); equal at 80 at the start" in text
    assert "at the start and 2,000 after training." in text


def test_an_error_as_large_as_the_noise_is_not(tmp_path: Path) -> None:
    make_noise(tmp_path, error_size=1.2)
    text = sentences.answer(stored(tmp_path))
    assert "nowhere near" not in text
    assert "cannot be told apart from that at which" in text


def test_real_products_are_preferred_and_emulated_ones_named(tmp_path: Path) -> None:
    make_noise(tmp_path, emulated=True)
    assert sentences.answer(stored(tmp_path)).startswith(
        "**FP8 is emulated in all of these runs.**"
    )
    make_noise(tmp_path)
    assert [run.record.noise["emulated"] for run in stored(tmp_path)] == [False, False]


def test_each_model_has_its_own_answer(tmp_path: Path) -> None:
    make_noise(tmp_path)
    section = make_noise_section(emulated=False)
    for name, emulated in (("mine", False), ("emulated", True)):
        noise = section | {"emulated": emulated}
        store(tmp_path, "local", make_record(model="tiny-llama", run_id=name, noise=noise))
    everything = load_runs(tmp_path)
    first, second = sentences.places(everything)
    assert [run.record.run_id for run in second] == ["mine"]
    assert {run.record.config["model"] for run in first} == {"llama-3.2-1b"}
    told = sentences.answer(everything)
    assert "\n- llama-3.2-1b on tinystories, 8 × H200: " in told
    assert "\n- tiny-llama on tinystories, your machine: " in told
    text = sentences.limits(everything)
    what = "8 sequences of 10 tokens a point, at most 50 steps in FP8 tensorwise. Noise scale in "
    assert f"- {sentences.here(first)}: {what}" in text
    assert f"- {sentences.here(second)}: 8 sequences" in text
    assert "Left out: 1 run with emulated FP8" in text
    assert "Left out" not in sentences.limits(first)
    assert sentences.here(first) == "llama-3.2-1b on tinystories, 8 × H200"


def test_a_diverged_run_counts_and_a_failed_one_does_not(tmp_path: Path) -> None:
    for status in ("diverged", "failed"):
        record = make_record(status=status, run_id=status, noise=make_noise_section())
        store(tmp_path, "local", record)
    assert [run.record.status for run in stored(tmp_path)] == ["diverged"]


@pytest.mark.parametrize(
    ("zero", "cut", "words"),
    [
        (
            0.002,
            0.0,
            "at most 0.20 % become zero, and none is cut off, as scales follow the largest: what "
            "document A calls",
        ),
        (
            0.3,
            0.0,
            "at most 30.00 % become zero, and none is cut off, as scales follow the largest: "
            "whether that adds to the error cannot be told",
        ),
        (
            0.0,
            0.05,
            "and at most 5.00 % are cut off at its largest: whether that adds to the error",
        ),
    ],
)
def test_what_the_casts_lose_decides_what_is_said_of_underflow(
    zero: float, cut: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = gemms_text(monkeypatch, fp8_gemm(0.03, zero, cut))
    assert words in text
    assert "off by 3.0 %, a BF16 one by 0.17 % (medians over 1 layer)" in text


def fp8_gemm(error: float, zero: float, cut: float = 0.0) -> dict[str, object]:
    return {"precision": "fp8_rowwise", "cast": True, "error": 0.03, "operand_error": error,
            "to_zero": zero, "cut_off": cut}  # fmt: skip


def gemms_text(monkeypatch: pytest.MonkeyPatch, *fp8: dict[str, object]) -> str:
    bf16 = fp8_gemm(0.0, 0.0) | {"precision": "bf16", "cast": False, "error": 0.0017}
    place = dict.fromkeys(tables.ALIKE, "same") | {"run_ids": "one"}
    table = pd.DataFrame([*fp8, bf16]).assign(gemm="output", module="up_proj", step=0, **place)
    monkeypatch.setattr(tables, "over_runs", lambda *_: table)
    return sentences.gemms([])


@pytest.mark.parametrize(("error", "words"), [
    (0.028, "1 of 3 GEMMs lose more than 1 %, and their operands are off by 2.8 %, as others are "
     "(2.5 %): the error is that of rounding"),
    (0.04, "the range of the format takes part in the error"),
])  # fmt: skip
def test_casts_that_lose_elements_are_held_against_others_of_their_kind(
    error: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = fp8_gemm(0.026, 0.001), fp8_gemm(0.024, 0.0)
    assert words in gemms_text(monkeypatch, fp8_gemm(error, 0.03), *others)


def test_an_error_that_is_one_sequences_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_noise(tmp_path)
    table = crossings((80, 60, 90), (90, 70, 95))
    monkeypatch.setattr(sentences, "fp8_rows", lambda _: table)
    assert "one sequence holds" not in sentences.answer(load_runs(tmp_path))
    table["worst_share"] = [0.1, 0.8]
    text = sentences.answer(load_runs(tmp_path))
    assert "In 1 of 2 cases one sequence holds more than half of the squared error" in text
    assert "without it they are at 10 %." in text


def test_a_table_gives_no_interval_where_one_sequence_makes_the_error(tmp_path: Path) -> None:
    make_noise(tmp_path)
    crossing = tables.over_runs(tables.crossing_table, stored(tmp_path))
    shown = rows.crossings(crossing)
    crossing.loc[crossing["seed"] == 0, ["worst_share", "ratio_without_worst"]] = 0.9, 0.001
    one = rows.crossings(crossing)
    assert (one["ratio_pct"] < shown["ratio_pct"]).all()
    assert (one["ratio_range"] == shown["ratio_range"]).all()  # the other seed's are the same
    crossing["worst_share"] = 0.9
    assert {*rows.crossings(crossing)["ratio_range"]} == {"–"}


def test_the_variance_is_read_off_the_table(tmp_path: Path) -> None:
    make_noise(tmp_path)
    # Both runs are made of the same numbers, which lie in the band.
    text = sentences.variance_law(stored(tmp_path))
    assert text == (
        "The variance of a mean over N sequences falls as 1/N, within chance: 2 of 2 runs in the "
        "band of 95 %, of up to 4 sequences. That is arithmetic for sequences drawn at "
        "random."
    )


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        (
            [0.8, 1.0, 1.0, 1.0],
            "as 1/N, within chance: 3 of 4 runs in the band of 95 %, of up to 8 ",
        ),
        ([0.8, 1.3, 1.3, 1.0], "unlike 1/N in 3 of 4 runs"),
        ([1.3, 1.3, 1.3, 1.0], "more slowly than 1/N in 3 of 4 runs"),
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


def test_tables_are_medians_over_seeds_with_the_range_of_all_intervals(tmp_path: Path) -> None:
    make_noise(tmp_path)
    crossing = tables.over_runs(tables.crossing_table, stored(tmp_path))
    shown = rows.crossings(crossing)
    assert shown[["step", "what", "num_seeds"]].values.tolist() == [
        [0, "FP8 rowwise", 2], [50, "FP8 rowwise", 2],
    ]  # fmt: skip
    whole = crossing[(crossing["scope"] == "all") & (crossing["step"] == 0)]
    assert shown["crossing_batch"][0] == pytest.approx(whole["crossing_batch"].median())
    assert shown["crossing_range"][0] == "\u00a0to\u00a0".join(
        f"{end:,.0f}" if end >= 10 else f"{end:.1f}"
        for end in (whole["crossing_batch_low"].min(), whole["crossing_batch_high"].max())
    )


def test_errors_of_single_gemms_are_medians_in_a_row_each_recipe(tmp_path: Path) -> None:
    make_noise(tmp_path)
    (row,) = rows.gemms(tables.over_runs(tables.gemm_table, stored(tmp_path))).to_dict("records")
    assert (row["what"], row["error_pct_output"], row["to_zero_pct"]) == ("FP8 rowwise", 10, 25)


def test_nothing_measured_says_what_to_run() -> None:
    for say in (
        sentences.answer,
        sentences.gemms,
        sentences.variance_law,
        sentences.limits,
    ):
        assert "make reproduce STUDY=precision-noise" in say([])


def test_a_comparison_names_its_reference_unless_it_is_bf16(tmp_path: Path) -> None:
    make_noise(tmp_path)
    crossing = tables.over_runs(tables.crossing_table, stored(tmp_path))
    both = pd.concat([crossing, crossing.assign(reference="fp32")])
    assert set(rows.crossings(both)["what"]) == {"FP8 rowwise", "FP8 rowwise v FP32"}


@pytest.mark.parametrize(("tokens", "words"), [
    (2_048, "FP8's error would be the larger"),
    (8_192, ""),  # 122 sequences are within the interval
    (50_000, "the sampling noise would still be the larger"),
])  # fmt: skip
def test_large_steps_are_spoken_of_where_it_is_known(
    tokens: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = make_noise_section() | {"tokens_per_sample": tokens}
    store(tmp_path, "local", make_record(noise=noise))
    monkeypatch.setattr(sentences, "fp8_rows", lambda _: crossings((90, 50, 300)))
    text = sentences.answer(load_runs(tmp_path))
    assert ("steps of a million tokens" in text) == bool(words)
    assert words in text
