"""`a.b.c=VALUE`: settings changed in the tree before it is checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from wdskit.errors import Problem
from wdskit.pipeline.document import Document, read_document
from wdskit.pipeline.problems import Path, did_you_mean, dotted, listing, show
from wdskit.pipeline.spec_types import StageSpec
from wdskit.pipeline.specs import STAGES

_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_STEP = re.compile(r"\[(\d+)\]")


def _long_form(value: Any) -> Any:
    """What stands for nothing, or for a number of steps, as a mapping."""
    if value is None:
        return {}
    return {"every": value} if type(value) is int else value


_SECTIONS: dict[Path, Callable[[Any], Any]] = {
    ("loader",): lambda value: {} if value is None else value,
    ("loader", "stats"): _long_form,
}
"""What an override may add to where the file does not have it, and how it is written out."""


class _Lost(Exception):
    pass


class Override:
    """One override.

    Attributes:
        where: How messages name it.
        document: Its value.
        path: Where it was put, known once `apply` has run.
    """

    def __init__(self, text: str) -> None:
        self.where = f"--set {text if len(text) <= 200 else text[:199] + '…'}"
        self.text = text
        self.document = Document()
        self.path: Path = ()

    def apply(self, tree: Any) -> list[Problem]:
        """Change the tree in place; what is wrong comes back and leaves the tree as it was."""
        name, sign, value = self.text.partition("=")
        steps = [step for step in _STEP.sub(r".\1", name.strip()).split(".") if step]
        if not sign or not steps:
            return [Problem(self.where, "", "an override is written PATH=VALUE, such as loader.workers=4.")]
        self.document = read_document(value)
        if self.document.faults:
            place = tuple(int(step) if _NUMBER.fullmatch(step) else step for step in steps)
            return [Problem(self.where, dotted((*place, *at)), rule) for _, at, rule in self.document.faults]
        try:
            self.path = _Walk(tree).put(steps, self.document.tree)
        except _Lost as err:
            return [Problem(self.where, "", str(err))]
        return []


class _Walk:
    """The way from the tree's root to the place of one value."""

    def __init__(self, tree: Any) -> None:
        self.node = tree
        self.path: Path = ()
        self.slot: tuple[Any, Any] | None = None  # container and key of `node`
        self.model: type[StageSpec] | None = None  # where `node` is what stands behind a stage's name

    def put(self, steps: list[str], value: Any) -> Path:
        """Go all the way and put the value there."""
        for number, step in enumerate(steps):
            self._go(step, last=number == len(steps) - 1)
        container, key = self.slot or ({}, "")
        container[key] = value
        return self.path

    def _go(self, step: str, *, last: bool) -> None:
        self._expand(step)
        if isinstance(self.node, dict):
            self._into_mapping(step, last=last)
        elif isinstance(self.node, list) and self._in_pipeline() and not _NUMBER.fullmatch(step):
            self._into_stage(self._find_stage(step), step)
        elif isinstance(self.node, list):
            self._into_list(step)
        elif self.node == step and self.slot and isinstance(self.slot[0], list) and len(self.path) in {2, 3}:
            container, at = self.slot  # a stage without arguments, named by its position
            self.node, self.path = container, self.path[:-1]
            self._into_stage(at, step)
        else:
            raise _Lost(f"{dotted(self.path) or 'the document'} is {show(self.node)}; nothing stands below it.")

    def _expand(self, step: str) -> None:
        """Write a shorthand out, so that a setting has a place."""
        if self.model is None or isinstance(self.node, dict):
            return
        if isinstance(self.node, list) and _NUMBER.fullmatch(step):
            return
        try:
            self.node = self.model.expand(self.node)
        except ValueError as err:
            raise _Lost(f"{dotted(self.path)}: {err}") from None
        container, key = self.slot or ({}, "")
        container[key] = self.node

    def _into_mapping(self, step: str, *, last: bool) -> None:
        long_form = _SECTIONS.get((*self.path, step))
        if step not in self.node and not last and long_form is None:
            raise _Lost(self._unknown(step))
        if not last and long_form is not None:
            self.node[step] = long_form(self.node.get(step))
        self._enter(self.node, step, (*self.path, step))

    def _into_list(self, step: str) -> None:
        if not _NUMBER.fullmatch(step):
            raise _Lost(f"{dotted(self.path)} is a list; a position is needed (0 for the first), not {show(step)}.")
        if int(step) >= len(self.node):
            raise _Lost(f"{dotted(self.path)} has {len(self.node)} items; there is no [{step}].")
        self._enter(self.node, int(step), (*self.path, int(step)))

    def _in_pipeline(self) -> bool:
        return self.path == ("pipeline",) or (len(self.path) == 2 and self.path[0] == "pipelines")

    def _find_stage(self, name: str) -> int:
        """Index of the one item of this pipeline that is the stage `name`."""
        names = [_stage_name(item) for item in self.node]
        if names.count(name) == 1:
            return names.index(name)
        if name in names:
            places = ", ".join(f"{dotted(self.path)}[{at}]" for at, other in enumerate(names) if other == name)
            raise _Lost(f"`{name}` stands {names.count(name)} times; say which: {places}.")
        raise _Lost(self._unknown(name))

    def _into_stage(self, index: int, name: str) -> None:
        """Past an item of a pipeline, to what stands behind its name."""
        if isinstance(self.node[index], str):
            self.node[index] = {name: None}
        self._enter(self.node[index], name, (*self.path, index, name))
        self.model = STAGES.get(name)

    def _enter(self, container: Any, key: Any, path: Path) -> None:
        item = container.get(key) if isinstance(container, dict) else container[key]
        is_stage = len(path) in {3, 4} and isinstance(path[-1], str) and isinstance(path[-2], int)
        self.node, self.slot, self.path = item, (container, key), path
        self.model = STAGES.get(str(path[-1])) if is_stage else None

    def _unknown(self, step: str) -> str:
        if isinstance(self.node, dict):
            known = [key for key in self.node if isinstance(key, str)]
        else:
            known = sorted({name for name in map(_stage_name, self.node) if name})
        has = f" It has {listing(known[:30])}." if known else " It is empty."
        place = dotted(self.path) or "the document"
        return f"there is no `{step}` in {place}.{did_you_mean(step, known) or has}"


def _stage_name(item: Any) -> str | None:
    if isinstance(item, str):
        return item
    if isinstance(item, dict) and len(item) == 1:
        return str(next(iter(item)))
    return None
