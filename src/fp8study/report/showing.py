"""A run's instruments, for reading on a terminal."""

from __future__ import annotations

import statistics
from typing import Any

from fp8study.core.records import RunRecord


def instruments_text(record: RunRecord) -> str:
    """Return what a run measured: time, utilisation, memory, energy, GEMMs, communication."""
    results, found = record.results, record.instruments
    why = f": {record.status_detail}" if record.status_detail else ""
    lines = [f"{record.run_id} ({record.status}{why})"]
    use = results | {"run_tflops": found.get("ceilings", {}).get("run_tflops")}
    lines += _lines("loss", results, _LOSS)
    lines += _lines("time", results, _TIME) + _lines("use", use, _USE)
    lines += _lines("memory", found.get("memory", {}), _MEMORY)
    lines += _lines("energy", found.get("energy", {}), _ENERGY)
    step = found.get("step", {})
    for row in step.get("gemm", []):
        took = f" in {row['time_ms']:.1f} ms" if "time_ms" in row else ""
        lines.append(f"  GEMMs     {row['num']} of {row['dtypes']}: {row['tflop']:.3g} TFLOP{took}")
    kinds = step.get("by_kind_ms", {})
    lines += [f"  kernels   {ms:8.1f} ms  {kind.replace('_', ' ')}" for kind, ms in kinds.items()]
    lines += [
        f"  moved     {row['gib']:8.3f} GiB  {row['collective']} of {row['dtype']}, {row['num']} ×"
        for row in step.get("communication", [])
    ]
    if "overhead" in found:
        blocks = found["overhead"]
        pairs = zip(blocks["measured_ms"], blocks["plain_ms"], strict=True)
        cost = statistics.median(100 * (measured / plain - 1) for measured, plain in pairs)
        lines.append(f"  measuring {cost:+.2f} % of a step (median over blocks)")
    return "\n".join(lines)


#: Key → what it is called and how its value is written.
_LOSS = {
    "loss_last20_mean": "{:.4f} nats, mean of the last steps, 20 at most",
    "validation_loss": "{:.4f} nats on text that was kept out",
}
_TIME = {
    "step_time_ms_median": "{:.1f} ms a step (median)",
    "step_time_ms_p10": "{:.1f} ms (10th percentile)",
    "step_time_ms_p90": "{:.1f} ms (90th percentile)",
    "tokens_per_second_per_gpu": "{:,.0f} tokens/s per GPU",
    "startup_seconds": "{:.1f} s start-up",
    "first_step_seconds": "{:.1f} s first step",
    "warm_up_seconds": "{:.1f} s warm-up in all",
}
_USE = {
    "tflops_per_gpu": "{:.1f} TFLOP/s per GPU",
    "mfu_bf16_peak_pct": "{:.1f} % of the dense BF16 peak",
    "mfu_mixed_peak_pct": "{:.1f} % of the mixed peak",
    "mfu_achievable_pct": "{:.1f} % of the GEMM peak measured here",
}
#: What a share is of; the first records lack it.
_WHOLE = {
    "mfu_bf16_peak_pct": "bf16_peak_tflops",
    "mfu_mixed_peak_pct": "mixed_peak_tflops",
    "mfu_achievable_pct": "run_tflops",
}
_MEMORY = {
    "parameters_gib": "{:.2f} GiB parameters",
    "gradients_gib": "{:.2f} GiB gradients",
    "optimizer_gib": "{:.2f} GiB optimizer states",
    "rest_gib": "{:.2f} GiB rest at the peak, if all gradients are there by then",
    "first_step_allocated_gib": "{:.2f} GiB peak of the first step",
    "steady_allocated_gib": "{:.2f} GiB steady peak",
    "steady_reserved_gib": "{:.2f} GiB reserved",
    "num_alloc_retries": "{} retries in the timed window",
    "num_device_allocs": "{} allocations from the driver in the timed window",
}
_ENERGY = {
    "joule_per_token": "{:.4f} J per token",
    "watts_mean": "{:.0f} W per GPU",
    "clock_sm_mhz_median": "{:.0f} MHz SM clock",
}


def _lines(what: str, values: dict[str, Any], known: dict[str, str]) -> list[str]:
    lines = []
    for key, text in known.items():
        if values.get(key) is not None:
            whole = values.get(_WHOLE.get(key, ""))
            of = "" if whole is None else f", {whole:.0f} TFLOP/s"
            lines.append(f"  {what:<9} {text.format(values[key])}{of}")
    return lines
