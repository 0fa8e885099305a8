"""What a configuration field is: its type, its range, its words, and what it rules out.

`fp8study.core.fields` declares each field once, by `declare` or `switch`; everything else that
knows about fields is derived from these declarations.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fp8study.core.errors import UserError, nearest, one_line

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text",
          dict: "a mapping of fields to values", type(None): "none"}  # fmt: skip
_LISTS = {str: "a list of texts", int: "a list of whole numbers", dict: "a list of mappings"}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
#: Ways in which pages and what is copied from them write a minus.
_MINUS = dict.fromkeys(map(ord, "\u2011\u2212"), "-")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$")


class _Loader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does: ``010`` and ``1:30`` are texts, not 8 and 90.

    A key that is given twice is refused, of which YAML would take the last in silence.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if first := lines.get(key.value):
                raise UserError(
                    f"'{key.value}' is given twice (lines {first} and {line}); merge them"
                )
            lines[key.value] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if not tag.endswith((":int", ":float"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _WHOLE, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """Parse YAML, with no number where there may be a mistake.

    Raises:
        yaml.YAMLError: It is none.
        UserError: A mapping has a key twice.
    """
    return yaml.load(text, _Loader)


def read_mapping(path: Path, what: str, keys: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        UserError: It cannot be read, or is none; `what` and `keys` say what it should be.
    """
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = one_line(error).replace(' in "<unicode string>"', "")
        raise UserError(f"{path}: cannot read the {what} ({reason}); mend it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping {keys}")
    return content


def read_value(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its field's type, undoing what a notebook or command line did to it.

    Whole floats count as integers, integers as floats, and a comma-separated text or a single
    value as a list, since papermill can pass nothing else.

    Raises:
        UserError: It names the field, the value and what would be valid.
    """
    kinds = alternatives(hint)
    for kind in kinds:
        try:
            return _convert(value, kind)
        except (ValueError, OverflowError):
            continue
    choices = [c for k in kinds if typing.get_origin(k) is Literal for c in typing.get_args(k)]
    if choices:
        choices += ["true", "false"] if bool in kinds else []
        remedy = f"{nearest(str(value), choices)}; choose one of {', '.join(choices)}"
    else:
        words = (
            _LISTS[typing.get_args(k)[0]] if typing.get_origin(k) is tuple else _WORDS[k]
            for k in kinds
        )
        remedy = f"; give {' or '.join(words)}"
        if isinstance(value, bool) and str in kinds:  # what YAML makes of yes, no, on and off
            remedy += " in quotes"
    said = repr(value)
    raise UserError(f"{name}: {said[:99] + '…' * (len(said) > 99)} is not valid{remedy}")


def read_list(name: str, value: Any, kind: Any = None) -> tuple[Any, ...]:
    """Return a list, each of its parts as `kind` where one is given.

    Raises:
        UserError: It is no list, or as `read_value`.
    """
    if not isinstance(value, list):
        raise UserError(f"{name}: {value!r} is not a list; put it in brackets")
    return tuple(read_value(name, part, kind) if kind else part for part in value)


def _convert(value: Any, kind: Any) -> Any:
    """Return a value as one kind, or raise ValueError."""
    origin, text = typing.get_origin(kind), isinstance(value, str)
    if origin is tuple:
        if value == "none":
            return ()
        parts = [part.strip() for part in value.split(",") if part.strip()] if text else value
        parts = parts if isinstance(parts, list | tuple) else [parts]
        return tuple(_convert(part, typing.get_args(kind)[0]) for part in parts)
    if origin is Literal:
        fits = value in typing.get_args(kind) and not isinstance(value, bool)
    elif kind is type(None):
        value, fits = None, value in (None, "none")
    elif kind is bool:
        value, fits = value in (True, "true"), value in ("true", "false") or value is bool(value)
    elif kind in (int, float):
        said = value.translate(_MINUS) if text else ""
        if text and (_WHOLE if kind is int else _NUMBER).match(said):
            value = kind(said)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fits = fits and math.isfinite(value) and (kind is float or value == int(value))
        value = kind(value) if fits else value
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise ValueError
    return value


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of ``A | B``, or the hint itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def type_name(hint: Any) -> str:
    """Name a type in a few letters: ``int``, ``fsdp2|ddp|none``, ``list[str]``."""
    names: list[str] = []
    for kind in alternatives(hint):
        if typing.get_origin(kind) is Literal:
            names += typing.get_args(kind)
        elif typing.get_origin(kind) is tuple:
            names.append(f"list[{typing.get_args(kind)[0].__name__}]")
        elif kind is not type(None):
            names.append(kind.__name__)
    return "|".join(names)


Group = Literal["task", "float8", "execution", "tuning", "measurement", "fault"]
#: What is compared: repeats of an arm; arms of two folders; FP8 with BF16; the arms of an
#: attribution; the switches of a training path; a run and what it goes on from.
Comparison = Literal["repeat", "folder", "pair", "effect", "switch", "resume"]


@dataclass(frozen=True)
class Field:
    """One field of a configuration, but for its name, type and default."""

    group: Group
    meaning: str
    """One or two plain sentences, with the unit."""
    low: float = -math.inf
    """Least value, itself allowed."""
    high: float = math.inf
    """Largest value, itself allowed."""
    one_of: tuple[int, ...] = ()
    """The numbers that are allowed; empty for a range."""
    pattern: str = ""
    """What a text, or each text of a list, must match."""
    example: str = ""
    """What to give, where a text does not match."""
    refused: tuple[tuple[Callable[[Any], Any], str], ...] = ()
    """What it rules out: a condition on the resolved configuration, and the words that follow the
    field and its value (what is wrong; the remedy), formatted with the other fields."""
    decide: Callable[[Any], Any] | None = None
    """Gives the value where nothing was said, from the fields that are declared before it."""
    plain: Any = None
    """A switch: what the plain path makes of it."""
    words: str = ""
    """A switch: what the report calls a value of it."""
    differs: tuple[str, ...] = ()
    """The comparisons (`Comparison`) between whose sides it may differ."""

    def check(self, name: str, value: Any, default: Any) -> None:
        """Refuse, naming what would be valid, a value of the right type outside the field's range.

        Raises:
            UserError: There is one.
        """
        for part in value if isinstance(value, tuple) else (value,):
            wrong = ""
            if isinstance(part, str):
                if any(len(piece) > 255 for piece in part.split("/")):  # no file has such a name
                    raise UserError(
                        f"{name}: '{part[:40]}…' has {len(part)} letters; give a shorter text"
                    )
                if self.pattern and not re.fullmatch(self.pattern, part):
                    raise UserError(f"{name}: '{part}' is not valid; {self.example}")
            elif isinstance(part, int | float) and self.one_of and part not in self.one_of:
                wrong = f"none of {', '.join(map(str, self.one_of))}"
            elif isinstance(part, int | float) and not self.low <= part <= self.high:
                wrong = f"outside {self.low:.10g} to {self.high:.10g}"
            if wrong:
                raise UserError(f"{name}: {part} is {wrong}; try {shown(default) or 'none'}")


def declare(default: Any, group: Group, meaning: str, differs: str = "", **more: Any) -> Any:
    """Declare a field of a dataclass; `more` as in `Field`."""
    spec = Field(group, meaning, differs=tuple(differs.split()), **more)
    return dataclasses.field(default=default, metadata={"spec": spec})


def switch(plain: Any, tuned: Any, words: str, meaning: str, differs: str = "", **more: Any) -> Any:
    """Declare a field that a training path decides where nothing was said.

    Args:
        plain: What the plain path makes of it.
        tuned: What the tuned path does; a function of the configuration where that depends.
        words: What the report calls a value, as ``{} loss head``.
        meaning: As `Field`, and so is `more`.
        differs: As `Field`, besides the comparison of switches.
    """
    choose = tuned if callable(tuned) else lambda _: tuned
    return declare(
        None, "tuning", meaning, f"switch resume {differs}", plain=plain, words=words,
        decide=lambda config: choose(config) if config.path == "tuned" else plain, **more,
    )  # fmt: skip


def shown(value: Any) -> str:
    """Write a value as a command line takes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def refuse(config: Any, specs: Iterable[tuple[str, Field]]) -> None:
    """Refuse fields of a resolved configuration that exclude each other.

    Raises:
        UserError: It names the field, its value, what it contradicts and the remedy.
    """
    for name, spec in specs:
        value = getattr(config, name)
        for is_wrong, words in spec.refused:
            if is_wrong(config):
                text = f"'{value}'" if isinstance(value, str) else shown(value)
                raise UserError(f"{name}: {text} {words.format(**vars(config))}")
