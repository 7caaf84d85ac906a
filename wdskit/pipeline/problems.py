"""Plain English for what is wrong with a setting: the value, what is needed, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Path = tuple[str | int, ...]

_MAX_SHOWN = 60
_SIMPLE_KEY = re.compile(r"[^\s.\[\]:=]+")
_TRUTH = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_NEEDS = {
    "int_type": "a whole number is needed",
    "float_type": "a number is needed",
    "bool_type": "`true` or `false` is needed",
    "string_type": "text is needed",
    "dict_type": "a mapping is needed, as in {name: value}",
    "mapping_type": "a mapping is needed, as in {name: value}",
}

_YAML_ADVICE = (
    ("'\\t'", "Indent with spaces, not with tabs."),
    ("mapping values are not allowed here", "Check the indentation, or put text that holds `: ` in quotes."),
    ("could not find expected ':'", "Check the indentation of this line, and the quotes of the one before."),
    ("expected ',' or ']'", "A `[` is not closed, or a comma is missing; text that holds `{` needs quotes."),
    ("expected ',' or '}'", "A `{` is not closed, or a comma is missing; text that holds `{` needs quotes."),
    ("expected <block end>", "The indentation does not fit the lines above."),
    ("end of stream", "Close the quotes."),
    ("expected alphabetic or numeric character", "Text that starts with `*` or `&` needs quotes."),
    ("cannot start any token", "Text that starts with `%`, `@` or a backtick needs quotes."),
    ("expected the node content", "A value is missing, or text that starts with one of `,]}` needs quotes."),
    ("expected <document start>", "Something stands behind the document's end."),
)


class Flaw(NamedTuple):
    """One thing wrong, at a path relative to whatever was checked."""

    path: Path
    rule: str


def dotted(path: Path) -> str:
    """`("pipelines", "train", 2, "shuffle")` as `pipelines.train[2].shuffle`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _SIMPLE_KEY.fullmatch(part) and len(part) <= _MAX_SHOWN:
            text += f".{part}"
        else:
            text += f"[{show(part)}]"
    return text.removeprefix(".")


def show(value: object) -> str:
    """A value as a message shows it: YAML's spelling, short, one line. Never fails, whatever the value is."""
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
        items = [_show_item(item) for item in value[:4]]
        return f"[{', '.join([*items, '…'] if len(value) > 4 else items)}]"
    if isinstance(value, Mapping):
        return "a mapping"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in set('aeiou') else 'a'} {name}"


def _show_item(item: object) -> str:
    return "[…]" if isinstance(item, (list, tuple)) else "{…}" if isinstance(item, Mapping) else show(item)


def describe(value: object) -> str:
    """`show`, followed by what kind of thing that is: "`no` is text"."""
    shown = show(value)
    if isinstance(value, str):
        return f"{shown} is text"
    if isinstance(value, bool):
        return f"{shown} is a truth value"
    if isinstance(value, float):
        return f"{shown} is a decimal number"
    if isinstance(value, (list, tuple)):
        return f"{shown} is a list"
    return f"it is {shown}"


def wrong_kind(value: object, need: str) -> str:
    """The rule for a value of the wrong kind: `need` is "a list is needed"."""
    return f"{describe(value)}; {need}.{_hint(value, need)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` with the nearest of `known`, or nothing."""
    near = nearest(name, known)
    return f" Did you mean `{near}`?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` is most likely a slip of, or None."""
    names = list(known)
    lowered = name[: 2 * _MAX_SHOWN].lower().replace("-", "_")
    if lowered in names:
        return lowered
    whole = next((part for part in reversed(lowered.split("_")) if part in names), None)
    if whole is not None:  # `batch_size` is `size`, though `global_size` has more letters of it
        return whole
    near = difflib.get_close_matches(lowered, names, n=1)
    return near[0] if near else None


def listing(names: Iterable[str]) -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def translate(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a rule. `missing` and `extra_forbidden` are the caller's: they need the model."""
    kind, value, facts = error["type"], error["input"], error.get("ctx", {})
    if kind == "wdskit":
        return str(error["msg"])
    if kind in _NEEDS:
        return wrong_kind(value, _NEEDS[kind])
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", facts["expected"])
        hint = did_you_mean(value, options) if isinstance(value, str) else ""
        return f"{show(value)} is {'none of' if len(options) > 1 else 'not'} {listing(options)}.{hint}"
    if kind == "greater_than_equal":
        return f"{show(value)} is too small; it must be at least {_bound(facts['ge'])}."
    if kind == "greater_than":
        return f"{show(value)} is too small; it must be greater than {_bound(facts['gt'])}."
    if kind == "less_than_equal":
        return f"{show(value)} is too large; it must be at most {_bound(facts['le'])}."
    if kind == "less_than":
        return f"{show(value)} is too large; it must be below {_bound(facts['lt'])}."
    if kind == "finite_number":
        return f"{show(value)} is no number to work with; it must be finite."
    if kind == "too_short":
        return "it is empty; name at least one."
    if kind == "string_unicode":
        return "it holds half of a character (a lone surrogate); write the text in UTF-8."
    return f"{show(value)} does not fit: {error['msg'][:1].lower()}{error['msg'][1:]}."


def yaml_advice(problem: str) -> str:
    """What to do about one of PyYAML's own messages, "" where there is nothing to say."""
    return next((advice for part, advice in _YAML_ADVICE if part in problem), "")


def _bound(limit: float) -> str:
    return show(int(limit) if limit == int(limit) else limit)


def _hint(value: object, need: str) -> str:
    if not isinstance(value, str):
        return " Put it in quotes." if need.startswith("text") and isinstance(value, (bool, int, float)) else ""
    if "`true`" in need and value.lower() in _TRUTH:
        return f" Write `{_TRUTH[value.lower()]}`."
    if "number" not in need and "`true`" not in need:
        return ""
    if re.fullmatch(r"[-+]?\d+(\.\d+)?|true|false", value) and len(value) < _MAX_SHOWN:
        return " Remove the quotes."
    if re.fullmatch(r"\d{1,3}([_,]\d{3})+", value) and len(value) < _MAX_SHOWN:
        return f" Write {re.sub('[_,]', '', value)}."
    return ""
