"""What the answer rests on, in words, and never of two machines at once."""

import dataclasses
import math
from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis.runs.naming import IN_ONE_PASS
from fp8study.core.hardware import find_peak
from fp8study.report import page as pages
from fp8study.report import rows, sentences, speed_rows
from fp8study.report.words import machine_name
from tests.analysis.test_leads import store_leads
from tests.checkout import ROOT
from tests.factories import CPU, make_record, store


def test_a_loss_that_was_judged_and_left_open_is_told_apart(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    report = pages.load_report(tmp_path)
    judged = report.decisions.assign(loss_is_same=True, loss_verdict="undecided")
    said = sentences.changes(dataclasses.replace(report, decisions=judged))
    assert " for 1 setting surely faster (+21.0 %, 1 of them judged and undecided)" in said
    assert "judged and undecided" not in sentences.changes(report)


def test_settings_of_the_plain_path_alone_are_apart(tmp_path: Path) -> None:
    """Together both tables hold every setting, and the line over the second counts its own."""
    store_leads(tmp_path, 1, 0.90, 0.91, 0.92)
    plain = pages.load_report(tmp_path).decisions
    first, second = speed_rows.by_path(plain)
    assert (len(first), len(second)) == (1, 0)  # nothing else to show first
    tuned = plain.assign(path="tuned", num_gpus=2, lead_pct=20.0)
    first, second = speed_rows.by_path(pd.concat([plain, tuned], ignore_index=True))
    assert (first["path"].tolist(), second["path"].tolist()) == (["tuned"], ["plain"])
    assert sentences.plain_only(second) == (
        "1 setting timed on the plain path alone: BF16 in 1 (\u22129.0 %)"
    )


def test_no_range_joins_two_machines(tmp_path: Path) -> None:
    """A `quick` of one's own, on another GPU, never stands in one range with the reference."""
    mine = {"gpu_name": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 80.0}
    for place, facts, lead, loss in (
        ("reference/h200x8", {}, 1.2, 5.5), ("local", mine, 0.8, 7.7),
    ):  # fmt: skip
        for precision, factor in (("bf16", 1.0), ("fp8_rowwise", lead)):
            for seed in range(3):
                results = {
                    "tokens_per_second_per_gpu": 10_000 * factor, "memory_peak_gib": 50 * factor,
                    "loss_last20_mean": loss * (1 + (factor - 1) / 10) + seed / 1000,
                }  # fmt: skip
                record = make_record(precision=precision, seed=seed, results=results, machine=facts)
                store(tmp_path, place, record)
    report = pages.load_report(tmp_path)
    verdicts = "; ".join(
        f"{row['where']}: {row['span']}" for row in rows.verdicts(report).to_dict("records")
    )
    own, theirs = verdicts.split("8 × H200")
    assert "our machine (NVIDIA H100 80GB HBM3)" in own
    assert "+20.0" not in own and "\u221220.0" not in theirs and "H100" not in theirs
    unknown = sentences.unknown(report).splitlines()
    assert unknown[0].startswith("- **Your machine (NVIDIA H100") and "8 × H200" in unknown[1]
    (both,) = speed_rows.side_by_side(speed_rows.decisions(report.decisions)).to_dict("records")
    assert (round(both["lead_pct"]), round(both["lead_pct_other"])) == (-20, 20)


def test_a_laptop_that_ran_its_study_is_not_told_to_run_it(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22, place="reference/box")
    assert sentences.beside(pages.load_report(tmp_path)).startswith("Your machine is not here yet.")
    store(tmp_path, "local", make_record(machine=CPU))
    said = sentences.beside(pages.load_report(tmp_path))
    assert said.startswith("Your machine has no GPU: its [losses](quality.qmd) count, ")
    assert said.endswith("`make reproduce` on NVIDIA GPUs.")


@pytest.mark.parametrize(
    ("label", "name"),
    [("h200x4", "4 × H200"), ("rtx-4090x2", "2 × RTX 4090"), ("local", "your machine"),
     ("box", "box"), ("boxx2", "boxx2"), ("h100-nvlx8", "8 × H100 NVL")],
)  # fmt: skip
def test_a_machine_is_named_by_its_gpus(label: str, name: str) -> None:
    assert machine_name(label) == name


@pytest.mark.parametrize(
    ("label", "num_gpus", "seen"),
    [("h200x8", 1, None), ("h200x1", 1, None), ("box", 1, None), ("h200x16", 16, None),
     ("h200x4", 1, "8 × H200"), ("h200x1", 2, "8 × H200"), ("h200x2", 2, "8 × H200"),
     ("h100x8", 1, "8 × H200")],
)  # fmt: skip
def test_a_folder_is_not_taken_at_its_word(
    label: str, num_gpus: int, seen: str | None, tmp_path: Path
) -> None:
    """Of several nodes there are more GPUs than on the machine."""
    store(tmp_path, f"reference/{label}", make_record(num_gpus=num_gpus))
    lines = pages.load_report(tmp_path).unreadable
    said = f"/{label}: its name says {machine_name(label)}, its records are of {seen}; rename"
    assert [said in line for line in lines] == [True] * bool(seen)


def test_labels_of_committed_machines_tell_the_gpus_of_their_records() -> None:
    report = pages.load_report(ROOT / "results")
    runs = report.runs[(report.runs["machine"] != "local") & report.runs["gpu_name"].notna()]
    assert len(runs) and not any("rename the folder" in line for line in report.unreadable)
    for label, own in runs.groupby("machine"):
        [gpu] = {find_peak(name).name_part for name in own["gpu_name"]}
        most, is_alone = int(own["num_gpus_on_machine"].max()), own["num_gpus"].eq(1).all()
        said = f"1 × {gpu}" if is_alone else f"{most} × {gpu}"
        assert machine_name(label) == said


def test_an_interval_of_one_session_is_marked(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    (row,) = speed_rows.decisions(pages.load_report(tmp_path).decisions).to_dict("records")
    assert row["ci"].endswith("‡") and row["num_sessions"] == 1


@pytest.mark.parametrize(("in_one_pass", "is_said"), [(True, False), (False, True)])
def test_a_loss_from_before_one_pass_is_called_so(in_one_pass: bool, is_said: bool) -> None:
    row = {"loss_verdict": "equivalent", "loss_gap_pct": 0.01, "loss_epochs": 0.5, "machine": "a",
           "loss_study": "losses", "loss_machine": "a", "loss_is_same": True,
           "loss_in_one_pass": in_one_pass, "setting": f"tuned, {IN_ONE_PASS}",
           "loss_rate": math.nan, "loss_rate_above": math.nan}  # fmt: skip
    assert speed_rows._loss(pd.Series(row)).endswith("before\u00a0one\u00a0pass") == is_said
