import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fp8study.run import machine as machines
from fp8study.run.gpu_lease import memory_in_use
from fp8study.run.machine import visible_gpus


class NvmlError(Exception):
    pass


def fake_nvml(num_gpus: int) -> SimpleNamespace:
    """Return a management library whose second GPU answers as little as some drivers do."""

    def silent_on_one(value: Any) -> Any:
        def answer(handle: int, *_: int) -> Any:
            if handle == 1:
                raise NvmlError("Not Supported")
            return value

        return answer

    def memory(handle: int, version: int = 1) -> SimpleNamespace:
        silent_on_one(None)(handle if version == 2 else 0)
        return SimpleNamespace(total=140 * 2**30, used=3 * 2**30)

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: num_gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}abc-def",
        nvmlMemory_v2=2,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetPowerManagementLimit=silent_on_one(700_000),
        nvmlDeviceGetMaxClockInfo=silent_on_one(1980),
    )


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    library = fake_nvml(4)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield library


def test_gpus_are_described(four_gpus: SimpleNamespace) -> None:
    first, second, *_ = visible_gpus()
    assert (first.index, first.name, first.memory_gib) == (0, "NVIDIA H200", 140.0)
    assert (first.compute_capability, first.power_limit_watts) == ((9, 0), 700.0)
    assert (second.power_limit_watts, second.clock_sm_max_mhz) == (None, None)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("3, 0", [3, 0]),
        ("GPU-1abc-def,GPU-0abc-def", [1, 0]),
        ("GPU-2", [2]),  # CUDA takes a unique beginning
        ("1,-1,2", [1]),  # CUDA stops at the first that it does not know
        ("0,0", [0]),  # nobody can lease one GPU twice
    ],
)
def test_cuda_visible_devices_chooses_gpus(
    chosen: str | None,
    expected: list[int],
    four_gpus: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.index for gpu in visible_gpus()] == expected


def test_machine_without_a_driver_has_no_gpus(
    four_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setattr(four_gpus, "nvmlInit", no_driver)
    assert visible_gpus() == []


def test_gpu_that_shares_the_machines_memory_is_described(
    four_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_supported(handle: int) -> None:
        raise NvmlError("Not Supported")

    monkeypatch.setattr(four_gpus, "nvmlDeviceGetMemoryInfo", not_supported)
    assert len(visible_gpus()) == 4


def test_an_amd_gpu_is_said_to_be_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "visible_gpus", lambda: [])
    monkeypatch.setattr(machines.Path, "exists", lambda path: str(path) == "/dev/kfd")
    assert "AMD GPUs are not supported" in str(machines.unsupported_gpu())
    monkeypatch.setattr(machines.Path, "exists", lambda path: False)
    assert machines.unsupported_gpu() is None


def test_the_memory_in_use_is_asked_of_the_driver(four_gpus: SimpleNamespace) -> None:
    assert [memory_in_use(index) for index in range(3)] == [3.0, 0.0, 3.0]  # one does not say

    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    four_gpus.nvmlInit = no_driver
    assert memory_in_use(0) == 0.0
