"""What a ``config.json`` must hold before transformers makes a configuration of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fp8study.core.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: What it must say; published ones leave out others where transformers' default holds, and of a
#: part for text also the last two.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
_TEXT_SIZES = (*_SIZES, "vocab_size", "num_attention_heads")
#: Kind of model, size → what its published ones call it, where transformers knows that name too.
_OLDER_NAMES = {("bloom", "hidden_size"): "n_embed"}
#: What transformers' kinds of models call the activation of an MLP.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
#: Kinds of rotary embedding that some models' configurations translate.
_OLDER_ROPES = ("su", "mrope")
#: A value of another kind than transformers' own, in its words.
_WRONG_KIND = re.compile(
    r"Field '(\w+)' (?:expected (\w+), got|.*doesn't match any type in (.*?\)))"
)
_KINDS = {"int": "whole number", "float": "decimal number", "bool": "true or false", "str": "text",
          "dict": "mapping", "NoneType": "null"}  # fmt: skip


def check_content(
    model: str,
    given: dict[str, Any],
    check_kind: Callable[[PreTrainedConfig], None] | None = None,
) -> None:
    """Refuse a configuration that leaves out a size, or from which no model can be built.

    Args:
        model: As the user names it.
        given: What its ``config.json`` says.
        check_kind: Refuses a kind of model by its usual configuration, before any field is looked
            at.

    Raises:
        UserError: Names the field.
    """
    from transformers import CONFIG_MAPPING

    if (kind := str(given.get("model_type"))) not in CONFIG_MAPPING:
        return  # transformers says so better
    usual = CONFIG_MAPPING[kind]()
    if check_kind:
        check_kind(usual)
    if given.get("quantization_config"):
        raise UserError(
            f"model: '{model}' has a quantization_config, of weights that are not trained here; "
            "remove it from its config.json, or give the model as it was before"
        )
    sizes = _SIZES if given.get("text_config") else _TEXT_SIZES
    given, usual = given.get("text_config") or given, usual.get_text_config()
    known = vars(type(usual)).get("__annotations__", {})
    for name in sizes:
        own = usual.attribute_map.get(name, name)
        names = given.keys() & {name, own, _OLDER_NAMES.get((kind, name), own)}
        if own in known and not names:
            raise UserError(
                f"model: '{model}' has no {own} in its config.json; transformers would take "
                f"{getattr(usual, name)} for it: add it"
            )
        if any(isinstance(given[n], int) and given[n] < 1 for n in names):
            raise UserError(
                f"model: '{model}' has no {own} of 1 or more in its config.json; mend it"
            )
    _check_choices(model, given, usual)


def _check_choices(model: str, given: Mapping[str, Any], usual: PreTrainedConfig) -> None:
    """Refuse an activation or a rotary embedding that transformers does not know.

    It does so itself only when it builds the model.
    """
    from transformers.activations import ACT2FN

    found = re.findall(r"_validate_(\w+)_rope_parameters", "\n".join(dir(usual)))
    choices = [(name, given.get(name), [*ACT2FN]) for name in _ACTIVATIONS]
    choices += [(name, kind, found) for name, kind in _ropes(given) if kind not in _OLDER_ROPES]
    for name, value, known in choices:
        if isinstance(value, str) and value not in known:
            raise UserError(
                f"model: '{model}' has {name}: '{value}' in its config.json, which transformers "
                f"does not know{nearest(value, known)}; choose one of {', '.join(known)}"
            )


def _ropes(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each kind of rotary embedding, one for all layers or one a kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(whole := given.get(name), dict):
            for each in (whole, *whole.values()):
                if isinstance(each, dict):
                    yield name, each.get("rope_type", each.get("type"))


def mended(error: Exception, given: Mapping[str, Any]) -> str:
    """Say what is wrong with a configuration, of which `given` is what the file says, and mend it.

    transformers names Python's types where a value is of the wrong kind.
    """
    reason = str(error.args[0] if isinstance(error, KeyError) else error).strip().splitlines()[-1:]
    said = (reason[0] if reason else type(error).__name__).strip().removeprefix("ValueError: ")
    if not (wrong := _WRONG_KIND.search(said)):
        return f"{said.rstrip('.')}; mend its configuration"
    name, kinds = wrong[1], re.findall(r"\w+", wrong[2] or wrong[3])
    given = given.get("text_config") or given
    if name == "rope_parameters" and given.get(name) is None:
        name = "rope_scaling"  # its older name
    value = given.get(name)
    words = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds if kind in _KINDS))
    number = str(value).removesuffix(".0") + (".0" if type(value) is int else "")
    is_wanted = re.fullmatch(r"-?\d+(\.0)?", number) and kinds != ["str"]
    hint = f"write {number}" if is_wanted else "mend its configuration"
    return f"{name}: {json.dumps(value)} is no {words}; {hint}"
