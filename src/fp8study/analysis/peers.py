"""What another trainer did on the same machine in the same call, to hold ours against.

Rates of two calls differ by more than one would like, and rates of two machines by much more. So
a peer counts only where its record lies with ours: ``results/<machine>/<study>/peer/`` holds one
``peer.json`` a configuration, in folders or by itself, and ``results/<machine>/<study>/`` our runs.
Figures that others published are no records and never get here.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fp8study.analysis.arms import Arm, group_arms
from fp8study.analysis.ratios import Ratio, ratio_of
from fp8study.core.errors import UserError, nearest, one_line
from fp8study.core.recipes import RECIPES
from fp8study.core.records import STATUSES, RunRecord

_TEXTS = ("name", "version", "command", "model", "precision", "started_at")
_COUNTS = ("sequence_length", "micro_batch_size", "num_gpus")
_MEASURED = ("tokens_per_second_per_gpu", "memory_peak_gib")


@dataclass(frozen=True)
class PeerRecord:
    """One configuration of a peer, repeated in one call; further keys of the file are left alone.

    Raises:
        UserError: A field has the wrong type or range.
    """

    name: str
    version: str
    command: str
    """What was typed."""
    model: str
    """In our words, as are the other fields: a preset's name."""
    precision: str
    sequence_length: int
    """Tokens."""
    micro_batch_size: int
    """Sequences per GPU and forward pass."""
    num_gpus: int
    machine: dict[str, Any]
    """As in `fp8study.core.records.RunRecord`: at least device and gpu_name."""
    versions: dict[str, str | None]
    started_at: str
    """ISO 8601, UTC."""
    tokens_per_second_per_gpu: list[float]
    """One number a repeat, warm-up left out; see `rates`."""
    memory_peak_gib: list[float]
    """One number a repeat: what the allocator had reserved."""
    log_files: list[str]
    status: str = "completed"
    commit: str | None = None
    windows_tokens_per_second: list[list[float]] = field(default_factory=list)
    """The rates per GPU of each repeat's windows, all of equally many steps, if they are known."""

    @property
    def rates(self) -> list[float]:
        """Tokens per second and GPU of each repeat, over all of its timed steps, as ours are."""
        windows = self.windows_tokens_per_second
        return [statistics.harmonic_mean(w) for w in windows] or self.tokens_per_second_per_gpu

    def __post_init__(self) -> None:
        for name in _TEXTS:
            self._need(name, isinstance(getattr(self, name), str), "no text")
        for name in _COUNTS:
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            self._need(name, is_count and value > 0, "no positive whole number")
        for name in ("machine", "versions"):
            self._need(name, isinstance(getattr(self, name), dict), "no mapping")
        for name in _MEASURED:
            sound = _are_rates(getattr(self, name))
            self._need(name, sound, "no list of positive numbers, one a repeat")
        logs = self.log_files
        named = isinstance(logs, list) and all(isinstance(log, str) for log in logs)
        self._need("log_files", named, "no list of file names")
        self._need("status", self.status in STATUSES, f"none of {', '.join(STATUSES)}")
        known = tuple(RECIPES)
        self._need(
            "precision",
            self.precision in known,
            f"no precision of ours{nearest(self.precision, known)}",
        )
        counts = len(self.tokens_per_second_per_gpu), len(self.memory_peak_gib)
        if counts[0] != counts[1]:
            raise UserError(
                f"memory_peak_gib: {counts[1]} values for {counts[0]} repeats; give one a repeat"
            )
        windows = self.windows_tokens_per_second
        sound = isinstance(windows, list) and all(_are_rates(w) and w for w in windows)
        self._need("windows_tokens_per_second", sound, "no list of lists of positive numbers")
        if windows and len(windows) != counts[0]:
            raise UserError(
                f"windows_tokens_per_second: {len(windows)} lists for {counts[0]} repeats; give "
                "one a repeat, or none"
            )
        if self.status == "completed" and not counts[0]:
            raise UserError("tokens_per_second_per_gpu: empty; a completed peer has repeats")

    def _need(self, name: str, sound: bool, what: str) -> None:
        if not sound:
            raise UserError(f"{name}: {getattr(self, name)!r} is {what}; mend the record")


def _are_rates(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < float("inf")
        for v in values
    )


def read_peer(path: Path) -> PeerRecord:
    """Read one ``peer.json``.

    Raises:
        UserError: The file is not JSON, misses a field or holds a wrong value.
    """
    known = {each.name for each in fields(PeerRecord)}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise UserError("expected a mapping of fields to values")
        return PeerRecord(**{key: value for key, value in content.items() if key in known})
    except (OSError, ValueError, TypeError, UserError) as error:
        raise UserError(f"{path}: not a peer's record ({one_line(error)})") from error


def read_peers(study_dir: Path) -> list[PeerRecord]:
    """Read the peers beside the runs of a study, in the order of their paths.

    Args:
        study_dir: ``results/<machine>/<study>``.
    """
    folder = study_dir / "peer"
    return [
        read_peer(path) for path in sorted({*folder.glob("*.json"), *folder.rglob("peer.json")})
    ]


@dataclass(frozen=True)
class PeerComparison:
    """One of our arms and a peer at the same work."""

    peer: PeerRecord
    arm: Arm
    speed_ratio: Ratio | None
    """Ours ÷ the peer's tokens per second and GPU; None where a side has no rates that count."""

    @property
    def reserved_gib(self) -> float | None:
        """What our allocator had reserved, as a peer's record has it; the median over runs."""
        found = [
            r.instruments.get("memory", {}).get("steady_reserved_gib") for r in self.arm.records
        ]
        known = [value for value in found if value is not None]
        return statistics.median(known) if known else None


def compare_with_peers(
    records: list[RunRecord], peers: list[PeerRecord]
) -> tuple[list[PeerComparison], list[PeerRecord]]:
    """Pair our arms with peers that did the same work on the same kind of GPU.

    Args:
        records: Of one study.
        peers: From beside them.

    Returns:
        The pairs, and the peers that have no arm of ours.
    """
    arms = [arm for arm in group_arms(records).values() if len(arm.completed)]
    pairs, alone = [], []
    for peer in peers:
        matching = [arm for arm in arms if _same_work(arm, peer)]
        rates = peer.rates if peer.status == "completed" else []
        pairs += [PeerComparison(peer, arm, ratio_of([arm.rates], [rates])) for arm in matching]
        alone += [] if matching else [peer]
    return pairs, alone


def _same_work(arm: Arm, peer: PeerRecord) -> bool:
    ours, config = arm.records[0].machine, arm.config
    return (
        str(config.get("model")).rstrip("/").split("/")[-1] == peer.model
        and config.get("precision") == peer.precision
        and all(config.get(name) == getattr(peer, name) for name in _COUNTS)
        # Neither does more than its micro-batch between two updates, nor less than all of it.
        # What else is done there, as clipping, a peer's record does not say.
        and config.get("gradient_accumulation_steps") == 1
        and not config.get("activation_checkpointing")
        and not bool((arm.runs["stale"] | arm.runs["planted"]).any())
        and ours.get("gpu_name") == peer.machine.get("gpu_name")
    )
