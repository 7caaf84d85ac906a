"""Folders that `pack` makes from each kind of source, with their samples as Python's tarfile reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from formats import Samples, read_folder, shard_names
from images import image_bytes, make_folder

from wdskit import pack

KINDS = ["images", "mixed", "table", "rows", "names"]


class Packed(NamedTuple):
    """A folder of several shards. `samples` has the bytes in the shards."""

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
    for kind, rows, num in (("rows", _rows(), 4), ("names", _names(), 2)):
        pack([{"__key__": key, **fields} for key, fields in rows.items()], root / kind, max_samples=num)
    return {kind: _packed(root / kind) for kind in KINDS}


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
    lines = [json.dumps(line, ensure_ascii=number % 2 == 0) for number, line in enumerate(_lines())]
    path = root / "manifest.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


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


def _packed(folder: Path) -> Packed:
    shards = [str(folder / name) for name in shard_names(folder)]
    assert len(shards) > 1
    return Packed(folder, shards, read_folder(folder))
