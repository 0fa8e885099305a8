"""Which recipe a setting is decided by, and how tokens per second scale with GPUs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis.decision import decision_table, judged_losses
from fp8study.analysis.leads import SETTING, best_recipes, leads_table, scaling_table, to_decide
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.naming import FAST_ACCUMULATION, FP8_HEAD
from fp8study.report.speed_plots import scaling_figure
from tests.analysis.test_leads import store_leads
from tests.factories import make_record, store
from tests.table_factories import frame


def test_of_recipes_the_fastest_is_kept_and_scaling_starts_at_one_hundred(tmp_path: Path) -> None:
    for num_gpus, lead in ((1, 1.2), (4, 1.1)):
        store_leads(tmp_path, 1, lead, num_gpus=num_gpus, fp8_all_gather=num_gpus > 1)
        store_leads(tmp_path, 2, 0.9, num_gpus=num_gpus, precision="fp8_rowwise")
    leads = leads_table(frame(tmp_path))
    assert set(best_recipes(leads)["precision"]) == {"fp8_tensorwise"}
    scaling = scaling_table(leads).set_index(["precision", "num_gpus"])["kept_pct"]
    assert scaling["bf16", 4] == scaling["bf16", 1] == 100
    assert scaling["fp8_tensorwise", 4] == pytest.approx(100 * 1.1 / 1.2)


def test_weights_are_gathered_in_the_faster_format_where_gpus_are_counted(tmp_path: Path) -> None:
    for num_gpus, in_fp8, lead in ((1, True, 1.2), (2, True, 0.6), (2, False, 1.1)):
        store_leads(tmp_path, 1 + in_fp8, lead, num_gpus=num_gpus, fp8_all_gather=in_fp8)
    table = scaling_table(leads_table(frame(tmp_path)))
    two = table[(table["num_gpus"] == 2) & (table["precision"] != "bf16")]
    assert two["kept_pct"].tolist() == [pytest.approx(100 * 1.1 / 1.2)]
    assert two["fp8_all_gather"].tolist() == [False]
    axis = scaling_figure(table, "").axes[0]
    assert " ".join(axis.get_title(loc="left").split()).endswith("batch 1, BF16 all-gather")


def test_scaling_parts_batches_and_takes_clipped_runs_beside_clipped_ones(tmp_path: Path) -> None:
    ways = [
        (1, 1, None, 1.5),
        (1, 1, 1.0, 1.2),
        (2, 1, 1.0, 1.1),
        (1, 4, None, 1.3),
        (2, 4, None, 1.3),
    ]
    for number, (num_gpus, batch, norm, lead) in enumerate(ways):
        config = {"num_gpus": num_gpus, "micro_batch_size": batch, "max_grad_norm": norm}
        store_leads(tmp_path, number, lead, **config)
    table = scaling_table(leads_table(frame(tmp_path)))
    fp8 = table[table["precision"] != "bf16"].set_index(["micro_batch_size", "num_gpus"])
    assert fp8.loc[(1, 2), "kept_pct"] == pytest.approx(100 * 1.1 / 1.2)
    assert fp8.loc[(4, 2), "kept_pct"] == pytest.approx(100)
    assert len(fp8) == 4
    titles = [
        " ".join(axis.get_title(loc="left").split()) for axis in scaling_figure(table, "").axes
    ]
    assert [", clipped" in title for title in titles] == [True, False]


def test_a_shape_that_nobody_trains_has_a_lead_and_no_decision(tmp_path: Path) -> None:
    for model in ("llama-3.2-1b", "llama-1b-width-512"):
        store_leads(tmp_path, 1, 1.2, model=model)
    runs = frame(tmp_path)
    leads = leads_table(runs)
    assert len(leads) == 2
    assert set(best_recipes(leads)["model"]) == {"llama-3.2-1b"}
    decisions = decision_table(leads, judged_losses(loss_gap_table(runs), runs))
    assert set(decisions["model"]) == {"llama-3.2-1b"}


def test_several_nodes_are_held_against_the_most_gpus_of_one(tmp_path: Path) -> None:
    rates = {(4, 1): 100.0, (8, 1): 90.0, (8, 2): 81.0, (16, 2): 72.0}
    for hour, ((num_gpus, num_nodes), rate) in enumerate(rates.items()):
        for precision, times in (("bf16", 1.0), ("fp8_tensorwise", 1.5)):
            run_id = f"{precision}-{num_gpus}-{num_nodes}"
            results = {"tokens_per_second_per_gpu": times * rate}
            when = f"2000-01-01T{hour:02}:00:00+00:00"
            config = {"num_gpus": num_gpus, "num_nodes": num_nodes, "precision": precision}
            record = make_record(
                config=config, run_id=run_id, results=results, started_at=when, ended_at=when
            )
            store(tmp_path, "local", record)
    table = scaling_table(leads_table(frame(tmp_path)))
    assert len(table) == 8
    for _, lines in table.groupby("precision"):
        shares = lines.set_index(["num_gpus", "num_nodes"])["of_one_node_pct"]
        assert shares[8, 2] == pytest.approx(90)
        assert shares[16, 2] == pytest.approx(80)
        assert shares[[(4, 1), (8, 1)]].isna().all()


@pytest.mark.parametrize(
    ("model", "num_gpus", "batch", "stays"),
    [("llama-3.1-8b", 1, 1, True), ("llama-3.2-1b-untied", 1, 8, True),
     ("llama-3.1-8b", 2, 2, True), ("llama-3.1-8b", 4, 1, True), ("llama-3.1-8b", 8, 1, False),
     ("llama-3.2-1b-untied", 2, 1, True), ("llama-3.2-1b", 1, 8, True),
     ("llama-3.2-1b", 2, 8, False)],
)  # fmt: skip
def test_a_loss_head_that_one_must_ask_for_decides_nothing(
    model: str, num_gpus: int, batch: int, stays: bool
) -> None:
    sharded = "FSDP2" if num_gpus > 1 else "not sharded"
    row = dict.fromkeys(SETTING) | {
        "model": model, "num_gpus": num_gpus, "gpu_name": "NVIDIA H200",
        "precision": "fp8_tensorwise",
        "setting": f"{sharded}, 4096 tokens, batch {batch}, compiled, FP32 masters, tuned",
    }  # fmt: skip
    arms = "FP8 tensorwise", f"FP8 tensorwise, {FP8_HEAD}", f"FP8 tensorwise, {FAST_ACCUMULATION}"
    kept = to_decide(pd.DataFrame([row | {"arm": arm} for arm in arms]))
    assert [*kept["arm"]] == [*arms[: 1 + stays]]
    assert len(to_decide(pd.DataFrame([row | {"arm": arms[1]}]))) == 1  # it alone was asked for
