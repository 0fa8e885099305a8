"""Energy, power and clocks of a GPU over the timed window, from the driver's own counters.

Absent rather than zero: where the driver does not say, nothing is reported.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter
from typing import Any

import torch

#: Clocks and reasons are sampled; the energy is a counter and needs no sampling.
SAMPLE_SECONDS = 0.25

#: NVML's names of why a GPU does not run at its highest clock → ours.
_REASONS = {
    "nvmlClocksEventReasonSwPowerCap": "power_cap",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power_brake",
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal",
    "nvmlClocksEventReasonHwThermalSlowdown": "thermal",
    "nvmlClocksEventReasonHwSlowdown": "hardware_slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync_boost",
}


class PowerMeter:
    """One GPU's energy between `open_window` and `close_window`, without what is between pauses."""

    def __init__(self, device: torch.device) -> None:
        self.facts: dict[str, Any] = {}
        self._handle = _handle(device) if device.type == "cuda" else None
        self._stop, self._counts = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._seconds, self._joules = 0.0, 0.0
        self._watts: list[float] = []
        self._clocks: list[int] = []
        self._reasons: Counter[str] = Counter()

    def open_window(self) -> None:
        """Read the counter and start sampling; call when the GPU has finished what came before."""
        if self._handle is None:
            return
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self.go_on()
        self._thread.start()

    def pause(self) -> None:
        """Leave out what comes now, as a save; call when the GPU has finished the last step."""
        if self._thread is None:
            return
        self._counts.clear()
        self._seconds += time.perf_counter() - self._since
        self._joules += _joules(self._handle) - self._joules_before

    def go_on(self) -> None:
        """Count again."""
        if self._thread is None:
            return
        self._since, self._joules_before = time.perf_counter(), _joules(self._handle)
        self._counts.set()

    def close_window(self) -> None:
        """Read the counter again; call when the GPU has finished the window's last step."""
        if self._thread is None:
            return
        self.pause()
        self.stop()
        watts = statistics.fmean(self._watts) if self._watts else math.nan
        if not math.isnan(self._joules):
            watts = self._joules / self._seconds
        if not math.isnan(watts):
            self.facts |= {"joules": watts * self._seconds, "watts_mean": watts}
        if self._clocks:
            self.facts["clock_sm_mhz_median"] = statistics.median(self._clocks)
            self.facts["clock_sm_mhz_min"] = min(self._clocks)
            self.facts["throttled_pct"] = {
                reason: 100 * number / len(self._clocks) for reason, number in self._reasons.items()
            }

    def stop(self) -> None:
        """End sampling, also where the window never closes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            if not self._counts.is_set():
                continue
            watts = _told("nvmlDeviceGetPowerUsage", self._handle)
            clock = _told("nvmlDeviceGetClockInfo", self._handle, 1)  # of the multiprocessors
            reasons = _reasons(self._handle)
            if watts is not None:
                self._watts.append(watts / 1000)
            if clock is not None and reasons is not None:
                self._clocks.append(clock)
                self._reasons.update(reasons)


def _told(function: str, *arguments: Any) -> Any:
    """Return what one of NVML's functions says; None where the driver does not say."""
    import pynvml

    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError:
        return None


def _reasons(handle: Any) -> set[str] | None:
    """Return our names of what throttles a GPU now."""
    import pynvml

    mask = _told("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if mask is None:
        return None
    return {reason for name, reason in _REASONS.items() if mask & getattr(pynvml, name, 0)}


def _handle(device: torch.device) -> Any:
    """Return NVML's handle of a torch device, found by its UUID: indices may be remapped.

    None where there is none, and for a GPU split into instances: its counters are everybody's.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (pynvml.NVMLError, AttributeError):
        return None
    is_split = (_told("nvmlDeviceGetMigMode", handle) or [0])[0]
    return None if is_split else handle


def _joules(handle: Any) -> float:
    """Return what the GPU has taken since its driver began to count; not a number: unknown."""
    millijoules = _told("nvmlDeviceGetTotalEnergyConsumption", handle)
    return math.nan if millijoules is None else millijoules / 1000


def summarise_energy(ranks: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Return a run's energy from each rank's `PowerMeter.facts`, in order.

    `num_tokens` are those of the timed window over all ranks.

    Returns:
        ``ranks``; and, where every rank knows its energy, ``joule_per_token`` (all GPUs' energy
        over all tokens), ``watts_mean`` and ``clock_sm_mhz_median`` (means over GPUs),
        ``clock_sm_mhz_min`` and ``throttled_pct`` (share of samples by reason, the worst GPU's).
        Empty if no rank knows anything.
    """
    if not any(ranks):
        return {}
    summary: dict[str, Any] = {}
    if all("joules" in facts for facts in ranks):
        summary["joule_per_token"] = sum(facts["joules"] for facts in ranks) / num_tokens
        summary["watts_mean"] = statistics.fmean(facts["watts_mean"] for facts in ranks)
    if all("clock_sm_mhz_median" in facts for facts in ranks):
        reasons = {reason for facts in ranks for reason in facts["throttled_pct"]}
        medians = [facts["clock_sm_mhz_median"] for facts in ranks]
        summary |= {
            "clock_sm_mhz_median": statistics.fmean(medians),
            "clock_sm_mhz_min": min(facts["clock_sm_mhz_min"] for facts in ranks),
            "throttled_pct": {
                r: max(facts["throttled_pct"].get(r, 0.0) for facts in ranks) for r in reasons
            },
        }
    return summary | {"ranks": ranks}
