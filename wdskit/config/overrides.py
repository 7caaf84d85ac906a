"""Apply overrides, `a.b.c=VALUE`, to the tree of a configuration before the tree is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from wdskit.config.messages import Flaw, Path, did_you_mean, dotted, listing, show
from wdskit.config.spec import Stages, StageSpec
from wdskit.config.yaml_reader import read_yaml

_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_INDEX = re.compile(r"\[(\d+)\]")
_ADDED = {("loader",), ("errors",), ("cache",)}
"""Mappings that an override adds if the configuration does not have them."""


class _PathError(Exception):
    """The path of an override does not exist. The text is the message for the user."""


def apply_override(
    tree: Any, text: str, stages: Stages, sections: Mapping[str, type[BaseModel]]
) -> tuple[Path, list[Flaw]]:
    """Change one setting of a configuration's tree in place.

    The VALUE `null` removes a setting of a stage or section that has a default. Any other setting becomes None.

    Args:
        tree: The tree of a `yaml_reader.Document`.
        text: `PATH=VALUE`. VALUE is YAML. PATH names an item of a list by the item's position. A stage that appears
            once in its pipeline may also be named by the stage's name.
        stages: Maps the name of each stage to its class.
        sections: Maps `loader`, `errors` and `cache` to their classes.

    Returns:
        (path of the changed value, []), or ((), flaws) for an invalid override, which changes nothing.
    """
    name, sign, value = text.partition("=")
    steps = [step for step in _INDEX.sub(r".\1", name.strip()).split(".") if step]
    if not sign or not steps:
        return (), [Flaw((), "an override is written PATH=VALUE, such as loader.workers=4.")]
    document = read_yaml(value, setting=steps[-1])
    if document.flaws:
        place = tuple(int(step) if _NUMBER.fullmatch(step) else step for step in steps)
        return (), [Flaw((*place, *flaw.path), flaw.rule) for flaw in document.flaws]
    change = _Change(document.tree, stages, sections)
    try:
        change.put(tree, steps, (), None)
    except _PathError as err:
        return (), [Flaw((), str(err))]
    return change.path, []


class _Change:
    """Sets one value in a tree of settings.

    Attributes:
        path: Path of the changed value; empty before `put` is called.
    """

    def __init__(self, value: Any, stages: Stages, sections: Mapping[str, type[BaseModel]]) -> None:
        self.value = value
        self.stages = stages
        self.sections = sections
        self.path: Path = ()

    def put(self, node: Any, steps: list[str], path: Path, model: type[StageSpec] | None) -> Any:
        """Set the value below `node`, a value of the tree, and return the changed node.

        `steps` are the names and positions that lead from `node` to the value. `path` is the path of `node`. `model` is
        the class of the stage whose settings `node` has, or None. Raises _PathError if a node on the way does not
        exist.
        """
        if not steps:
            self.path = path
            return self.value
        node = _long_form(node, steps[0], path, model)
        if isinstance(node, list):
            key, steps = _find_item(node, steps, path)
        elif isinstance(node, dict):
            key, steps = steps[0], steps[1:]
            if steps and key not in node and (*path, key) not in _ADDED:
                raise _PathError(_unknown(key, node, path))
        else:
            raise _PathError(f"{dotted(path) or 'the document'} is {show(node)}; nothing is below it.")
        if self.value is None and not steps and self._has_default(str(key), path, model):
            self.path = (*path, key)
            node.pop(key, None)
            return node
        below = self.stages.get(str(key)) if isinstance(node, dict) and _is_pipeline(path[:-1]) else None
        old = node.get(key) if isinstance(node, dict) else node[key]
        node[key] = self.put(old, steps, (*path, key), below)
        return node

    def _has_default(self, key: str, path: Path, model: type[BaseModel] | None) -> bool:
        """Return True if the setting `key` has a default.

        The setting belongs to the stage class `model`, or to the section at `path`, such as `loader`.
        """
        if len(path) == 1:
            model = self.sections.get(str(path[0]))
        field = None if model is None else model.model_fields.get(key)
        return field is not None and not field.is_required()


def _is_pipeline(path: Path) -> bool:
    return path == ("pipeline",) or (len(path) == 2 and path[0] == "pipelines")


def _long_form(node: Any, step: str, path: Path, model: type[StageSpec] | None) -> Any:
    """Return a short form as a long form that can have the setting `step`. Return any other node unchanged.

    - The short form of a stage's settings becomes a mapping: `200` in `shuffle: 200` becomes `{size: 200}`.
    - In a list of stages, each `NAME` becomes `{NAME: null}`.
    - A missing `loader`, `errors` or `cache` becomes an empty mapping.

    `path` is the path of `node`. `model` is the class of the stage whose settings `node` has, or None.
    Raises _PathError if the stage takes no arguments.
    """
    if model is not None and not isinstance(node, dict):
        if isinstance(node, list) and _NUMBER.fullmatch(step):
            return node
        try:
            return model.expand(node)
        except ValueError as err:
            raise _PathError(f"{dotted(path)}: {err}") from None
    if node is None and path in _ADDED:
        return {}
    if isinstance(node, list) and _is_pipeline(path):
        return [{item: None} if isinstance(item, str) else item for item in node]
    return node


def _find_item(items: list[Any], steps: list[str], path: Path) -> tuple[Any, list[str]]:
    """Return (index, rest): the index of the item that the first step names, and the steps below this item.

    The first step is a position in the list `items`, or in a pipeline also the name of a stage. The name stays in the
    rest, because the item is `{name: settings}`. `path` is the path of the list.

    Raises:
        _PathError: The list does not have the item, or several stages have the name.
    """
    name = steps[0]
    if _NUMBER.fullmatch(name):
        if int(name) >= len(items):
            raise _PathError(f"{dotted(path)} has {len(items)} items; there is no [{name}].")
        return int(name), steps[1:]
    if not _is_pipeline(path):
        raise _PathError(f"{dotted(path)} is a list; a position is needed (0 for the first), not {show(name)}.")
    names = [next(iter(item)) if isinstance(item, dict) and len(item) == 1 else None for item in items]
    if name not in names:
        raise _PathError(_unknown(name, sorted(filter(None, names)), path))
    if names.count(name) > 1:
        places = ", ".join(f"{dotted(path)}[{at}]" for at, other in enumerate(names) if other == name)
        raise _PathError(f"`{name}` appears {names.count(name)} times; say which: {places}.")
    return names.index(name), steps


def _unknown(step: str, names: Any, path: Path) -> str:
    known = list(dict.fromkeys(names))
    has = f" It has {listing(known[:30])}." if known else " It is empty."
    return f"there is no `{step}` in {dotted(path) or 'the document'}.{did_you_mean(step, known) or has}"
