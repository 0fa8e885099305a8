"""Numbers and lists in words."""

from __future__ import annotations

from collections.abc import Iterable


def count(number: int, noun: str) -> str:
    """Put a number before its noun, in the plural where it is not one."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def listed(words: Iterable[object]) -> str:
    """Join words by commas and an ``and``."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
