"""Whether a ``config.json`` is one: JSON in UTF-8, of names that stand there once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8study.core.errors import UserError, first_line


def config_file(model: str) -> Path:
    """Return where a model's configuration is, should it be a folder or that file itself."""
    return Path(model, "config.json") if Path(model).is_dir() else Path(model)


def read_file(path: Path) -> dict[str, Any]:
    """Return what a configuration says; nothing where there is no file, which may be on the hub.

    Raises:
        UserError: It is no mapping in JSON, with the line and column, or names a field twice: only
            the last would count.
    """

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"model: '{path}' gives {twice} twice; leave one")
        return dict(pairs)

    def beyond_json(name: str) -> float:  # transformers writes ±Infinity
        if name == "NaN":
            raise ValueError("NaN is no number")
        return float(name)

    try:
        raw = path.read_bytes()
    except OSError:
        return {}
    try:
        text = raw.decode("utf-8")
        content = json.loads(text, object_pairs_hook=each_once, parse_constant=beyond_json)
    except UnicodeDecodeError as error:
        line, start = raw.count(b"\n", 0, error.start) + 1, raw.rfind(b"\n", 0, error.start)
        raise UserError(
            f"model: '{path}' is no text in UTF-8 (line {line} column {error.start - start}); "
            "give the config.json of a model"
        ) from error
    except ValueError as error:
        raise UserError(f"model: '{path}' is no JSON ({first_line(error)}); mend it") from error
    if not isinstance(content, dict):
        raise UserError(
            f"model: '{path}' holds no names with values; give the config.json of a model of "
            "transformers"
        )
    if not isinstance(content.get("text_config") or {}, dict):
        raise UserError(
            f"model: '{path}' has a text_config that holds no names with values; mend it"
        )
    return content
