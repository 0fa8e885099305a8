"""Peaks of GPUs by the names that their driver gives them."""

from typing import Any

import pytest

from fp8study.core.errors import UserError
from fp8study.core.hardware import (
    GPU_PEAKS,
    bf16_peak_tflops,
    find_peak,
    mixed_peak_tflops,
    named_gpu,
)


@pytest.mark.parametrize(
    ("gpu_name", "expected"),
    [
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144G"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_peak_is_found_by_the_drivers_name(gpu_name: str, expected: str) -> None:
    peak = find_peak(gpu_name)
    assert peak is not None
    assert peak.name_part == expected


def test_memory_is_what_error_correction_leaves() -> None:
    sizes = [named_gpu(name).memory_gib for name in ("l40s", "l4", "h100-80gb", "a100")]
    assert sizes == [45, 22.5, 80, None]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA B300 SXM6 AC", "b300-270gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("rtx4090", "rtx-4090-24gb"),
        ("4090", "rtx-4090-24gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40", "l40-48gb"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-96gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla A100", "a100"),
        *((each, peak.slug) for peak in GPU_PEAKS for each in (peak.slug, peak.name_part)),
    ],
)
def test_a_gpu_is_named_as_its_driver_or_this_project_prints_it(name: str, slug: str) -> None:
    assert named_gpu(name).slug == slug


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "is not known; name one of gb200.*, rtx-4090-24gb; without FP8: a100; for any "
           "other GPU run `make reproduce` on it$")
          for name in ("h30", "h900", "l20", "rtx 5080", "rtx pro 5000")),
        ("h100-pci", r"is not known \(did you mean 'h100-pcie'\?\)"),
        ("h100-96gb", r"is not known \(did you mean 'h100-80gb'\?\)"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "is not known"),
        ("NVIDIA H100", "several sizes of memory; name one of h100-pcie-80gb, .*, h100-80gb$"),
        ("v100", "V100 has no FP8 tensor cores.* train in FP16 there, or name one of"),
        ("NVIDIA A10", "A10 has no FP8 tensor cores.* train in BF16 there, or name one of"),
        *((name, "NVIDIA GPUs only: nothing else was tried") for name in
          ("mi250", "mi300x", "mi355x", "AMD Instinct MI325X", "tpu", "gaudi2")),
    ],
)  # fmt: skip
def test_other_gpus_are_not_taken_for_those_in_the_table(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        named_gpu(name)


@pytest.mark.parametrize(
    "gpu_name", [None, "", "NVIDIA Z999", "NVIDIA H2", "NVIDIA RTX A1000", "NVIDIA XH100"]
)
def test_no_peak_is_guessed(gpu_name: str | None) -> None:
    assert bf16_peak_tflops(gpu_name) is None
    assert mixed_peak_tflops(gpu_name, 0.5) is None


@pytest.mark.parametrize(
    ("gpu_name", "namesake"),
    [
        ("NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("NVIDIA GB300", "NVIDIA B300"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_peak_is_not_that_of_a_faster_or_slower_namesake(gpu_name: str, namesake: str) -> None:
    peak, other = find_peak(gpu_name), find_peak(namesake)
    assert other is not None
    assert peak is None or peak.bf16_tflops != other.bf16_tflops


def test_the_mixed_peak_lies_between_both_and_needs_fp8_units_only_for_fp8() -> None:
    assert bf16_peak_tflops("NVIDIA H200") == mixed_peak_tflops("NVIDIA H200", 0.0) == 989
    assert mixed_peak_tflops("NVIDIA H200", 1.0) == pytest.approx(1979)
    # Half of the work at each peak takes 1/2/989 + 1/2/1979 of a second per TFLOP.
    assert mixed_peak_tflops("NVIDIA H200", 0.5) == pytest.approx(1318.9, abs=0.1)
    assert mixed_peak_tflops("NVIDIA A100-SXM4-80GB", 0.0) == 312
    assert mixed_peak_tflops("NVIDIA A100-SXM4-80GB", 0.1) is None


def test_every_gpu_has_an_architecture() -> None:
    by_name = {peak.name_part: peak.architecture for peak in GPU_PEAKS}
    assert {*by_name.values()} == {"Blackwell", "Hopper", "Ada", "Ampere"}
    assert by_name["H100 PCIe"] == by_name["GH200"] == "Hopper" != by_name["GB200"]


@pytest.mark.parametrize("peak", GPU_PEAKS, ids=lambda peak: peak.name_part)
def test_fp8_peak_is_twice_the_bf16_peak(peak: Any) -> None:
    assert peak.source
    if peak.fp8_tflops is not None:
        assert peak.fp8_tflops / peak.bf16_tflops == pytest.approx(2.0, rel=0.02)
