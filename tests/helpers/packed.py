"""Folders that `pack` makes from each kind of source, with the samples that were packed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from images import image_bytes, make_folder

from wdskit import LocalShard, pack
from wdskit.dataset.index import read_index

Samples = dict[str, dict[str, bytes]]
"""Fields by key, in order."""

KINDS = ["images", "mixed", "table", "rows", "names"]


class Packed(NamedTuple):
    """A folder of several shards. `samples` has the bytes that were packed."""

    folder: Path
    shards: list[str]
    samples: Samples


def pack_all(root: Path) -> dict[str, Packed]:
    """Make a folder of each kind: photos; JPEG with PNG; a manifest; Python rows; extreme names that pack accepts."""
    make_folder(root / "photos", {"cat": 4, "dog": 3})
    make_folder(root / "both", {"cat": 3, "dog": 3})
    make_folder(root / "both", {"dog/old": 2}, kind="PNG", suffix=".png")
    pack(root / "photos", root / "images", max_samples=3, shuffle=1)
    pack(root / "both", root / "mixed", max_samples=5, shuffle=2, workers=1)
    pack(_manifest(root), root / "table", max_samples=4)
    pack([{"__key__": key, **fields} for key, fields in _rows().items()], root / "rows", max_samples=4)
    pack([{"__key__": key, **fields} for key, fields in _names().items()], root / "names", max_samples=2)
    made = {
        "images": _photos(root / "photos"),
        "mixed": _photos(root / "both"),
        "table": _table(root),
        "rows": {key: _encoded(fields) for key, fields in _rows().items()},
        "names": {key: _encoded(fields) for key, fields in _names().items()},
    }
    return {kind: _packed(root / kind, samples, shuffled=kind in {"images", "mixed"}) for kind, samples in made.items()}


def as_json(value: Any) -> bytes:
    """Return JSON as pack writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _photos(folder: Path) -> Samples:
    classes = sorted(path.name for path in folder.iterdir())
    samples = {}
    for path in sorted(folder.rglob("*.*")):
        name = path.relative_to(folder).as_posix()
        kind = name.split("/")[0]
        facts = {"cls": classes.index(kind), "class": kind, "path": name}
        key, field = name.split(".")
        samples[key] = {"cls": b"%d" % facts["cls"], field: path.read_bytes(), "json": as_json(facts)}
    return samples


def _lines() -> list[dict[str, Any]]:
    """Return the rows of a manifest."""
    return [
        {
            "key": f"row{n}",
            "image": f"photos/cat/{n % 4:04d}.jpg",
            "caption": f'Grüße, 雪 \U0001f600 \\ " {n}',
            "n": n,
            "nested": {"box": [n / 4, 0.5], "tags": [{"name": "a"}, {"name": "ß"}][: 1 + n % 2], "none": None},
        }
        for n in range(9)
    ]


def _manifest(root: Path) -> Path:
    path = root / "manifest.jsonl"
    path.write_text("\n".join(map(_line, range(len(_lines())))), encoding="utf-8")
    return path


def _line(number: int) -> str:
    """Return the JSON of a row, which is also the JSON of its sample."""
    return json.dumps(_lines()[number], ensure_ascii=number % 2 == 0)


def _table(root: Path) -> Samples:
    return {
        line["key"]: {
            "jpg": (root / line["image"]).read_bytes(),
            "json": _line(number).encode(),
        }
        for number, line in enumerate(_lines())
    }


def _rows() -> dict[str, dict[str, Any]]:
    """Return rows with Python values of every kind that pack accepts."""
    return {
        f"part-{n % 2}/{n:03d}": {
            "png": image_bytes("PNG", number=n),
            "cls": n - 2,
            "txt": f"Text {n}: 雪\n" if n else "",
            "npy": np.arange(n, n + 3, dtype=np.float32),
            "json": {"n": n, "list": [n, n + 1]},
        }
        for n in range(6)
    }


def _names() -> dict[str, dict[str, Any]]:
    """Return extreme keys and fields that pack accepts: 100 bytes, not ASCII, dots in fields, empty, unknown types."""
    return {
        "雪/bild-ä": {"txt": "snow"},
        "n" * 96: {"txt": "100 bytes"},
        "d" * 60 + "/" + "e" * 35: {"txt": "and a folder"},
        "a": {"left.png": image_bytes("PNG"), "seg.left.png": image_bytes("PNG", number=1), "empty": b""},
        "A": {"pyd": b"\x80\x04.", "bin": bytes(range(256)) * 5, "block": b"x" * 512, "c++": b"int main;"},
        "a-": {"x": b"the key before is no prefix of this one"},
    }


def _encoded(fields: dict[str, Any]) -> dict[str, bytes]:
    """Return the values as bytes, encoded by the field's name."""

    def encode(field: str, value: Any) -> bytes:
        if field == "json":
            return as_json(value)
        if field == "npy":
            stream = io.BytesIO()
            np.save(stream, value)
            return stream.getvalue()
        return value if isinstance(value, bytes) else str(value).encode()

    return {field: encode(field, value) for field, value in sorted(fields.items())}


def _packed(folder: Path, samples: Samples, *, shuffled: bool) -> Packed:
    shards = [str(folder / entry.name) for entry in read_index(str(folder)).entries]
    assert len(shards) > 1
    if shuffled:
        keys = []
        for path in shards:
            with LocalShard(path) as shard:
                keys += map(shard.key, range(len(shard)))
        assert sorted(keys) == sorted(samples) != keys
        samples = {key: samples[key] for key in keys}
    return Packed(folder, shards, {key: dict(sorted(fields.items())) for key, fields in samples.items()})
