from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from fp8study.run import doctor
from fp8study.run.machine import Machine
from tests.checkout import ROOT, run_python
from tests.machines import A100, H200, UNKNOWN, machine


def test_the_supported_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(doctor.SUPPORTED) <= set(project["dependencies"])
    oldest, beyond = doctor.SUPPORTED_PYTHON
    assert SpecifierSet(project["requires-python"]) == SpecifierSet(f">={oldest},<{beyond}")


def test_a_package_that_is_missing_or_too_old_is_a_problem_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == "torchao":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    missing, old = doctor._package("torchao>=0.17"), doctor._package("torch>=2.11,<2.14")
    assert (missing.state, missing.found) == (doctor.PROBLEM, "not installed")
    assert (old.state, old.found) == (doctor.PROBLEM, "1.0")
    assert "make setup" in missing.remedy
    assert "torch>=2.11,<2.14" in old.remedy


@pytest.mark.parametrize(
    ("gpu", "state", "word"),
    [
        (H200, doctor.OK, "every FP8 recipe"),
        (A100, doctor.WARNING, "no FP8 tensor cores"),
        (UNKNOWN, doctor.WARNING, "peak unknown"),
    ],
)
def test_each_gpu_is_told_what_fp8_it_can_do(
    gpu: tuple[str, float, tuple[int, int]], state: str, word: str
) -> None:
    (finding,) = doctor._gpus(machine(gpu))
    assert finding.state == state
    assert word in finding.found
    assert bool(finding.remedy) == (state != doctor.OK)


def test_a_gpu_that_others_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_in_use", lambda index: 41.2)
    (finding,) = doctor._gpus(machine(H200))
    assert finding.state == doctor.WARNING
    assert "processes hold 41 GiB" in finding.found


@pytest.mark.parametrize(
    ("link", "state", "found"),
    [("NV18", "ok", "NVLink (NV18)"), ("PIX", "warning", "PCIe (PIX)"), (None, "warning", "")],
)
def test_links_between_gpus(
    link: str | None, state: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpu_link", lambda: link)
    finding = doctor._links(machine(H200, H200))
    assert finding.state == state
    assert finding.found.startswith(found)


def test_a_disk_without_room_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there" / "yet"
    assert doctor._disk("disk", missing, "results go there").found.endswith(str(tmp_path))
    assert not missing.exists()
    monkeypatch.setattr(doctor, "_LEAST_DISK_GIB", 1e9)
    finding = doctor._disk("disk", tmp_path, "results go there")
    assert finding.state == doctor.PROBLEM
    assert finding.remedy.startswith("free at least")


def test_a_folder_that_cannot_be_made_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8STUDY_CACHE", "/proc/nowhere")  # where root may not write either
    (finding,) = (f for f in doctor.examine(machine()) if f.name == "cache")
    assert finding.state == doctor.PROBLEM
    assert finding.remedy.startswith("make /proc/nowhere writable: tokens go there; or set FP8")


def test_the_command_says_the_same_in_words_and_in_json() -> None:
    done = run_python(ROOT, "-m", "fp8study.cli", "doctor", "--json")
    findings = [doctor.Finding(**found) for found in json.loads(done.stdout)]
    problems = [f for f in findings if f.state == "problem"]
    assert done.returncode == (1 if problems else 0)
    assert [f.name for f in findings][:3] == ["python", "torch", "torchao"]
    assert all(f.remedy for f in findings if f.state != "ok")
    words = doctor.report_text(findings)
    assert all(f.found in words and f.remedy in words for f in findings)


def test_an_amd_gpu_is_not_taken_for_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "unsupported_gpu", lambda: "AMD GPUs are not supported")
    (finding,) = doctor._gpus(Machine((), 8))
    assert (finding.state, finding.found) == (doctor.WARNING, "AMD GPUs are not supported")
    assert finding.remedy
