"""The four places that name dependencies agree: pyproject, conda, the pins, the scripts."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts import setup_environment, wheelhouse

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
PIN_LINES = [
    line
    for line in (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
PYTHONS = wheelhouse.SUPPORTED


def specifiers(requirements: list[str]) -> dict[str, SpecifierSet]:
    parsed = [Requirement(text) for text in requirements]
    return {canonicalize_name(r.name): r.specifier for r in parsed}


def pinned_versions(lines: list[str], python: str) -> dict[str, str]:
    """Name to version, of the lines that hold on `python`."""
    versions = {}
    for line in lines:
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            (clause,) = pin.specifier
            versions[canonicalize_name(pin.name)] = clause.version
    return versions


def violations(requirements: list[str], versions: dict[str, str]) -> list[str]:
    return [
        f"{name}{specifier}: pinned {versions.get(name)}"
        for name, specifier in specifiers(requirements).items()
        if name not in versions or not specifier.contains(versions[name], prereleases=True)
    ]


def conda_dependencies() -> tuple[list[str], list[str]]:
    """(conda packages, pip section) of environment.yml."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    (pip_section,) = (entry["pip"] for entry in entries if isinstance(entry, dict))
    return [entry for entry in entries if isinstance(entry, str)], pip_section


def test_conda_pip_section_repeats_pyproject() -> None:
    _, pip_section = conda_dependencies()
    assert specifiers(pip_section) == specifiers(REQUIREMENTS)
    assert len(pip_section) == len(REQUIREMENTS)


def test_the_environment_of_make_setup_can_use_a_cluster() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras["slurm"]) <= set(extras["dev"])


def test_conda_has_the_python_range_and_quarto() -> None:
    conda, _ = conda_dependencies()
    by_name = specifiers(conda)
    assert by_name["python"] == SpecifierSet(PROJECT["requires-python"])
    assert {"quarto", "pip"} <= by_name.keys()


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_satisfy_pyproject(python: str) -> None:
    assert violations(REQUIREMENTS, pinned_versions(PIN_LINES, python)) == []


def test_a_pin_too_old_or_absent_is_seen() -> None:
    versions = pinned_versions(PIN_LINES, "3.12") | {"torch": "2.10.0"}
    del versions["pandas"]
    found = violations(REQUIREMENTS, versions)
    assert [text.split(": ")[1] for text in found] == ["pinned 2.10.0", "pinned None"]


def test_pins_are_exact_and_of_no_machine() -> None:
    """No local version (`+cpu`), path or URL: they would install on one machine only."""
    exact = re.compile(r'[\w.-]+==[\w.!]+( ; python_version [<>=]+ "3\.\d+")?')
    assert [line for line in PIN_LINES if not exact.fullmatch(line)] == []


def test_no_package_is_pinned_twice() -> None:
    for python in PYTHONS:
        holding = [
            line
            for line in PIN_LINES
            if (marker := Requirement(line).marker) is None
            or marker.evaluate({"python_version": python})
        ]
        assert len(holding) == len(pinned_versions(PIN_LINES, python))


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_closed(python: str) -> None:
    """Every direct requirement of an installed pinned package is pinned too, on each Python.

    torch's CUDA packages are the exception: they depend on its build.
    """
    from importlib import metadata

    versions = pinned_versions(PIN_LINES, python)
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    absent = set()
    for name, version in versions.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name == "torch" or distribution.version != version:
            continue
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                absent.add(canonicalize_name(requirement.name))
    assert absent - versions.keys() == set()


def test_scripts_know_the_python_range() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}.0")]
    assert list(PYTHONS) == minors
    oldest, newest = setup_environment.OLDEST, setup_environment.NEWEST
    assert [f"3.{oldest[1]}", f"3.{newest[1]}"] == [minors[0], minors[-1]]
