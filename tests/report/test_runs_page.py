"""The page of runs says of each run what its record says, under the name that tables link to."""

import hashlib
import re
from pathlib import Path

from fp8study.report import layouts
from fp8study.report.page import load_report
from fp8study.report.runs_page import runs_text, varied_fields
from fp8study.report.table import show
from tests.factories import CPU, make_record, store
from tests.study_factories import make_quick


def test_every_run_stands_under_the_name_that_tables_link_to(tmp_path: Path) -> None:
    make_quick(tmp_path)
    report = load_report(tmp_path)
    listed = re.findall(r'<details class="run" id="([^"]+)"', runs_text(report).data)
    assert sorted(listed) == sorted(report.runs["run_ids"])
    table = report.with_warnings(report.throughput)
    shown = show(table, layouts.THROUGHPUT, "", choose=["arm"]).data
    links = re.findall(r'href="runs\.html\?of=([^#"]+)#([^"]+)">(\d+)<', shown)
    assert len(links) == len(table)
    assert {first for _, first, _ in links} <= set(listed)
    keys = dict(re.findall(r'id="([^"]+)" data-key="(\w+)"', runs_text(report).data))
    assert len(set(keys.values())) == len(listed)
    named = [sorted(keys[name] for name in ids.split()) for ids in report.throughput["run_ids"]]
    assert [sorted(of.split(".")) for of, *_ in links] == named
    counts = [len(ids.split()) for ids in report.throughput["run_ids"]]
    assert [int(count) for *_, count in links] == counts
    assert shown.count("data-choose") == 1 and (len(table) > 15) == ("searchable" in shown)


def test_a_run_says_what_its_record_says(tmp_path: Path) -> None:
    record = make_record(warnings=["a <b>fallback</b>"], results={"loss_last20_mean": 7.0})
    folder = store(tmp_path, "reference/box", record, [9.0, 7.0, 5.0])
    store(tmp_path, "reference/box", make_record(precision="fp8_rowwise", seed=3))
    text = runs_text(load_report(tmp_path)).data
    assert "2 runs that differ in `precision`, `seed`." in text
    assert "precision fp8_rowwise, seed 3" in text
    assert "7.0000 nats, 1 warning" in text
    assert "a &lt;b&gt;fallback&lt;/b&gt;" in text
    assert "Loss as logged, from 9.00 to 5.00 over 3 steps" in text
    digest = hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()
    assert f"results/reference/box/{record.study}/{record.run_id}" in text
    assert digest[:12] in text


def test_a_cpus_speed_is_not_shown(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record(machine=CPU))
    assert "tokens/s" not in runs_text(load_report(tmp_path)).data


def test_the_loss_of_a_timed_run_is_not_shown(tmp_path: Path) -> None:
    """It did as many steps as fitted."""
    results = {"loss_last20_mean": 5.4321, "tokens_per_second_per_gpu": 1234.0}
    record = make_record(config={"timed_seconds": 30.0}, results=results)
    store(tmp_path, "reference/box", record, [9.0, 7.0, 5.0])
    text = runs_text(load_report(tmp_path)).data
    assert "1,234 tokens/s per GPU, timed: its loss compares with none" in text
    assert "5.4321" not in text and "Loss as logged" not in text


def test_quarto_is_given_no_html_output() -> None:
    """For one, it loads require.js and jQuery from the network."""
    package = Path(__file__).parents[2] / "src" / "fp8study" / "report"
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    assert len(sources) > 20
    assert not [text for text in sources if re.search(r"import .*\bHTML\b|_repr_html_", text)]


def test_what_runs_differ_in_is_found_in_their_configurations() -> None:
    assert varied_fields([{"a": 1, "b": 2, "c": [0]}, {"a": 1, "c": [1]}]) == ["b", "c"]
    assert varied_fields([{"a": 1}, {"a": 1}]) == []


def test_a_field_that_came_later_is_no_difference(tmp_path: Path) -> None:
    older = make_record(seed=1)
    older.config.pop("optimizer_state", None)
    newer = make_record(seed=2)
    newer.config["optimizer_state"] = "fp32"
    for record in (older, newer):
        store(tmp_path, "reference/box", record)
    assert "2 runs that differ in `seed`." in runs_text(load_report(tmp_path)).data
