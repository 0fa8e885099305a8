"""Values of typed fields: what text-only interfaces did to them, and whether they fit."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal

from fp8study.core.errors import UserError, nearest

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text",
          type(None): "none"}  # fmt: skip
_ITEMS = {str: "a list of texts", int: "a list of whole numbers"}


def coerce(value: Any, hint: Any) -> Any:
    """Undo what text-only interfaces did to a value; leave anything else for `check_type`.

    Args:
        value: From papermill, YAML or a command line.
        hint: The field's type.
    """
    kinds = _alternatives(hint)
    if isinstance(value, bool) or value is None:
        return value
    if value == "none" and type(None) in kinds:
        return None
    if value in ("true", "false") and bool in kinds:
        return value == "true"
    if float in kinds and (isinstance(value, int) or (isinstance(value, str) and _is_float(value))):
        return float(value)  # YAML reads 1e-5 as a text
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            return _coerce_list(value, typing.get_args(kind)[0])
    return value


def _coerce_list(value: Any, item: type) -> Any:
    """As `coerce`, for a list: ``0,50`` is one, and so is a number on its own."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
        if item is int and all(part.isdecimal() for part in value):
            value = [int(part) for part in value]
    elif isinstance(value, item):
        value = [value]
    if isinstance(value, list):
        return tuple(coerce(part, item) for part in value)
    return value


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of ``A | B``, or the hint itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not of its field's type.

    Raises:
        UserError: It names the field, the value and what would be valid.
    """
    if not any(_fits(value, kind) for kind in _alternatives(hint)):
        raise UserError(f"{name}: {value!r} is not valid{_expectation(value, hint)}")


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is tuple:
        item_kind = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_fits(item, item_kind) for item in value)
    if kind is type(None):
        return value is None
    if kind in (int, float):
        return (
            isinstance(value, int if kind is int else (int, float))
            and not isinstance(value, bool)
            and math.isfinite(value)
        )
    return isinstance(value, kind)


def _expectation(value: Any, hint: Any) -> str:
    kinds = _alternatives(hint)
    choices = [
        c for kind in kinds if typing.get_origin(kind) is Literal for c in typing.get_args(kind)
    ]
    if choices and bool in kinds:
        choices += ["true", "false"]
    if choices:
        return f"{nearest(str(value), choices)}; choose one of {', '.join(choices)}"
    names = [
        _ITEMS[typing.get_args(k)[0]] if typing.get_origin(k) is tuple else _NAMES[k] for k in kinds
    ]
    return f"; give {' or '.join(names)}"
