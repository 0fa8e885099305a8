"""docs/architecture.md says what the code says: its picture, its files, its walks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import draw_rooms

#: Rooms that never import torch, nor what would.
WITHOUT_TORCH = ("core", "data", "run", "analysis", "report")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_rooms_are_drawn_as_the_imports_are() -> None:
    drawn = draw_rooms.BLOCK.search(PAGE)
    assert drawn
    assert drawn.group() == draw_rooms.rooms_block(), "run python scripts/draw_rooms.py"


def test_every_room_is_on_the_page() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "fp8study").glob("*/__init__.py")}
    assert len(rooms) == 8
    assert all(re.search(rf"\b{room}\b", PAGE) for room in rooms)


def test_named_functions_are_where_the_page_says() -> None:
    named = re.findall(r"`((?:src|notebooks|report)/[^`]+)`: `(\w+)`", PAGE)
    assert len(named) > 15
    for path, name in named:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (path, name)


@pytest.mark.parametrize(("name", "most"), [("precision", 7), ("tflops_per_gpu", 6)])
def test_a_walk_is_short_and_goes_straight_down(name: str, most: int) -> None:
    (walk,) = re.findall(rf"^`{name}`, .*:\n\n((?:\d\. .*\n)+)", PAGE, flags=re.MULTILINE)
    files = re.findall(r"^\d\. `([^`]+)`", walk, flags=re.MULTILINE)
    assert 2 < len(files) <= most
    assert len(set(files)) == len(files)


def test_the_half_that_answers_and_the_launcher_import_no_torch() -> None:
    """As they run, beside what `make lint` says of the lines that import."""
    rooms = [ROOT / "src" / "fp8study" / room for room in WITHOUT_TORCH]
    names = [f"fp8study.{path.parent.name}.{path.stem}" for r in rooms for path in r.glob("*.py")]
    code = f"import sys, {', '.join(n for n in names if not n.endswith('__'))}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "torchao", "accelerate", "transformers"} & set(done.stdout.split())


def test_a_plan_is_made_without_what_only_judging_needs() -> None:
    code = "import sys, fp8study.run.plan; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "scipy" not in done.stdout.split()  # half of the time that `fp8study plan` would take


def test_no_room_and_no_file_outgrows_its_size() -> None:
    for path in (ROOT / "src" / "fp8study").rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, path
    for room in (ROOT / "src" / "fp8study").rglob("__init__.py"):
        modules = [path for path in room.parent.glob("*.py") if path != room]
        assert len(modules) <= 14 or room.parent.name == "report", room.parent
