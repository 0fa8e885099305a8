"""A thin layer over pandoc and its JSON document tree."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pypandoc

from fp8study.core.errors import UserError

Node = dict[str, Any]
Nodes = list[Any]


def run(text: str, source: str, target: str, arguments: Sequence[str] = ()) -> str:
    """Convert `text` with pandoc, raising a `UserError` where pandoc is missing or refuses."""
    try:
        return pypandoc.convert_text(text, target, format=source, extra_args=list(arguments))
    except OSError as error:
        raise UserError(f"pandoc is not there ({error}); pip install pypandoc_binary.") from error
    except RuntimeError as error:
        raise UserError(f"pandoc failed: {' '.join(str(error).split())}") from error


def read(text: str, source: str = "markdown") -> Node:
    """Parse `text` to a pandoc document tree."""
    return json.loads(run(text, source, "json"))


@functools.lru_cache(maxsize=256)
def _read_inlines(text: str) -> str:
    return json.dumps(read(text)["blocks"][0]["c"])


def read_inlines(text: str) -> Nodes:
    """Parse one line of Markdown to inlines."""
    return json.loads(_read_inlines(text))


def walk(node: Any, action: Callable[[Node], Nodes | None]) -> Any:
    """Rebuild a tree in document order.

    Args:
        node: any part of a document tree.
        action: given an element, it returns what takes its place, or None to keep it and
            look within. What it returns is not looked into again.

    Returns:
        The rebuilt tree.
    """
    if isinstance(node, dict):
        return {key: walk(value, action) for key, value in node.items()}
    if not isinstance(node, list):
        return node
    rebuilt: Nodes = []
    for item in node:
        is_element = isinstance(item, dict) and "t" in item
        replacement = action(item) if is_element else None
        rebuilt += [walk(item, action)] if replacement is None else replacement
    return rebuilt


def find(node: Any, kind: str) -> list[Node]:
    """Return the elements of one type, in document order."""
    if isinstance(node, list):
        return [found for item in node for found in find(item, kind)]
    if not isinstance(node, dict):
        return []
    here = [node] if node.get("t") == kind else []
    return here + find(node.get("c"), kind)


def attributes(node: Node) -> Nodes:
    """Return the `[identifier, classes, key-value pairs]` of an element that has them."""
    content = node["c"]
    return content[1] if node["t"] == "Header" else content[0]


def take_attribute(attr: Nodes, key: str) -> str | None:
    """Remove a key-value pair from `attr` and return its value, None where it has none."""
    found = [value for name, value in attr[2] if name == key]
    attr[2] = [pair for pair in attr[2] if pair[0] != key]
    return str(found[0]) if found else None


def string(text: str) -> Node:
    """Return a text inline."""
    return {"t": "Str", "c": text}


def div(classes: list[str], blocks: Nodes, identifier: str = "") -> Node:
    """Return a div block."""
    return {"t": "Div", "c": [[identifier, classes, []], blocks]}


def raw_html(text: str) -> Node:
    """Return a block of literal HTML."""
    return {"t": "RawBlock", "c": ["html", text]}


def plain_text(node: Any) -> str:
    """Return the text within a part of a tree, without its markup."""
    if isinstance(node, list):
        return "".join(plain_text(item) for item in node)
    if not isinstance(node, dict):
        return ""
    if node.get("t") in ("Str", "Code", "Math"):
        content = node["c"]
        return str(content if isinstance(content, str) else content[1])
    if node.get("t") in ("Space", "SoftBreak"):
        return " "
    return plain_text(node.get("c"))
