"""What another trainer did on the same machine in the same session, to hold ours against.

Rates of two sessions differ by more than one would like, and rates of two machines by much more.
So a peer counts only where its record lies with ours: ``results/<machine>/<study>/peer/`` holds one
``peer.json`` a configuration and session, in folders or by itself, and
``results/<machine>/<study>/`` our runs. Where both sides were run in blocks, by turns on the same
GPUs, they are compared within blocks and pooled over sessions. Figures that others published are no
records and never get here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from fp8study.analysis.arms import Arm, Ratio, group_arms, median, ratio_in_blocks, ratio_of
from fp8study.analysis.runs.frames import run_path
from fp8study.analysis.runs.naming import arm_label, setting_label
from fp8study.analysis.runs.pairing import together
from fp8study.core.errors import UserError, one_line
from fp8study.core.recipes import Precision
from fp8study.core.record_shape import as_run
from fp8study.core.records import STATUSES, RunRecord, StoredRun

_COUNTS = ("sequence_length", "micro_batch_size", "num_gpus")
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PeerRecord(BaseModel):
    """One configuration of a peer, repeated in one call; further keys of the file are left alone.

    Raises:
        ValidationError: A field has the wrong type or range.
        UserError: The repeats do not fit together, or there is no such status.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    name: str
    version: str
    command: str
    """What was typed."""
    model: str
    """In our words, as are the other fields: a preset's name."""
    precision: Precision
    sequence_length: PositiveInt
    """Tokens."""
    micro_batch_size: PositiveInt
    """Sequences per GPU and forward pass."""
    num_gpus: PositiveInt
    machine: dict[str, Any]
    """As in `fp8study.core.records.RunRecord`: at least device and gpu_name."""
    versions: dict[str, str | None]
    started_at: str
    """ISO 8601, UTC."""
    tokens_per_second_per_gpu: list[_Positive]
    """One number a repeat, warm-up left out; see `rates`."""
    memory_peak_gib: list[_Positive]
    """One number a repeat: what the allocator had reserved."""
    log_files: list[str]
    status: str = "completed"
    commit: str | None = None
    windows_tokens_per_second: list[Annotated[list[_Positive], Field(min_length=1)]] = []
    """The rates per GPU of each repeat's windows, all of equally many steps, if they are known."""
    blocks: list[int] = []
    """Each repeat's block, if it was run by turns with ours: the ``repeat`` of our run."""

    @property
    def rates(self) -> list[float]:
        """Tokens per second and GPU of each repeat, over all of its timed steps, as ours are."""
        windows = self.windows_tokens_per_second
        return [statistics.harmonic_mean(w) for w in windows] or self.tokens_per_second_per_gpu

    @model_validator(mode="after")
    def _fits(self) -> Self:
        num_repeats = len(self.tokens_per_second_per_gpu)
        for name in ("memory_peak_gib", "windows_tokens_per_second", "blocks"):
            found = getattr(self, name)
            if len(found) != num_repeats and (found or name == "memory_peak_gib"):
                raise UserError(f"{name}: {len(found)} values for {num_repeats} repeats")
        if self.status not in STATUSES:
            raise UserError(f"status: {self.status!r} is none of {', '.join(STATUSES)}")
        if self.status == "completed" and not num_repeats:
            raise UserError("tokens_per_second_per_gpu: empty; a completed peer has repeats")
        return self


def read_peer(path: Path) -> PeerRecord:
    """Read one ``peer.json``.

    Raises:
        UserError: The file is not JSON, misses a field or holds a wrong value.
    """
    try:
        return PeerRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}, not {first['input']!r}"
        raise UserError(f"{path}: not a peer's record ({reason})") from error
    except (OSError, UserError) as error:
        raise UserError(f"{path}: not a peer's record ({one_line(error)})") from error


def read_peers(study_dir: Path) -> list[PeerRecord]:
    """Read the peers beside the runs of a study, in the order of their paths."""
    folder = study_dir / "peer"
    return [
        read_peer(path) for path in sorted({*folder.glob("*.json"), *folder.rglob("peer.json")})
    ]


#: A peer's records of one configuration: its sessions.
Sessions = tuple[PeerRecord, ...]


def in_sessions(peers: Sequence[PeerRecord]) -> list[Sessions]:
    """Put together what a peer did of one configuration in several sessions.

    Sessions out of blocks stand alone, where they have rates.
    """
    found: dict[tuple[object, ...], list[PeerRecord]] = {}
    for number, peer in enumerate(peers):
        names = ("name", "version", "model", "precision", *_COUNTS)
        what = tuple(getattr(peer, name) for name in names)
        alone = () if peer.blocks or not peer.rates else (number,)
        found.setdefault((*what, peer.machine.get("gpu_name"), *alone), []).append(peer)
    return [
        tuple(sorted(sessions, key=lambda peer: peer.started_at)) for sessions in found.values()
    ]


def compare_with_peers(
    records: list[RunRecord], peers: list[PeerRecord]
) -> list[tuple[Sessions, Arm, Ratio | None]]:
    """Pair the arms of one study with the peers beside it that did the same work on such a GPU.

    Of an arm those runs count that the peer's host did since the same boot: what the study did in
    another session is another comparison.

    Returns:
        Each pair with our tokens per second and GPU over the peer's; None where a side has no
        rates that count.
    """
    arms = group_arms(records).values()
    pairs = [
        (sessions, _since_boot(arm, sessions))
        for sessions in in_sessions(peers)
        for arm in arms
        if _same_work(arm, sessions[0])
    ]
    return [
        (sessions, arm, _ratio(_Rates.of_arm(arm, sessions), _Rates.of_peer(sessions)))
        for sessions, arm in pairs
        if len(arm.completed)
    ]


def _since_boot(arm: Arm, sessions: Sessions) -> Arm:
    """Return an arm without the runs of other hosts and boots; older records name neither."""
    boots = {_boot_of(peer.machine) for peer in sessions}
    records = tuple(record for record in arm.records if _boot_of(record.machine) in boots)
    ids = [record.run_id for record in records]
    return replace(arm, records=records, runs=arm.runs[arm.runs["run_id"].isin(ids)])


def _boot_of(machine: Mapping[str, Any]) -> tuple[object, ...]:
    return machine.get("host_hash"), machine.get("boot_hash")


@dataclass(frozen=True)
class _Rates:
    """One side's tokens per second and GPU."""

    every: list[float]
    blocks: dict[int, float]

    @classmethod
    def of_arm(cls, arm: Arm, sessions: Sessions) -> Self:
        """Where the peer ran in blocks so did ours; else equal repeats are no block."""
        return cls(arm.rates, arm.blocks if any(peer.blocks for peer in sessions) else {})

    @classmethod
    def of_peer(cls, sessions: Sessions) -> Self:
        # What came after a block takes nothing from it.
        known = [peer for peer in sessions if peer.status == "completed" or peer.blocks]
        every = [rate for peer in known for rate in peer.rates]
        blocks = [block for peer in known for block in peer.blocks]
        return cls(every, dict(zip(blocks, every, strict=True)) if blocks else {})


def _ratio(above: _Rates, below: _Rates) -> Ratio | None:
    """Divide within blocks where both sides have some, else group by group."""
    if above.blocks:
        return ratio_in_blocks(above.blocks, below.blocks)
    return ratio_of([above.every], [below.every])


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


_PLACE = ["machine", "study", "model", "num_gpus", "precision", "setting"]
PEER_COLUMNS = [
    *_PLACE, "max_grad_norm", "arm", "peer", "num_runs", "num_peer_runs",
    "tokens_per_second_per_gpu", "range", "peer_tokens_per_second_per_gpu", "peer_range", "ratio",
    "ratio_interval", "num_blocks", "sessions", "reserved_gib", "peer_reserved_gib", "run_ids",
    "tokens_per_gpu",
    *(f"{side}lead{end}_pct" for side in ("", "peer_") for end in ("", "_low", "_high")),
]  # fmt: skip


def peer_table(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """Hold our arms against the trainers whose records lie beside theirs.

    The columns of `PEER_COLUMNS`, one row for each of our arms that did a peer's work: medians and
    ranges of the rates over repeats, their ``ratio`` (ours over the peer's) with Welch's interval
    in words, or how the peer ended where it has no rates, and medians of what each side's allocator
    had reserved, GiB. Arms that clip gradients
    (at ``max_grad_norm``) say so in their name and share the others' setting. ``lead_pct`` and
    ``peer_lead_pct`` are each side's own FP8 over its own BF16, by the same rule, with their 95 %
    intervals.

    Raises:
        UserError: A peer's record is broken.
    """
    rows = []
    for folder in sorted({run.run_dir.parent for run in stored}):
        if not (peers := read_peers(folder)):
            continue
        there = [run for run in stored if run.run_dir.parent == folder]
        place = {"machine": there[0].machine_label, "study": there[0].record.study}
        pairs = compare_with_peers([run.record for run in there], peers)
        paths = {run.record.run_id: run_path(run) for run in there}
        for sessions, arm, ratio in pairs:
            ids = {"run_ids": together(arm.completed["run_id"].map(paths))}
            rows.append(place | _peer_row(sessions, arm, ratio) | ids)
    # A switch that exists for FP8 only is in the setting's name, and no part of the pair.
    bf16 = {_alike(row): row for row in rows if row["precision"] == "bf16"}
    for row in rows:
        if row["precision"] != "bf16" and _alike(row) in bf16 and row["num_peer_runs"]:
            row |= _leads(row, bf16[_alike(row)])
    table = pd.DataFrame(rows, columns=PEER_COLUMNS).astype({"num_blocks": "Int64"})
    order = [*_PLACE[:4], "peer", "setting", "max_grad_norm", "precision"]
    return table.sort_values(order, kind="stable", na_position="first")


def _peer_row(sessions: Sessions, arm: Arm, ratio: Ratio | None) -> dict[str, object]:
    peer, norm = sessions[0], arm.config.get("max_grad_norm")
    had = as_run(arm.records[0].config, arm.records[0].warnings)
    reserved = [r.instruments.get("memory", {}).get("steady_reserved_gib") for r in arm.records]
    own, theirs = _Rates.of_arm(arm, sessions), _Rates.of_peer(sessions)
    rates = [rate for session in sessions for rate in session.rates]
    return {
        **{name: arm.config.get(name) for name in ("model", "num_gpus", "precision")},
        "setting": setting_label(had, says_clipping=False),
        "max_grad_norm": norm,
        "arm": arm_label(arm.records[0]) + (f", clipped at {norm:g}" if norm else ""),
        "peer": f"{peer.name} {peer.version}",
        "sides": (own, theirs),
        "pair_key": arm.runs["pair_key"].iloc[0],
        "tokens_per_gpu": peer.sequence_length * peer.micro_batch_size,
        "num_runs": len(arm.rates),
        "num_peer_runs": len(rates),
        "tokens_per_second_per_gpu": median(arm.rates),
        "range": _range(arm.rates),
        "peer_tokens_per_second_per_gpu": median(rates),
        "peer_range": _range(rates),
        "ratio": ratio.estimate if ratio else None,
        "ratio_interval": ratio.interval_text() if ratio else _ends(sessions),
        "num_blocks": len({*own.blocks} & {*theirs.blocks}) if theirs.blocks else None,
        "sessions": _by_session(own, sessions) if theirs.blocks else "",
        "reserved_gib": median([gib for gib in reserved if gib is not None]),
        "peer_reserved_gib": median([gib for peer in sessions for gib in peer.memory_peak_gib]),
    }


def _ends(sessions: Sessions) -> str:
    """Name how the sessions without rates ended, as ``out of memory``."""
    ended = dict.fromkeys(peer.status for peer in sessions if not peer.rates)
    return ", ".join(ended).replace("_", " ")


def _by_session(own: _Rates, sessions: Sessions) -> str:
    """Write each session's ratio after the time at which its first block began."""
    ratios = [(peer.started_at, _ratio(own, _Rates.of_peer((peer,)))) for peer in sessions]
    return "; ".join(f"{at[:16]}: {ratio.estimate:.3f}" for at, ratio in ratios if ratio)


def _alike(row: dict[str, Any]) -> tuple[object, ...]:
    """What the BF16 row has in common with the FP8 row that it is compared with."""
    return row["machine"], row["study"], row["pair_key"], row["peer"]


def _leads(fp8: dict[str, Any], bf16: dict[str, Any]) -> dict[str, float]:
    found = {}
    for number, side in enumerate(("", "peer_")):
        ratio = _ratio(fp8["sides"][number], bf16["sides"][number])
        if ratio:
            found[f"{side}lead_pct"] = 100 * (ratio.estimate - 1)
            if ratio.interval:
                found[f"{side}lead_low_pct"] = 100 * (ratio.interval.low - 1)
                found[f"{side}lead_high_pct"] = 100 * (ratio.interval.high - 1)
    return found


def _range(values: Sequence[float]) -> str | None:
    return f"{min(values):,.0f} to {max(values):,.0f}" if values else None


def published_table(path: Path) -> pd.DataFrame:
    """Figures that others published, tokens/s per GPU, with each recipe's lead over BF16.

    A file with the columns source, setting, gpus, and one per precision gets
    ``fp8_tensorwise_pct`` and ``fp8_rowwise_pct``, % over BF16.
    """
    table = pd.read_csv(path)
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        table[f"{recipe}_pct"] = 100 * (table[recipe] / table["bf16"] - 1)
    return table
