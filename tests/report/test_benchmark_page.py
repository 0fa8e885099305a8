"""The committed page is what the committed records give, and every row of it is told apart."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fp8study.report.benchmark_page import SPEED, benchmarks_path, benchmarks_text
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


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of a section's tables, headings and rules left out."""
    section = text.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    tables = re.findall(r"(?:^\|.*\n)+", section.replace("\\|", ""), flags=re.M)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_committed_page_is_what_the_records_give() -> None:
    """Another record, or another wording, wants `make report` and a commit."""
    committed = benchmarks_path(RESULTS).read_text(encoding="utf-8")
    assert committed == benchmarks_text(RESULTS), "run `make report` and commit BENCHMARKS.md"
    for section in committed.split("\n### ")[1:]:  # a group's rows are told apart by their arms
        assert section.startswith(("Beside", "Software")) or not _twins(section)


def _twins(section: str) -> list[str]:
    lines = re.split(r"\n\*\*", section)
    arms = [[" ".join(row.split("|")[1:3]) for row in part.splitlines() if row[:1] == "|"]
            for part in lines]  # fmt: skip
    return [name for part in arms for name in part if part.count(name) > 1]


def test_a_row_is_the_median_over_seeds_and_repeats(tmp_path: Path) -> None:
    put(tmp_path, 40_000.0, 42_000.0, 41_500.0)
    put(tmp_path, 50_000.0, name="alone", precision="fp8_tensorwise")
    for repeat, rate in enumerate((100.0, 200.0, 600.0)):
        put(tmp_path, rate, name=f"repeat-{repeat}", repeat=repeat, model="tiny-llama")
    text = benchmarks_text(tmp_path)
    several, single, repeated = rows(text, SPEED)
    assert several[1:4] == ["BF16", "3", "41,500"]
    assert single[1:5] == ["FP8 tensorwise", "1", "50,000", "+25.0"]
    assert repeated[1:4] == ["BF16", "3", "200"]
    assert "**llama-3.2-1b, quick on h200x8: " in text
    assert "8 × NVIDIA H200" in text
    assert "2.11.0" in text and "0.17.0" in text


def test_void_timings_give_no_figure_but_memory_does(tmp_path: Path) -> None:
    put(tmp_path, 40_000.0, results={"memory_peak_gib": 130.0})
    text = benchmarks_text(tmp_path)
    assert "130.0" in rows(text, SPEED)[0]
    assert "memory nearly full" in rows(text, SPEED)[0]
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


def test_own_data_are_named_without_their_folder(tmp_path: Path) -> None:
    data = {"corpus": "text:stories.txt"}
    record = make_record(corpus=f"text:{tmp_path}/stories.txt", data=data)
    record.config["tokenizer"] = "bpe"
    store(tmp_path, MACHINE, record)
    text = benchmarks_text(tmp_path)
    assert "text:stories.txt" in text
    assert str(tmp_path) not in text


def test_a_record_cannot_break_the_table(tmp_path: Path) -> None:
    put(tmp_path, 40_000.0, model="a|b<i>")
    assert r"a\|b\<i\>" in benchmarks_text(tmp_path)


def test_peers_stand_beside_ours(tmp_path: Path) -> None:
    put(tmp_path, 10_890.0, 11_000.0, 11_110.0, study="speed")
    assert "Beside other trainers" not in benchmarks_text(tmp_path)
    folder = tmp_path / MACHINE / "speed" / "peer"
    store_peer(folder / "one")
    store_peer(folder / "two", precision="fp8_tensorwise")
    text = benchmarks_text(tmp_path)
    (row,) = rows(text, "Beside other trainers in the same session")
    assert row[:3] == ["BF16", "3", "11,000"]
    assert (row[4], row[6]) == ("10,000", "1.100")
    assert "peer: synthetic-trainer 9.9.9, 3 runs" in text
    assert "commit 0123456789, llama-3.2-1b × 1, bf16, batch 1, completed: `train" in text
    shutil.rmtree(folder)
    store_peer(folder / "one", status="out_of_memory")
    assert "bf16, batch 1, out of memory" in benchmarks_text(tmp_path)
