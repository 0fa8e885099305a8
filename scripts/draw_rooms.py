"""Draw the rooms of the package and who imports whom: `python scripts/draw_rooms.py`.

Writes a mermaid picture, read off the imports, into docs/architecture.md; a test holds the two
together. An arrow points to what is imported. Every room imports `core`; only the rooms that
import nothing else show it.
"""

from __future__ import annotations

import re
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "fp8study"
BLOCK = re.compile(r"(?<=<!-- rooms: scripts/draw_rooms.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def room_imports() -> set[tuple[str, str]]:
    """Return which room imports which; imports for type hints alone do not count."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None, exclude_type_checking_imports=True)
    return {
        (_room(module), _room(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if "" not in (_room(module), _room(imported)) and _room(module) != _room(imported)
    }


def _room(module: str) -> str:
    """Return the second part of a module's name; the package itself has none."""
    return f"{module}.".split(".")[1]


def rooms_block() -> str:
    """Return the picture."""
    found = sorted(room_imports())
    arrows = [f"  {room} --> {other}" for room, other in found if other != "core"]
    outermost = sorted(
        {room for room, _ in found} - {room for room, other in found if other != "core"}
    )
    arrows += [f"  {room} --> core" for room in outermost]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", ""])


def main() -> None:
    """Write the picture into the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: rooms_block(), text), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: rooms drawn")


if __name__ == "__main__":
    main()
