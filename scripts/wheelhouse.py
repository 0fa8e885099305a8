"""Gather the wheels that a GPU node without network needs, for its Python, into one folder.

All of requirements/cpu.txt but torch: the node's torch is built for its CUDA, and is there
already. pip cannot resolve for another Python than its own, so the closure is the pinned list
itself, and each pin's marker is evaluated here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "cpu.txt"
# torch brings its own setuptools: each of its versions bounds that one otherwise.
LEFT_OUT = ("torch", "setuptools")
SUPPORTED = ("3.11", "3.12", "3.13")
# pip matches a tag exactly, so each is named. glibc 2.28 (RHEL 8) is the oldest node we think of.
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)),
    *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
    "linux_x86_64",
    "any",
]


def fail(message: str) -> NoReturn:
    sys.exit(f"wheelhouse: {message}")


def version_named(value: str) -> str:
    """The X.Y that `value` names: itself, or the version of the interpreter of that name."""
    version = value
    if not re.fullmatch(r"\d+\.\d+", value):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            answer = subprocess.run([value, "-c", code], capture_output=True, text=True)
        except OSError:
            fail(f"PYTHON={value} is neither a version nor a Python here: say PYTHON=3.12")
        version = answer.stdout.strip()
        print(f"wheelhouse: {value} is Python {version}; for another: PYTHON=3.12", flush=True)
    if version not in SUPPORTED:
        fail(f"PYTHON={value}: Python {version} is not supported, {', '.join(SUPPORTED)} are")
    return version


def read_pins(version: str) -> list[str]:
    """The pins that hold on Python `version`, without LEFT_OUT, as `name==version`."""
    from pip._vendor.packaging.requirements import Requirement

    environment = {"python_version": version, "python_full_version": f"{version}.0"}
    pins = []
    for line in PINS.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pin = Requirement(text)
        if pin.name not in LEFT_OUT and (pin.marker is None or pin.marker.evaluate(environment)):
            pins.append(f"{pin.name}{pin.specifier}")
    return pins


def run_pip(*arguments: str) -> str:
    """Run pip; its errors, or an empty string if it succeeded."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def build_wheel(pin: str, folder: Path) -> None:
    """Build the wheel of a package that publishes its source only; it must be pure Python."""
    with tempfile.TemporaryDirectory() as scratch:
        errors = run_pip("wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, pin)
        if errors:
            fail(f"{pin} has no wheel for this Python and cannot be built:\n{errors.strip()}")
        (wheel,) = Path(scratch).iterdir()
        if not wheel.name.endswith("-none-any.whl"):
            fail(f"{pin} has no wheel for this Python and is not pure Python: pin another version")
        (folder / wheel.name).write_bytes(wheel.read_bytes())


def gather(pins: list[str], version: str, folder: Path) -> None:
    target = ["--python-version", version, "--implementation", "cp", "--only-binary=:all:"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    pins = list(pins)
    while True:
        errors = run_pip("download", "--quiet", "--no-deps", "-d", str(folder), *target, *pins)
        if not errors:
            return
        # pip stops at the first package without a wheel: build that one, and ask for the others.
        found = re.search(r"No matching distribution found for (\S+)", errors)
        if not found or found[1] not in pins:
            fail(f"pip could not gather the wheels:\n{errors.strip()[-2000:]}")
        print(f"wheelhouse: {found[1]} has no wheel, building it", flush=True)
        build_wheel(found[1], folder)
        pins.remove(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Gather wheels for a node without network.")
    parser.add_argument("--python", required=True, help="version of the node's Python, as 3.12")
    parser.add_argument("--output", type=Path, default=Path("wheelhouse"))
    arguments = parser.parse_args()
    version = version_named(arguments.python)
    folder: Path = arguments.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"WHEELHOUSE={folder}: {error.strerror}; name a folder that you may write to")
    pins = read_pins(version)
    print(f"wheelhouse: {len(pins)} packages for Python {version}, linux x86_64 ...", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        gather(pins, version, Path(scratch))
        for stale in folder.glob("*.whl"):  # two versions of a package would stop an install
            if not stale.name.startswith(tuple(f"{name}-" for name in LEFT_OUT)):  # the user's own
                stale.unlink()
        for wheel in Path(scratch).iterdir():
            wheel.replace(folder / wheel.name)
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in folder.glob("*.whl")}
    print(f"wheelhouse: {len(sizes)} wheels, {sum(sizes.values()):.0f} MiB in {folder}/")
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]:
        print(f"  {sizes[name]:6.1f} MiB  {name}")
    print(
        f"Copy {folder}{os.sep} to the node and, with the environment active that has its torch, "
        f"run:\n  make setup WHEELHOUSE={folder}"
    )


if __name__ == "__main__":
    main()
