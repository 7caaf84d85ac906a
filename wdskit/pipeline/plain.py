"""A dict that a user made in Python as a tree of our own dicts and lists, to be changed and walked safely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wdskit.limits import MAX_CONFIG_DEPTH
from wdskit.pipeline.document import MAX_NODES, NUMBERED
from wdskit.pipeline.problems import Flaw, Path, show


def plain_tree(source: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Flaw]]:
    """A copy of `source` with every mapping a dict and every list or tuple a list; other values are the same objects.

    No recursion, so that a dict which holds itself, or 100,000 others, is a flaw and not a crash.
    """
    root: dict[str, Any] = {}
    flaws: list[Flaw] = []
    stack: list[tuple[Any, Any, Path]] = [(source, root, ())]
    num_nodes = 0
    while stack:
        old, new, path = stack.pop()
        if len(path) >= MAX_CONFIG_DEPTH:
            return root, [Flaw((), f"it is nested deeper than {MAX_CONFIG_DEPTH} levels.")]
        for key, value in old.items() if isinstance(old, Mapping) else enumerate(old):
            num_nodes += 1
            if num_nodes > MAX_NODES:
                return root, [Flaw((), f"it holds more than {MAX_NODES} values; no configuration is that long.")]
            if isinstance(old, Mapping) and type(key) is int and path[-1:] in NUMBERED:
                new[str(key)] = value
                continue
            if isinstance(old, Mapping) and not isinstance(key, str):
                flaws.append(Flaw(path, f"the name {show(key)} is no text. Put it in quotes."))
                continue
            copy: Any = value
            if isinstance(value, Mapping):
                copy = {}
            elif isinstance(value, (list, tuple)):
                copy = []
            if copy is not value:
                stack.append((value, copy, (*path, key)))
            if isinstance(new, dict):
                new[key] = copy
            else:
                new.append(copy)
    return root, flaws
