"""`make setup` chooses the right environment, repairs a broken one, and fails in one line."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from scripts import setup_environment as setup
from scripts import wheelhouse

ROOT = Path(__file__).resolve().parents[2]
NEEDED, WANTED = ["torch>=2.11,<2.14", "pandas>=2.2", "pytest>=8"], ["ruff>=0.12"]


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -I -S: no installed package is importable, as with a bare Python.
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts" / arguments[0]), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout in which every command is noted, and creates what it would, but not run."""
    for name in ("pyproject.toml", "requirements/cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".make").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "read_requirements", lambda: (NEEDED, WANTED))
    monkeypatch.setattr(setup, "install_package", lambda python, wheelhouse: None)
    monkeypatch.setattr(setup, "run_quietly", lambda command: Path(command[0]).exists())
    monkeypatch.setattr(setup, "is_managed_by_system", lambda: False)
    return tmp_path


@pytest.fixture
def steps(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def note(what: str, command: list[str], remedy: str) -> None:
        commands.append(command)
        if "venv" in command:
            python = checkout / ".venv" / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()

    monkeypatch.setattr(setup, "run_step", note)
    return commands


def have(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that exactly these versions are installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(setup.metadata, "version", version)


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (4, 0)])
def test_other_python_is_refused_in_one_line(version: tuple[int, int]) -> None:
    with pytest.raises(SystemExit) as stop:
        setup.check_python_version(version)
    message = str(stop.value)
    assert f"Python {version[0]}.{version[1]} " in message
    assert "make setup PYTHON=" in message
    assert "\n" not in message


def test_supported_pythons_pass() -> None:
    for minor in (11, 12, 13):
        setup.check_python_version((3, minor))


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("torch>=2.11,<2.14", "torch"), ("types-PyYAML", "types-PyYAML"), ("a_b==1", "a_b")],
)
def test_name_of(requirement: str, name: str) -> None:
    assert setup.name_of(requirement) == name


def test_unsatisfied_are_the_absent_and_the_unfitting(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, torch="2.10.0", pytest="9.0")
    assert setup.find_unsatisfied(NEEDED) == NEEDED[:2]
    have(monkeypatch, torch="2.11.0+cu130", pandas="3.0", pytest="9.0")
    assert setup.find_unsatisfied(NEEDED) == []


def test_a_complete_environment_is_used_even_without_linters(
    steps: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, torch="2.13.0", pandas="3.0", pytest="9.0")
    assert setup.choose_environment(None, always_venv=False) == sys.executable
    assert steps == []
    assert "ruff" in capsys.readouterr().out


def test_an_incomplete_environment_gets_a_venv_from_the_pins(
    steps: list[list[str]], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, torch="2.13.0", pytest="9.0")
    python = setup.choose_environment(None, always_venv=False)
    assert python == str(checkout / ".venv" / "bin" / "python")
    assert steps[0][1:3] == ["-m", "venv"]
    # Exactly the pins: any looser request of torch would fetch another, gigabytes large.
    assert steps[1][4:] == ["install", "-r", "requirements/cpu.txt"]


def test_venv_can_be_demanded(steps: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, torch="2.13.0", pandas="3.0", pytest="9.0", ruff="0.12")
    assert setup.choose_environment(None, always_venv=True) != sys.executable


def test_wheelhouse_completes_an_environment_with_torch(
    steps: list[list[str]], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, torch="2.11.0+cu130", pytest="9.0")
    wheels = checkout / "wheels"
    assert setup.choose_environment(wheels, always_venv=False) == sys.executable
    (command,) = steps
    assert command[0] == sys.executable
    assert {"--no-index", str(wheels), *NEEDED} <= set(command)
    assert not set(WANTED) & set(command)  # a GPU node needs no linters
    assert "requirements/cpu.txt" not in command
    held = Path(command[command.index("-c") + 1]).read_text()
    assert held == "torch==2.11.0+cu130\n"


def test_wheelhouse_without_any_torch_is_one_clear_line(
    steps: list[list[str]], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, pandas="3.0", pytest="9.0")
    with pytest.raises(SystemExit, match=r"no torch .* add a torch wheel"):
        setup.choose_environment(checkout, always_venv=False)
    assert steps == []


def test_a_finished_venv_is_left_as_it_is(steps: list[list[str]]) -> None:
    first = setup.build_venv(None)
    steps.clear()
    assert setup.build_venv(None) == first
    assert steps == []


def test_a_half_built_venv_is_built_anew(steps: list[list[str]], checkout: Path) -> None:
    setup.build_venv(None)
    (checkout / ".venv" / "complete").unlink()  # as if killed in the middle of pip
    (checkout / ".venv" / "half-unpacked").touch()
    steps.clear()
    setup.build_venv(None)
    assert len(steps) == 2
    assert not (checkout / ".venv" / "half-unpacked").exists()
    assert (checkout / ".venv" / "complete").exists()


def test_changed_pins_update_the_venv(steps: list[list[str]], checkout: Path) -> None:
    setup.build_venv(None)
    (checkout / "requirements" / "cpu.txt").write_text("torch==2.13.0\n")
    steps.clear()
    setup.build_venv(None)
    assert [command[-2] for command in steps] == ["-r"]


def test_a_bare_python_reports_a_bad_wheelhouse() -> None:
    result = run_script("setup_environment.py", "--wheelhouse", "no-such-folder")
    assert result.returncode == 1
    assert result.stderr.startswith("setup: WHEELHOUSE=no-such-folder holds no wheels")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("value", ["3.9", "no-such-python", "3.14"])
def test_wheelhouse_names_a_bad_python(value: str, tmp_path: Path) -> None:
    result = run_script("wheelhouse.py", "--python", value, "--output", str(tmp_path))
    assert result.returncode == 1
    assert f"PYTHON={value}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_wheelhouse_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "wheels")
    result = run_script("wheelhouse.py", "--python", "3.12", "--output", folder)
    assert result.returncode == 1
    assert result.stderr.startswith(f"wheelhouse: WHEELHOUSE={folder}: Not a directory; name a ")
    assert result.stderr.count("\n") == 1


def test_wheelhouse_leaves_torch_out_and_heeds_markers() -> None:
    pytest.importorskip("pip")
    on_311, on_312 = wheelhouse.read_pins("3.11"), wheelhouse.read_pins("3.12")
    assert not any(pin.startswith(("torch==", "setuptools==")) for pin in on_312)
    assert any(pin.startswith("torchao==") for pin in on_312)
    assert any(pin.startswith("aiohttp==") for pin in on_312)
    assert not any(pin.startswith("aiohttp==") for pin in on_311)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_sets_up_again_only_when_something_changed(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.txt", "scripts/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    inputs = ["pyproject.toml", "requirements/cpu.txt", "scripts/setup_environment.py"]
    for name in inputs:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    stamp = tmp_path / ".make" / "python"
    stamp.parent.mkdir()
    interpreter = tmp_path / "python"
    interpreter.touch()
    stamp.write_text(f"{interpreter}\n")

    def is_current(*variables: str) -> bool:
        command = ["make", "-q", ".make/python", *variables]
        # Without the variables of a `make test` around this test.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        return subprocess.run(command, cwd=tmp_path, env=environment).returncode == 0

    assert is_current()
    assert not is_current("PYTHON=python3.12")
    for name in inputs:
        os.utime(tmp_path / name)
        os.utime(tmp_path / name, (2**31, 2**31))
        assert not is_current(), name
        os.utime(tmp_path / name, (1, 1))
    interpreter.unlink()
    assert not is_current()


@pytest.mark.parametrize(
    ("origin", "told"), [("/other/src/fp8study/__init__.py", "/other/src/fp8study"), ("None", "")]
)
def test_an_environment_that_is_taken_from_another_checkout_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    origin: str, told: str,
) -> None:  # fmt: skip
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {origin}\n")
    python.chmod(0o755)
    monkeypatch.setattr(setup, "run_quietly", lambda command: True)
    setup.install_package(str(python), None)
    said = capsys.readouterr().out
    assert (told in said and "this checkout's now" in said) if told else not said
