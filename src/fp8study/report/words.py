"""Small words that every sentence of the report is built from."""

from __future__ import annotations


def escape(text: str) -> str:
    """Make a text from a record safe inside Markdown."""
    for mark in "\\`*_[]<>$|":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def how_to_get(study: str) -> str:
    """Say which command makes the records of a study."""
    return f"run `make reproduce STUDY={study}` on a machine with NVIDIA GPUs"


def no_gpu_records(study: str = "quick") -> str:
    """Say that there is nothing from a GPU, as plain text for tables and figures."""
    return f"No GPU records here yet: {how_to_get(study).replace('`', '')}."


def count(number: int, noun: str) -> str:
    """Put a number before its noun, in the plural where it is not one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def signed(value: float, digits: int) -> str:
    """Write a number with its sign, as mathematics does."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "+" if float(text) == 0 else "\u2212")
