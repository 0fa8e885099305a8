"""Reject what we do not know: a misspelt or unsupported option must not be ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from fp8study.core.errors import UserError


def load_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping.

    Args:
        text: the YAML source; empty means an empty mapping.
        where: how an error names the source.

    Returns:
        The mapping.

    Raises:
        UserError: the text is not YAML, or not a mapping.
    """
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: not valid YAML ({reason}); quote the value.") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UserError(f"{where}: expected `key: value` lines, got {loaded!r}.")
    return {str(key): value for key, value in loaded.items()}


def known_keys(options: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise a `UserError` for the first key of `options` that is not in `known`."""
    allowed = sorted(known)
    for key in options:
        if key not in allowed:
            raise UserError(
                f"{where}: option `{key}` is not supported here; remove it or use one of "
                f"{', '.join(allowed)}."
            )


def section(options: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """Return the mapping under `key`, empty where it is absent, null or `default`."""
    value = options.get(key)
    if value is None or value == "default":
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where}: `{key}` must be a mapping, not {value!r}.")
    return value


def flag(options: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    """Return the boolean under `key`."""
    value = options.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{where}: `{key}` must be true or false, not {value!r}.")
    return value


def number(options: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """Return the positive number under `key`."""
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{where}: `{key}` must be a number above 0, not {value!r}.")
    return float(value)


def text_or_none(options: Mapping[str, Any], key: str, where: str) -> str | None:
    """Return the string under `key` on one line, or None where it is absent."""
    value = options.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: `{key}` must be a text, not {value!r}; put it in quotes.")
    return " ".join(value.split())


def only_false(options: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    """Raise a `UserError` where one of `keys` is set to anything but false."""
    for key in keys:
        if options.get(key, False) is not False:
            shown = str(options[key]).lower()
            raise UserError(
                f"{where}: `{key}: {shown}` is not supported, because a page must show "
                f"what its cells give now; set `{key}: false`."
            )
