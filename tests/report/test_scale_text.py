"""The words and the table about sizes that nobody here has run."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis import scale
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.report.predictions import LINKS, SCALE, links_words, scale_rows, scale_words
from fp8study.report.table import show
from tests.checkout import ROOT


def test_the_words_say_what_it_rests_on_and_how_far_it_is_off() -> None:
    cells = cells_of(read_runs(ROOT / "results"))
    check = scale.check_table(cells)
    said = scale_words(check, scale.published_table())
    assert said.startswith(
        "**Beyond what was measured: take speeds as upper bounds.** Assumed: 8 GPUs a node"
    )
    for num_gpus in (1, 2, 4):
        assert f" % on {num_gpus}" in said
    whole = (check["step_error_pct"] * check["num_cells"])[check["num_gpus"] == 1].sum()
    mean = whole / check["num_cells"][check["num_gpus"] == 1].sum()
    assert f"off by {mean:.0f} % on 1," in said
    assert "on up to 128 GPUs the law promises 2 to 3 points too much" in said
    table = show(scale_rows(scale.scale_table(cells)), SCALE, "none")
    assert "llama-3.1-405b, 512 × NVIDIA H200 on 64 nodes" in str(table.data)
    assert "All rows: modelled" in str(table.data)
    assert "True" not in str(table.data)


def test_slow_links_are_told_with_their_rate_and_a_row_a_pair() -> None:
    links = scale.links_table(cells_of(read_runs(ROOT / "results")))
    assert f"at {links['link_gb_per_s'].iloc[0]:.1f} GB/s" in links_words(links)
    table = str(show(links, LINKS, "none").data)
    assert f"{links['measured_pct'].iloc[-1]:+.1f}" in table
    assert table.count(">llama-3.1-8b<") == 2


def test_without_records_it_says_so() -> None:
    empty = pd.DataFrame()
    assert "over other links" in links_words(empty)
    assert "No records of several GPUs" in scale_words(empty, scale.published_table())
    assert "nothing here" in str(show(scale_rows(empty), SCALE, "nothing here").data)
