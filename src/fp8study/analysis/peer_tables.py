"""The table of what another trainer did in the same call as our runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pandas as pd

from fp8study.analysis.frames import arm_label, setting_label
from fp8study.analysis.peers import PeerComparison, compare_with_peers, read_peers
from fp8study.core.records import StoredRun

_PLACE = ["machine", "study", "model", "num_gpus", "precision", "setting"]
PEER_COLUMNS = [
    *_PLACE, "max_grad_norm", "arm", "peer", "num_runs", "num_peer_runs",
    "tokens_per_second_per_gpu", "range", "peer_tokens_per_second_per_gpu", "peer_range", "ratio",
    "ratio_interval", "reserved_gib", "peer_reserved_gib",
]  # fmt: skip


def peer_table(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """Hold our arms against the trainers whose records lie beside theirs.

    Args:
        stored: From `fp8study.core.records.load_runs`.

    Returns:
        The columns of `PEER_COLUMNS`, one row for each of our arms that did a peer's work: medians
        and ranges of the rates over repeats, their ``ratio`` (ours over the peer's) with Welch's
        interval in words, and medians of what each side's allocator had reserved, GiB. Arms that
        clip gradients (at ``max_grad_norm``) say so in their name and share the others' setting.

    Raises:
        UserError: A peer's record is broken.
    """
    rows = []
    for folder in sorted({run.run_dir.parent for run in stored}):
        there = [run for run in stored if run.run_dir.parent == folder]
        pairs, _ = compare_with_peers([run.record for run in there], read_peers(folder))
        rows += [
            {"machine": there[0].machine_label, "study": there[0].record.study} | _row(pair)
            for pair in pairs
        ]
    table = pd.DataFrame(rows, columns=PEER_COLUMNS)
    order = [*_PLACE[:4], "setting", "max_grad_norm", "precision"]
    return table.sort_values(order, kind="stable", na_position="first")


def _row(pair: PeerComparison) -> dict[str, object]:
    peer, config, ratio = pair.peer, pair.arm.config, pair.speed_ratio
    norm = config.get("max_grad_norm")
    return {
        **{name: config.get(name) for name in ("model", "num_gpus", "precision")},
        "setting": setting_label(pair.arm.records[0].config, says_clipping=False),
        "max_grad_norm": norm,
        "arm": arm_label(pair.arm.records[0]) + (f", clipped at {norm:g}" if norm else ""),
        "peer": f"{peer.name} {peer.version}",
        "num_runs": len(pair.arm.rates),
        "num_peer_runs": len(peer.rates),
        "tokens_per_second_per_gpu": _median(pair.arm.rates),
        "range": _range(pair.arm.rates),
        "peer_tokens_per_second_per_gpu": _median(peer.rates),
        "peer_range": _range(peer.rates),
        "ratio": ratio.estimate if ratio else None,
        "ratio_interval": ratio.interval_text() if ratio else None,
        "reserved_gib": pair.reserved_gib,
        "peer_reserved_gib": _median(peer.memory_peak_gib),
    }


def _range(values: Sequence[float]) -> str | None:
    return f"{min(values):,.0f} to {max(values):,.0f}" if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
