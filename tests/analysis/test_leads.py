"""FP8's lead, pooled over sessions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.pairing import sessions_of, shorten_arms
from fp8study.analysis.speed import throughput_table
from fp8study.core.records import UNSTEADY
from tests.checkout import ROOT
from tests.factories import CPU, make_record, store
from tests.table_factories import frame


def store_leads(folder: Path, hour: int, *leads: float, **changes: Any) -> None:
    """Store a pair of runs for each lead (a ratio), repeats of one seed in one session.

    With `beside_those` BF16's runs are there already.
    """
    beside_those = changes.pop("beside_those", False)
    precision = changes.pop("precision", "fp8_tensorwise")
    place, measured = changes.pop("place", "local"), changes.pop("results", {})
    gathers = changes.pop("fp8_all_gather", False)
    for repeat, lead in enumerate(leads):
        for kind, rate in (("bf16", 10_000.0), (precision, 10_000.0 * lead))[beside_those:]:
            fields = {"study": f"at-{hour}", "repeat": repeat, "precision": kind} | changes
            name = f"{kind}-{repeat}-{hour}-{fields.get('num_gpus', 1)}-{fields.get('model', '')}"
            name += "-".join(fields.get("skip", []))
            fields["fp8_all_gather"] = gathers and kind != "bf16"
            rates = {"tokens_per_second_per_gpu": rate, "energy_joule_per_token": 1 / rate}
            fields["results"] = rates | measured
            when = f"2000-01-01T{hour:02}:0{repeat}:00+00:00"
            record = make_record(**fields, run_id=name, started_at=when, ended_at=when)
            store(folder, place, record)


def only(table: pd.DataFrame) -> pd.Series:
    (row,) = [row for _, row in table.iterrows()]
    return row


def test_sessions_are_pooled_and_the_last_one_replaces_nothing(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.1, 1.2, 1.2)
    store_leads(tmp_path, 9, 1.5)
    row = only(leads_table(frame(tmp_path)))
    assert (row["num_sessions"], row["num_pairs"], row["num_runs"]) == (2, 4, 8)
    in_first = (1.1 * 1.2 * 1.2) ** (1 / 3)
    assert row["lead_pct"] == pytest.approx(100 * ((in_first * 1.5) ** 0.5 - 1))
    assert (row["lead_low_pct"], row["lead_high_pct"]) == (pytest.approx(10), pytest.approx(50))
    assert row["ci_low_pct"] < 0 < row["lead_high_pct"] < row["ci_high_pct"]
    assert row["sessions"] == "2000-01-01 01:00: +16.6 %; 2000-01-01 09:00: +50.0 %"
    assert row["studies"] == "at-1, at-9"
    assert len(row["run_ids"].split()) == 8
    assert "local/at-9/bf16-0-9-1-" in row["run_ids"]
    assert row["energy_change_pct"] == pytest.approx(100 * (1 / 1.2 - 1))


@pytest.mark.parametrize("machine", ["h100x1", "h200x2", "h200x4"])
def test_every_lead_lies_in_the_middle_of_its_interval(machine: str) -> None:
    path = ROOT / "results/reference" / machine / "tables/leads.csv"
    leads = pd.read_csv(path).dropna(subset="ci_low_pct")
    low, lead, high = (
        np.log1p(leads[f"{name}_pct"] / 100) for name in ("ci_low", "lead", "ci_high")
    )
    assert len(leads) and (low < lead).all()
    assert np.allclose((low + high) / 2, lead, atol=1e-4)


def test_the_spread_between_sessions_is_learnt_from_every_setting(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.10)
    store_leads(tmp_path, 9, 1.12)
    store_leads(tmp_path, 1, 1.3, model="llama-3.2-3b")
    table = leads_table(frame(tmp_path)).set_index("model")
    assert table["ci_low_pct"].notna().all()
    once, twice = table.loc["llama-3.2-3b"], table.loc["llama-3.2-1b"]
    # One session less widens the interval by the root of two, on the scale of logarithms.
    assert once["ci_high_pct"] - once["ci_low_pct"] > 1.4 * (
        twice["ci_high_pct"] - twice["ci_low_pct"]
    )


def test_one_session_alone_has_the_interval_of_its_pairs(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.10, 1.11, 1.12)
    row = only(leads_table(frame(tmp_path)))
    assert 8 < row["ci_low_pct"] < 10 < row["lead_pct"] < 12 < row["ci_high_pct"] < 14


def test_the_spread_of_one_session_is_learnt_from_every_setting_with_repeats(
    tmp_path: Path,
) -> None:
    store_leads(tmp_path, 1, 1.10, 1.11)
    alone = only(leads_table(frame(tmp_path)))
    store_leads(tmp_path, 1, 1.30, 1.31, model="llama-3.2-3b")
    store_leads(tmp_path, 1, 1.20, model="qwen3-4b")
    table = leads_table(frame(tmp_path)).set_index("model")
    width = table["ci_high_pct"] - table["ci_low_pct"]
    assert width["llama-3.2-1b"] < (alone["ci_high_pct"] - alone["ci_low_pct"]) / 2
    assert 1.3 * width["llama-3.2-3b"] < width["qwen3-4b"]
    assert table.loc["qwen3-4b", "ci_low_pct"] > 15


def test_recipes_beside_one_bf16_run_are_no_repetition_of_each_other(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.10, 1.12)
    alone = only(leads_table(frame(tmp_path)))
    store_leads(tmp_path, 1, 1.10, 1.12, precision="fp8_rowwise", beside_those=True)
    table = leads_table(frame(tmp_path)).set_index("precision")
    for name in ("ci_low_pct", "ci_high_pct"):
        assert table[name].to_numpy() == pytest.approx([alone[name]] * 2)


def test_a_setting_whose_step_time_had_not_settled_has_its_own_spread_alone(
    tmp_path: Path,
) -> None:
    unsteady = {"warnings": [f"{UNSTEADY}, after 41 s: it still changed by 7.5%"]}
    store_leads(tmp_path, 1, 1.30, 1.301, model="llama-3.2-3b")
    store_leads(tmp_path, 1, 0.80, model="llama-3.2-1b", **unsteady)
    store_leads(tmp_path, 1, 0.80, 0.90, model="qwen3-4b", **unsteady)
    table = leads_table(frame(tmp_path)).set_index("model")
    width = table["ci_high_pct"] - table["ci_low_pct"]
    assert width["llama-3.2-3b"] < 3
    assert table["ci_low_pct"].isna().tolist() == [True, False, False]
    assert width["qwen3-4b"] > 50


def test_one_pair_of_each_setting_has_no_interval(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.10)
    store_leads(tmp_path, 1, 1.20, model="llama-3.2-3b")
    assert leads_table(frame(tmp_path))["ci_low_pct"].isna().all()


def test_runs_of_two_sessions_make_no_pair(tmp_path: Path) -> None:
    for hour, precision in ((1, "bf16"), (5, "fp8_tensorwise")):
        when = f"2000-01-01T0{hour}:00:00+00:00"
        record = make_record(precision=precision, started_at=when, ended_at=when)
        store(tmp_path, "local", record)
    assert leads_table(frame(tmp_path)).empty


def test_another_host_is_another_session(tmp_path: Path) -> None:
    for host, precision in (("a", "bf16"), ("b", "fp8_tensorwise")):
        record = make_record(precision=precision, machine={"host_hash": host})
        store(tmp_path, "local", record)
    assert leads_table(frame(tmp_path)).empty
    assert list(sessions_of(frame(tmp_path)).str[-4:]) == ["on a", "on b"]


def test_what_one_gpu_varies_by_is_not_the_interval_of_several(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.10, 1.12)
    store_leads(tmp_path, 1, 1.20, num_gpus=2, strategy="fsdp2")
    low = leads_table(frame(tmp_path)).set_index("num_gpus")["ci_low_pct"]
    assert low[1] < 10
    assert pd.isna(low[2])
    store_leads(tmp_path, 3, 1.30, num_gpus=2, strategy="fsdp2", study="again")
    low = leads_table(frame(tmp_path)).set_index("num_gpus")["ci_low_pct"]
    assert low[2] < -20  # one degree of freedom


def test_a_second_session_of_a_study_is_pooled_with_the_first(tmp_path: Path) -> None:
    """It lies beside it in a folder of its own, and was on a rented host of the same name."""
    folder = tmp_path / "reference" / "h100"
    for name, card, lead in (("machine-2", "GPU-b", 1.2), ("machine", "GPU-a", 1.1)):
        gpus = [{"index": 0, "uuid": f"{card}bcd-0123", "name": "NVIDIA H100"}]
        there = {"host_hash": "rented", "num_gpus_on_machine": 1, "gpus": gpus}
        store_leads(tmp_path, 1, lead, place="reference/h100", study="machine", machine=there)
        (folder / "machine").rename(folder / name)
    row = only(leads_table(frame(tmp_path)))
    assert (row["num_sessions"], row["studies"]) == (2, "machine, machine-2")
    assert row["lead_pct"] == pytest.approx(100 * ((1.1 * 1.2) ** 0.5 - 1))
    assert re.findall(r"with GPU-[ab]bcd: (\S+) %", row["sessions"]) == ["+10.0", "+20.0"]


def test_studies_that_name_one_arm_differently_are_pooled(tmp_path: Path) -> None:
    """What an arm keeps in BF16 is in its name only where the study has another that does not."""
    usual, other = ["layers.0.q", "lm_head"], ["layers.1.q", "lm_head"]
    store_leads(tmp_path, 1, 1.1, skip=usual)
    store_leads(tmp_path, 5, 1.2, skip=usual)
    table = leads_table(shorten_arms(frame(tmp_path)))
    assert only(table)["arm"] == "FP8 tensorwise"
    store_leads(tmp_path, 5, 1.5, skip=other, beside_those=True)
    table = leads_table(shorten_arms(frame(tmp_path))).set_index("num_sessions")
    assert table.loc[2, "lead_pct"] == pytest.approx(100 * ((1.1 * 1.2) ** 0.5 - 1))
    assert table.loc[2, "arm"] == "FP8 tensorwise"
    assert table.loc[1, "arm"] == "FP8 tensorwise, skips layers.1.q lm_head"
    store_leads(tmp_path, 9, 1.5, skip=other)  # alone in its study, so not named there
    assert set(leads_table(shorten_arms(frame(tmp_path)))["arm"]) == {
        "FP8 tensorwise, skips layers.0.q lm_head", "FP8 tensorwise, skips layers.1.q lm_head",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("used", "hosts"),
    [("a b c a d", "a a c a c"),
     ("a c b d ab cd", "a c a c a c"),  # by turns, and a run on two tells whose are whose
     ("a c b a", "a c b a"),  # nobody knows whose the third is
     ("a c b e", "a c b e")],  # nor whether it is the fourth's
)  # fmt: skip
def test_hosts_of_one_name_are_told_apart_by_their_gpus(
    used: str, hosts: str, tmp_path: Path
) -> None:
    """Each host has one GPU at an index: a and b are of one, c and d of another, e of a third."""
    for at, cards in enumerate(used.split()):
        gpus = [{"index": "abcde".index(card) % 2, "uuid": f"GPU-{card}bcd-01"} for card in cards]
        there = {"host_hash": "rented", "num_gpus_on_machine": 2, "gpus": gpus}
        began = f"2000-01-01T00:0{at}:00+00:00"  # else it is a copy
        record = make_record(study=f"machine-{at}", machine=there, started_at=began)
        store(tmp_path, "local", record)
    named = [f"rented with GPU-{host}bcd" for host in hosts.split()]
    assert list(frame(tmp_path)["host_hash"]) == named


@pytest.mark.parametrize(("boots", "num_leads"), [("aa", 1), ("ab", 0)])
def test_jobs_of_one_boot_are_of_one_host_whatever_gpu_they_see(
    boots: str, num_leads: int, tmp_path: Path
) -> None:
    """A scheduler may show each job its own GPU alone, which then is the first."""
    for at, (boot, precision) in enumerate(zip(boots, ("bf16", "fp8_tensorwise"), strict=True)):
        there = {"host_hash": "node", "boot_hash": f"{boot}0123456789", "num_gpus_on_machine": 1,
                 "gpus": [{"index": 0, "uuid": f"GPU-{at}"}]}  # fmt: skip
        store(tmp_path, "local", make_record(precision=precision, machine=there))
    assert len(leads_table(frame(tmp_path))) == num_leads
    hosts = {"aa": ["node", "node"], "ab": ["node booted a0123456", "node booted b0123456"]}
    assert list(frame(tmp_path)["host_hash"]) == hosts[boots]


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": False},
        {"machine": CPU},
        {"untrained": ["*"]},
        {"results": {"num_alloc_retries": 1}},
    ],
)
def test_what_nobody_would_use_has_no_lead(changes: dict[str, Any], tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.2, **changes)
    table = leads_table(frame(tmp_path))
    assert table["lead_pct"].isna().all()
    assert len(table) == ("results" in changes)


def test_machines_are_never_pooled(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.2)
    store_leads(tmp_path, 1, 0.8, place="reference/box")
    table = leads_table(frame(tmp_path)).set_index("machine")
    assert table["lead_pct"].round().to_dict() == {"box": -20, "local": 20}


def test_a_trial_of_a_switch_has_no_vote(tmp_path: Path) -> None:
    for precision, rate in (("bf16", 1.0), ("fp8_tensorwise", 2.0)):
        record = make_record(precision=precision, results={"tokens_per_second_per_gpu": rate})
        record.config["attention"] = "cudnn"
        store(tmp_path, "local", record)
    assert leads_table(frame(tmp_path)).empty


def test_fp16_is_a_baseline_and_no_lead_or_gap_of_fp8(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 1.1)
    store_leads(tmp_path, 9, 1.2, precision="fp16")
    runs = frame(tmp_path)
    assert set(leads_table(runs)["precision"]) == {"fp8_tensorwise"}
    assert set(loss_gap_table(runs)["precision"]) == {"fp8_tensorwise"}
    rates = throughput_table(runs).set_index("precision")
    assert rates.loc["fp16", "arm"] == "FP16"
    assert pd.isna(rates.loc["fp16", "speedup_pct"])
    assert rates.loc["fp16", "note"] == ""
