"""The README and the docs promise commands, fields and files: each must exist as it says."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fp8study import cli
from fp8study.core import config
from fp8study.core.presets import PRESETS
from fp8study.core.studies import load_study, study_names

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    if path.name != "log.md"  # tells what was, not what is
}
TEXT = "\n".join(PAGES.values())


def commands() -> list[list[str]]:
    """Every command in the pages' indented blocks and code, comments left out, lines joined."""
    joined = TEXT.replace("\\\n", " ")
    text = "\n".join(re.findall(r"^ {4}(.*)$", joined, flags=re.MULTILINE))
    inline = re.findall(r"`((?:make|fp8study) [^`]*)`", TEXT)
    parts = [part for line in text.splitlines() for part in line.split("&&")] + inline
    words = [shlex.split(part, comments=True) for part in parts]
    return [w for w in words if w and w[0] in ("make", "fp8study", "$(cat")]


def test_named_make_targets_and_variables_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = [w for w in commands() if w[0] == "make"]
    assert len(used) > 5
    for _, *arguments in used:
        for argument in arguments:
            name, is_variable, value = argument.partition("=")
            if is_variable:
                assert re.search(rf"^{name} \?=", makefile, flags=re.MULTILINE), argument
            else:
                assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), argument
            if name == "STUDY":
                assert value in [*study_names(), "qwen", "<name>"], argument


def test_named_commands_and_fields_exist() -> None:
    known = {command.callback.__name__ for command in cli.app.registered_commands}
    assert len(known) == 13
    used = [w for w in commands() if w[0] == "fp8study"]
    assert used
    for _, command, *_ in used:
        assert command in known or command == "--help"
    fields = [w.split("=")[0] for words in used for w in words if "=" in w]
    fields += [w.split("=")[0] for text in re.findall(r"SET='([^']*)'", TEXT) for w in text.split()]
    (papermill,) = [w for w in commands() if w[0] == "$(cat"]
    fields += [papermill[i + 1] for i, word in enumerate(papermill) if word == "-p"]
    assert len(fields) > 6
    assert set(fields) <= set(config.FIELD_NAMES)
    assert papermill[papermill.index("-p") + 2] in PRESETS


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page])
    folder = (ROOT / page).parent
    absent = [link for link in links if "://" not in link and not (folder / link).exists()]
    paths = re.findall(
        r"`((?:src|scripts|tests|results/reference|pipelines|docs)/[^`<]*)`", PAGES[page]
    )
    absent += [path for path in paths if not (ROOT / path).exists()]
    assert absent == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 90
    for page in PAGES:
        assert page == "README.md" or f"({page})" in readme, page
    assert "](docs/log.md)" in readme


def test_the_three_documents_are_identified_where_they_are_first_named() -> None:
    assert "[document A](docs/sources.md)" in PAGES["README.md"]
    rows = re.findall(r"^\| \*\*([ABC])\*\* \|(.*)\|$", PAGES["docs/sources.md"], re.MULTILINE)
    assert [letter for letter, _ in rows] == ["A", "B", "C"]
    for _, row in rows:
        assert len([cell for cell in row.split("|") if cell.strip()]) == 4
        assert "](https://" in row


@pytest.mark.parametrize(("page", "runs"), [("docs/using.md", 9), ("docs/clusters.md", 6)])
def test_example_study_is_valid(
    page: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGES[page], flags=re.DOTALL)
    folder = tmp_path / "pipelines" / "studies"
    folder.mkdir(parents=True)
    (folder / "example.yaml").write_text(example)
    monkeypatch.chdir(tmp_path)
    assert len(load_study("example").runs) == runs


def test_picture_is_small_and_there() -> None:
    assert (ROOT / "docs" / "document-a.png").stat().st_size < 200_000


def test_citation_agrees_with_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{citation["version"]}"' in pyproject
    assert f'license = "{citation["license"]}"' in pyproject
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"[{citation['version']}] – {citation['date-released']}" in changes
