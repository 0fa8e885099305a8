"""Numbers and lists in words."""

from __future__ import annotations

import re
from collections.abc import Iterable


def count(number: int, noun: str) -> str:
    """Put a number before its noun, in the plural where it is not one."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def amount(number: float) -> str:
    """Write a number of tokens, as 4,096 or 1.02 million or 161 billion."""
    if number < 1e6:
        return f"{number:,.0f}"
    scale, word = (1e6, "million") if number < 1e9 else (1e9, "billion")
    return f"{number / scale:{',.0f' if number >= 100 * scale else '.3g'}} {word}"


def listed(words: Iterable[object]) -> str:
    """Join words by commas and an ``and``."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def rate(value: float) -> str:
    """Write a learning rate, as 5e-5 or 2.5e-4."""
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def number(value: float, spec: str) -> str:
    """Write a number by a format, as mathematics does: a true minus, and no negative zero."""
    text = format(value, spec)
    if text.startswith("-") and not re.search("[1-9]", text):
        text = text.replace("-", "+" if "+" in spec else "")
    return text.replace("-", "\u2212").replace("inf", "∞")
