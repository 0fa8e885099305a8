"""The answer on the first screen: on one GPU, on several, and by model."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis import decision
from fp8study.analysis.runs.naming import FP8_HEAD
from fp8study.analysis.small_steps import is_by_kernel_no_more
from fp8study.report import answer, layouts, loss_sentences, rows
from fp8study.report.page import load_report
from fp8study.report.table import show
from tests.analysis.test_leads import store_leads
from tests.checkout import ROOT

SLOWER, OPEN, FASTER = (0.90, 0.91, 0.92), (1.0, 1.1), (1.20, 1.21, 1.22)


def told(results: Path) -> list[str]:
    report = load_report(results)
    return answer.decide(report, answer.settled(report)).split("\n\n")


def cells(results: Path) -> list[dict[str, str]]:
    table, _ = answer.matrix(answer.settled(load_report(results)))
    return [
        {n: str(cell).replace("\u00a0", " ").replace("\u2011", "-") for n, cell in row.items()}
        for row in table.to_dict("records")
    ]


@pytest.mark.parametrize(
    ("ratios", "said", "cell"),
    [
        (SLOWER, "stay with BF16.** FP8 is surely faster in 0 of 1 setting, BF16 is to be kept "
         "in 1.", "BF16 at batch 1 (\u22129.0 %, plain path)"),
        (FASTER, "yes, once its loss is checked.** FP8 is surely faster in 1 of 1 setting.",
         "FP8 at batch 1 (+21.0 %, plain path)"),
        (OPEN, "not decided, measure more.** FP8 is surely faster in 0 of 1 setting, 1 open.",
         "open at batch 1 (+4.9 %, plain path)"),
    ],
)  # fmt: skip
def test_one_setting_is_answered_for(
    ratios: tuple[float, ...], said: str, cell: str, tmp_path: Path
) -> None:
    store_leads(tmp_path, 1, *ratios)
    first, limits = told(tmp_path)
    assert first == f"**On one GPU: {said}"
    assert limits.endswith("--num-gpus 8 --gpu h100-80gb`.")
    assert ("in 0 of the 1 faster setting: check yours" in limits) == (ratios == FASTER)
    (row,) = cells(tmp_path)
    assert row["1 GPU"] == cell and row["name"] == "llama-3.2-1b"


def test_nothing_is_answered_without_a_pair(tmp_path: Path) -> None:
    assert told(tmp_path)[0].startswith("**No answer yet.**")
    table, _ = answer.matrix(answer.settled(load_report(tmp_path)))
    assert table.empty


def test_one_gpu_and_several_are_answered_for_apart(tmp_path: Path) -> None:
    for gpus, ratios in ((1, SLOWER), (2, OPEN), (4, FASTER)):
        store_leads(tmp_path, 1, *ratios, num_gpus=gpus)
    alone, several, *_ = told(tmp_path)
    assert alone.startswith("**On one GPU: stay with BF16.**")
    assert several == (
        "**On several GPUs: FP8 for llama-3.2-1b (4 GPUs, batch 1), once its loss is checked.** "
        "FP8 is surely faster in 1 of 2 settings, 1 open."
    )
    (row,) = cells(tmp_path)
    assert [row[n].partition(" ")[0] for n in ("1 GPU", "2 GPUs", "4 GPUs")] == [
        "BF16", "open", "FP8",
    ]  # fmt: skip


def give_sizes(results: Path) -> None:
    for path in results.rglob("run.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        is_large = record["config"]["model"] == "qwen3-4b"
        record["model"]["num_parameters"] = 4_022_468_096 if is_large else 1_235_814_400
        path.write_text(json.dumps(record), encoding="utf-8")


def test_size_and_tokens_are_named_where_they_tell_the_settings_apart(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, *SLOWER)
    store_leads(tmp_path, 2, *FASTER, micro_batch_size=8)
    give_sizes(tmp_path)
    first = told(tmp_path)[0]
    assert first.startswith("**On one GPU: yes, from 32,768 tokens a GPU and step on, once")
    assert first.endswith("faster in 1 of 2 settings, BF16 is to be kept in 1.")
    (row,) = cells(tmp_path)
    assert row["1 GPU"].startswith("BF16 at batch 1 (\u22129.0 %, plain path); FP8 at batch 8 (")
    store_leads(tmp_path, 3, 1.10, 1.11, 1.12, model="qwen3-4b")
    give_sizes(tmp_path)
    assert "yes, from 4B or 32,768 tokens a GPU and step on, once" in told(tmp_path)[0]
    store_leads(tmp_path, 4, 0.80, 0.81, 0.82, model="qwen3-4b", micro_batch_size=8)
    give_sizes(tmp_path)
    assert "FP8 for llama-3.2-1b (1 GPU, batch 8), qwen3-4b (1 GPU, batch 1)" in told(tmp_path)[0]


def test_a_cell_names_the_recipe_unless_it_is_tensorwise(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, *FASTER, precision="fp8_rowwise")
    (row,) = cells(tmp_path)
    assert row["1 GPU"] == "FP8 at batch 1 (+21.0 %, rowwise, plain path)"


def test_a_length_that_a_large_model_alone_had_is_no_reason(tmp_path: Path) -> None:
    """Two GPUs had 8,192 tokens with an 8B alone, and were said to gain so with any model."""
    store_leads(tmp_path, 1, *SLOWER)
    store_leads(tmp_path, 2, *FASTER, model="qwen3-4b")
    store_leads(tmp_path, 3, *FASTER, model="qwen3-4b", micro_batch_size=8)
    give_sizes(tmp_path)
    assert "yes, from 4B on, once" in told(tmp_path)[0]


def test_an_open_setting_is_no_reason_either(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, *OPEN, micro_batch_size=16)
    store_leads(tmp_path, 2, *FASTER, micro_batch_size=8)
    give_sizes(tmp_path)
    assert "FP8 for llama-3.2-1b (1 GPU, batch 8), once" in told(tmp_path)[0]


def test_a_large_model_alone_is_no_reason_where_it_had_more_tokens(tmp_path: Path) -> None:
    """An untied 1B at batch 8 was said to be large enough, with eight times the tokens."""
    store_leads(tmp_path, 1, *SLOWER)
    store_leads(tmp_path, 2, *FASTER, model="qwen3-4b", micro_batch_size=8)
    give_sizes(tmp_path)
    assert "yes, from 32,768 tokens a GPU and step on, once" in told(tmp_path)[0]


def test_ones_own_machine_is_answered_for_alone(tmp_path: Path) -> None:
    """The reference is told beside it, and has no say in the sentence."""
    store_leads(tmp_path, 1, *SLOWER, place="reference/box")
    store_leads(tmp_path, 2, *FASTER, micro_batch_size=8)
    assert told(tmp_path)[0].startswith("**On one GPU: yes, once its loss is checked.** ")
    own, theirs = cells(tmp_path)
    assert own["gpu"].startswith("your machine (") and own["1 GPU"].startswith("FP8 at batch 8")
    assert theirs["1 GPU"].startswith("BF16 at batch 1")


def test_machines_with_one_kind_of_gpu_count_as_one_and_the_tuned_path_before_the_plain() -> None:
    report = load_report(ROOT / "results")
    table = answer.settled(report)
    place = ["gpu", "name", "num_gpus", "micro_batch_size", "gradient_accumulation_steps"]
    assert not table.duplicated(place).any() and len(table) < len(report.decisions)
    tuned = report.decisions[report.decisions["path"] == "tuned"]
    plain, where = table[table["is_plain"]], ["gpu_name", "model", "num_gpus"]
    timed = {*tuned[where].itertuples(index=False, name=None)}
    assert len(plain) and not timed & {*plain[where].itertuples(index=False, name=None)}
    shown, _ = answer.matrix(table)
    cells = " ".join(shown.drop(columns=["gpu", "name", "run_ids"]).to_numpy().ravel())
    assert cells.count("loss\u00a0equal") <= table["action"].eq(decision.FP8).sum()
    assert ("loss\u00a0equal" in cells) == table["action"].eq(decision.FP8).any()
    checked = table[table["action"] == decision.CHECK]
    tested = checked[checked["loss_is_same"].eq(True) & checked["loss_verdict"].eq("undecided")]
    assert cells.count("loss\u00a0undecided") == len(tested)
    for gap in tested["loss_gap_pct"]:
        assert f":\u00a0{gap:+.2f}\u00a0%".replace("-", "\u2212") in cells
    assert "[Answer](index.qmd#tbl-settled)" in loss_sentences.answer(report)
    equal = rows.settled_losses(report)
    assert not equal.duplicated(["model", "starts_from", "num_gpus"]).any()
    assert {*equal["verdict"]} == {"equivalent"}
    assert "llama-3.2-1b" in str(show(equal, layouts.SETTLED, "").data)
    still = f"tested and still open in {len(tested)}" if len(tested) else "faster settings; no run"
    assert still in answer.decide(report, table)


def test_of_machines_with_one_kind_of_gpu_the_latest_form_of_the_path_is_told() -> None:
    """Fewer sessions of what `run` does today come before more of what it did."""
    report = load_report(ROOT / "results")
    timed = report.decisions[report.decisions["ci_low_pct"].notna()]
    place = ["gpu_name", "model", "num_gpus", "micro_batch_size"]
    behind = timed.assign(behind=~timed["arm"].str.contains(FP8_HEAD))
    (row,) = (
        answer.settled(report).query("name == 'llama-3.1-8b' and num_gpus == 1").to_dict("records")
    )
    there = behind[(behind[place] == [row[name] for name in place]).all(axis=1)]
    assert there["machine"].nunique() > 1 and there["behind"].nunique() > 1
    latest = there[~there["behind"]].sort_values(["num_sessions", "num_pairs"], ascending=False)
    assert latest["lead_pct"].iloc[0] == row["lead_pct"]
    assert decision.forms_behind(pd.Series(row)) == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_an_earlier_form_is_told_until_todays_has_an_interval(is_known: bool) -> None:
    report = load_report(ROOT / "results")
    asked = {"machine": "h200x2", "model": "llama-3.2-3b", "num_gpus": 1, "micro_batch_size": 2}
    is_it = (report.decisions[list(asked)] == list(asked.values())).all(axis=1)
    earlier = report.decisions[is_it & ~report.decisions["setting"].str.contains("one pass")]
    today = earlier.assign(setting=earlier["setting"] + ", updated in one pass", lead_pct=30.0)
    if not is_known:
        today = today.assign(lead_pct=math.nan, ci_low_pct=math.nan, action=decision.MORE)
    both = dataclasses.replace(report, decisions=pd.concat([earlier, today]))
    (row,) = answer.settled(both).to_dict("records")
    assert row["is_before"] is not is_known
    assert (row["lead_pct"] == 30.0) == is_known


@pytest.mark.parametrize(("lead", "action"), [(30.0, decision.CHECK), (-12.0, decision.MORE)])
def test_a_gain_that_todays_path_does_not_show_is_open(lead: float, action: str) -> None:
    report = load_report(ROOT / "results")
    asked = {"machine": "h200x2", "model": "llama-3.2-3b", "num_gpus": 1, "micro_batch_size": 2}
    is_it = (report.decisions[list(asked)] == list(asked.values())).all(axis=1)
    earlier = report.decisions[is_it & ~report.decisions["setting"].str.contains("one pass")]
    today = earlier.assign(
        setting=earlier["setting"] + ", updated in one pass", lead_pct=lead, ci_low_pct=math.nan,
        ci_high_pct=math.nan, action=decision.MORE,
    )  # fmt: skip
    both = dataclasses.replace(report, decisions=pd.concat([earlier, today]))
    table = answer.settled(both)
    assert table["action"].tolist() == [action]
    (cell,) = answer.matrix(table)[0]["1 GPU"]
    assert f"earlier path; today's {lead:+.1f} %, no CI".replace("-", "\u2212") in cell.replace(
        "\u00a0", " "
    )


def test_nothing_is_opened_but_what_lost_by_kernel_and_is_one_graph_today() -> None:
    report = load_report(ROOT / "results")
    closed = decision.decision_table(
        report.leads, decision.judged_losses(report.loss_gaps, report.runs)
    )
    opened = decision.opened(closed)
    changed = closed[closed["action"] != opened["action"]]
    assert len(changed) and {*opened.loc[changed.index, "action"]} == {decision.MORE}
    assert {*changed["action"]} <= {decision.BF16, decision.TRY, decision.LITTLE}
    assert all(is_by_kernel_no_more(row) for _, row in changed.iterrows())
    assert sorted(report.decisions["action"]) == sorted(opened["action"])


def test_what_was_slower_by_kernel_is_open_where_steps_are_one_graph_today() -> None:
    report = load_report(ROOT / "results")
    asked = {"machine": "h100x1", "model": "llama-3.2-1b", "num_gpus": 1, "micro_batch_size": 1}
    is_it = (report.decisions[list(asked)] == list(asked.values())).all(axis=1)
    timed = report.decisions[is_it & report.decisions["path"].eq("tuned")]
    assert set(timed["action"]) == {decision.MORE} and timed["ci_high_pct"].max() < 0
    table = answer.settled(report)
    row = table[(table[list(asked)] == list(asked.values())).all(axis=1)]
    assert row["action"].tolist() == [decision.MORE]
    assert row["lead_pct"].iloc[0] in timed["lead_pct"].tolist()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"num_gpus": 4}, "open"),
        ({"num_gpus": 4, "master_dtype": "bf16"}, "open"),
        ({"num_gpus": 1, "strategy": "none"}, "open"),
        ({"num_gpus": 4, "micro_batch_size": 16}, "BF16"),
        ({"num_gpus": 4, "gradient_accumulation_steps": 2}, "BF16"),
        ({"num_gpus": 8}, "BF16"),  # for which the path makes no graph
    ],
    ids=str,
)
def test_what_was_slower_on_the_plain_path_is_open_where_the_tuned_one_makes_a_graph(
    changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """The page said BF16 of a Qwen3-4B on four H200, and `advise` FP8, predicted."""
    store_leads(tmp_path, 1, *SLOWER, model="qwen3-4b", **changes)
    (row,) = cells(tmp_path)
    gpus, batch = (changes.get(name, 1) for name in ("num_gpus", "micro_batch_size"))
    cell = row["1 GPU" if gpus == 1 else f"{gpus} GPUs"]
    passes = " in 2 passes" * ("gradient_accumulation_steps" in changes)
    assert cell == f"{kind} at batch {batch}{passes} (\u22129.0 %, plain path)"
    kept, said = "BF16 is to be kept in 1.", told(tmp_path)[0]
    assert said.endswith(", 1 open." if kind == "open" else f", {kept}")


def test_a_lead_is_of_all_machines_with_the_gpu_that_timed_the_same(tmp_path: Path) -> None:
    """One machine's stood there alone, and another's was 2 points above it."""
    store_leads(tmp_path, 1, *FASTER, place="reference/one")
    store_leads(tmp_path, 2, 1.31, 1.32, place="reference/two")
    store_leads(tmp_path, 4, 1.51, 1.52, place="reference/three", precision="fp8_rowwise")
    (row,) = cells(tmp_path)
    assert row["1 GPU"] == "FP8 at batch 1 (+21.0 to +31.5 %, plain path)"
    assert {name.split("/")[0] for name in row["run_ids"].split()} == {"one", "two"}
