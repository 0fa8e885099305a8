from pathlib import Path

import pytest

from fp8study.analysis.peers import PEER_COLUMNS, peer_table
from fp8study.core.config import make_config
from fp8study.core.records import load_runs
from fp8study.report import speed_sentences
from fp8study.report.layouts import PEER_LEADS
from fp8study.report.table import markdown
from tests.factories import make_record, store
from tests.peer_factories import store_peer


def test_our_arm_stands_beside_the_peer_that_did_its_work(tmp_path: Path) -> None:
    place = "reference/box"
    for seed, rate in enumerate((10_900.0, 11_000.0, 11_100.0)):
        results = {"tokens_per_second_per_gpu": rate}
        memory = {"memory": {"steady_reserved_gib": 25.0 + seed}}
        record = make_record(study="beside", seed=seed, results=results, instruments=memory)
        store(tmp_path, place, record)
    store(tmp_path, place, make_record(study="alone", precision="fp8_rowwise"))
    folder = tmp_path / place / "beside" / "peer"
    store_peer(folder / "same")
    store_peer(folder / "other", precision="fp8_tensorwise")
    (row,) = peer_table(load_runs(tmp_path)).to_dict("records")
    assert (row["machine"], row["study"], row["precision"]) == ("box", "beside", "bf16")
    assert (row["num_runs"], row["num_peer_runs"]) == (3, 3)
    assert row["tokens_per_second_per_gpu"] == 11_000
    assert row["range"] == "10,900 to 11,100"
    assert row["peer_range"] == "9,900 to 10,100"
    assert row["ratio"] == pytest.approx(1.1, rel=1e-4)
    assert row["ratio_interval"].startswith("1.0")
    assert (row["reserved_gib"], row["peer_reserved_gib"]) == (26.0, 30.0)


def test_arms_that_clip_stand_in_the_same_group(tmp_path: Path) -> None:
    for norm in (1.0, None):
        record = make_record(study="beside", max_grad_norm=norm, run_id=f"norm-{norm}")
        # As the tuned path chooses: with clipping other switches are usual.
        record.config.update(make_config(record.config | {"path": "tuned"}).to_dict())
        store(tmp_path, "reference/box", record)
    store_peer(tmp_path / "reference/box/beside/peer/same")
    table = peer_table(load_runs(tmp_path))
    assert list(table["arm"]) == ["BF16", "BF16, clipped at 1"]
    assert table["setting"].nunique() == 1


def test_without_peers_the_table_has_its_columns(tmp_path: Path) -> None:
    store(tmp_path, "reference/box", make_record())
    table = peer_table(load_runs(tmp_path))
    assert table.empty
    assert list(table) == PEER_COLUMNS


def test_blocks_are_compared_within_and_pooled_over_sessions(tmp_path: Path) -> None:
    """A box that slows down by half from block to block changes no ratio within one."""
    place, peers = "reference/box", tmp_path / "reference/box/beside/peer"
    speed = {0: 1.0, 1: 0.5, 2: 0.25, 3: 0.125}
    for precision, ours in (("bf16", 11_000.0), ("fp8_tensorwise", 14_300.0)):
        for repeat, factor in speed.items():
            results = {"tokens_per_second_per_gpu": ours * factor * (1 + 0.001 * repeat)}
            record = make_record(
                study="beside", repeat=repeat, precision=precision, results=results,
                run_id=f"{precision}-{repeat}",
            )  # fmt: skip
            store(tmp_path, place, record)
        theirs = {"bf16": 10_000.0, "fp8_tensorwise": 12_000.0}[precision]
        for day, blocks in ((2, [1, 0]), (3, [3, 2])):
            store_peer(
                peers / f"{precision}-{day}", precision=precision, blocks=blocks,
                started_at=f"2000-01-0{day}T10:00:00+00:00", log_files=["a", "b"],
                tokens_per_second_per_gpu=[theirs * speed[block] for block in blocks],
                memory_peak_gib=[30.0, 30.0],
            )  # fmt: skip
    bf16, fp8 = peer_table(load_runs(tmp_path)).to_dict("records")
    assert (bf16["num_blocks"], bf16["num_peer_runs"]) == (4, 4)
    assert bf16["ratio"] == pytest.approx(1.1 * 1.0015, rel=1e-5)
    low, high = map(float, bf16["ratio_interval"].split(" to "))
    assert 1.095 < low < bf16["ratio"] < high < 1.105
    assert bf16["sessions"] == "2000-01-02T10:00: 1.101; 2000-01-03T10:00: 1.103"
    assert fp8["lead_pct"] == pytest.approx(30)
    assert fp8["peer_lead_pct"] == pytest.approx(20)
    assert fp8["lead_high_pct"] - fp8["lead_low_pct"] < 0.1


def test_a_block_without_its_partner_does_not_count(tmp_path: Path) -> None:
    for repeat in (0, 1):
        record = make_record(study="beside", repeat=repeat, run_id=f"run-{repeat}")
        store(tmp_path, "reference/box", record)
    store_peer(tmp_path / "reference/box/beside/peer/some", blocks=[1, 2, 3])
    (row,) = peer_table(load_runs(tmp_path)).to_dict("records")
    assert (row["num_blocks"], row["ratio_interval"]) == (1, "no interval: 1 run")


def test_a_peer_out_of_memory_is_named_and_a_switch_of_fp8_has_its_lead(tmp_path: Path) -> None:
    place = "reference/box"
    tuned = {"path": "tuned", "strategy": "none"}
    for precision, rate, of_fp8 in (
        ("bf16", 10_000.0, {}),
        ("fp8_tensorwise", 13_000.0, {"transposes": "separate", "cast_kernels": "one_layout"}),
    ):
        record = make_record(
            study="beside", precision=precision, run_id=precision, max_grad_norm=1.0,
            results={"tokens_per_second_per_gpu": rate},
        )  # fmt: skip
        asked = make_config(record.config | {"master_dtype": "fp32"} | tuned | of_fp8)
        record.config.update(asked.resolved().to_dict())
        store(tmp_path, place, record)
        peers = tmp_path / place / "beside" / "peer" / precision
        one = {"tokens_per_second_per_gpu": [8_000.0], "memory_peak_gib": [30.0], "blocks": [0]}
        store_peer(peers / "timed", precision=precision, **one)
        none = {"tokens_per_second_per_gpu": [], "memory_peak_gib": [], "status": "out_of_memory"}
        for session in ("first", "second"):
            store_peer(peers / session, name="short", precision=precision, **none)
    table = peer_table(load_runs(tmp_path))
    short, timed = (table[table["peer"].str.startswith(name)] for name in ("short", "synth"))
    assert list(short["ratio_interval"]) == ["out of memory"] * 2
    assert short["num_blocks"].isna().all()
    assert timed["num_blocks"].tolist() == [1, 1]
    assert timed["lead_pct"].tolist()[1] == pytest.approx(30)
    assert "out of memory" in markdown(table, PEER_LEADS)
    told = speed_sentences.peers(table)
    assert (
        "tuned path over synthetic-trainer 9.9.9, tokens/s: llama-3.2-1b on 1 GPU 1.25 times"
        in told
    )
    assert "1.62 times in FP8 tensorwise (with separate transposes) (1 block" in told
    assert "(1 block on the same GPUs)" in told
    assert (
        "Out of memory on 1 GPU: short 9.9.9 with llama-3.2-1b in BF16 and FP8 tensorwise." in told
    )
    assert "tokenises" not in told


def test_leads_are_of_one_machine(tmp_path: Path) -> None:
    rates = {("a", "bf16"): 10_000.0, ("a", "fp8_tensorwise"): 13_000.0,
             ("b", "bf16"): 20_000.0, ("b", "fp8_tensorwise"): 22_000.0}  # fmt: skip
    for (box, precision), rate in rates.items():
        record = make_record(
            study="beside", precision=precision, run_id=precision,
            results={"tokens_per_second_per_gpu": rate},
        )  # fmt: skip
        store(tmp_path, f"reference/{box}", record)
        store_peer(tmp_path / f"reference/{box}/beside/peer/{precision}", precision=precision)
    table = peer_table(load_runs(tmp_path))
    leads = table[table["precision"] != "bf16"].set_index("machine")["lead_pct"]
    assert leads.to_dict() == {"a": pytest.approx(30), "b": pytest.approx(10)}


def test_a_trainer_that_only_ran_out_of_memory_is_told(tmp_path: Path) -> None:
    store(tmp_path, "reference/box", make_record(study="beside", max_grad_norm=1.0))
    none = {"tokens_per_second_per_gpu": [], "memory_peak_gib": [], "status": "out_of_memory"}
    store_peer(tmp_path / "reference/box/beside/peer/short", name="short", **none)
    told = speed_sentences.peers(peer_table(load_runs(tmp_path)))
    assert told.endswith("shapes. Out of memory on 1 GPU: short 9.9.9 with llama-3.2-1b in BF16.")
