"""The committed page is what the committed records give, and every row of it is told apart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis.speed import THEMES, VOID, measured_runs, theme_table
from fp8study.core.records import load_runs
from fp8study.report.benchmark_page import benchmarks_path, benchmarks_text
from tests.factories import CPU, make_record, store
from tests.peer_factories import store_peer

RESULTS = Path(__file__).parents[2] / "results"
MACHINE = "reference/h200x8"


def put(folder: Path, *rates: float, place: str = MACHINE, **changes: Any) -> None:
    measured = changes.pop("results", {})
    name = changes.pop("name", "run")
    for seed, rate in enumerate(rates):
        record = make_record(
            run_id=f"{name}-{seed}", seed=seed,
            results={"tokens_per_second_per_gpu": rate} | measured, **changes,
        )  # fmt: skip
        store(folder, place, record)


def rows(text: str, theme: str) -> list[list[str]]:
    """The cells of a theme's table, heading and rule left out."""
    after = text.split(f"### {theme}\n\n", 1)[1].split("\n\n", 1)[0]
    lines = [line.replace("\\|", "") for line in after.splitlines()[2:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_committed_page_is_what_the_records_give() -> None:
    """Another record, or another wording, wants `make report` and a commit."""
    committed = benchmarks_path(RESULTS).read_text(encoding="utf-8")
    assert committed == benchmarks_text(RESULTS), "run `make report` and commit BENCHMARKS.md"


def test_no_two_committed_rows_look_the_same() -> None:
    runs = measured_runs(load_runs(RESULTS))
    for machine, chosen in runs.groupby("machine"):
        for theme in THEMES:
            table = theme_table(chosen, theme)
            identity = ["study", "model", "GPUs", "setting", "precision"]
            twins = table[table.duplicated(identity, keep=False)]
            assert twins.empty, (machine, theme.title, twins[identity])


def test_a_row_is_the_median_with_the_range(tmp_path: Path) -> None:
    put(tmp_path, 40_000.0, 42_000.0, 41_500.0)
    put(tmp_path, 50_000.0, name="alone", precision="fp8_tensorwise")
    text = benchmarks_text(tmp_path)
    several, single = rows(text, "Throughput")
    assert several[-3:-1] == ["3", "41,500 (40,000 to 42,000)"]
    assert single[-3:-1] == ["1", "50,000"]
    assert several[:3] == ["quick", "llama-3.2-1b", "1"]
    assert "`make reproduce STUDY=quick`: 4 runs, 2000-01-01; 8 × NVIDIA H200" in text
    assert "torch 2.11.0, torchao 0.17.0, accelerate unknown" in text


def test_repeats_of_one_seed_all_count(tmp_path: Path) -> None:
    for repeat, rate in enumerate((100.0, 200.0, 600.0)):
        put(tmp_path, rate, name=f"repeat-{repeat}", repeat=repeat)
    assert rows(benchmarks_text(tmp_path), "Throughput")[0][-3:-1] == ["3", "200 (100 to 600)"]


def test_void_timings_give_no_figure_but_memory_does(tmp_path: Path) -> None:
    put(tmp_path, 40_000.0, results={"memory_peak_gib": 130.0})
    text = benchmarks_text(tmp_path)
    assert rows(text, "Throughput")[0][-2:] == [VOID, VOID]
    assert rows(text, "Peak memory")[0][-1] == "130.0"
    assert "40,000" not in text


@pytest.mark.parametrize(
    "changes",
    [{"status": "diverged"}, {"machine": CPU}, {"runs_per_gpu": 4},
     {"untrained": ["model.layers.*"]}, {"model": "llama-3.2-1b", "place": "local"}],
    ids=str,
)  # fmt: skip
def test_what_is_no_benchmark_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    place = changes.pop("place", MACHINE)
    put(tmp_path, 40_000.0, place=place, **changes)
    text = benchmarks_text(tmp_path)
    assert "No GPU records here yet." in text
    assert "40,000" not in text


def test_own_data_are_in_the_command_without_their_folder(tmp_path: Path) -> None:
    data = {"corpus": "text:stories.txt"}
    record = make_record(corpus=f"text:{tmp_path}/stories.txt", data=data)
    record.config["tokenizer"] = "bpe"
    store(tmp_path, MACHINE, record)
    text = benchmarks_text(tmp_path)
    assert "STUDY=quick SET='corpus=text:stories.txt tokenizer=bpe'`" in text
    assert str(tmp_path) not in text


def test_a_record_cannot_break_the_table(tmp_path: Path) -> None:
    put(tmp_path, 40_000.0, model="a|b<i>")
    assert r"a\|b\<i\>" in benchmarks_text(tmp_path)


def test_peers_stand_beside_ours(tmp_path: Path) -> None:
    put(tmp_path, 10_890.0, 11_000.0, 11_110.0, study="speed")
    assert "other trainers" not in benchmarks_text(tmp_path)
    folder = tmp_path / MACHINE / "speed" / "peer"
    store_peer(folder / "one")
    store_peer(folder / "two", precision="fp8_tensorwise")
    text = benchmarks_text(tmp_path)
    (row,) = rows(text, "Beside other trainers in the same call: speed")
    assert row[2:7] == ["synthetic-trainer 9.9.9", "3 and 3", "11,000", "10,000", "1.100"]
    assert " to " in row[7]
    assert "commit 0123456789, llama-3.2-1b × 1, bf16, batch 1: `train --everything`" in text
    assert text.count("no arm of ours did the same") == 1
    shutil.rmtree(folder)
    store_peer(folder / "one", status="out_of_memory")
    assert "bf16, batch 1, out of memory" in benchmarks_text(tmp_path)
