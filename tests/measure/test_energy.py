"""The power meter against a driver that we play ourselves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from fp8study.measure import energy
from fp8study.measure.energy import PowerMeter, summarise_energy

GPU = torch.device("cuda", 0)


class Driver:
    """Counts 300 W of wall time, at a power cap for every second sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts_energy: bool = True) -> None:
        self.samples = 0
        self.counts_energy = counts_energy
        played = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetTotalEnergyConsumption": self.energy,
            "nvmlDeviceGetPowerUsage": lambda handle: 300_000,
            "nvmlDeviceGetClockInfo": lambda handle, which: 1500 + 10 * (self.samples % 2),
            "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
        }
        for name, function in played.items():
            monkeypatch.setattr(pynvml, name, function)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc")
        )
        monkeypatch.setattr(energy, "SAMPLE_SECONDS", 0.01)

    def energy(self, handle: Any) -> int:
        assert handle == "GPU-abc"
        if not self.counts_energy:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(300_000 * time.perf_counter())  # mJ

    def reasons(self, handle: Any) -> int:
        self.samples += 1
        return int(pynvml.nvmlClocksEventReasonSwPowerCap) if self.samples % 2 else 0


def measured() -> dict[str, Any]:
    meter = PowerMeter(GPU)
    meter.open_window()
    time.sleep(0.3)
    meter.close_window()
    return meter.facts


def test_energy_is_the_difference_of_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    facts = measured()
    assert facts["watts_mean"] == pytest.approx(300, rel=0.3)
    assert facts["joules"] >= 300 * 0.3 * 0.9
    assert facts["clock_sm_mhz_min"] == 1500
    assert facts["throttled_pct"]["power_cap"] == pytest.approx(50, abs=35)


def test_what_is_between_pauses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, clock = Driver(monkeypatch), [0.0]
    monkeypatch.setattr(energy.time, "perf_counter", lambda: clock[0])
    meter = PowerMeter(GPU)
    meter.open_window()
    clock[0] = 2.0
    meter.pause()
    time.sleep(0.05)  # no sample is taken, but for one that had begun
    taken, clock[0] = driver.samples, 12.0
    time.sleep(0.05)
    assert driver.samples == taken
    meter.go_on()
    clock[0] = 13.0
    meter.close_window()
    assert meter.facts["joules"] == pytest.approx(300 * (2 + 1))
    assert meter.facts["watts_mean"] == pytest.approx(300)


def test_without_a_counter_sampled_power_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, counts_energy=False)
    facts = measured()
    assert facts["watts_mean"] == 300
    assert facts["joules"] == pytest.approx(300 * 0.3, rel=1)


def test_a_gpu_that_tells_nothing_has_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)

    def refuse(uuid: str) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", refuse)
    assert measured() == {}


def test_a_share_of_a_split_gpu_has_no_energy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: [1, 1])
    assert measured() == {}


def test_a_cpu_has_no_energy() -> None:
    meter = PowerMeter(torch.device("cpu"))
    meter.open_window()
    meter.close_window()
    assert meter.facts == {}
    assert summarise_energy([meter.facts], 100) == {}


def test_sampling_ends_where_the_window_never_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    meter = PowerMeter(GPU)
    meter.open_window()
    time.sleep(0.05)
    meter.stop()
    taken = driver.samples
    time.sleep(0.05)
    assert 0 < taken == driver.samples


def test_joules_per_token_are_all_gpus_over_all_tokens() -> None:
    one = {"joules": 100.0, "watts_mean": 500.0, "clock_sm_mhz_median": 1900,
           "clock_sm_mhz_min": 1800, "throttled_pct": {"power_cap": 10.0}}  # fmt: skip
    other = one | {"joules": 300.0, "watts_mean": 700.0, "clock_sm_mhz_min": 1500,
                   "throttled_pct": {}}  # fmt: skip
    found = summarise_energy([one, other], num_tokens=1000)
    assert found["joule_per_token"] == pytest.approx(0.4)
    assert (found["watts_mean"], found["clock_sm_mhz_min"]) == (600, 1500)
    assert found["throttled_pct"] == {"power_cap": 10.0}
    half = summarise_energy([one, {}], 1000)  # half an answer is none
    assert half == {"ranks": [one, {}]}
