"""Read a configuration, apply overrides, and check the result. One error lists all problems.

The YAML text becomes a tree of dicts, lists and scalars, and the line of each path. PyYAML composes the nodes; no
object is made from a tag. Scalars have the types of YAML 1.2. What YAML readers interpret differently is refused:
repeated names, merge keys, tags, base 60; and aliases, which make a small file large. A stage then becomes
`{name: settings}`, so that overrides and checks know one form only. pydantic checks the settings.
"""

from __future__ import annotations

import json
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
    read_settings,
    read_stage,
    show,
    unknown_setting,
    wrong_kind,
)
from wdskit.errors import ConfigError, Problem, StorageError
from wdskit.limits import MAX_CONFIG_BYTES
from wdskit.text import as_int

VERSION = 1
SINGLE = "pipeline"
"""The setting for a single pipeline, and the name of that pipeline."""

_SYNTAX = "{}[],:#"
_HIDDEN = "".join(chr(0x10000 * plane + 0xFFFE) for plane in range(1, 1 + len(_SYNTAX)))
"""Characters that never appear in text (Unicode's noncharacters). While PyYAML parses, they replace the characters of
`_SYNTAX` inside `${...}`, so that a variable needs no quotes in `{size: ${BATCH:-24}}`.
"""

_HIDE = str.maketrans(_SYNTAX, _HIDDEN)
_UNHIDE = str.maketrans(_HIDDEN, _SYNTAX)
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}\n]*))?\}|\$\{[^}\n]{0,60}\}?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]{1,21}|0x[0-9a-fA-F]{1,16}")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AMBIGUOUS = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?|[-+]?0[0-9]+(\.[0-9]*)?|[-+]?[0-9]{26,}")
"""Text that is a number for some YAML readers: base 60, a leading zero, or more digits than any setting has."""

_PIPELINE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_INDEX = re.compile(r"\[(\d+)\]")
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")

Stage = StageSpec | Callable[..., Any]
Sections = Mapping[str, type[BaseModel]]
Place = tuple[int, str]
"""The line of a value, and its place for messages, such as `train.yaml:12`."""


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
        ConfigError: The configuration has problems. They have the order of the file; problems of overrides come last.
        StorageError: The file cannot be read.
    """
    if isinstance(source, Mapping):
        document = Document("config dict", {"version": VERSION} | _copy(source))
    else:
        document = Document(str(source))
        document.read_yaml(_read_file(source))
    loaded = _check(document, overrides, stages, sections)
    if not document.problems:
        return loaded
    found = sorted(dict.fromkeys(document.problems), key=lambda each: each[0])
    raise ConfigError(problems=tuple(Problem(where, dotted(path), rule) for (_, where), path, rule in found))


def _read_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a configuration file, cut after `MAX_CONFIG_BYTES + 1` bytes; bytes that are not UTF-8 become
    lone surrogates, which PyYAML refuses. StorageError: The file cannot be read.
    """
    try:
        with FilePath(path).open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1).decode(errors="surrogateescape")
    except OSError as err:
        raise StorageError(f"{path}: the configuration cannot be read: {err.strerror}.", url=str(path)) from err


def _copy(value: Any) -> Any:
    """Return a copy of nested dicts and lists, with names that are text. Other values are the same objects."""
    if isinstance(value, Mapping):
        return {str(as_int(name)): _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


class Document:
    """A configuration as a tree, the places of its values, and its problems.

    Attributes:
        origin: The path of the file, for messages.
        tree: dicts, lists, str, int, float, bool and None; from a dict, also all other objects of the dict.
        places: Maps the path of each value to its place.
        problems: (place, path, rule) for each problem.
        unread: Paths of values that could not be read: they are None in the tree. Other problems of them are dropped.
    """

    def __init__(self, origin: str, tree: Any = None) -> None:
        self.origin = origin
        self.tree = tree
        self.places: dict[Path, Place] = {(): (0, origin)}
        self.problems: list[tuple[Place, Path, str]] = []
        self.unread: list[Path] = []

    def note(self, path: Path, rule: str) -> None:
        """Collect a problem of the setting at `path`, unless a part of it could not be read."""
        if not any(path[: len(unread)] == unread[: len(path)] for unread in self.unread):
            near = next(path[:size] for size in range(len(path), -1, -1) if path[:size] in self.places)
            self.problems.append((self.places[near], path, rule))

    def replace(self, path: Path, value: Any, place: Place) -> None:
        """Set the value at `path`. Problems of the old value are dropped."""
        node = self.tree
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        self.places = {at: old for at, old in self.places.items() if at[: len(path)] != path} | {path: place}
        self.unread = [at for at in self.unread if at[: len(path)] != path]
        self.problems = [each for each in self.problems if each[1][: len(path)] != path]

    def read_yaml(self, text: str) -> None:
        """Read one YAML document. Variables such as `${HOME}` get their values from the environment of the process."""
        hidden = _VARIABLE.sub(lambda found: found[0].translate(_HIDE) if found[1] else found[0], text)
        if len(text) > MAX_CONFIG_BYTES:
            self._fail(1, f"it has more than {MAX_CONFIG_BYTES} bytes")
            return
        try:
            loader = _Loader(hidden.removeprefix("\ufeff"))
        except yaml.reader.ReaderError as err:
            self._fail(1 + text.count("\n", 0, err.position), "a control character, or a byte that is not UTF-8")
            return
        try:
            node = loader.get_single_node()
        except (yaml.YAMLError, ValueError, OverflowError, IndexError, RecursionError) as err:
            # PyYAML does not wrap all errors
            mark = getattr(err, "problem_mark", None) or getattr(err, "context_mark", None) or loader
            words = [getattr(err, "context", None), getattr(err, "problem", err)]
            self._fail(mark.line + 1, ": ".join(str(word) for word in words if word).translate(_UNHIDE))
            return
        if node is None:
            self._fail(1, "the document is empty")
            return
        self.places.clear()
        self.tree = self._value(node, ())

    def _fail(self, line: int, what: str) -> None:
        self.problems.append(((line, f"{self.origin}:{line}"), (), f"this is not plain YAML: {what[:200]}."))
        self.unread.append(())

    def _value(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of a node, and note its place."""
        self.places.setdefault(path, self._place(node))
        if isinstance(node, yaml.ScalarNode):
            try:
                text = _fill(node.value.translate(_UNHIDE))
                return text if node.style else type_plain(text)
            except ValueError as err:
                self.note(path, str(err))
                self.unread.append(path)
                return None
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, at)) for at, item in enumerate(node.value)]
        tree: dict[str, Any] = {}
        for key, item in node.value:
            name = key.value.translate(_UNHIDE).replace("$$", "$") if isinstance(key, yaml.ScalarNode) else "<<"
            if name in tree:
                rule = f"{show(name)} appears twice in this mapping. Remove one."
                self.problems.append((self._place(key), path, rule))
            elif name == "<<" or "${" in name:
                rule = "a name is plain text: no list, mapping, merge key or variable."
                self.problems.append((self._place(key), path, rule))
            else:
                here = (*path, name)
                self.places[here] = self._place(key)
                tree[name] = self._value(item, here)
        return tree

    def _place(self, node: yaml.Node) -> Place:
        line: int = node.start_mark.line + 1
        return line, f"{self.origin}:{line}"


class _Loader(yaml.BaseLoader):
    """Composes nodes. Anchors, aliases and tags are errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None or getattr(event, "tag", None) is not None:
            what = "anchors, aliases and tags are not supported; write the value itself"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def type_plain(text: str) -> str | float | None:
    """Return the value of a YAML scalar that is written without quotes: None, bool, int, float, or the text itself.
    ValueError: YAML readers disagree about the type of `text`.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _AMBIGUOUS.fullmatch(text):
        raise ValueError(f"{show(text)} is a number to some YAML readers and text to others. Put text in quotes.")
    if _WHOLE.fullmatch(text):
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return float(text) if _DECIMAL.fullmatch(text) else text


def _fill(text: str) -> str:
    """Return the text with the values of its variables. ValueError: A variable is invalid or not set, or a character is
    not allowed.
    """
    text = _VARIABLE.sub(_value_of, text)
    if bad := _CONTROL.search(text):
        raise ValueError(f"{show(text)} has the character U+{ord(bad[0]):04X}; remove it.")
    return text


def _value_of(found: re.Match[str]) -> str:
    """Return the text for a variable. ValueError: It is not a variable, or is not set."""
    name, default = found.groups()
    if found[0] == "$$":
        return "$"
    if name is None or "${" in (default or ""):
        raise ValueError(
            f"{show(found[0])} is not a variable. Write ${{NAME}} or ${{NAME:-default}}; `$$` gives a `$`."
        )
    value = os.environ.get(name) or default
    if value is None and name not in os.environ:
        raise ValueError(f"the environment variable `{name}` is not set. Set it, or write ${{{name}:-default}}.")
    return value or ""


def _check(
    document: Document, overrides: Sequence[str], stages: Stages, sections: Sections
) -> tuple[dict[str, tuple[Stage, ...]], dict[str, Any]]:
    """Apply the overrides, and check all settings. The result is valid only if the document has no problems."""
    tree, note = document.tree, document.note
    if not isinstance(tree, dict):
        note((), wrong_kind(tree, "a mapping with `version`, `pipelines` and `loader` is needed"))
        return {}, {}
    tree |= {name: {} for name in sections if tree.get(name) is None}
    _expand_stages(tree, stages)
    for text in overrides:
        _override(document, text)
        _expand_stages(tree, stages)
    known = ["version", SINGLE, "pipelines", *sections]
    unknown = [name for name in tree if name not in known]
    for name in unknown:
        note((name,), unknown_setting(name, known))
    if tree.get("version") != VERSION or tree["version"] is True:
        note(("version",), f"write `version: {VERSION}` at the top, not {show(tree.get('version'))}.")
    named = tree.get("pipelines")
    if (SINGLE in tree) == ("pipelines" in tree) and not unknown:
        note(
            (SINGLE,), "write either `pipeline:` and a list of stages, or `pipelines:` and a mapping of names to lists."
        )
    elif "pipelines" in tree and not (isinstance(named, dict) and named):
        note(("pipelines",), wrong_kind(named, "a mapping of names to lists of stages is needed"))
    for name in named if isinstance(named, dict) else ():
        if not _PIPELINE_NAME.fullmatch(name):
            note(("pipelines", name), f"{show(name)} is not a valid name; use letters, digits, _ and -.")
    pipelines = {str(path[-1]): _check_stages(document, path, items, stages) for path, items in _pipelines(tree)}
    checked = {}
    for name, model in sections.items():
        flaws: list[Flaw] = []
        checked[name] = read_settings(model, tree[name], flaws)
        for flaw in flaws:
            note((name, *flaw.path), flaw.rule)
    return pipelines, checked


def _check_stages(document: Document, path: Path, items: Any, known: Stages) -> tuple[Stage, ...]:
    """Return the stages of the pipeline at `path`. A stage with problems is its class, or None if it has no name."""
    if not isinstance(items, list):
        document.note(path, wrong_kind(items, "a list of stages is needed, each line starting with `- `"))
        return ()
    stages: list[Any] = []
    for at, item in enumerate(items):
        flaws: list[Flaw] = []
        is_function = callable(item) and not isinstance(item, type)
        spec = item if is_function else read_stage(known, item, flaws)
        stages.append(spec or (known.get(str(flaws[0].path[0])) if flaws[0].path else None))
        for flaw in flaws:
            document.note((*path, at, *flaw.path), flaw.rule)
    for at, rule in check_order(stages):
        name = getattr(stages[at], "name", None) if stages else None
        document.note((*path, at, name) if name else (*path, at) if stages else path, rule)
    return tuple(stages)


def _expand_stages(tree: dict[str, Any], known: Stages) -> None:
    """Write each stage of a known name as `{name: settings}`, so that an override can find or add a setting."""
    for _, items in _pipelines(tree):
        for at, item in enumerate(items) if isinstance(items, list) else ():
            name, value = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, None)
            stage = known.get(name) if isinstance(name, str) else None
            if stage is not None and not stage.is_mapping and not isinstance(value, dict):
                items[at] = {name: stage.expand(value)}


def _pipelines(tree: dict[str, Any]) -> list[tuple[Path, Any]]:
    """Return the path and the items of each pipeline in a tree."""
    named = tree.get("pipelines")
    found: list[tuple[Path, Any]] = [((SINGLE,), tree[SINGLE])] if SINGLE in tree else []
    return found + [(("pipelines", name), items) for name, items in named.items()] if isinstance(named, dict) else found


def _override(document: Document, text: str) -> None:
    """Apply an override such as `loader.workers=4` to the tree, or collect its problem.

    Later problems of the changed setting name the override instead of a line.
    """
    place = sys.maxsize, f"--set {text if len(text) <= 200 else text[:199] + '…'}"
    name, sign, value = text.partition("=")
    steps = [step for step in _INDEX.sub(r".\1", name.strip()).split(".") if step]
    given = Document("")
    given.read_yaml(value)
    try:
        path = _find(document.tree, steps)
    except ValueError as err:
        document.problems.append((place, (), str(err)))
        return
    if not sign or not path:
        document.problems.append((place, (), "an override is written PATH=VALUE: loader.workers=4."))
    elif given.problems:
        document.problems.append((place, path, given.problems[0][-1]))
    else:
        document.replace(path, given.tree, place)


def _find(node: Any, steps: list[str], path: Path = ()) -> Path:
    """Return the path of the value that `steps` name below `node`, which is at `path`. The last step may be new.

    A stage may be named by its position or its name. ValueError: A value on the way does not exist.
    """
    if not steps:
        return path
    step, rest = steps[0], steps[1:]
    if isinstance(node, list):
        names = [next(iter(item)) if isinstance(item, dict) and len(item) == 1 else "" for item in node]
        if step.isdecimal() and int(step[:9]) < len(node):
            return _find(node[int(step)], rest, (*path, int(step)))
        if names.count(step) == 1:
            at = names.index(step)
            return _find(node[at][step], rest, (*path, at, step))
        found = f"are {names.count(step)}" if step in names else "is no"
        raise ValueError(f"there {found} {show(step)} in {dotted(path)}.{did_you_mean(step, names)}")
    if not isinstance(node, dict):
        raise ValueError(f"{dotted(path)} is {show(node)}; nothing is below it.")  # noqa: TRY004 (the text is wrong)
    if rest and step not in node:
        raise ValueError(f"there is no {show(step)} in {dotted(path) or 'it'}.{did_you_mean(step, node)}")
    return _find(node.get(step), rest, (*path, step))


def to_yaml(pipelines: Mapping[str, Sequence[Stage]], sections: Mapping[str, Mapping[str, Any]], origin: str) -> str:
    """Return a configuration as YAML text with every setting that is not null. `load` reads the same settings from it.

    Args:
        pipelines: The stages of each pipeline by name.
        sections: The settings of `loader`, `errors` and `cache` that are not null.
        origin: The path of the file, for messages.

    Raises:
        ConfigError: The configuration contains a function, which YAML text can only name.
    """
    lines = [f"version: {VERSION}"] + ([] if list(pipelines) == [SINGLE] else ["pipelines:"])
    indent = "  " * (len(lines) - 1)
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
        return f"{{{', '.join(f'{_write(str(name))}: {_write(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False).replace("$", "$$")
