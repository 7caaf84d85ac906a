"""Read a configuration, apply overrides, and check the result. One error lists all problems.

The YAML text becomes a tree of dicts, lists and scalars, and the line of each path. PyYAML composes the nodes; no
object is made from a tag. Scalars have the types of YAML 1.2. What YAML readers interpret differently is refused:
repeated names, merge keys, tags, base 60; and aliases, which make a small file large. A stage then becomes
`{name: settings}`, so that overrides and checks know one form only. pydantic checks the settings.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo

from wdskit.config import types
from wdskit.config.order import check_order
from wdskit.config.types import Path, Stages
from wdskit.errors import ConfigError, Problem, StorageError
from wdskit.limits import MAX_CONFIG_BYTES
from wdskit.text import as_int

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
_AMBIGUOUS = r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?|[-+]?0[0-9]+(\.[0-9]*)?|[-+]?[0-9]{26,}"
"""Text that is a number for some YAML readers: base 60, a leading zero, or more digits than any setting has."""

_TYPES: list[tuple[str, Callable[[str], Any]]] = [
    (r"null|Null|NULL|~|", lambda _: None),
    (r"true|True|TRUE", lambda _: True),
    (r"false|False|FALSE", lambda _: False),
    (r"[-+]?[0-9]+|0o[0-7]{1,21}|0x[0-9a-fA-F]{1,16}", lambda text: int(text, 0)),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
]
"""Patterns of scalars without quotes in YAML 1.2, and what makes their values of the text."""

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")

Stage = types.StageSpec | Callable[..., Any]
Place = tuple[int, str]
"""The line of a value, and its place for messages, such as `train.yaml:12`."""


def _read_stages(items: list[Any], info: ValidationInfo) -> list[Stage]:
    """Return the stages of a pipeline. For the check of their order, a stage with problems is its class, or None if it
    has no known name.
    """
    known: Stages = info.context or {}
    stages: list[Any] = []
    flaws = []
    for at, item in enumerate(items):
        try:
            stages.append(item if callable(item) and not isinstance(item, type) else types.read_stage(item, known))
        except ValidationError as err:
            flaws += [((at, *path), rule) for path, rule in types.flaws_of(err)]
            stages.append(known.get(str(types.split_stage(item)[0])))
    flaws += [((at,) if stages else (), rule) for at, rule in check_order(stages)]
    if flaws:
        raise types.invalid(flaws)
    return stages


PipelineStages = Annotated[list[Any], AfterValidator(_read_stages)]
PipelineName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


class Configuration(types.Settings):
    """The settings of a configuration file. A subclass adds the sections `loader`, `errors` and `cache`."""

    version: Literal[1]
    pipeline: PipelineStages | None = None
    pipelines: Annotated[dict[PipelineName, PipelineStages], Field(min_length=1)] | None = None


Loaded = TypeVar("Loaded", bound=Configuration)


def load(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str], stages: Stages, model: type[Loaded]
) -> tuple[Loaded, dict[str, Any]]:
    """Read and check a configuration. Return its settings, and the tree of dicts and lists with the overrides.

    Args:
        source: The path of a YAML file, or its content as a dict. A dict is not changed and needs no `version`.
        overrides: Texts `a.b.c=VALUE`, applied in order before the checks.
        stages: Maps the name of each stage to its class.
        model: The class of the settings.

    Raises:
        ConfigError: The configuration has problems. They have the order of the file; problems of overrides come last.
        StorageError: The file cannot be read.
    """
    if isinstance(source, Mapping):
        document = Document("config dict", {"version": 1} | _copy(source))
    else:
        document = Document(str(source))
        document.read_yaml(_read_file(source))
    if isinstance(document.tree, dict):
        absent = [name for name in model.model_fields if document.tree.get(name) is None]
        document.tree |= {name: {} for name in absent if name not in Configuration.model_fields}
        for text in overrides:
            place = sys.maxsize, f"--set {text if len(text) <= 200 else text[:199] + '…'}"
            try:
                _override(document, text, place, stages)
            except ValueError as err:
                document.problems.append((place, (), str(err)))
        if (document.tree.get(SINGLE) is None) == (document.tree.get("pipelines") is None):
            document.note((SINGLE,), "write either `pipeline: [STAGE, ...]` or `pipelines: {NAME: [STAGE, ...]}`.")
    try:
        loaded = model.model_validate(document.tree, context=stages)
    except ValidationError as err:
        for path, rule in types.flaws_of(err):
            document.note(path, rule)
    if not document.problems:
        return loaded, document.tree
    found = sorted(dict.fromkeys(document.problems), key=lambda each: each[0])
    raise ConfigError(problems=tuple(Problem(where, types.dotted(path), rule) for (_, where), path, rule in found))


def _read_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a configuration file. Bytes that are not UTF-8 become lone surrogates, which PyYAML refuses.

    Raises:
        StorageError: The file cannot be read.
        ConfigError: The file has more than `MAX_CONFIG_BYTES`.
    """
    try:
        with FilePath(path).open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as err:
        raise StorageError(f"{path}: the configuration cannot be read: {err.strerror}.", url=str(path)) from err
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: a configuration has at most {MAX_CONFIG_BYTES} bytes.")
    return data.decode(errors="surrogateescape")


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

    def forget(self, path: Path, place: Place) -> None:
        """Drop the problems of the value at `path`, because another value with this place has replaced it."""
        self.places = {at: old for at, old in self.places.items() if at[: len(path)] != path} | {path: place}
        self.unread = [at for at in self.unread if at[: len(path)] != path]
        self.problems = [each for each in self.problems if each[1][: len(path)] != path]

    def read_yaml(self, text: str) -> None:
        """Read one YAML document. Variables such as `${HOME}` get their values from the environment of the process."""
        hidden = _VARIABLE.sub(lambda found: found[0].translate(_HIDE) if found[1] else found[0], text)
        loader: Any = None
        self.places[()] = self._place(1)
        try:
            loader = _Loader(hidden.removeprefix("\ufeff"))
            node = loader.get_single_node()
        except (yaml.YAMLError, ValueError, OverflowError, IndexError, RecursionError) as err:
            # PyYAML does not wrap all errors
            mark = getattr(err, "problem_mark", None) or getattr(err, "context_mark", None) or loader
            self.places[()] = self._place(1 + (mark.line if mark else text.count("\n", 0, getattr(err, "position", 0))))
            words = getattr(err, "context", None), getattr(err, "problem", None) or getattr(err, "reason", err)
            what = ": ".join(str(word) for word in words if word).translate(_UNHIDE)
            self.note((), f"this is not plain YAML: {what[:200]}.")
            self.unread.append(())
            return
        if node is not None:
            self.places.clear()
            self.tree = self._value(node, ())

    def _value(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of a node, and note its place."""
        self.places.setdefault(path, self._place(node.start_mark.line + 1))
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
            place = self._place(key.start_mark.line + 1)
            name = key.value.translate(_UNHIDE).replace("$$", "$") if isinstance(key, yaml.ScalarNode) else "<<"
            if name in tree:
                self.problems.append((place, path, f"{types.show(name)} appears twice in this mapping. Remove one."))
            elif name == "<<" or "${" in name:
                self.problems.append((place, path, "a name is plain text: no list, mapping, merge key or variable."))
            else:
                here = (*path, name)
                self.places[here] = place
                tree[name] = self._value(item, here)
        return tree

    def _place(self, line: int) -> Place:
        return line, f"{self.origin}:{line}"


class _Loader(yaml.BaseLoader):
    """Composes nodes. Anchors, aliases and tags are errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None or getattr(event, "tag", None) is not None:
            what = "anchors, aliases and tags are not supported; write the value itself"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def type_plain(text: str) -> Any:
    """Return the value of a YAML scalar that is written without quotes: None, bool, int, float, or the text itself.
    ValueError: YAML readers disagree about the type of `text`.
    """
    if re.fullmatch(_AMBIGUOUS, text):
        raise ValueError(f"{types.show(text)} is a number to some YAML readers and text to others. Put text in quotes.")
    return next((convert(text) for pattern, convert in _TYPES if re.fullmatch(pattern, text)), text)


def _fill(text: str) -> str:
    """Return the text with the values of its variables. ValueError: A variable is invalid or not set, or a character is
    not allowed.
    """
    text = _VARIABLE.sub(_value_of, text)
    if bad := yaml.reader.Reader.NON_PRINTABLE.search(text):
        raise ValueError(f"{types.show(text)} has the character U+{ord(bad[0]):04X}; remove it.")
    return text


def _value_of(found: re.Match[str]) -> str:
    """Return the text for a variable. ValueError: It is not a variable, or is not set."""
    name, default = found.groups()
    if found[0] == "$$":
        return "$"
    if name is None or "${" in (default or ""):
        raise ValueError(f"write {types.show(found[0])} as ${{NAME}} or ${{NAME:-default}}; `$$` gives a `$`.")
    value = os.environ.get(name) or default
    if value is None and name not in os.environ:
        raise ValueError(f"the environment variable `{name}` is not set. Set it, or write ${{{name}:-default}}.")
    return value or ""


def _override(document: Document, text: str, place: Place, known: Stages) -> None:
    """Apply an override such as `loader.workers=4` to the tree. Later problems of the changed setting have `place`.

    Raises:
        ValueError: The override is invalid.
    """
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError("an override is written PATH=VALUE: loader.workers=4.")
    path, parent = _find(document.tree, re.split(r"[.\[\]]+", name.strip(" ].")), known)
    given = Document("")
    given.read_yaml(value)
    for _, _, rule in given.problems:
        raise ValueError(rule)
    parent[path[-1]] = given.tree
    document.forget(path, place)


def _find(node: Any, steps: Sequence[str], known: Stages) -> tuple[Path, Any]:
    """Return the path of the value that `steps` name below `node`, and the list or dict of the value. The last step may
    be new. An item of a list is named by its position, a stage also by its name; the short form of a stage on the way
    becomes `{name: settings}`.

    Raises:
        ValueError: A value on the way does not exist.
    """
    path: Path = ()
    parent = node
    for number, step in enumerate(steps, 1):
        names = [*node] if isinstance(node, dict) else []
        if isinstance(node, list):
            names = [str(types.split_stage(item)[0]) for item in node]
            places = [at for at, name in enumerate(names) if step in (name, str(at))]
            if len(places) == 1:
                at = places[0]
                if stage := known.get(names[at]):
                    value = types.split_stage(node[at])[1]
                    node[at] = {stage.name: value if stage.is_mapping and value is not None else stage.expand(value)}
                path, parent, node = (*path, at), node, node[at]
                if step != names[at]:
                    continue
        if not isinstance(node, dict) or (step not in node and number < len(steps)):
            near = " Use its position." if step in names else types.did_you_mean(step, names)
            raise ValueError(f"{names.count(step) or 'no'} {types.show(step)} in {types.dotted(path) or 'it'}.{near}")
        path, parent, node = (*path, step), node, node.get(step)
    return path, parent


def to_yaml(tree: Mapping[str, Any], origin: str) -> str:
    """Return the tree of a configuration as YAML text. `load` reads the same settings from it.

    Args:
        tree: Result of `load`.
        origin: The path of the file, for messages.

    Raises:
        ConfigError: The configuration contains an object of Python, such as a function, which YAML text can only name.
    """
    shown = {name: value for name, value in tree.items() if value}
    try:
        text: str = yaml.dump(shown, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    except yaml.representer.RepresenterError as err:
        rule = "it holds a function, which YAML can only name. Register it and use the name."
        raise ConfigError(problems=(Problem(origin, "", rule),)) from err
    return text


class _Dumper(yaml.SafeDumper):
    """Writes text so that `load` reads the same text, and no aliases."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None if _PLAIN.fullmatch(text) and type_plain(text) == text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text.replace("$", "$$"), style)


_Dumper.add_representer(str, _write_text)
