from pathlib import Path

import pytest

from fp8study.analysis.peers import PEER_COLUMNS, peer_table
from fp8study.core.config import make_config
from fp8study.core.records import load_runs
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
