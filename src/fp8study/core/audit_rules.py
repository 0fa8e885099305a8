"""What a run's audit, allocator and losses say of it, without torch: of records and in training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fp8study.core.errors import UserError

if TYPE_CHECKING:
    from fp8study.core.records import RunRecord

#: Recomputation changes by some points how much of the arithmetic the FP8 layers do.
PRODUCTS_TOLERANCE_PCT = 10.0
#: Above this share of unchanged weights, BF16 masters stall rather than train.
STALL_PCT = 50.0
#: Above this share of the GPU's memory, time spent in the allocator can pass for a speed-up, where
#: the record does not count what the allocator took from the driver.
MEMORY_LIMIT_SHARE = 0.85
#: Allocations from the driver a timed step, above which a timing is theirs. Nothing lies near it:
#: runs of ours took memory once in 26 to 50 steps, none of which was 1.2 % over the median, or
#: over a hundred times a step, and retried as well.
ALLOCATIONS_A_STEP = 1 / 20
#: A step's loss of so many times the first one is told. In 344 runs that compared losses at rates
#: that train well it was at most 1.02 times; an odd text of a batch of one can be above 1.05, too.
LOSS_RISE = 1.05

#: How the warning of such a rise begins, by which it is found among a record's warnings.
LOSS_ROSE = "the loss rose"
#: torch's operators of fused attention, forward.
_ATTENTION = re.compile(r"_scaled_dot_product_(cudnn|flash|efficient)_attention")
_DEFECTS = {
    "unexplained": "{n} linear layers should compute in FP8 but do not",
    "outside_optimizer": "{n} of {trainable} trainable parameters are not in the optimizer",
    "in_optimizer_twice": "{n} parameters are in the optimizer more than once",
    "frozen": "{n} parameters have a gradient but the first step did not touch them",
    "stale_casts": "{n} layers multiply with a kept weight that is not their weight's",
}


def timing_is_void(results: Mapping[str, Any], gpu_memory_gib: float | None = None) -> bool:
    """Tell whether a run's timing may be the allocator's, by a record's ``results``.

    It had to retry, or took memory from the driver again and again, inside the timed window. Of a
    run that does not count the second: it nearly filled its GPU's memory.
    """
    allocations, peak = results.get("num_device_allocs"), results.get("memory_peak_gib")
    if results.get("num_alloc_retries"):
        return True
    if allocations is None:
        return bool(peak and gpu_memory_gib and peak > MEMORY_LIMIT_SHARE * gpu_memory_gib)
    return bool(allocations > ALLOCATIONS_A_STEP * (results.get("num_timed_steps") or 0))


def problems(audit: Mapping[str, Any]) -> list[str]:
    """Return what makes a run something else than its ``audit`` claims, one line each."""
    found = []
    for name, words in _DEFECTS.items():
        if number := audit.get(f"num_{name}"):
            names = f": {_names(audit[name], number)}" if name in audit else ""
            found.append(words.format(n=number, trainable=audit.get("num_trainable")) + names)
    measured, expected = audit.get("fp8_gemm_flops_pct"), audit.get("fp8_gemm_flops_pct_expected")
    if measured is not None and expected is not None:
        if expected == 0 and measured > 0:
            found.append(f"{measured:.0f} % of the GEMMs' FLOPs ran in FP8, but none should")
        elif measured < expected - PRODUCTS_TOLERANCE_PCT:
            found.append(
                f"{measured:.0f} % of the GEMMs' FLOPs ran in FP8 in the profiled step, "
                f"but {expected:.0f} % should"
            )
    return found


def without_hidden_products(part: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out which share of the GEMMs ran in FP8, where a trace cannot tell.

    A replayed CUDA graph shows kernels but no GEMMs: those of the compiled layers are missing
    from the profiled step, in BF16 runs too. Uncompiled FP8 runs of before counted the GEMM that
    torchao's tensors took apart as well, of two dtypes as no kernel takes them. Such a run is proof
    of nothing, and is not counted. The `part` is a record's ``audit``, or the ``step`` of its
    instruments.
    """
    names = part.get("matmul_dtypes") or [row["dtypes"] for row in part.get("gemm", ())]
    counted_twice = any("float8" not in n and len(set(n.split(" × "))) > 1 for n in names)
    counted_twice &= config.get("compile") is False
    hidden = counted_twice or config.get("compile_mode") == "reduce-overhead"
    return {k: v for k, v in part.items() if not (hidden and k.startswith("fp8_gemm_"))}


def attention_kernels(step: Mapping[str, Any]) -> list[str]:
    """Return which of torch's fused attention kernels a profiled step's operators name.

    As ``cudnn``, ``flash`` (also where version 4 takes its place) and ``efficient``; none where no
    step was profiled. The `step` is that of a record's ``instruments``.
    """
    names = sorted({name for of_dtype in step.get("operations", {}).values() for name in of_dtype})
    return [found[1] for name in names if (found := _ATTENTION.fullmatch(name))]


def attention_taken_over(asked: str | None, step: Mapping[str, Any]) -> str:
    """Say so if another kernel than the preferred one did a GPU's attention; empty if none did.

    Whether FlashAttention is version 4 the operators of the `step`, as `attention_kernels` has it,
    do not tell.
    """
    if asked in (None, "default") or not step.get("operations"):
        return ""
    ran = attention_kernels(step) or ["none of torch's fused kernels"]
    others = [kernel for kernel in ran if kernel != asked.removesuffix("4")]
    return f"attention: {' and '.join(others)} ran, where {asked} was preferred" if others else ""


def audit_of(record: RunRecord) -> dict[str, Any]:
    """Return a record's audit with its attention's kernels, without what its trace cannot tell.

    Raises:
        UserError: It holds none.
    """
    if not record.audit:
        reason = (
            "the record is older than the audit: make the run again to have one"
            if record.status == "completed"
            else f"the run ended before a step was audited (status {record.status}): run it again"
        )
        raise UserError(f"audit: '{record.run_id}' holds none; {reason}")
    found = {"attention_kernels": attention_kernels(record.instruments.get("step", {}))}
    return without_hidden_products(found | record.audit, record.config)


def cautions(audit: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the run's loss must know, one line each."""
    stalled = audit.get("stalled_pct")
    if stalled is None or stalled <= STALL_PCT or problems(audit):
        return []
    masters = ", ".join(audit.get("master_dtypes", []))
    return [
        f"{stalled:.0f} % of {_whose(audit)} did not change in the first step: the learning rate "
        f"is too small for {masters} masters"
    ]


def audit_text(audit: Mapping[str, Any]) -> str:
    lines = [f"  problem   {line}" for line in problems(audit)]
    lines += [f"  caution   {line}" for line in cautions(audit)]
    if planted := audit.get("num_planted"):
        lines.append(f"  planted   {planted} weights left out of the optimizer on purpose")
    if not lines:
        lines.append("  healthy   every weight with a gradient is trained, every layer explained")
    lines.append(f"  FP8       {audit['num_linear_fp8']} of {audit['num_linear']} linear layers")
    lines += [f"            {n} not: {reason}" for reason, n in audit["skipped"].items()]
    whose = _whose(audit)
    for phase in audit.get("phases", ()):
        stalled = phase.get("stalled_pct")  # None: the run diverged by then
        seen = "no gradient in its first step was a number"
        if stalled is not None:
            seen = f"{100 - stalled:.1f} % of {whose} changed in its first step"
        lines.append(
            f"  phase     {phase['precision']} from step {phase['step'] + 1}, "
            f"{phase['num_linear_fp8']} layers in FP8; {seen}"
        )
    for what in ("master", "gradient", "optimizer_state"):
        dtypes = ", ".join(audit[f"{what}_dtypes"])
        lines.append(f"  {'dtype':<9} {what.replace('_', ' ')}: {dtypes}")
    if "matmul_dtypes" in audit:
        lines.append(f"  {'dtype':<9} matmul inputs: {', '.join(audit['matmul_dtypes'])}")
        for collective, dtypes in audit["communication_dtypes"].items():
            lines.append(f"  {'dtype':<9} {collective.replace('_', '-')}: {', '.join(dtypes)}")
    if kernels := audit.get("attention_kernels"):
        lines.append(f"  attention {', '.join(kernels)}")
    if audit.get("fp8_gemm_flops_pct") is not None:
        lines.append(
            f"  GEMMs     {audit['fp8_gemm_flops_pct']:.1f} % of their FLOPs in FP8 in the "
            f"profiled step, {audit['fp8_gemm_flops_pct_expected']:.1f} % expected"
        )
    stalled = audit["stalled_pct"]
    if stalled is not None:
        lines.append(f"  weights   {100 - stalled:.1f} % of {whose} changed in the first step")
    return "\n".join(lines)


def _whose(audit: Mapping[str, Any]) -> str:
    """Say of what ``stalled_pct`` is: weights left out on purpose cannot change, nor count."""
    return "the weights that are trained" if audit.get("num_planted") else "the weights"


def _names(names: list[str], number: int) -> str:
    rest = number - len(names[:3])
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
