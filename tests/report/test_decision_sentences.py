"""The answer in words: what to train in, where, and never of two machines at once."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

from fp8study.core.hardware import find_peak
from fp8study.report import page as pages
from fp8study.report import rows, sentences, speed_rows
from fp8study.report.words import machine_name
from tests.analysis.test_leads import store_leads
from tests.checkout import ROOT
from tests.factories import CPU, make_record, store


def told(results: Path) -> tuple[str, str]:
    report = pages.load_report(results)
    return sentences.decide(report), " ".join(sentences.conditions(report))


def test_slower_fp8_is_left_alone(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 0.90, 0.91, 0.92)
    decision, condition = told(tmp_path)
    assert decision == "**No: stay with BF16.**"
    assert condition.endswith(":** BF16 for llama-3.2-1b: \u22129.0 %.")


def test_faster_fp8_is_recommended_once_its_loss_is_known(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    decision, condition = told(tmp_path)
    assert decision == "**Yes, once its loss is checked.**"
    assert condition.endswith(":** FP8 for llama-3.2-1b: +21.0 %.")


def test_what_is_open_is_not_decided(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.0, 1.1)
    decision, condition = told(tmp_path)
    assert decision == "**Not decided: measure more.**"
    assert condition.endswith("1 of 1 open (+4.9 % so far).")


def test_the_decision_says_where_it_was_measured(tmp_path: Path) -> None:
    for gpus, leads in ((1, (0.90, 0.91, 0.92)), (2, (1.0, 1.1)), (4, (1.20, 1.21, 1.22))):
        store_leads(tmp_path, 1, *leads, num_gpus=gpus)
    decision, condition = told(tmp_path)
    assert decision == "**In some settings, once its loss is checked; in others BF16.**"
    assert condition.endswith(
        "FP8 for llama-3.2-1b (4 GPUs, batch 1): +21.0 %; BF16 for llama-3.2-1b (1 GPU, batch 1): "
        "\u22129.0 %; 1 of 3 open."
    )
    report = pages.load_report(tmp_path)
    asked = "A loss verdict ([`check-loss`](quality.qmd#sec-scatter)) for 1 setting surely faster"
    assert f"{asked} (+21.0 %); " in sentences.changes(report)


def test_a_loss_that_was_judged_and_left_open_is_told_apart(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.20, 1.21, 1.22)
    report = pages.load_report(tmp_path)
    judged = report.decisions.assign(loss_is_same=True, loss_verdict="undecided")
    said = sentences.changes(dataclasses.replace(report, decisions=judged))
    assert " for 1 setting surely faster (+21.0 %, 1 of them judged and undecided)" in said
    assert "judged and undecided" not in sentences.changes(report)


def give_sizes(results: Path) -> None:
    for path in results.rglob("run.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        is_large = record["config"]["model"] == "qwen3-4b"
        record["model"]["num_parameters"] = 4_022_468_096 if is_large else 1_235_814_400
        path.write_text(json.dumps(record), encoding="utf-8")


def test_a_condition_is_named_where_size_and_tokens_tell_the_settings_apart(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 0.90, 0.91, 0.92)
    store_leads(tmp_path, 2, 1.20, 1.21, 1.22, micro_batch_size=8)
    give_sizes(tmp_path)
    decision, condition = told(tmp_path)
    assert decision == (
        "**Yes, from 32,768 tokens per GPU and step on, once its loss is checked.** So in 1 of 1 "
        "setting, all on one GPU. Below that BF16 in 1 of 1."
    )
    assert condition.endswith(
        "FP8 at 32,768 tokens (1 GPU, plain): +21.0 %; BF16 up to 1.2B (1 GPU, plain) and 4,096 "
        "tokens: \u22129.0 %."
    )
    store_leads(tmp_path, 3, 1.10, 1.11, 1.12, model="qwen3-4b")
    give_sizes(tmp_path)
    decision, condition = told(tmp_path)
    assert decision.startswith("**Yes, from 4B or 32,768 tokens per GPU and step on, once its loss")
    assert ".** So in 2 of 2" in decision
    assert "FP8 at 4B (1 GPU, plain) or 32,768 tokens (1 GPU, plain): " in condition
    store_leads(tmp_path, 4, 0.80, 0.81, 0.82, model="qwen3-4b", micro_batch_size=8)
    give_sizes(tmp_path)
    decision, condition = told(tmp_path)
    assert " on, once" not in decision and "qwen3-4b (1 GPU, batch 1)" in condition


def test_a_large_model_alone_is_no_reason_where_it_had_more_tokens(tmp_path: Path) -> None:
    """An untied 1B at batch 8 was said to be large enough, with eight times the tokens."""
    store_leads(tmp_path, 1, 0.90, 0.91, 0.92)
    store_leads(tmp_path, 2, 1.20, 1.21, 1.22, model="qwen3-4b", micro_batch_size=8)
    give_sizes(tmp_path)
    decision, condition = told(tmp_path)
    assert decision.startswith("**Yes, from 32,768 tokens per GPU and step on, ")
    assert "FP8 at 32,768 tokens (1 GPU, plain): " in condition and "4B" not in condition


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


def test_ones_own_machine_is_decided_for_alone(tmp_path: Path) -> None:
    """The reference is told beside it, and has no say in the sentence."""
    store_leads(tmp_path, 1, 0.90, 0.91, 0.92, place="reference/box")
    store_leads(tmp_path, 2, 1.20, 1.21, 1.22, micro_batch_size=8)
    decision, condition = told(tmp_path)
    assert decision == "**Yes, once its loss is checked.**"
    assert "**Your machine (" in condition and "**box:** BF16 for" in condition


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
    for told in (" ".join(sentences.conditions(report)), verdicts):
        own, theirs = told.split("8 × H200")
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
    [("h200x8", 1, None), ("box", 1, None), ("h200x16", 16, None), ("h200x4", 1, "8 × H200"),
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
        most = int(own["num_gpus_on_machine"].max())
        assert machine_name(label) == f"{most} × {gpu}"
