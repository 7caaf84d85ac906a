"""Read YAML into dicts, lists and scalars, with the line of every value.

PyYAML's parser yields events, and this module interprets them. Scalars have the types of the core schema of YAML 1.2.
Two kinds of syntax are refused: what YAML readers interpret differently (duplicate keys, merge keys, tags, base 60),
and aliases, which make a small file large. No Python object is constructed from a tag, and no function is called.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from wdskit.config.messages import UNREADABLE, Flaw, Path, forbidden_character, show
from wdskit.limits import MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH
from wdskit.text import as_int

MAX_FLAWS = 100
"""Reading stops after this number of flaws."""

MAX_NODES = 100_000
"""Limit for the values in one document. A large configuration has hundreds; PyYAML reads this number in 3 s."""

MAX_DIGITS = 25
"""Limit for the length of a whole number. 2**64 has 20 digits; longer numbers are typing errors or unquoted text."""

NUMBERED = {("weight",)}
"""The last parts of paths to mappings whose names are numbers, such as the schedule `weight: {0: 1.0, 10000: 0.2}`."""

_SYNTAX = "{}[],:#"
_HIDDEN = "".join(chr(0x10000 * plane + 0xFFFE) for plane in range(1, 1 + len(_SYNTAX)))
"""Characters that never appear in text (Unicode's noncharacters). While PyYAML parses, they replace the characters of
`_SYNTAX` inside `${...}`, so that a variable needs no quotes in `{size: ${BATCH:-24}}`.
"""

_HIDE = str.maketrans(_SYNTAX, _HIDDEN)
_UNHIDE = str.maketrans(_HIDDEN, _SYNTAX)
_BAD_CHARACTER = re.compile(
    f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff{_HIDDEN}]"
)
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{[^}\n]{0,60}\}?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AMBIGUOUS = (
    (
        r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?",
        "is a base-60 number to some YAML readers and text to others. Put it in quotes.",
    ),
    (r"[-+]?0[0-9]+(\.[0-9]*)?", "starts with a zero. Put text in quotes, and write a number without the zero."),
)
_ADVICE = (
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
    ("expected <document start>", "Something follows the document's end."),
)
"""Parts of PyYAML's messages, and the advice that is added to a message with this part."""


@dataclass
class Document:
    """The content of a YAML text or a dict.

    Attributes:
        tree: dicts, lists, str, int, float, bool and None; from a dict, also all other objects of the dict. A value
            that could not be read is None, and a value with an invalid name is left out. The whole tree is None if the
            reading stopped, for example because the text is empty or is not YAML, or because the document is too long
            or nested too deeply.
        lines: Maps the path of each value to a line, from 1: the line of its key, or its own line without a key. Empty
            for a dict.
        flaws: The problems with their lines, in the order of the text; at most `MAX_FLAWS`.
    """

    tree: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)


class ScalarError(ValueError):
    """A single value in YAML is invalid. The text of the error is the message for the user."""


class _Stop(Exception):
    """Raised to end the reading. The reason is the last flaw of the document."""


def read_yaml(data: bytes | str, *, setting: str = "") -> Document:
    """Read one YAML document. Variables such as `${HOME}` get their values from the environment of the process.

    Invalid text never raises: the problems are in `Document.flaws`.

    Args:
        data: The text; bytes are UTF-8.
        setting: Name of the setting whose value the text is; empty for a whole configuration.
    """
    reader = _Reader(setting)
    with suppress(_Stop):
        reader.document.tree = reader.read(data)
    return reader.document


def read_dict(source: Mapping[Any, Any]) -> Document:
    """Return a Python dict as a document. Dicts and lists are copied, and tuples become lists; all other values are the
    same objects.

    No error is raised. The document has a flaw if a name is not text, or if the dict contains itself, is nested too
    deeply or has more than `MAX_NODES` values.
    """
    reader = _Reader("")
    reader.line = 0
    with suppress(_Stop):
        reader.document.tree = reader.copy(source, ())
    return reader.document


def type_plain(text: str) -> str | float | None:
    """Return the value of a YAML scalar that is written without quotes: None, bool, int, float, or the text itself.

    Raises:
        ScalarError: YAML readers disagree about the type of `text`, or the number is too long or too large.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "0123456789+-.":
        return text
    for pattern, rule in _AMBIGUOUS:
        if re.fullmatch(pattern, text):
            raise ScalarError(f"{show(text)} {rule}")
    if _WHOLE.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ScalarError(f"{show(text)} is a number of {len(text)} digits. If it is text, put it in quotes.")
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    if not _DECIMAL.fullmatch(text):
        return text
    number = float(text)
    if math.isinf(number):
        raise ScalarError(f"{show(text)} is larger than any number. If it is text, put it in quotes.")
    return number


class _Reader:
    """A builder of one document, from the events of PyYAML's parser or from a dict."""

    def __init__(self, setting: str) -> None:
        self.document = Document()
        self.setting = setting  # name of the setting whose value the document is; empty for a whole configuration
        self.events: Iterator[Any] = iter(())
        self.line = 1  # line of the last event; 0 for a dict
        self.num_nodes = 0
        self.num_filled = 0  # characters in the values of all replaced variables

    def read(self, data: bytes | str) -> Any:
        """Return the tree of a YAML text. On invalid syntax, add a flaw and raise `_Stop`."""
        try:
            self.events = iter(yaml.parse(self._decode(data), Loader=yaml.SafeLoader))
            return self._stream()
        except yaml.MarkedYAMLError as err:
            mark = err.problem_mark or err.context_mark
            self.line = mark.line + 1 if mark else 1
            self._stop(_plain_english(err))
        except (yaml.YAMLError, ValueError, OverflowError, IndexError):
            # errors that PyYAML does not wrap: an escape beyond Unicode, a %YAML version with many digits
            self._stop("this is not YAML. Look for an escape such as \\U that names no character.")

    def _decode(self, data: bytes | str) -> str:
        if len(data) > MAX_CONFIG_BYTES:
            self._stop(f"it has more than {MAX_CONFIG_BYTES} bytes; no configuration is that long.")
        try:
            text = data.decode("utf-8") if isinstance(data, bytes) else data
        except UnicodeDecodeError as err:
            self.line = err.object.count(b"\n", 0, err.start) + 1
            self._stop(f"byte {err.start} (0x{err.object[err.start]:02x}) is not UTF-8. Save the file as UTF-8.")
        text = text.removeprefix("\ufeff")
        if bad := _BAD_CHARACTER.search(text):
            self.line = text.count("\n", 0, bad.start()) + 1
            self._stop(f"the character U+{ord(bad[0]):04X} is not allowed in YAML; remove it.")
        return _VARIABLE.sub(_hide_syntax, text)

    def _stream(self) -> Any:
        self._next()  # start of the stream
        start = self._next()
        if isinstance(start, yaml.StreamEndEvent):
            self.line = 1
            self._stop("the document is empty.")
        if start.tags:
            self._flaw((), "`%TAG` has no meaning here; remove the line.")
        tree = self._node(self._next(), ())
        self._next()  # end of the document
        if not isinstance(self._next(), yaml.StreamEndEvent):
            self._stop("a second document starts here; a configuration has only one.")
        return tree

    def _next(self) -> Any:
        event = next(self.events)
        self.line = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            event.value = event.value.translate(_UNHIDE)
        self._count(isinstance(event, yaml.NodeEvent))
        return event

    def _count(self, num_nodes: int) -> None:
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            self._stop(f"it holds more than {MAX_NODES} values; no configuration is that long.")

    def _check_depth(self, path: Path) -> None:
        """Add a flaw and raise `_Stop` if a list or mapping at `path` is nested too deeply."""
        if len(path) >= MAX_CONFIG_DEPTH:
            self._stop(f"it is nested deeper than {MAX_CONFIG_DEPTH} levels.")

    def _flaw(self, path: Path, rule: str, *, unread: bool = True) -> None:
        self.document.flaws.append(Flaw(path, rule, self.line, unread))
        if len(self.document.flaws) == MAX_FLAWS:
            raise _Stop

    def _stop(self, rule: str) -> NoReturn:
        self._flaw((), rule)
        raise _Stop

    def _node(self, event: Any, path: Path) -> Any:
        """Return the value that starts with PyYAML's `event`. If it is invalid, add a flaw and return None."""
        self.document.lines.setdefault(path, self.line)
        if isinstance(event, yaml.AliasEvent):
            self._flaw(path, _alias_rule(event))
            return None
        self._check_properties(event, path)
        if isinstance(event, yaml.ScalarEvent):
            try:
                text = self._fill(event.value)
                return type_plain(text) if event.implicit[0] else text
            except ScalarError as err:
                self._flaw(path, str(err))
                return None
        self._check_depth(path)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        items: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items))))
        return items

    def _mapping(self, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = event.value if isinstance(event, yaml.ScalarEvent) else UNREADABLE
            rule = self._key_rule(event, key in mapping, path)
            if rule:
                self._flaw((*path, UNREADABLE), rule, unread=key not in mapping)
            if isinstance(event, yaml.ScalarEvent):
                self._check_properties(event, (*path, UNREADABLE))
                self.document.lines.setdefault((*path, key), self.line)
            elif not isinstance(event, yaml.AliasEvent):
                self._node(event, (*path, key))
            value = self._node(self._next(), (*path, key))
            if not rule:
                mapping[key] = value
        return mapping

    def _key_rule(self, event: Any, is_repeated: bool, path: Path) -> str:  # noqa: FBT001 (private, one call)
        """Return why a key of the mapping at `path` is invalid; "" if it is valid.

        `event` is PyYAML's event of the key. `is_repeated` is True if the mapping has the key already.
        """
        if isinstance(event, yaml.AliasEvent):
            return _alias_rule(event)
        if not isinstance(event, yaml.ScalarEvent):
            return "a name is needed here, not a list or mapping. Text that starts with `[` or `{` needs quotes."
        name = event.value
        if is_repeated:
            first = self.document.lines.get((*path, name))
            return f"{show(name)} appears twice in this mapping, first on line {first}. Remove one."
        if not event.implicit[0]:
            return ""
        if name == "<<":
            return "the merge key `<<` is not supported; write the settings out."
        if "${" in name:
            return f"{show(name)}: variables work in values, not in names."
        try:
            return _name_rule(type_plain(name), path or (self.setting,))
        except ScalarError as err:
            return str(err)

    def _check_properties(self, event: Any, path: Path) -> None:
        if event.anchor is not None:
            self._flaw(path, f"the anchor `&{event.anchor}` is not supported; remove it.", unread=False)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!", 1)
            self._flaw(path, f"the tag {show(tag)} is not supported; remove it. Quotes make text.")

    def _fill(self, text: str) -> str:
        """Replace the variables in a text, such as `${HOME}`. Raises ScalarError for an invalid variable or value."""
        text = _VARIABLE.sub(self._value_of, text)
        if rule := forbidden_character(text):
            raise ScalarError(rule)
        return text

    def _value_of(self, found: re.Match[str]) -> str:
        """Return the text that replaces a match of `_VARIABLE`. Variables inside this text are not replaced.

        Raises:
            ScalarError: The variable is misspelt or not set, or the values of all variables together are too long.
        """
        name, default = found.groups()
        if found[0] == "$$":
            return "$"
        if name is None:
            msg = f"{show(found[0])} is not a variable. Write ${{NAME}} or ${{NAME:-default}}; `$$` gives a `$`."
            raise ScalarError(msg)
        if default is not None and "${" in default:
            raise ScalarError(f"{show(found[0])}: a default cannot hold another variable.")
        value = os.environ.get(name)
        if default is not None and not value:
            return str(default)
        if value is None:
            raise ScalarError(f"the environment variable `{name}` is not set. Set it, or write ${{{name}:-default}}.")
        self.num_filled += len(value)
        if self.num_filled > MAX_CONFIG_BYTES:
            raise ScalarError(f"the variables expand to more than {MAX_CONFIG_BYTES} characters in all.")
        return value

    def copy(self, value: Any, path: Path) -> Any:
        """Return a deep copy of the dicts and lists in a value at `path`. Tuples become lists.

        A value with an invalid name is left out, and a flaw is added. If there are too many values, or the value is
        nested too deeply, add a flaw and raise `_Stop`.
        """
        self._count(1)
        if not isinstance(value, (Mapping, list, tuple)):
            return value
        self._check_depth(path)
        if not isinstance(value, Mapping):
            return [self.copy(item, (*path, at)) for at, item in enumerate(value)]
        mapping = {}
        for given, item in value.items():
            name = as_int(given)
            if rule := _name_rule(name, path):
                self._flaw((*path, UNREADABLE), rule)
            else:
                mapping[str(name)] = self.copy(item, (*path, str(name)))
        return mapping


def _hide_syntax(found: re.Match[str]) -> str:
    is_variable = found[1] is not None and "\n" not in found[0]
    return found[0].translate(_HIDE) if is_variable else found[0]


def _alias_rule(event: yaml.AliasEvent) -> str:
    return f"the alias `*{event.anchor}` is not supported; write the value itself."


def _name_rule(name: object, path: Path) -> str:
    """Return why the key `name` of the mapping at `path` is invalid; "" if it is valid.

    A key is valid if it is text. In a mapping that is the value of `weight`, a whole number is valid, too.
    """
    if isinstance(name, str) or (type(name) is int and path[-1:] in NUMBERED):
        return ""
    return f"the name {show(name)} is not text. Put it in quotes."


def _plain_english(err: yaml.MarkedYAMLError) -> str:
    problem = (err.problem or err.context or "it cannot be read").translate(_UNHIDE)
    advice = next((f" {advice}" for part, advice in _ADVICE if part in problem), "")
    context = f" ({err.context}, line {err.context_mark.line + 1})" if err.context and err.context_mark else ""
    problem = problem.replace("'\\x00'", "the end").replace("'<stream end>'", "the end")
    return f"this is not YAML: {problem}{context}.{advice}"
