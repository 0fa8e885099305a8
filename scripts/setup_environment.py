"""Choose or build the environment that every make target runs in.

Three cases, in this order:

1. The interpreter that runs this script already holds all that is needed: it is used as it is.
   Needed are [project.dependencies] and the pytest packages of the dev extra. The rest of that
   extra (ruff, mypy, stubs, statsmodels ...) may be absent: `make lint` wants it, no run does.
2. A wheelhouse is given and this interpreter has a fitting torch, as a GPU node without network
   does: what is missing is installed from that folder, torch is held at its version.
3. Else `.venv` is built, from the wheelhouse or else from the exact pins of requirements/cpu.txt.

Then the package is installed in editable mode, and the interpreter's path is written to
`.make/python`, which the Makefile reads. Only the standard library is used here, because this
runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
PINS = Path("requirements/cpu.txt")
VENV = Path(".venv")
STAMP = Path(".make/python")
LOG = Path(".make/setup.log")
OLDEST, NEWEST = (3, 11), (3, 13)  # requires-python, which cannot be read before this check


def fail(message: str) -> NoReturn:
    sys.exit(f"setup: {message}")


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def check_python_version(version: tuple[int, int]) -> None:
    if not OLDEST <= version <= NEWEST:
        fail(
            f"Python {version[0]}.{version[1]} ({sys.executable}) is not supported, "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} are: "
            "name another with `make setup PYTHON=python3.12`"
        )


# --- what this interpreter has ------------------------------------------------------------------


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def parser_of_requirements() -> Any:
    """The `Requirement` class of packaging, or of the copy inside pip; None without either."""
    for module in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return __import__(module, fromlist=["Requirement"]).Requirement
        except ImportError:
            continue
    return None


def read_requirements() -> tuple[list[str], list[str]]:
    """(needed, wanted): a run or a test fails without the needed, only linting without the rest."""
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    dev: list[str] = project["optional-dependencies"]["dev"]
    needed = project["dependencies"] + [r for r in dev if r.startswith("pytest")]
    return needed, [r for r in dev if r not in needed]


def find_unsatisfied(requirements: list[str]) -> list[str]:
    """Those of `requirements` that this interpreter lacks or has in a version that does not fit."""
    parse = parser_of_requirements()
    if parse is None:  # nothing is installed here that could compare versions
        return requirements
    unsatisfied = []
    for text in requirements:
        requirement = parse(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unsatisfied.append(text)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unsatisfied.append(text)
    return unsatisfied


def is_managed_by_system() -> bool:
    """Whether the distribution asks pip to keep out of this interpreter (PEP 668)."""
    in_venv = sys.prefix != sys.base_prefix
    return not in_venv and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()


# --- pip ----------------------------------------------------------------------------------------


def run_quietly(command: list[str]) -> bool:
    """Run with the output in the log; whether it succeeded."""
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode == 0


def run_step(what: str, command: list[str], remedy: str) -> None:
    """Run one long step with a line before and after; stop with the log's end if it fails."""
    say(f"{what} ...")
    start = time.monotonic()
    if not run_quietly(command):
        lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(f"  | {line}" for line in lines[-8:]), file=sys.stderr)
        fail(f"failed: {what} (all of the output: {LOG}); {remedy}")
    say(f"done in {time.monotonic() - start:.0f} s")


def pip(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check", *arguments]


def offline(wheelhouse: Path | None) -> list[str]:
    """The options that keep pip to the wheelhouse; none without one."""
    return ["--no-index", "--find-links", str(wheelhouse)] if wheelhouse else []


def remedy_for(wheelhouse: Path | None) -> str:
    if wheelhouse:
        return (
            f"gather {wheelhouse} again with `make wheelhouse PYTHON={sys.version_info[0]}."
            f"{sys.version_info[1]}` where there is a network, and copy it here"
        )
    return "check the network and `pip config list`, or use WHEELHOUSE=<folder of wheels>"


# --- the steps ----------------------------------------------------------------------------------


def complete_active(requirements: list[str], num_missing: int, wheelhouse: Path) -> None:
    """Install what is missing into this interpreter's environment; torch stays at its version.

    All requirements are named, not the missing ones only: pip then weighs what the packages that
    stay ask for, and leaves alone those that fit.
    """
    held = LOG.with_name("held.txt")
    held.write_text(f"torch=={metadata.version('torch')}\n", encoding="utf-8")
    run_step(
        f"installing {num_missing} missing packages from {wheelhouse} into {sys.prefix}",
        pip(sys.executable, "install", *offline(wheelhouse), "-c", str(held), *requirements),
        remedy_for(wheelhouse),
    )


def digest_of_inputs() -> str:
    content = b"".join(Path(p).read_bytes() for p in ("pyproject.toml", PINS, __file__))
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


def build_venv(wheelhouse: Path | None) -> str:
    """Build or update .venv and return its interpreter.

    `.venv/complete` is written last and names what was built. A .venv without it was killed half
    way: nothing in it can be trusted, so it is built anew.
    """
    if wheelhouse and not any(wheelhouse.glob("torch-*.whl")):
        fail(
            f"{sys.executable} has no torch that fits pyproject.toml and WHEELHOUSE={wheelhouse} "
            "holds none: activate the environment that has it, or add a torch wheel to the folder"
        )
    python = str(ROOT / VENV / "bin" / "python")
    complete = VENV / "complete"
    digest = digest_of_inputs()
    works = complete.exists() and run_quietly([python, "-c", "import pip"])
    if works and complete.read_text(encoding="utf-8") == digest:
        say(f"{VENV} is up to date")
        install_package(python, wheelhouse)  # the checkout may have moved
        return python
    if not works:
        if VENV.exists():
            say(f"{VENV} is incomplete or broken: building it anew")
            shutil.rmtree(VENV)
        run_step(
            f"creating {VENV} with Python {sys.version.split()[0]}",
            [sys.executable, "-m", "venv", str(VENV)],
            "on Debian and Ubuntu: apt install python3-venv",
        )
    complete.unlink(missing_ok=True)
    if wheelhouse:
        needed, wanted = read_requirements()
        what, packages = f"packages from {wheelhouse}", [*needed, *wanted]
    else:
        what, packages = f"the pins of {PINS} (some minutes)", ["-r", str(PINS)]
    run_step(
        f"installing {what}",
        # pip compiles, too: where Python may not write bytecode, every run would do it anew.
        pip(python, "install", *offline(wheelhouse), *packages),
        remedy_for(wheelhouse),
    )
    install_package(python, wheelhouse)
    complete.write_text(digest, encoding="utf-8")
    return python


def imported_from(python: str) -> str:
    """The file that `python`, run elsewhere than here, imports fp8study from; empty without."""
    code = "import importlib.util as u; s = u.find_spec('fp8study'); print(s and s.origin)"
    # -P and no PYTHONPATH: what counts is what is installed.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(
        [python, "-P", "-c", code], capture_output=True, text=True, env=environment
    ).stdout.strip()
    return "" if found == "None" else found


def install_package(python: str, wheelhouse: Path | None) -> None:
    """Make `import fp8study` find this checkout."""
    before = imported_from(python)
    if before and Path(before).is_relative_to(ROOT / "src"):
        return
    if before:
        say(
            f"its fp8study was {Path(before).parent}, and is this checkout's now; VENV=1 builds "
            "an environment for this checkout alone"
        )
    editable = ["install", "--no-deps", "-e", "."]
    has_backend = run_quietly([python, "-c", "import hatchling, editables"])
    options = ["--no-build-isolation"] if has_backend else offline(wheelhouse)
    if run_quietly(pip(python, *editable, *options)):
        return
    # No build backend and none to be had: a path file does the same, less the `fp8study` command.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    try:
        Path(folder, "fp8study.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
    except OSError as error:
        fail(f"cannot write into {folder} ({error.strerror}); use `make setup VENV=1`")
    say("no build backend here: src/ is linked by a path file; use `python -m fp8study.cli`")


def choose_environment(wheelhouse: Path | None, always_venv: bool) -> str:
    if always_venv:
        return build_venv(wheelhouse)
    if is_managed_by_system():
        say(f"{sys.executable} belongs to the system: using {VENV}")
        return build_venv(wheelhouse)
    needed, wanted = read_requirements()
    missing, unlinted = find_unsatisfied(needed), find_unsatisfied(wanted)
    has_torch = "torch" not in map(name_of, missing)
    if missing and wheelhouse and has_torch:
        complete_active(needed, len(missing), wheelhouse)
        missing = []
    if missing:
        say(f"the active environment lacks {len(missing)} of {len(needed)} packages: using {VENV}")
        return build_venv(wheelhouse)
    say(f"using the active environment, {sys.prefix}")
    if unlinted:
        say(f"absent, but no run or test needs it: {', '.join(map(name_of, unlinted))}")
    install_package(sys.executable, wheelhouse)
    return sys.executable


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose or build the environment for make.")
    parser.add_argument("--wheelhouse", type=Path, help="install from this folder, offline")
    parser.add_argument("--venv", action="store_true", help="leave the active environment alone")
    arguments = parser.parse_args()
    check_python_version(sys.version_info[:2])
    wheelhouse: Path | None = arguments.wheelhouse
    if wheelhouse and not any(wheelhouse.glob("*.whl")):
        fail(f"WHEELHOUSE={wheelhouse} holds no wheels: fill it with `make wheelhouse`")
    wheelhouse = wheelhouse and wheelhouse.resolve()
    os.chdir(ROOT)
    STAMP.parent.mkdir(exist_ok=True)
    LOG.write_bytes(b"")
    python = choose_environment(wheelhouse, arguments.venv)
    STAMP.write_text(f"{python}\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; another `make setup` repairs what is half built")
    except PermissionError as error:
        fail(f"cannot write {error.filename}; make it and its folder writable")
