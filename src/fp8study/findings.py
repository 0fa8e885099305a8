"""What an audit means: the torch-free half, for records as well as for running training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Above this share of unmoved weights, BF16 masters stall rather than train.
STALL_PCT = 50.0


def problems(audit: Mapping[str, Any]) -> list[str]:
    """Return what makes a run something else than it claims to be, one line each.

    Args:
        audit: The ``audit`` of a record, see `fp8study.audit`.
    """
    found = []
    if number := audit.get("num_unexplained"):
        found.append(
            f"{number} linear layers should compute in FP8 but do not: "
            f"{_names(audit['unexplained'], number)}"
        )
    if number := audit.get("num_outside_optimizer"):
        found.append(
            f"{number} of {audit['num_trainable']} trainable parameters are not in the optimizer: "
            f"{_names(audit['outside_optimizer'], number)}"
        )
    if number := audit.get("num_in_optimizer_twice"):
        found.append(f"{number} parameters are in the optimizer more than once")
    if number := audit.get("num_frozen"):
        found.append(
            f"{number} parameters have a gradient but the first step did not touch them: "
            f"{_names(audit['frozen'], number)}"
        )
    return found


def cautions(audit: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the run's loss must know, one line each."""
    stalled = audit.get("stalled_pct")
    if stalled is None or stalled <= STALL_PCT or problems(audit):
        return []
    masters = ", ".join(audit.get("master_dtypes", []))
    return [
        f"{stalled:.0f} % of the weights did not move in the first step: the learning rate is "
        f"too small for {masters} masters"
    ]


def audit_text(audit: Mapping[str, Any]) -> str:
    """Return an audit for reading, problems first."""
    lines = [f"  problem   {line}" for line in problems(audit)]
    lines += [f"  caution   {line}" for line in cautions(audit)]
    if planted := audit.get("num_planted"):
        lines.append(f"  planted   {planted} weights left out of the optimizer on purpose")
    if not lines:
        lines.append("  healthy   every weight with a gradient is trained, every layer explained")
    lines.append(f"  FP8       {audit['num_linear_fp8']} of {audit['num_linear']} linear layers")
    lines += [f"            {n} not: {reason}" for reason, n in audit["skipped"].items()]
    for what in ("master", "gradient", "optimizer_state"):
        dtypes = ", ".join(audit[f"{what}_dtypes"])
        lines.append(f"  {'dtype':<9} {what.replace('_', ' ')}: {dtypes}")
    stalled = audit["stalled_pct"]
    if stalled is not None:
        lines.append(f"  moved     {100 - stalled:.1f} % of the weights, in the first step")
    return "\n".join(lines)


def _names(names: list[str], number: int) -> str:
    rest = number - len(names[:3])
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
