"""Synthetic records of a trainer that does not exist. None of these numbers was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8study.analysis.peers import PeerRecord
from tests.factories import H200


def peer_content(**changes: Any) -> dict[str, Any]:
    """Return what ``peer.json`` holds."""
    return {
        "name": "synthetic-trainer",
        "version": "9.9.9",
        "commit": "0123456789" * 4,
        "command": "train --everything",
        "model": "llama-3.2-1b",
        "precision": "bf16",
        "sequence_length": 4096,
        "micro_batch_size": 1,
        "num_gpus": 1,
        "machine": dict(H200),
        "versions": {"torch": "2.11.0", "torchao": "0.17.0"},
        "started_at": "2000-01-01T00:00:00+00:00",
        "tokens_per_second_per_gpu": [9_900.0, 10_000.0, 10_100.0],
        "memory_peak_gib": [30.0, 30.0, 30.5],
        "log_files": ["repeat-1.log", "repeat-2.log", "repeat-3.log"],
        **changes,
    }


def make_peer(**changes: Any) -> PeerRecord:
    """Build one record."""
    return PeerRecord(**peer_content(**changes))


def store_peer(folder: Path, file: str = "peer.json", **changes: Any) -> Path:
    """Write one record, sound or not, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    path.write_text(json.dumps(peer_content(**changes)), encoding="utf-8")
    return path
