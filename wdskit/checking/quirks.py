"""What is in a shard that some reader trips over: counted in the pass of `verify --for`, judged in `readers`.

The reader of wdskit gives whole members and hides how a header wrote their names and sizes, so the headers are looked
at again here, each by a pread of one block that is in the page cache already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, TEXT_FIELDS, decode_field
from wdskit.dataset.keys import split_name
from wdskit.errors import DecodeError
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.urls import LocalFile
from wdskit.tar.header import (
    GNU_LONG_NAME_TYPE,
    PAX_GLOBAL_TYPE,
    PAX_TYPE,
    USTAR,
    Overrides,
    padded,
    parse_octal,
    parse_pax,
)
from wdskit.tar.window import Passed
from wdskit.text import shorten

Quirk = Literal[
    "pax", "long_name", "prefix", "size", "space", "newline", "upper_case", "no_extension", "dot_file", "meta", "int",
    "text", "json", "json_types",
]  # fmt: skip


@dataclass
class Quirks:
    """What was seen: of each quirk how often, and the first member."""

    counts: dict[Quirk, int] = field(default_factory=dict)
    first: dict[Quirk, tuple[str, int]] = field(default_factory=dict)  # its name and offset
    first_samples: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # key and fields of five
    json_shapes: dict[str, dict[str, str]] = field(default_factory=dict)  # of each JSON field: type by name

    def note(self, quirk: Quirk, name: str, offset: int) -> None:
        """Count one."""
        self.counts[quirk] = self.counts.get(quirk, 0) + 1
        self.first.setdefault(quirk, (shorten(name), offset))


class QuirkFinder:
    """Looks at the members of one shard.

    Args:
        quirks: Where to note what it sees.
        file: The shard.
    """

    def __init__(self, quirks: Quirks, file: LocalFile) -> None:
        self._quirks = quirks
        self._file = file
        self._start = 0  # of the member that is looked at

    def look(self, name: str, start: int, data: bytes) -> None:
        """One member.

        Args:
            name: As the reader gives it.
            start: Offset of its first header.
            data: Its bytes.
        """
        self._start = start
        self._look_at_headers(name, start)
        if " " in name:
            self._note("space", name)
        if "\n" in name:
            self._note("newline", name)
        split = split_name(name)
        if split is None:
            hidden = name.rpartition("/")[2].startswith(".")
            self._note("dot_file" if hidden else "meta" if name.startswith("__") else "no_extension", name)
            return
        if not name.endswith(split[1]):
            self._note("upper_case", name)
        if not isinstance(data, Passed):
            self._look_at_value(name, split[1], data)

    def _note(self, quirk: Quirk, name: str) -> None:
        self._quirks.note(quirk, name, self._start)

    def _look_at_headers(self, name: str, start: int) -> None:
        """Note how the headers from `start` on are written."""
        while True:
            block = self._file.read_at(start, BLOCK_BYTES)
            kind = block[156]
            start += BLOCK_BYTES
            if kind not in (PAX_TYPE, PAX_GLOBAL_TYPE, GNU_LONG_NAME_TYPE):
                break
            size = parse_octal(block[124:136], "size")
            if kind == GNU_LONG_NAME_TYPE:
                self._note("long_name", name)
            elif parse_pax(self._file.read_at(start, size)) != Overrides():
                self._note("pax", name)
            start += padded(size)
        if block[257:265] == USTAR and block[345]:
            self._note("prefix", name)
        if block[135] not in b"\x00 " or block[124] & 0x80:
            self._note("size", name)

    def _look_at_value(self, name: str, field_name: str, data: bytes) -> None:
        kind = field_name.rpartition(".")[2]
        try:
            if kind in JSON_FIELDS:
                self._look_at_json(name, field_name, decode_field(field_name, data))
            elif kind in INT_FIELDS or kind in TEXT_FIELDS:
                decode_field(field_name, data)
        except DecodeError:
            self._note("int" if kind in INT_FIELDS else "text" if kind in TEXT_FIELDS else "json", name)

    def _look_at_json(self, name: str, field_name: str, value: object) -> None:
        """Compare the types at the top of a JSON value with the first that were seen."""
        shape = {str(at): type(one).__name__ for at, one in value.items()} if isinstance(value, dict) else {}
        shape[""] = type(value).__name__
        known = self._quirks.json_shapes.setdefault(field_name, shape)
        for at, kind in shape.items():
            if kind != "NoneType" and known.get(at) == "NoneType":
                known[at] = kind
            elif kind not in (known.get(at), "NoneType"):
                self._note("json_types", name)
                return
