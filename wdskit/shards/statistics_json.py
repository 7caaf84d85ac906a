"""What keys the JSON of samples has, of which types, and how often."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from wdskit.text import shorten

MAX_KEYS = 1000
MAX_DEPTH = 4
MAX_ITEMS = 100
"""Items of a list that are looked at."""

_WORD = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_TYPES: dict[type, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "list",
}


@dataclass
class KeyTally:
    """One key."""

    num_samples: int = 0
    types: dict[str, int] = field(default_factory=dict)
    least: float | None = None
    most: float | None = None
    last: int = -1  # the document in which it came last

    def note(self, value: Any, document: int) -> None:
        """Count a value."""
        if document != self.last:
            self.num_samples += 1
            self.last = document
        kind = _TYPES[type(value)]
        self.types[kind] = self.types.get(kind, 0) + 1
        if kind == "integer" or (kind == "number" and math.isfinite(value)):
            self.least = value if self.least is None else min(self.least, value)
            self.most = value if self.most is None else max(self.most, value)

    def merge(self, other: KeyTally) -> None:
        """Count what another one did in other samples."""
        self.num_samples += other.num_samples
        for kind, count in other.types.items():
            self.types[kind] = self.types.get(kind, 0) + count
        for value in (other.least, other.most):
            if value is not None:
                self.least = value if self.least is None else min(self.least, value)
                self.most = value if self.most is None else max(self.most, value)


class JsonTally:
    """The keys of one JSON field, `MAX_DEPTH` levels deep.

    Attributes:
        keys: By path, in the order in which they first came.
        num_more: Values of keys beyond `MAX_KEYS`.
    """

    def __init__(self) -> None:
        self.keys: dict[str, KeyTally] = {}
        self.num_more = 0
        self._num_documents = 0

    def add(self, value: Any) -> None:
        """Count one document."""
        self._num_documents += 1
        if isinstance(value, dict):
            self._add_items(value, "", 1)
        else:
            self._add(value, "", 1)

    def _add_items(self, value: dict[str, Any], path: str, depth: int) -> None:
        for key, one in value.items():
            self._add(one, _join(path, key), depth)

    def _add(self, value: Any, path: str, depth: int) -> None:
        known = self.keys.get(path)
        if known is None:
            if len(self.keys) >= MAX_KEYS:
                self.num_more += 1
                return
            known = self.keys[path] = KeyTally()
        known.note(value, self._num_documents)
        if depth >= MAX_DEPTH:
            return
        if isinstance(value, dict):
            self._add_items(value, path, depth + 1)
        elif isinstance(value, list):
            for one in value[:MAX_ITEMS]:
                self._add(one, f"{path}[]", depth + 1)

    def merge(self, other: JsonTally) -> None:
        """Count what another one did in the samples that come next."""
        self.num_more += other.num_more
        for path, tally in other.keys.items():
            known = self.keys.get(path)
            if known is None and len(self.keys) >= MAX_KEYS:
                self.num_more += sum(tally.types.values())
                continue
            if known is None:
                known = self.keys[path] = KeyTally()
            known.merge(tally)


def _join(path: str, key: str) -> str:
    if _WORD.fullmatch(key):
        return f"{path}.{shorten(key)}" if path else shorten(key)
    return f"{path}[{json.dumps(shorten(key))}]"
