"""Records of other trainers: what is refused, and with which of our arms they are paired."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis.peers import compare_with_peers, read_peer, read_peers
from fp8study.core.errors import UserError
from tests.factories import make_record
from tests.peer_factories import make_peer, store_peer


def test_a_sound_record_is_read_and_its_further_keys_are_left_alone(tmp_path: Path) -> None:
    peer = read_peer(store_peer(tmp_path, mfu_pct=[40.0]))
    assert (peer.name, peer.num_gpus, peer.status) == ("synthetic-trainer", 1, "completed")
    assert len(peer.tokens_per_second_per_gpu) == len(peer.memory_peak_gib) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": 7}, "name: Input should be a valid string, not 7"),
        ({"num_gpus": 0}, "num_gpus: Input should be greater than 0"),
        ({"num_gpus": True}, "num_gpus"),
        ({"precision": "fp8_tensorwis"}, "precision: Input should be 'bf16', 'fp16', 'fp8"),
        ({"machine": "H200"}, "machine: Input should be an object, not 'H200'"),
        ({"tokens_per_second_per_gpu": [1.0, 2.0, -3.0]}, "tokens_per_second_per_gpu"),
        (
            {"tokens_per_second_per_gpu": [1.0, "fast", 3.0]},
            "gpu.1: Input should be a valid number",
        ),
        ({"tokens_per_second_per_gpu": 9000.0}, "gpu: Input should be a valid array, not 9000.0"),
        ({"memory_peak_gib": [50.0]}, "1 values for 3 repeats"),
        ({"blocks": [0, 1]}, "blocks: 2 values for 3 repeats"),
        ({"tokens_per_second_per_gpu": [], "memory_peak_gib": []}, "empty"),
        ({"log_files": "a.log"}, "log_files: Input should be a valid array"),
        ({"status": "fine"}, "status: 'fine' is none of completed"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_file(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = store_peer(tmp_path, **changes)
    with pytest.raises(UserError) as raised:
        read_peer(path)
    assert str(raised.value).startswith(f"{path}: not a peer's record")
    assert words in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"name": "x"})])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "peer.json").write_text(text)
    with pytest.raises(UserError, match="not a peer's record"):
        read_peer(tmp_path / "peer.json")


def test_peers_lie_beside_the_runs_in_folders_or_by_themselves(tmp_path: Path) -> None:
    assert read_peers(tmp_path) == []
    store_peer(tmp_path / "peer" / "some-configuration")
    store_peer(tmp_path / "peer", file="other.json", num_gpus=2)
    (tmp_path / "peer" / "some-configuration" / "else.json").write_text("no record")
    assert sorted(peer.num_gpus for peer in read_peers(tmp_path)) == [1, 2]


def ours(factor: float = 1.1, **changes: Any) -> list[Any]:
    rates = (9_900.0, 10_000.0, 10_100.0)
    return [
        make_record(
            run_id=f"run-{seed}", seed=seed, model="llama-3.2-1b",
            results={"tokens_per_second_per_gpu": factor * rate}, **changes,
        )
        for seed, rate in enumerate(rates)
    ]  # fmt: skip


def test_ours_is_divided_by_the_peer_with_an_interval() -> None:
    ((_, _, ratio),) = compare_with_peers(ours(1.1), [make_peer()])
    assert ratio is not None
    assert ratio.estimate == pytest.approx(1.1)
    assert ratio.interval is not None
    assert ratio.interval.low < 1.1 < ratio.interval.high


@pytest.mark.parametrize(
    ("own", "theirs"),
    [({}, {"model": "llama-3.1-8b"}), ({}, {"precision": "fp8_tensorwise"}), ({}, {"num_gpus": 2}),
     ({}, {"sequence_length": 2048}), ({}, {"micro_batch_size": 2}),
     ({}, {"machine": {"device": "cuda", "gpu_name": "NVIDIA H100"}}),
     ({}, {"machine": {"device": "cuda", "gpu_name": "NVIDIA H200", "boot_hash": "later"}}),
     ({"gradient_accumulation_steps": 2}, {}), ({"activation_checkpointing": True}, {}),
     ({"untrained": ["model.layers.*"]}, {}), ({"status": "failed"}, {})],
    ids=str,
)  # fmt: skip
def test_other_work_or_another_gpu_is_not_compared(
    own: dict[str, Any], theirs: dict[str, Any]
) -> None:
    assert compare_with_peers(ours(**own), [make_peer(**theirs)]) == []


def test_an_arms_runs_of_another_boot_are_another_comparison() -> None:
    own = [{"device": "cuda", "gpu_name": "NVIDIA H200", "boot_hash": boot} for boot in "ab"]
    records = [*ours(1.1, machine=own[0]), *ours(1.5, machine=own[1])]
    records = [dataclasses.replace(r, run_id=f"{n}") for n, r in enumerate(records)]
    peer = make_peer(machine=own[0])
    ((_, arm, ratio),) = compare_with_peers(records, [peer])
    assert ratio is not None
    assert (len(arm.completed), ratio.estimate) == (3, pytest.approx(1.1))


def test_a_peer_that_ran_out_of_memory_gives_no_ratio() -> None:
    peer = make_peer(status="out_of_memory")
    ((_, _, ratio),) = compare_with_peers(ours(), [peer])
    assert ratio is None


def test_blocks_are_compared_whatever_failed_before_them() -> None:
    blocks = make_peer(blocks=[0, 1, 2])
    failed = make_peer(
        status="failed", tokens_per_second_per_gpu=[], memory_peak_gib=[], log_files=[],
        started_at="1999-01-01T00:00:00+00:00",
    )  # fmt: skip
    records = [dataclasses.replace(r, config=r.config | {"repeat": n}, run_id=f"{n}")
               for n, r in enumerate(ours(1.1))]  # fmt: skip
    alone, with_failed = (
        compare_with_peers(records, peers)[0][2] for peers in ([blocks], [failed, blocks])
    )
    assert alone == with_failed
    assert alone is not None and alone.counts == (3,)


def test_a_peers_rate_is_that_over_all_of_its_windows() -> None:
    assert make_peer().rates == [9_900, 10_000, 10_100]
    windows = [[10_000.0, 5_000.0, 10_000.0], [8_000.0], [9_000.0, 9_000.0]]
    peer = make_peer(windows_tokens_per_second=windows)
    assert peer.rates == pytest.approx([7_500, 8_000, 9_000])


@pytest.mark.parametrize("windows", [[[1.0], []], [1.0, 2.0, 3.0], [[1.0], [2.0]], "fast"])
def test_windows_that_are_none_are_refused(windows: object, tmp_path: Path) -> None:
    path = store_peer(tmp_path, windows_tokens_per_second=windows)
    with pytest.raises(UserError, match="windows_tokens_per_second"):
        read_peer(path)
