"""Hand-written shards that break a rule of a reader, with the readers that cannot read them.

docs/formats.md lists these rules; `check_readers.py` shows that each reader fails on these shards and on no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from images import image_bytes
from tar_corpus import END, V7, header, long_name, member, pax, record

READERS = ("hf", "dali", "energon", "wids", "open_clip", "timm")
FIELDS = {"jpg": image_bytes("JPEG"), "cls": b"1", "json": b'{"n": 1}', "txt": b"x"}


def sample(key: str, *, without: str = "", **options) -> bytes:
    """Return one sample with all fields; `options` are those of its headers."""
    return b"".join(member(f"{key}.{name}", data, **options) for name, data in FIELDS.items() if name != without)


def each(make: Callable[[bytes, bytes], bytes], key: str = "b") -> bytes:
    """Return one sample, each member made by a function of its name and data."""
    return b"".join(make(f"{key}.{name}".encode(), data) for name, data in FIELDS.items())


def jsons(*documents: bytes) -> bytes:
    return b"".join(
        member(f"{n}.jpg", FIELDS["jpg"])
        + member(f"{n}.cls", b"1")
        + member(f"{n}.json", data)
        + member(f"{n}.txt", b"x")
        for n, data in enumerate(documents)
    )


class Case(NamedTuple):
    """The members of a shard, and the readers that cannot read it."""

    data: bytes
    readers: set[str]


LONG = "n" * 120

UNSAFE: dict[str, Case] = {
    "plain": Case(sample("a"), set()),
    "not ASCII": Case(sample("\u00e9") + sample("\u96ea/\u00e4"), set()),
    "100 bytes": Case(sample("n" * 95), set()),
    "pax path": Case(each(lambda name, data: pax(record(b"path", name)) + member("x", data)), {"dali", "wids"}),
    "pax time": Case(each(lambda name, data: pax(record(b"mtime", b"1.5")) + member(name, data)), set()),
    "GNU long name": Case(each(lambda name, data: long_name(name) + member(name[:100], data), LONG), {"dali", "wids"}),
    "prefix": Case(sample("a", prefix=b"folder"), {"wids"}),
    "GNU magic": Case(sample("a", magic=b"ustar  \0"), set()),
    "12 digits": Case(each(lambda name, data: member(name, data, size=b"%012o" % len(data))), {"dali", "wids"}),
    "base 256": Case(
        each(lambda name, data: member(name, data, size=b"\x80" + len(data).to_bytes(11, "big"))), {"dali", "wids"}
    ),
    "a space": Case(sample("a b"), {"dali"}),
    "a folder with a dot": Case(sample("v1.2/a"), set()),
    "a leading ./": Case(sample("./a"), set()),
    "a control character": Case(sample("a\x1b"), set()),
    "a line end": Case(sample("a\nb"), {"wids"}),
    "v7": Case(sample("a", magic=V7), set()),
    "upper case": Case(sample("a", without="jpg") + member("a.JPG", FIELDS["jpg"]), {"hf", "dali", "energon", "wids"}),
    "README": Case(member("README", b"x") + sample("a"), {"dali"}),
    "a dot file": Case(member(".DS_Store", b"x") + sample("a"), {"dali", "wids"}),
    "__meta__": Case(member("__meta__/x.json", b"{}") + sample("a"), {"hf", "dali", "wids"}),
    "a directory": Case(header(b"folder/", kind=b"5") + sample("a"), set()),
    "a global header": Case(pax(record(b"comment", b"x"), kind=b"g") + sample("a"), set()),
    "cls is no integer": Case(sample("a", without="cls") + member("a.cls", b"one"), {"hf", "open_clip", "timm"}),
    "txt is no UTF-8": Case(sample("a", without="txt") + member("a.txt", b"\xff"), {"hf", "open_clip"}),
    "json changes its type": Case(jsons(*[b'{"a": 1}'] * 6, b'{"a": "x"}'), {"hf"}),
    "json is none": Case(jsons(b"{"), {"hf", "open_clip"}),
    "a late field": Case(b"".join(sample(f"{n}", without="json" if n < 5 else "") for n in range(7)), {"hf"}),
    "fields differ": Case(sample("a", without="json") + sample("b"), {"hf"}),
    "no label": Case(sample("a", without="cls"), {"timm"}),
    "no text": Case(sample("a", without="txt"), {"open_clip"}),
}


def shard(name: str) -> bytes:
    """Return a whole shard."""
    return UNSAFE[name].data + END
