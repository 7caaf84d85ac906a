"""What is in a shard that some reader trips over: counted in the pass of `verify --for`, judged in `readers`.

The reader of wdskit gives whole members and hides how a header wrote their names and sizes, so the headers are looked
at again here, each by a pread of one block that is in the page cache already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, TEXT_FIELDS, decode_field
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


@dataclass
class Quirks:
    """What was seen in one shard.

    Attributes:
        counts: Members with each quirk of `readers.RULES`.
        first: Name and offset of the first of them.
        first_samples: Key and fields of the first five samples.
        json_shapes: Of each JSON field, the type by name at the top; that of the whole value by "".
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, tuple[str, int]] = field(default_factory=dict)
    first_samples: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    json_shapes: dict[str, dict[str, str]] = field(default_factory=dict)

    def look(self, file: LocalFile, name: str, split: tuple[str, str] | None, start: int, data: bytes) -> None:
        """Note the quirks of one member.

        Args:
            file: The shard.
            name: As the reader gives it.
            split: Its key and field.
            start: Offset of its first header.
            data: Its bytes.
        """
        seen = _header_quirks(file, start)
        if " " in name:
            seen.add("space")
        if "\n" in name:
            seen.add("newline")
        if split is None:
            is_hidden = name.rpartition("/")[2].startswith(".")
            seen.add("dot_file" if is_hidden else "meta" if name.startswith("__") else "no_extension")
        else:
            if not name.endswith(split[1]):
                seen.add("upper_case")
            if not isinstance(data, Passed):
                seen.add(self._value_quirk(split[1], data))
        for quirk in seen - {""}:
            self.counts[quirk] = self.counts.get(quirk, 0) + 1
            self.first.setdefault(quirk, (shorten(name), start))

    def _value_quirk(self, name: str, data: bytes) -> str:
        """What is odd about a value, "" where nothing is."""
        kind = name.rpartition(".")[2]
        if kind not in JSON_FIELDS | INT_FIELDS | TEXT_FIELDS:
            return ""
        try:
            value = decode_field(name, data)
        except DecodeError:
            return "int" if kind in INT_FIELDS else "text" if kind in TEXT_FIELDS else "json"
        return "json_types" if kind in JSON_FIELDS and not self._has_known_shape(name, value) else ""

    def _has_known_shape(self, name: str, value: object) -> bool:
        """Compare the types at the top of a JSON value with the first that were seen."""
        shape = {str(at): type(one).__name__ for at, one in value.items()} if isinstance(value, dict) else {}
        shape[""] = type(value).__name__
        known = self.json_shapes.setdefault(name, shape)
        for at, kind in shape.items():
            if kind != "NoneType" and known.get(at) == "NoneType":
                known[at] = kind
            elif kind not in (known.get(at), "NoneType"):
                return False
        return True


def _header_quirks(file: LocalFile, start: int) -> set[str]:
    """How the headers from `start` on are written."""
    seen = set()
    while True:
        block = file.read_at(start, BLOCK_BYTES)
        kind = block[156]
        start += BLOCK_BYTES
        if kind not in (PAX_TYPE, PAX_GLOBAL_TYPE, GNU_LONG_NAME_TYPE):
            break
        size = parse_octal(block[124:136], "size")
        if kind == GNU_LONG_NAME_TYPE:
            seen.add("long_name")
        elif parse_pax(file.read_at(start, size)) != Overrides():
            seen.add("pax")
        start += padded(size)
    if block[257:265] == USTAR and block[345]:
        seen.add("prefix")
    if block[135] not in b"\x00 " or block[124] & 0x80:
        seen.add("size")
    return seen
