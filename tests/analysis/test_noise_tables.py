"""The frames and figures of a noise section whose numbers were made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8study.analysis.noise import moments as noise
from fp8study.analysis.noise import tables
from fp8study.core.records import StoredRun, read_record, write_record
from fp8study.report import noise_plots
from tests.factories import make_record
from tests.noise_factories import N, make_point


@pytest.fixture(scope="module")
def section() -> dict[str, Any]:
    return {"tokens_per_sample": 10, "emulated": True,
            "points": [make_point(0), make_point(50)]}  # fmt: skip


def test_one_row_per_point_and_scope(section: dict[str, Any]) -> None:
    table = tables.scale_table(section)
    assert list(zip(table["step"], table["scope"], strict=True)) == [
        (s, c) for s in (0, 50) for c in ("all", "fp8_layers")
    ]
    assert (table["noise_scale_low"] < table["noise_scale"]).all()
    assert (table["noise_scale_tokens"] == 10 * table["noise_scale"]).all()
    everything = table[table["scope"] == "all"]  # |G|² and tr(S) are 60 by construction
    assert everything["gradient_square"].to_list() == pytest.approx([60, 60], rel=0.3)
    assert everything["noise_trace"].to_list() == pytest.approx([60, 60], rel=0.3)


def test_a_gemm_is_told_with_what_its_casts_lose(section: dict[str, Any]) -> None:
    point = json.loads(json.dumps(section["points"][0]))
    point["products"]["values"] |= {
        "bf16": {"output": [[0.0017, 0, 0, 0, 0, 0, 0]]},
        "fp8_tensorwise": {"grad_input": [[0.06, 0.05, 0.001, 0.3, 0.02, 0, 0.2]]},
    }
    table = tables.gemm_table(section | {"points": [point]}).set_index(["precision", "gemm"])
    assert table["cast"].to_dict() == {
        ("fp8_rowwise", "output"): True, ("bf16", "output"): False,
        ("fp8_tensorwise", "grad_input"): True,
    }  # fmt: skip
    assert table["to_zero"].to_list() == [0.25, 0, 0.001]  # the larger of both operands
    assert table["cut_off"].to_list() == [0, 0, 0.3]
    assert table["error"].to_list() == [0.1, 0.0017, 0.06]


def test_a_scope_shows_what_the_whole_hides(section: dict[str, Any]) -> None:
    table = tables.gradient_table(section).set_index(["step", "reference", "scope"])
    whole, fp8 = (table.loc[(0, "bf16", s)] for s in ("all", "fp8_layers"))
    assert fp8["relative_error"] > 1.2 * whole["relative_error"]
    assert fp8["sqnr_db"] == pytest.approx(-20 * math.log10(fp8["relative_error"]))
    assert whole["loss_change"] == pytest.approx(0.5)


def test_the_worst_sequence_is_shown_beside_the_median(section: dict[str, Any]) -> None:
    point = json.loads(json.dumps(section["points"][0]))
    for gram in point["comparisons"][0]["error_grams"].values():
        for i in range(N):
            gram[i][i] = 0.01 * point["gradient_grams"]["all"][i][i]
        gram[3][3] *= 25
    table = tables.gradient_table(section | {"points": [point]}).set_index(["reference", "scope"])
    row = table.loc[("bf16", "all")]
    assert row["median_error"] == pytest.approx(0.1)
    assert row["worst_error"] == pytest.approx(0.5)
    assert math.isnan(table.loc[("fp32", "all")]["worst_error"])


def test_errors_on_one_axis(section: dict[str, Any]) -> None:
    table = tables.budget_table(section)
    rows = table[(table["step"] == 0) & (table["scope"] == "all")].set_index("batch")
    assert rows["measured"].to_dict() == {b: b <= N // 2 for b in tables.BATCHES}
    assert rows.loc[1, "sampling_error"] == pytest.approx(2 * rows.loc[4, "sampling_error"])
    parts = rows["systematic_error"] ** 2 + rows["random_error"] ** 2
    assert np.allclose(rows["precision_error"] ** 2, parts)
    assert np.allclose(rows["ratio"], rows["precision_error"] / rows["sampling_error"])
    crossing = tables.crossing_table(section).set_index(["step", "scope"]).loc[(0, "all")]
    below, above = rows[rows.index < crossing["crossing_batch"]], rows[
        rows.index > crossing["crossing_batch"]
    ]  # fmt: skip
    assert (below["ratio"] < 1).all()
    assert (above["ratio"] > 1).all()
    assert len(below) > 1 < len(above)
    assert crossing["ratio_at_1"] == pytest.approx(rows.loc[1, "ratio"])


def test_all_points_and_batches_make_one_test(section: dict[str, Any]) -> None:
    row = tables.inverse_law_table(section).set_index("scope").loc["all"]
    grams = [noise.gram_matrix(point["gradient_grams"]["all"]) for point in section["points"]]
    singles = [noise.inverse_law([gram], [batch]).value for gram in grams for batch in (2, 4)]
    assert row["largest_batch"] == 4
    assert row["ratio_to_inverse_law"] == pytest.approx(np.mean(singles))


def test_parameters_are_told_by_layer(section: dict[str, Any]) -> None:
    table = tables.parameter_table(section)
    assert len(table) == 2 * 2 * 2
    row = table[(table["step"] == 50) & table["is_fp8"] & (table["reference"] == "bf16")].iloc[0]
    assert row["layer"] == 0
    assert tables.layer_number("model.embed_tokens.weight") == -1


def test_points_of_a_diverged_run_are_left_out(section: dict[str, Any]) -> None:
    broken = json.loads(json.dumps(make_point(60)))
    broken["gradient_grams"]["all"][0][0] = None  # how NaN is stored
    bad_error = json.loads(json.dumps(make_point(70)))
    bad_error["comparisons"][0]["error_grams"]["all"][1][2] = None
    more = section | {"points": [*section["points"], broken, bad_error]}
    for table in (tables.scale_table, tables.crossing_table, tables.parameter_table):
        assert set(table(more)["step"]) == {0, 50}
    nothing = {"points": [broken], "tokens_per_sample": 10}
    assert tables.budget_table(nothing).empty
    assert tables.parameter_table(nothing).empty


def test_the_section_survives_the_record_and_runs_are_told_apart(
    section: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_record(make_record(seed=seed, noise=section), folder)
        runs.append(StoredRun(read_record(folder / "run.json"), folder, "local"))
    without = StoredRun(make_record(), tmp_path, "local")
    table = tables.over_runs(tables.scale_table, [*runs, without])
    assert table["seed"].to_list() == [0] * 4 + [1] * 4
    assert tables.over_runs(tables.scale_table, [without]).empty
    made = [tables.over_runs(make, runs) for make in (tables.budget_table, tables.crossing_table)]
    assert len(noise_plots.budget_figure(made[0], "", made[1]).axes) == 2


def test_figures_draw_what_there_is_and_say_if_there_is_nothing(section: dict[str, Any]) -> None:
    table, crossing = tables.budget_table(section), tables.crossing_table(section)
    figure = noise_plots.budget_figure(table, "", crossing)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[1:-2] == ["FP8 rowwise against BF16"]
    sampling = figure.axes[0].lines[0]
    drawn = table[(table["step"] == 0) & (table["scope"] == "all")]["sampling_error"]
    assert np.allclose(sampling.get_ydata(), drawn)
    assert len(noise_plots.layer_figure(tables.parameter_table(section), "").axes) == 2
    budget = noise_plots.budget_figure(table.head(0), "nothing yet", crossing)
    layers = noise_plots.layer_figure(table.head(0), "nothing yet")
    assert [figure.texts[0].get_text() for figure in (budget, layers)] == ["nothing yet"] * 2


def test_the_figure_marks_where_the_errors_are_equal(section: dict[str, Any]) -> None:
    table, crossing = tables.budget_table(section), tables.crossing_table(section)
    crossing["crossing_batch"] = 40.0
    crossing.loc[crossing["step"] == 50, "crossing_batch"] = math.inf
    figure = noise_plots.budget_figure(table, "", crossing)
    marked = [[text.get_text().strip() for text in axis.texts] for axis in figure.axes]
    assert marked == [["40 to 40"], []]
    assert "document A" in figure.legends[0].get_texts()[-1].get_text()
