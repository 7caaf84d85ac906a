"""Read a configuration, apply overrides, and check the result. One error lists the first 100 problems.

The YAML text becomes a tree of dicts, lists and scalars, and the line of each path. PyYAML composes the nodes; no
object is made from a tag. Scalars have the types of YAML 1.2. What YAML readers interpret differently is refused:
repeated names, merge keys, tags, base 60; and aliases, which make a small file large.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from wdskit.config.order import check_order, check_patterns
from wdskit.config.types import (
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
_PIPELINE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_INDEX = re.compile(r"\[(\d+)\]")
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")

Stage = StageSpec | Callable[..., Any]


class Models(NamedTuple):
    """The pydantic classes that check the parts of a configuration.

    Attributes:
        stages: Maps the name of each stage to its class.
        sections: Maps `loader`, `errors` and `cache` to their classes.
    """

    stages: Stages
    sections: Mapping[str, type[BaseModel]]


class LoadedConfig(NamedTuple):
    """A configuration without problems.

    Attributes:
        pipelines: The stages of each pipeline by name. The single pipeline of `pipeline:` has the name "pipeline".
        sections: Maps `loader`, `errors` and `cache` to their checked settings.
        origin: The path of the file, for messages.
    """

    pipelines: dict[str, tuple[Stage, ...]]
    sections: dict[str, Any]
    origin: str


def load(source: object, overrides: object, models: Models) -> LoadedConfig:
    """Read and check a configuration.

    Args:
        source: The path of a YAML file, or its content as a dict. A dict is not changed and needs no `version`.
        overrides: Texts `a.b.c=VALUE`, applied in order before the checks.
        models: The models of stages and sections.

    Raises:
        ConfigError: The configuration has problems, or an argument has a wrong type. The first `MAX_PROBLEMS` problems
            are listed in the order of the file; the problems of overrides come last.
        StorageError: The file cannot be read.
    """
    if not isinstance(overrides, list | tuple) or not all(isinstance(text, str) for text in overrides):
        rule = wrong_kind(overrides, 'a list of texts is needed, as in ["loader.workers=4"]')
        raise ConfigError(problems=(Problem("overrides", "", rule),))
    if isinstance(source, Mapping):
        reader = Reader("config dict")
        reader.read_dict(source)
    elif isinstance(source, str | os.PathLike):
        reader = Reader(str(source))
        reader.read_yaml(_read_file(source))
    else:
        rule = wrong_kind(source, "the path of a YAML file is needed, or the same as a dict")
        raise ConfigError(problems=(Problem("config", "", rule),))
    loaded = _ConfigChecker(reader, models).run(overrides)
    if loaded is not None and not reader.problems:
        return loaded
    unique = sorted(dict.fromkeys(reader.problems), key=lambda each: each[0])
    shown = [Problem(where, dotted(path), rule) for _, where, path, rule in unique[:MAX_PROBLEMS]]
    if len(unique) > len(shown):
        shown.append(Problem(reader.origin, "", f"{len(unique) - len(shown)} more problems are not shown."))
    raise ConfigError(problems=tuple(shown))


def _read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a configuration file. If the file is too long, return `MAX_CONFIG_BYTES + 1` bytes.

    Raises:
        ConfigError: `path` has several lines: the caller passed the text of a configuration.
        StorageError: The file cannot be read.
    """
    if isinstance(path, str) and "\n" in path:
        rule = "this is text, not a path. Pass a path, or the configuration as a dict."
        raise ConfigError(problems=(Problem("load_config", "", rule),))
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
        rule = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            rule = "anchors and aliases are not supported; write the value itself."
        elif event.tag is not None:
            rule = "tags are not supported; remove it. Quotes make text."
        elif isinstance(event, yaml.CollectionStartEvent) and self.depth >= MAX_CONFIG_DEPTH:
            rule = f"it is nested deeper than {MAX_CONFIG_DEPTH} levels."
        elif self.num_nodes > MAX_NODES:
            rule = f"it holds more than {MAX_NODES} values; no configuration is that long."
        if rule:
            raise _UnreadableError(event.start_mark.line + 1, rule)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(data: bytes | str) -> yaml.Node:
    """Return the node of the only document in a text. _UnreadableError: There is none."""
    if len(data) > MAX_CONFIG_BYTES:
        raise _UnreadableError(1, f"it has more than {MAX_CONFIG_BYTES} bytes; no configuration is that long.")
    try:
        text = (data.decode() if isinstance(data, bytes) else data).removeprefix("\ufeff")
    except UnicodeDecodeError as err:
        rule = f"byte {err.start} (0x{err.object[err.start]:02x}) is not UTF-8. Save the file as UTF-8."
        raise _UnreadableError(err.object.count(b"\n", 0, err.start) + 1, rule) from err
    if bad := _BAD_CHARACTER.search(text):
        rule = f"the character U+{ord(bad[0]):04X} is not allowed in YAML; remove it."
        raise _UnreadableError(text.count("\n", 0, bad.start()) + 1, rule)
    loader = _Loader(_VARIABLE.sub(lambda found: found[0].translate(_HIDE) if found[1] else found[0], text))
    try:
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        what = ": ".join(filter(None, (err.context, err.problem))).translate(_UNHIDE)
        raise _UnreadableError(mark.line + 1 if mark else 1, f"this is not YAML: {what}.") from err
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as err:
        # errors that PyYAML does not wrap: an escape beyond Unicode, a %YAML version with many digits
        rule = "this is not YAML. Look for an escape such as \\U that names no character."
        raise _UnreadableError(loader.line + 1, rule) from err
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
    if _WHOLE.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(f"{show(text)} is a number of {len(text)} digits. If it is text, put it in quotes.")
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    if not _DECIMAL.fullmatch(text):
        return text
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{show(text)} is larger than any number. If it is text, put it in quotes.")
    return number


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
        self._num_filled = self._num_copied = 0

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
        line = node.start_mark.line + 1
        self.places.setdefault(path, (line, f"{self.origin}:{line}"))
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
            rule = "" if name not in tree else f"{show(name)} appears twice in this mapping. Remove one."
            if not isinstance(key, yaml.ScalarNode):
                rule = "a name is needed here, not a list or mapping. Text that starts with `[` or `{` needs quotes."
            elif not key.style and (name == "<<" or "${" in name):
                rule = f"{show(name)}: merge keys, and variables in names, are not supported."
            place = key.start_mark.line + 1, f"{self.origin}:{key.start_mark.line + 1}"
            if rule:
                self.problems.append((*place, path, rule))
            else:
                here = (*path, name)
                self.places[here] = place
                tree[name] = self._value(item, here)
        return tree

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
        """Read a Python dict. Dicts and lists are copied, tuples become lists; all other values are the same objects.

        A problem is noted if a name is not text, or if the dict is nested too deeply or has too many values.
        """
        try:
            self.tree = self._copy(source, ())
        except ValueError as err:
            self.note((), str(err))
            self.unread.append(())

    def _copy(self, value: Any, path: Path) -> Any:
        self._num_copied += 1
        if self._num_copied > MAX_NODES:
            raise ValueError(f"it holds more than {MAX_NODES} values; no configuration is that long.")
        if not isinstance(value, Mapping | list | tuple):
            return value
        if len(path) >= MAX_CONFIG_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_CONFIG_DEPTH} levels.")
        if not isinstance(value, Mapping):
            return [self._copy(item, (*path, at)) for at, item in enumerate(value)]
        mapping = {}
        for given, item in value.items():
            name = as_int(given)
            if isinstance(name, bool) or not isinstance(name, str | int):
                self.note(path, f"the name {show(name)} is not text. Put it in quotes.")
            else:
                mapping[str(name)] = self._copy(item, (*path, str(name)))
        return mapping


class _ConfigChecker:
    """Checks one configuration. Its problems are added to those of the reader."""

    def __init__(self, reader: Reader, models: Models) -> None:
        self._reader = reader
        self._note = reader.note
        self._models = models

    def run(self, overrides: list[str] | tuple[str, ...]) -> LoadedConfig | None:
        """Apply the overrides, and check all settings. The result is valid only if there are no problems."""
        tree = self._reader.tree
        if () in self._reader.unread:
            return None
        if not isinstance(tree, dict):
            self._note((), wrong_kind(tree, "a mapping with `version`, `pipelines` and `loader` is needed"))
            return None
        for text in overrides:
            self._override(text)
        known = ["version", "pipeline", "pipelines", *self._models.sections]
        for name in tree:
            if name not in known:
                self._note((name,), unknown_setting(name, "A configuration", known))
        version = tree.get("version", VERSION)
        if "version" not in tree and self._reader.has_lines:
            self._note((), f"`version` is missing. Write `version: {VERSION}` at the top.")
        elif type(version) is not int or version != VERSION:
            rule = f"this wdskit reads `version: {VERSION}`, a number, not {show(version)}."
            self._note(("version",), rule)
        pipelines = self._pipelines(tree)
        sections = {name: self._section(name, tree.get(name)) for name in self._models.sections}
        return LoadedConfig(pipelines, sections, self._reader.origin)

    def _section(self, name: str, settings: Any) -> Any:
        section, flaws = read_settings(self._models.sections[name], {} if settings is None else settings)
        for flaw in flaws:
            self._note((name, *flaw.path), flaw.rule)
        return section

    def _pipelines(self, tree: dict[str, Any]) -> dict[str, tuple[Stage, ...]]:
        if "pipelines" not in tree:
            if "pipeline" in tree:
                return {SINGLE: self._stages(("pipeline",), tree["pipeline"])}
            if not any(did_you_mean(name, ["pipeline", "pipelines"]) for name in tree):
                self._note((), "there is no pipeline. Write `pipeline:` and a list of stages.")
            return {}
        if "pipeline" in tree:
            self._note(("pipeline",), "`pipeline` and `pipelines` exclude each other; move it into `pipelines`.")
        named = tree["pipelines"]
        if not isinstance(named, dict) or not named:
            self._note(("pipelines",), wrong_kind(named, "a mapping of names to lists of stages is needed"))
            return {}
        for name in named:
            if not _PIPELINE_NAME.fullmatch(name):
                self._note(("pipelines", name), f"{show(name)} is not a valid name; use letters, digits, _ and -.")
        return {name: self._stages(("pipelines", name), items) for name, items in named.items()}

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
        spec, flaws = read_item(self._models.stages, item)
        if spec is not None and not isinstance(item, StageSpec):
            flaws = check_patterns(spec)
        for flaw in flaws:
            self._note((*path, *flaw.path), flaw.rule)
        return spec or (self._models.stages.get(str(flaws[0].path[0])) if flaws[0].path else None)

    def _override(self, text: str) -> None:
        """Apply the override `text` to the tree, or collect its problem.

        Later problems of the changed setting name the override instead of a line.
        """
        place = sys.maxsize, f"--set {text if len(text) <= 200 else text[:199] + '…'}"
        try:
            path = _apply(text, self._reader.tree, self._models)
        except ValueError as err:
            self._reader.problems.append((*place, (), str(err)))
        else:
            self._reader.replace(path, place)


def _apply(text: str, tree: Any, models: Models) -> Path:
    """Apply an override to a tree. Return the path of the changed value. ValueError: It is invalid."""
    name, sign, value = text.partition("=")
    steps = [step for step in _INDEX.sub(r".\1", name.strip()).split(".") if step]
    if not sign or not steps:
        raise ValueError("an override is written PATH=VALUE, such as loader.workers=4.")
    reader = Reader("")
    reader.read_yaml(value)
    if reader.problems:
        raise ValueError(f"{'.'.join(steps)}: {reader.problems[0][3]}")
    change = _Change(reader.tree, models)
    change.put(tree, steps, (), None)
    return change.path


class _Change:
    """Sets one value in a tree of settings; the VALUE `null` removes a setting of a stage or section.

    Attributes:
        path: Path of the changed value; empty before `put` is called.
    """

    def __init__(self, value: Any, models: Models) -> None:
        self.path: Path = ()
        self._value = value
        self._models = models

    def put(self, node: Any, steps: list[str], path: Path, model: type[BaseModel] | None) -> Any:
        """Set the value below `node`, which is at `path` in the tree, and return the changed node.

        `steps` are the names and positions that lead from `node` to the value. `model` checks the settings in `node`;
        None for other nodes. ValueError: A node on the way does not exist.
        """
        if not steps:
            self.path = path
            return self._value
        key, rest = steps[0], steps[1:]
        is_short = not isinstance(node, dict) and not (isinstance(node, list) and key.isdecimal())
        if is_short and model is not None and issubclass(model, StageSpec):
            node = model.expand(node)
        elif node is None and len(path) == 1:
            node = {}
        if isinstance(node, list):
            at = self._position(node, key, path)
            name = _name_of(node[at]) if _is_pipeline(path) else ""
            if not name or (key.isdecimal() and not rest):
                node[at] = self.put(node[at], rest, (*path, at), None)
            else:
                below = node[at][name] if isinstance(node[at], dict) else None
                rest = rest[1:] if rest[:1] == [name] and key.isdecimal() else rest
                node[at] = {name: self.put(below, rest, (*path, at, name), self._models.stages.get(name))}
            return node
        if not isinstance(node, dict):
            msg = f"{dotted(path) or 'the document'} is {show(node)}; nothing is below it."
            raise ValueError(msg)  # noqa: TRY004 (the text is wrong, not its type)
        short = getattr(model, "shorthand", None)
        if key not in node and key.isdecimal() and isinstance(node.get(short), list):
            return {**node, short: self.put(node[short], steps, path, None)}
        if rest and key not in node and (path or key not in self._models.sections):
            raise ValueError(f"there is no {show(key)} in {dotted(path) or 'it'}.{did_you_mean(key, node)}")
        if self._value is None and not rest and model is not None and key in model.model_fields:
            self.path = (*path, key)
            node.pop(key, None)
            return node
        node[key] = self.put(node.get(key), rest, (*path, key), None if path else self._models.sections.get(key))
        return node

    def _position(self, items: list[Any], key: str, path: Path) -> int:
        """Return the position of the item that a step names. ValueError: There is none, or there are several."""
        if key.isdecimal():
            if int(key[:9]) < len(items):
                return int(key[:9])
            raise ValueError(f"{dotted(path)} has {len(items)} items; there is no [{key[:9]}].")
        if not _is_pipeline(path):
            raise ValueError(f"{dotted(path)} is a list; a position is needed, such as {dotted(path)}.0.")
        names = [_name_of(item) for item in items]
        found = [at for at, name in enumerate(names) if name == key]
        if len(found) > 1:
            places = ", ".join(dotted((*path, at)) for at in found)
            raise ValueError(f"{show(key)} appears {len(found)} times; say which: {places}.")
        if not found:
            raise ValueError(f"there is no {show(key)} in {dotted(path)}.{did_you_mean(key, filter(None, names))}")
        return found[0]


def _is_pipeline(path: Path) -> bool:
    return path == (SINGLE,) or (len(path) == 2 and path[0] == "pipelines")


def _name_of(item: Any) -> str:
    """Return the name of the stage that an item of a pipeline is; "" for another item, such as a function."""
    name = next(iter(item)) if isinstance(item, dict) and len(item) == 1 else getattr(item, "name", item)
    return name if isinstance(name, str) else ""


def to_yaml(pipelines: Mapping[str, tuple[Stage, ...]], sections: Mapping[str, Mapping[str, Any]], origin: str) -> str:
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
            lines.append(f"{indent}{_scalar(name)}:")
            lines += [f"{indent}  - {_stage(stage)}" for stage in stages]
        lines += [f"{name}: {_value(settings)}" for name, settings in sections.items() if settings]
    except TypeError as err:
        rule = "it holds a function, which YAML can only name. Register it and use the name."
        raise ConfigError(problems=(Problem(origin, "", rule),)) from err
    return "\n".join(lines) + "\n"


def _stage(stage: Stage) -> str:
    if not isinstance(stage, StageSpec):
        raise TypeError(stage)
    value = stage.write_settings()
    return stage.name if value is None else f"{stage.name}: {_value(value)}"


def _value(value: Any) -> str:
    """Return a value as YAML on one line.

    Raises:
        TypeError: The value is, or contains, a function or another object that YAML cannot hold.
    """
    if isinstance(value, Mapping):
        # `$` is not doubled in names, because names have no variables
        names = (_scalar(str(name)).replace("$$", "$") for name in value)
        return (
            "{" + ", ".join(f"{name}: {_value(item)}" for name, item in zip(names, value.values(), strict=True)) + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return _scalar(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, (int, float)):
        raise TypeError(value)
    return repr(value)


def _scalar(text: str) -> str:
    text = text.replace("$", "$$")
    try:
        is_plain = _PLAIN.fullmatch(text) and isinstance(type_plain(text), str)
    except ValueError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)
