"""Messages about invalid settings: the value, the rule, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

Path = tuple[str | int, ...]

UNREADABLE = "?"
"""Last part of a flaw's path if a name could not be read; replaces that name."""

_MAX_SHOWN = 60
_SIMPLE_KEY = re.compile(r"[^\s.\[\]:=]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_TRUTH = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_KINDS: tuple[tuple[Any, str], ...] = (
    (str, "text"),
    (bool, "a truth value"),
    (float, "a decimal number"),
    ((list, tuple), "a list"),
)

_NEEDS = {
    "int_type": "a whole number is needed",
    "float_type": "a number is needed",
    "bool_type": "`true` or `false` is needed",
    "string_type": "text is needed",
    "dict_type": "a mapping is needed, as in {name: value}",
    "mapping_type": "a mapping is needed, as in {name: value}",
}
"""Maps each of pydantic's type errors to the phrase that names the needed type."""

_RULES = {
    "greater_than_equal": "{value} is too small; it must be at least {limit}.",
    "greater_than": "{value} is too small; it must be greater than {limit}.",
    "less_than_equal": "{value} is too large; it must be at most {limit}.",
    "less_than": "{value} is too large; it must be below {limit}.",
    "finite_number": "{value} is not a usable number; it must be finite.",
    "too_short": "it is empty; name at least one.",
    "string_unicode": "it holds half of a character (a lone surrogate); write the text in UTF-8.",
}
"""Maps other errors of pydantic to the message."""

_TRANSFORMS = {
    name.lower(): name
    for name in (
        "AugMix", "AutoAugment", "ColorJitter", "CutMix", "GaussianBlur", "GaussianNoise", "MixUp", "RandAugment",
        "RandomAffine", "RandomCrop", "RandomErasing", "RandomGrayscale", "RandomPerspective",
        "RandomRotation", "RandomSolarize", "RandomVerticalFlip", "TrivialAugmentWide",
    )
}  # fmt: skip
"""Maps the lower-case names of torchvision's transforms that are not stages of wdskit to their names."""


class Flaw(NamedTuple):
    """One problem that a check has found in a value.

    Attributes:
        path: Path of the invalid setting, relative to the checked value.
        rule: The message.
        line: Line in the YAML text, from 1; 0 if only `path` says where the problem is.
        unread: Whether the value could not be read. Other messages about such a value are dropped.
    """

    path: Path
    rule: str
    line: int = 0
    unread: bool = False


def dotted(path: Path) -> str:
    """Return a path as text: `("pipelines", "train", 2, "shuffle")` becomes `pipelines.train[2].shuffle`."""
    text = ""
    for part in path:
        if part == UNREADABLE:
            continue
        if isinstance(part, int):
            text += f"[{part}]"
        elif _SIMPLE_KEY.fullmatch(part) and len(part) <= _MAX_SHOWN:
            text += f".{part}"
        else:
            text += f"[{show(part)}]"
    return text.removeprefix(".")


def show(value: object) -> str:
    """Return any value as one short line for messages: a text in backticks, `5`, `true`, `[1, 2]`, or "a mapping".

    This function never raises.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value)) if value.bit_length() <= 128 else "a number of more than 38 digits"
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str) and not value:
        return '""'
    if isinstance(value, str):
        text = str.__str__(value[: _MAX_SHOWN + 1])
        text = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
        return f"`{text}`" if len(value) <= _MAX_SHOWN else f"`{text[: _MAX_SHOWN - 1]}…`"
    if isinstance(value, (list, tuple)):
        items = [
            "[…]" if isinstance(item, (list, tuple)) else "{…}" if isinstance(item, Mapping) else show(item)
            for item in value[:4]
        ]
        return f"[{', '.join([*items, '…'] if len(value) > 4 else items)}]"
    if isinstance(value, Mapping):
        return "a mapping"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in set('aeiou') else 'a'} {name}"


def describe(value: object) -> str:
    """Return a value and its type as text, such as "`no` is text". If the type is evident: "it is 5"."""
    kind = next((kind for types, kind in _KINDS if isinstance(value, types)), "")
    return f"{show(value)} is {kind}" if kind else f"it is {show(value)}"


def wrong_kind(value: object, need: str) -> str:
    """Return the message for a value of the wrong kind. `need` is, for example, "a list is needed"."""
    return f"{describe(value)}; {need}.{_hint(value, need)}"


def _hint(value: object, need: str) -> str:
    """Return advice such as " Remove the quotes." if `value` is nearly what `need` asks for; else ""."""
    if not isinstance(value, str):
        return " Put it in quotes." if need.startswith("text") and isinstance(value, (bool, int, float)) else ""
    if "`true`" in need and value.lower() in _TRUTH:
        return f" Write `{_TRUTH[value.lower()]}`."
    if ("number" not in need and "`true`" not in need) or len(value) >= _MAX_SHOWN:
        return ""
    if re.fullmatch(r"[-+]?\d+(\.\d+)?|true|false", value):
        return " Remove the quotes."
    if re.fullmatch(r"\d{1,3}([_,]\d{3})+", value):
        return f" Write {re.sub('[_,]', '', value)}."
    return ""


def listing(names: Iterable[str]) -> str:
    """Join names to "`a`, `b` and `c`"; one name to "`a`", and no names to ""."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that the user probably meant by the misspelt `name`; None if no name is similar."""
    names = list(known)
    lowered = name[: 2 * _MAX_SHOWN].lower().replace("-", "_")
    if lowered in names:
        return lowered
    whole = next((part for part in reversed(lowered.split("_")) if part in names), None)
    if whole is not None:  # `batch_size` means `size`, although `global_size` shares more letters with it
        return whole
    near = difflib.get_close_matches(lowered, names, n=1)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean ...?` with the name in `known` that is nearest to `name`; "" if no name is similar."""
    near = nearest(name, known)
    return f" Did you mean `{near}`?" if near else ""


def unknown_stage(name: str, stages: Iterable[str]) -> str:
    """Return the message for a stage `name` that does not exist. `stages` are the known names, to suggest one."""
    transform = _TRANSFORMS.get(name[:_MAX_SHOWN].replace("_", "").lower())
    if transform:
        return f"{show(name)} is not a stage. Use torchvision's: `- torchvision: [{transform}]`."
    own = " To use your own function, register it and write its name, or `- map: its_name`."
    hint = did_you_mean(name, stages) or own
    return f"{show(name)} is not a stage.{hint}"


def unknown_setting(name: str, owner: str, known: list[str]) -> str:
    """Return the message for a setting `name` that does not exist.

    `owner` is the stage or section as text, such as "`batched`". `known` are the names of its settings.
    """
    if owner in {"`batched`", "`bucketed`"} and name in {"tail", "drop_last"}:
        return "no such setting. The source has it: `exact: {shards: ..., tail: drop}`, or `tail: pad`."
    has = f" {owner} has {listing(known)}." if known else f" {owner} takes no arguments."
    return f"no such setting.{did_you_mean(name, known) or has}"


def forbidden_character(text: str) -> str:
    """Return the message for text with a control character or a lone surrogate; "" for all other text."""
    bad = _CONTROL.search(text)
    if bad is None:
        return ""
    what = "half of a character," if bad[0] >= "\ud800" else "the control character"
    return f"{show(text)} holds {what} U+{ord(bad[0]):04X}; remove it."


def flaws_of(model: type[BaseModel], invalid: ValidationError) -> list[Flaw]:
    """Return the problems that pydantic found in settings of `model`, each once.

    A problem that only follows from another problem is left out: a misspelt setting is not also reported as missing.
    """
    errors = invalid.errors(include_url=False)
    unknown = [str(error["loc"][-1]) for error in errors if error["type"] == "extra_forbidden"]
    misspelt = {nearest(name, setting_names(model)) for name in unknown}
    inner = {error["loc"][:size] for error in errors for size in range(1, len(error["loc"]))}
    flaws = [
        _flaw(model, error)
        for error in errors
        # do not also report a misspelt setting as missing, or a list of wrong items as empty
        if not (error["type"] == "missing" and error["loc"][-1] in misspelt)
        and not (error["type"] == "too_short" and error["loc"] in inner)
    ]
    return list(dict.fromkeys(flaws))


_MARKS = ("[key]", "[number]", "[names]")  # pydantic's mark for a dict's key, and the tags of `NumberOrNames`


def _flaw(model: type[BaseModel], error: Mapping[str, Any]) -> Flaw:
    path: Path = tuple(part for part in error["loc"] if part not in _MARKS)
    items: Mapping[str, type[BaseModel]] = getattr(model, "items", {})
    inner = items.get(str(path[0])) if len(path) > 1 else None
    if error["type"] == "missing":
        return Flaw(path[:-1], _missing(inner or model, str(path[-1])))
    if error["type"] != "extra_forbidden":
        return Flaw(path, _rule(error))
    owner = f"`{getattr(model, 'name', model.__name__.removesuffix('Spec').lower())}`"
    if inner is not None:
        owner = f"an item of `{path[0]}`"
    return Flaw(path, unknown_setting(str(path[-1]), owner, setting_names(inner or model)))


def _rule(error: Mapping[str, Any]) -> str:
    """Return the message for one item of pydantic's `ValidationError.errors()`."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "wdskit":
        return str(error["msg"])
    if kind in _NEEDS:
        return wrong_kind(value, _NEEDS[kind])
    if kind in _RULES:
        limit = next((limit for limit in context.values() if isinstance(limit, (int, float))), 0)
        return _RULES[kind].format(value=show(value), limit=show(int(limit) if limit == int(limit) else limit))
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", context["expected"])
        hint = did_you_mean(value, options) if isinstance(value, str) else ""
        return f"{show(value)} is {'not one of' if len(options) > 1 else 'not'} {listing(options)}.{hint}"
    return f"{show(value)} does not fit: {error['msg'][:1].lower()}{error['msg'][1:]}."


def setting_names(model: type[BaseModel]) -> list[str]:
    """Return the names of a model's settings in YAML: aliases instead of field names."""
    return [one.alias or name for name, one in model.model_fields.items()]


def _missing(model: type[BaseModel], field: str) -> str:
    found = next(info for name, info in model.model_fields.items() if (info.alias or name) == field)
    examples, stage = found.examples, getattr(model, "name", "")
    example = f" Write for example `{stage}: {_written(examples[0])}`." if examples and stage else ""
    return f"the setting `{field}` is missing.{example}"


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return "null" if value is None else str(value)
