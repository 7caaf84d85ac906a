"""Read a configuration, apply overrides, and check the result. One error lists the first 100 problems.

The YAML text becomes a tree of dicts, lists and scalars, and the line of each path. PyYAML composes the nodes; no
object is made from a tag. Scalars have the types of YAML 1.2. What YAML readers interpret differently is refused:
repeated names, merge keys, tags, base 60; and aliases, which make a small file large. A stage then becomes
`{name: settings}`, so that overrides and checks know one form only. pydantic checks the settings.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import BaseModel

from wdskit.config.order import check_order
from wdskit.config.types import (
    Flaw,
    Path,
    Stages,
    StageSpec,
    did_you_mean,
    dotted,
    forbidden_character,
    read_item,
    read_settings,
    show,
    unknown_setting,
    wrong_kind,
)
from wdskit.errors import ConfigError, Problem, StorageError
from wdskit.limits import MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH
from wdskit.text import as_int

VERSION = 1
SINGLE = "pipeline"
"""The setting for a single pipeline, and the name of that pipeline."""

MAX_PROBLEMS = 100
MAX_NODES = 100_000
"""Limit for the values in one document. A large configuration has hundreds; PyYAML reads this number in 3 s."""

MAX_DIGITS = 25
"""Limit for the length of a whole number. 2**64 has 20 digits; longer numbers are typing errors or unquoted text."""

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
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}\n]*))?\}|\$\{[^}\n]{0,60}\}?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AMBIGUOUS = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?|[-+]?0[0-9]+(\.[0-9]*)?")
_TYPED = (_WHOLE, _DECIMAL, _NOT_FINITE, _AMBIGUOUS)
"""Patterns of text that needs quotes to stay text."""

_PIPELINE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_INDEX = re.compile(r"\[(\d+)\]")
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")

Stage = StageSpec | Callable[..., Any]
Sections = Mapping[str, type[BaseModel]]


def load(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str], stages: Stages, sections: Sections
) -> tuple[dict[str, tuple[Stage, ...]], dict[str, Any]]:
    """Read and check a configuration.

    Args:
        source: The path of a YAML file, or its content as a dict. A dict is not changed and needs no `version`.
        overrides: Texts `a.b.c=VALUE`, applied in order before the checks.
        stages: Maps the name of each stage to its class.
        sections: Maps `loader`, `errors` and `cache` to their classes.

    Returns:
        The stages of each pipeline by name, and the checked settings of each section by name. The single pipeline of
        `pipeline:` has the name "pipeline".

    Raises:
        ConfigError: The configuration has problems, or `overrides` is a text. The first `MAX_PROBLEMS` problems are
            listed in the order of the file; the problems of overrides come last.
        StorageError: The file cannot be read.
    """
    if isinstance(overrides, str):
        raise ConfigError(problems=(Problem("overrides", "", "a list is needed, as in ['loader.workers=4']."),))
    if isinstance(source, Mapping):
        reader = Reader("config dict")
        reader.read_dict(source)
    else:
        reader = Reader(str(source))
        reader.read_yaml(_read_file(source))
    loaded = _ConfigChecker(reader, stages, sections).run(overrides)
    if not reader.problems:
        return loaded
    unique = sorted(dict.fromkeys(reader.problems), key=lambda each: each[0])
    shown = [Problem(where, dotted(path), rule) for _, where, path, rule in unique[:MAX_PROBLEMS]]
    if len(unique) > len(shown):
        shown.append(Problem(reader.origin, "", f"{len(unique) - len(shown)} more problems are not shown."))
    raise ConfigError(problems=tuple(shown))


def _read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a configuration file. If the file is too long, return `MAX_CONFIG_BYTES + 1` bytes.
    StorageError: The file cannot be read.
    """
    try:
        with FilePath(path).open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or err
        raise StorageError(f"{path}: the configuration cannot be read: {reason}.", url=str(path)) from err


class _UnreadableError(Exception):
    """The text is not a YAML document that is accepted. Its arguments are the line and the message."""


class _Loader(yaml.BaseLoader):
    """Composes nodes. Aliases, anchors and tags are errors, and so are too many or too deeply nested values."""

    depth = num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.num_nodes += 1
        self.depth += 1
        rule = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            rule = "anchors and aliases are not supported; write the value itself."
        elif event.tag is not None:
            rule = "tags are not supported; remove it. Quotes make text."
        elif isinstance(event, yaml.CollectionStartEvent) and self.depth > MAX_CONFIG_DEPTH:
            rule = f"it is nested deeper than {MAX_CONFIG_DEPTH} levels."
        elif self.num_nodes > MAX_NODES:
            rule = f"it holds more than {MAX_NODES} values; no configuration is that long."
        if rule:
            raise _UnreadableError(event.start_mark.line + 1, rule)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(data: bytes | str) -> yaml.Node:
    """Return the node of the only document in a text. _UnreadableError: There is none."""
    if len(data) > MAX_CONFIG_BYTES:
        raise _UnreadableError(1, f"it has more than {MAX_CONFIG_BYTES} bytes; no configuration is that long.")
    try:
        text = (data.decode() if isinstance(data, bytes) else data).removeprefix("\ufeff")
    except UnicodeDecodeError as err:
        raise _UnreadableError(err.object.count(b"\n", 0, err.start) + 1, f"this is not UTF-8: {err.reason}.") from err
    if bad := _BAD_CHARACTER.search(text):
        rule = f"the character U+{ord(bad[0]):04X} is not allowed in YAML; remove it."
        raise _UnreadableError(text.count("\n", 0, bad.start()) + 1, rule)
    loader = _Loader(_VARIABLE.sub(lambda found: found[0].translate(_HIDE) if found[1] else found[0], text))
    try:
        node: yaml.Node | None = loader.get_single_node()
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as err:  # PyYAML does not wrap all errors
        mark = getattr(err, "problem_mark", None) or getattr(err, "context_mark", None) or loader
        words = [getattr(err, "context", None), getattr(err, "problem", err)]
        what = ": ".join(str(word) for word in words if word).translate(_UNHIDE)
        raise _UnreadableError(mark.line + 1, f"this is not YAML: {what[:200]}.") from err
    if node is None:
        raise _UnreadableError(1, "the document is empty.")
    return node


def type_plain(text: str) -> str | float | None:
    """Return the value of a YAML scalar that is written without quotes: None, bool, int, float, or the text itself.

    Raises:
        ValueError: YAML readers disagree about the type of `text`, or the number is too long or too large.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _AMBIGUOUS.fullmatch(text):
        raise ValueError(f"{show(text)} is a number to some YAML readers and text to others. Put text in quotes.")
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    is_whole = _WHOLE.fullmatch(text)
    if not is_whole and not _DECIMAL.fullmatch(text):
        return text
    if (is_whole and len(text) > MAX_DIGITS) or (not is_whole and math.isinf(float(text))):
        raise ValueError(f"{show(text)} is too large for a number. If it is text, put it in quotes.")
    return int(text, 0) if is_whole else float(text)


class Reader:
    """Reads a configuration into a tree, and collects the problems of the text.

    Attributes:
        origin: The path of the file, for messages.
        tree: dicts, lists, str, int, float, bool and None; from a dict, also all other objects of the dict.
        places: Maps the path of each value to (line, place); the place is for messages, such as `train.yaml:12`.
        problems: (line, place, path, rule) for each problem.
        has_lines: Whether the source is a text.
        unread: Paths of values that could not be read: they are None in the tree. Other problems of them are dropped.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.tree: Any = None
        self.places: dict[Path, tuple[int, str]] = {(): (0, origin)}
        self.problems: list[tuple[int, str, Path, str]] = []
        self.has_lines = False
        self.unread: list[Path] = []
        self._num_filled = 0

    def note(self, path: Path, rule: str) -> None:
        """Collect a problem of the setting at `path`, unless a part of it could not be read."""
        if not any(path[: len(unread)] == unread[: len(path)] for unread in self.unread):
            near = next(path[:size] for size in range(len(path), -1, -1) if path[:size] in self.places)
            self.problems.append((*self.places[near], path, rule))

    def replace(self, path: Path, place: tuple[int, str]) -> None:
        """Give a value that an override has set its place. What was wrong with the old value is no problem any more."""
        self.places = {at: old for at, old in self.places.items() if at[: len(path)] != path} | {path: place}
        self.unread = [at for at in self.unread if at[: len(path)] != path]
        self.problems = [each for each in self.problems if each[2][: len(path)] != path or each[0] == sys.maxsize]

    def read_yaml(self, data: bytes | str) -> None:
        """Read one YAML document. Variables such as `${HOME}` get their values from the environment of the process."""
        self.has_lines = True
        self.places.clear()
        try:
            self.tree = self._value(_compose(data), ())
        except _UnreadableError as err:
            line, rule = err.args
            self.problems.append((line, f"{self.origin}:{line}", (), rule))
            self.unread.append(())

    def _value(self, node: Any, path: Path) -> Any:
        self.places.setdefault(path, self._place(node))
        if isinstance(node, yaml.ScalarNode):
            try:
                text = self._fill(node.value.translate(_UNHIDE))
                return text if node.style else type_plain(text)
            except ValueError as err:
                self.note(path, str(err))
                self.unread.append(path)
                return None
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, at)) for at, item in enumerate(node.value)]
        tree: dict[str, Any] = {}
        for key, item in node.value:
            name = key.value.translate(_UNHIDE) if isinstance(key, yaml.ScalarNode) else ""
            if not isinstance(key, yaml.ScalarNode) or (not key.style and (name == "<<" or "${" in name)):
                rule = "a name is plain text: no list, mapping, merge key or variable."
                self.problems.append((*self._place(key), path, rule))
            elif name in tree:
                rule = f"{show(name)} appears twice in this mapping. Remove one."
                self.problems.append((*self._place(key), path, rule))
            else:
                here = (*path, name)
                self.places[here] = self._place(key)
                tree[name] = self._value(item, here)
        return tree

    def _place(self, node: yaml.Node) -> tuple[int, str]:
        line: int = node.start_mark.line + 1
        return line, f"{self.origin}:{line}"

    def _fill(self, text: str) -> str:
        """Replace the variables in a text, such as `${HOME}`. Raises ValueError for an invalid variable or value."""
        text = _VARIABLE.sub(self._value_of, text)
        if rule := forbidden_character(text):
            raise ValueError(rule)
        return text

    def _value_of(self, found: re.Match[str]) -> str:
        name, default = found.groups()
        if found[0] == "$$":
            return "$"
        if name is None or "${" in (default or ""):
            msg = f"{show(found[0])} is not a variable. Write ${{NAME}} or ${{NAME:-default}}; `$$` gives a `$`."
            raise ValueError(msg)
        value = os.environ.get(name) or default
        if value is None and name not in os.environ:
            raise ValueError(f"the environment variable `{name}` is not set. Set it, or write ${{{name}:-default}}.")
        self._num_filled += len(value or "")
        if self._num_filled > MAX_CONFIG_BYTES:
            raise ValueError(f"the variables expand to more than {MAX_CONFIG_BYTES} characters in all.")
        return value or ""

    def read_dict(self, source: Mapping[Any, Any]) -> None:
        """Read a Python dict. Dicts and lists are copied, tuples become lists; other values are the same objects."""
        self.tree = self._copy(source, ())

    def _copy(self, value: Any, path: Path) -> Any:
        if not isinstance(value, Mapping | list | tuple):
            return value
        if len(path) >= MAX_CONFIG_DEPTH:  # it may hold itself
            self.note((), f"it is nested deeper than {MAX_CONFIG_DEPTH} levels.")
            self.unread.append(())
        if () in self.unread:
            return None
        if not isinstance(value, Mapping):
            return [self._copy(item, (*path, at)) for at, item in enumerate(value)]
        named = {str(as_int(name)): item for name, item in value.items()}
        return {name: self._copy(item, (*path, name)) for name, item in named.items()}


class _ConfigChecker:
    """Checks one configuration. Its problems are added to those of the reader."""

    def __init__(self, reader: Reader, stages: Stages, sections: Sections) -> None:
        self._reader = reader
        self._note = reader.note
        self._known = stages
        self._sections = sections

    def run(self, overrides: Sequence[str]) -> tuple[dict[str, tuple[Stage, ...]], dict[str, Any]]:
        """Apply the overrides, and check all settings. The result is valid only if there are no problems."""
        tree = self._reader.tree
        if not isinstance(tree, dict):
            self._note((), wrong_kind(tree, "a mapping with `version`, `pipelines` and `loader` is needed"))
            return {}, {}
        tree |= {name: {} for name in self._sections if tree.get(name) is None}
        self._expand_stages()
        for text in overrides:
            self._override(text)
        known = ["version", "pipeline", "pipelines", *self._sections]
        for name in [name for name in tree if name not in known]:
            self._note((name,), unknown_setting(name, "A configuration", known))
        version = tree.get("version", None if self._reader.has_lines else VERSION)
        if type(version) is not int or version != VERSION:
            self._note(("version",), f"write `version: {VERSION}` at the top, not {show(version)}.")
        if "pipeline" in tree and "pipelines" in tree:
            self._note(("pipeline",), "`pipeline` and `pipelines` exclude each other; move it into `pipelines`.")
        pipelines = {str(path[-1]): self._stages(path, items) for path, items in _pipelines(tree)}
        for name in () if SINGLE in tree else pipelines:
            if not _PIPELINE_NAME.fullmatch(name):
                self._note(("pipelines", name), f"{show(name)} is not a valid name; use letters, digits, _ and -.")
        if "pipelines" in tree and not pipelines:
            rule = wrong_kind(tree["pipelines"], "a mapping of names to lists of stages is needed")
            self._note(("pipelines",), rule)
        elif not pipelines and not any(did_you_mean(name, ["pipeline", "pipelines"]) for name in tree):
            self._note((), "there is no pipeline. Write `pipeline:` and a list of stages.")
        return pipelines, {name: self._section(name, tree[name]) for name in self._sections}

    def _section(self, name: str, settings: Any) -> Any:
        section, flaws = read_settings(self._sections[name], settings)
        for flaw in flaws:
            self._note((name, *flaw.path), flaw.rule)
        return section

    def _stages(self, path: Path, items: Any) -> tuple[Stage, ...]:
        if not isinstance(items, list):
            self._note(path, wrong_kind(items, "a list of stages is needed, each line starting with `- `"))
            return ()
        stages = [self._stage((*path, at), item) for at, item in enumerate(items)]
        for at, rule in check_order(stages):
            name = getattr(stages[at], "name", None) if items else None
            self._note((*path, at, name) if name else (*path, at) if items else path, rule)
        return tuple(stages)

    def _stage(self, path: Path, item: Any) -> Any:
        """Return the stage that `item` describes, and collect its problems. `path` is the place of `item` in the tree.

        Return a function unchanged. Return the class of the stage if its settings are invalid. Return None if `item`
        names no known stage.
        """
        if callable(item) and not isinstance(item, type):
            return item
        spec, flaws = read_item(self._known, item)
        if spec is not None and not isinstance(item, StageSpec):
            flaws = [Flaw((spec.name, *flaw.path), flaw.rule) for flaw in spec.flaws()]
        for flaw in flaws:
            self._note((*path, *flaw.path), flaw.rule)
        return spec or (self._known.get(str(flaws[0].path[0])) if flaws[0].path else None)

    def _expand_stages(self) -> None:
        """Write each stage of a known name as `{name: settings}`, so that an override can find or add a setting."""
        for _, items in _pipelines(self._reader.tree):
            for at, item in enumerate(items) if isinstance(items, list) else ():
                name, value = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, None)
                stage = self._known.get(name) if isinstance(name, str) else None
                if stage is not None and not stage.is_mapping and not isinstance(value, dict):
                    items[at] = {name: stage.expand(value)}

    def _override(self, text: str) -> None:
        """Apply an override such as `loader.workers=4` to the tree, or collect its problem.

        Later problems of the changed setting name the override instead of a line.
        """
        place = sys.maxsize, f"--set {text if len(text) <= 200 else text[:199] + '…'}"
        name, sign, value = text.partition("=")
        steps = [step for step in _INDEX.sub(r".\1", name.strip()).split(".") if step]
        reader = Reader("")
        reader.read_yaml(value)
        node = self._reader.tree
        try:
            path = self._find(node, steps, ())
        except ValueError as err:
            self._reader.problems.append((*place, (), str(err)))
            return
        if not sign or not path or reader.problems:
            rule = reader.problems[0][3] if sign and path else "an override is written PATH=VALUE: loader.workers=4."
            self._reader.problems.append((*place, path if sign else (), rule))
            return
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = reader.tree
        self._reader.replace(path, place)
        self._expand_stages()

    def _find(self, node: Any, steps: list[str], path: Path) -> Path:
        """Return the path of the value that `steps` name below `node`, which is at `path`. The last step may be new.

        A stage may be named by its position or its name, and an item of its short form by its position.
        ValueError: A value on the way does not exist.
        """
        if not steps:
            return path
        step, rest = steps[0], steps[1:]
        if isinstance(node, list):
            names = [next(iter(item)) if isinstance(item, dict) and len(item) == 1 else "" for item in node]
            if step.isdecimal() and int(step[:9]) < len(node):
                return self._find(node[int(step)], rest, (*path, int(step)))
            if names.count(step) == 1:
                at = names.index(step)
                return self._find(node[at][step], rest, (*path, at, step))
            found = f"are {names.count(step)}" if step in names else "is no"
            raise ValueError(f"there {found} {show(step)} in {dotted(path)}.{did_you_mean(step, names)}")
        if not isinstance(node, dict):
            raise ValueError(f"{dotted(path)} is {show(node)}; nothing is below it.")  # noqa: TRY004 (the text is wrong)
        short = getattr(self._known.get(str(path[-1])), "shorthand", None) if len(path) > 2 else None
        if step.isdecimal() and isinstance(node.get(short), list):
            return self._find(node[short], steps, (*path, str(short)))
        if rest and step not in node:
            raise ValueError(f"there is no {show(step)} in {dotted(path) or 'it'}.{did_you_mean(step, node)}")
        return self._find(node.get(step), rest, (*path, step))


def _pipelines(tree: dict[str, Any]) -> list[tuple[Path, Any]]:
    """Return the path and the items of each pipeline in a tree."""
    named = tree.get("pipelines")
    found: list[tuple[Path, Any]] = [((SINGLE,), tree[SINGLE])] if SINGLE in tree else []
    return found + [(("pipelines", name), items) for name, items in named.items()] if isinstance(named, dict) else found


def to_yaml(pipelines: Mapping[str, Sequence[Stage]], sections: Mapping[str, Mapping[str, Any]], origin: str) -> str:
    """Return a configuration as YAML text with every setting that is not null. `load` reads the same settings from it.

    Args:
        pipelines: The stages of each pipeline by name.
        sections: The settings of `loader`, `errors` and `cache` that are not null.
        origin: The path of the file, for messages.

    Raises:
        ConfigError: The configuration contains a function, which YAML text can only name.
    """
    single = list(pipelines) == [SINGLE]
    indent = "" if single else "  "
    lines = [f"version: {VERSION}"] + ([] if single else ["pipelines:"])
    try:
        for name, stages in pipelines.items():
            lines.append(f"{indent}{_write(name)}:")
            # a mapping that is an item of a list needs no braces
            items = (_write(stage) for stage in stages)
            lines += [f"{indent}  - {item[1:-1] if item.startswith('{') else item}" for item in items]
        lines += [f"{name}: {_write(settings)}" for name, settings in sections.items() if settings]
    except TypeError as err:
        rule = "it holds a function, which YAML can only name. Register it and use the name."
        raise ConfigError(problems=(Problem(origin, "", rule),)) from err
    return "\n".join(lines) + "\n"


def _write(value: Any) -> str:
    """Return a value as YAML on one line. TypeError: The value is, or contains, an object that YAML cannot hold."""
    if isinstance(value, StageSpec):
        value = value.written()
    elif isinstance(value, BaseModel):
        value = {name: item for name, item in value if item is not None}
    if isinstance(value, Mapping):
        # `$` is not doubled in names, because names have no variables
        items = (f"{_write(str(name)).replace('$$', '$')}: {_write(item)}" for name, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write, value))}]"
    if isinstance(value, str):
        text = value.replace("$", "$$")
        is_plain = _PLAIN.fullmatch(text) and not any(each.fullmatch(text) for each in _TYPED) and text not in _WORDS
        return text if is_plain else json.dumps(text, ensure_ascii=False)
    return json.dumps(value)
