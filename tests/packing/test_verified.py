"""`verify` accepts everything that `pack` writes: random sources of each kind, with random options.

A run may be refused; then no file has a final name. `WDSKIT_ALL_FAULTS` makes 1,000 runs.
"""

from __future__ import annotations

import collections
import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import ALL, HastyDisk
from images import image_bytes
from tar_corpus import END, member

from wdskit import WdskitError, pack, verify

COUNT = 1000 if ALL else 30
JPEG, PNG = image_bytes("JPEG", size=(40, 24)), image_bytes("PNG", size=(24, 24))
LETTERS = "abZ09_-. äß中\u0301'\"%\\/"
IMAGES = {"jpg": JPEG, "png": PNG, "JPG": JPEG, "webp": image_bytes("WEBP"), "seg.png": PNG}
VALUES: dict[str, list[Any]] = {
    "cls": [0, 1, 7, "cat", "7", -1, 2.0, True, None, b"3", b"cat"],
    "txt": ["", "ä\n", "a\x00b", b"\xff\xfe", "\ud800"],
    "json": [{}, {"a": float("nan")}, {"b": [1, {"c": None}]}, [1], "text", b"{", b"[]", 1 << 70, {"cls": 3}],
    "npy": [np.zeros((2, 3)), np.float32(1), np.arange(0), np.array(["a"]), np.array([None], object), b"x"],
    "bin": [b"", bytes(2000)],
    "jpg": [b"", b"x", JPEG[:-9], PNG],
    "png": [PNG[:-4], JPEG],
    "x.cls": [1, "a"],
}


def draw_key(rng: random.Random, number: int) -> str:
    """Return a key that is usually plain and often unique."""
    if rng.random() < 0.7:
        return f"{rng.choice(['', 'a/', 'ä/b-'])}{number:03d}"
    return "".join(rng.choices(LETTERS, k=rng.choice([1, 5, 30, 130])))


def draw_row(rng: random.Random, number: int, oddness: float) -> dict[str, Any]:
    row: dict[str, Any] = {"__key__": draw_key(rng, number) if rng.random() < oddness else f"{number:03d}"}
    if rng.random() < 0.9:
        name = rng.choice([*IMAGES]) if rng.random() < oddness else "jpg"
        row[name] = IMAGES[name]
    for name in ("cls", "txt", "json", "npy", "bin"):
        if rng.random() < 0.4:
            row[name] = {"cls": number % 3, "txt": "a text", "json": {"n": number}, "npy": np.ones(2), "bin": b"1"}[
                name
            ]
    if rng.random() < oddness:
        name = rng.choice([*VALUES])
        row[name] = rng.choice(VALUES[name])
    return row


def draw_source(rng: random.Random, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a random source, and the options that it needs."""
    oddness = rng.choice([0, 0, 0.05, 0.2])
    rows = [draw_row(rng, number, oddness) for number in range(rng.choice([1, 3, 8, 20]))]
    kind = rng.choice(["rows", "once", "folder", "csv", "jsonl", "tars"])
    folder.mkdir()
    if kind in ("rows", "once"):
        return (rows if kind == "rows" else iter(rows)), {}
    if kind == "folder":
        for number, row in enumerate(rows):
            place = folder / rng.choice(["cat", "dog", "owl/small", "."]) / f"{number:03d}"
            place.parent.mkdir(parents=True, exist_ok=True)
            for name, value in row.items():
                if isinstance(value, bytes):
                    place.with_name(f"{place.name}.{name}").write_bytes(value)
        return str(folder), rng.choice([{}, {}, {"sidecars": "seg.png"}, {"files": "bin", "image_fields": ()}])
    if kind == "tars":
        members = [
            member(f"{number:03d}.{name}", value, size=len(value))
            for number, row in enumerate(rows)
            for name, value in row.items()
            if isinstance(value, bytes)
        ]
        (folder / "a.tar").write_bytes(b"".join(members) + END)
        return str(folder / "*.tar"), {}
    table = []
    for number, row in enumerate(rows):
        (folder / f"{number}.jpg").write_bytes(row.get("jpg") or JPEG)
        plain = {name: row[name] for name in ("cls", "txt", "json") if not isinstance(row.get(name, b""), bytes)}
        table.append({"image": f"{number}.jpg", **plain})
    path = folder / f"t.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        out = io.StringIO()
        writer = csv.DictWriter(out, [*dict.fromkeys(name for row in table for name in row)])
        writer.writeheader()
        writer.writerows(table)
        path.write_bytes(out.getvalue().encode(errors="surrogatepass"))
    options = {"fields": [f"{name}={name}" for name in ("cls", "txt") if rng.random() < 0.5]}
    return str(path), options


OPTIONS: dict[str, list[Any]] = {
    "max_samples": [1, 4],
    "max_bytes": [20_000],
    "num_shards": [1, 2],
    "shuffle": [3],
    "split": ["train=0.5,val=0.5"],
    "keys": ["clean", "hashed"],
    "skip_bad": [True, True, True],
    "validate": ["decode", "structure"],
    "resize": [8, 100],
    "format": ["png", "webp"],
    "orient": [True],
    "derive": ["width,height,sha256", "bytes"],
    "duplicates": ["drop", "report", "error"],
    "classes": [["cat", "dog"], ["0", "1", "2"]],
    "mask_fields": ["seg.png"],
    "image_fields": ["jpg", "png"],
    "allow_no_image": [True, True],
    "require": ["cls"],
    "export": ["dali", "energon", "open_clip", "timm", "webshart"],
    "threads": [2],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_packed_is_clean_to_verify(tmp_path: Path) -> None:
    ends: collections.Counter[str] = collections.Counter()
    for number in range(COUNT):
        rng = random.Random(number)
        source, options = draw_source(rng, tmp_path / f"{number}")
        for name in rng.sample([*OPTIONS], k=rng.choice([0, 1, 1, 2, 4])):
            options.setdefault(name, rng.choice(OPTIONS[name]))
        out = tmp_path / f"{number}" / ".." / f"{number}-out"
        try:
            pack(source, out, disk=HastyDisk(), **options)
        except WdskitError:
            ends["refused"] += 1
            assert not [path.name for path in out.glob("*") if not path.name.startswith(".")], (number, options)
            continue
        found = verify(out, images=options.get("validate", "structure"), workers=1)
        assert found.is_clean, (number, options, found.findings)
        ends["packed"] += 1
    assert min(ends["packed"], ends["refused"]) > COUNT // 5, ends
