"""Small files that claim to be large: each ends in a named error, in a process that never takes 200 MB."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats import jpeg, png, tar_bytes

MIB = 1 << 20
MOST_MIB = 200

PROGRAM = """
import gc, json, re, sys
import wdskit
from wdskit import pack
for path in json.loads(sys.argv[1]):
    options = {"sidecars": ["json"]} if path.endswith("sidecar") else {}
    try:
        pack(path, path + ".out", workers=1, **options)
        told = ["", "it was packed"]
    except wdskit.WdskitError as err:
        told = [type(err).__name__, str(err)]
    if path.endswith(".tar") and wdskit.verify(path, images="decode", workers=1).is_clean:
        told = ["", "it was verified"]
    gc.collect()
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    with open("/proc/self/status") as status, open("/proc/self/clear_refs", "w") as peak:
        num_kib = re.search(r"VmHWM:\\s*(\\d+)", status.read())[1]
        peak.write("5")  # proc(5): the most that was resident begins anew
    print(json.dumps([*told, int(num_kib) >> 10]), flush=True)
"""


def tar_of(typeflag: bytes, size: int, pax: dict[str, str] | None = None) -> bytes:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.size, info.pax_headers = typeflag, size, pax or {}
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) + bytes(1024)


def gzipped(start: bytes, num_mib: int, filling: bytes = b" ") -> bytes:
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, compresslevel=1) as file:
        file.write(start)
        for _ in range(num_mib):
            file.write(filling * MIB)
    return stream.getvalue()


def large_png() -> bytes:
    """Return a PNG of a few bytes whose header promises 65,536 x 65,536 pixels."""
    data = png(1)
    head = b"IHDR" + struct.pack(">2L", 1 << 16, 1 << 16) + data[24:29]
    return data[:12] + head + struct.pack(">L", zlib.crc32(head)) + data[33:]


def parquet(column: pa.Array, **options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"image": column}), stream, **options)
    return stream.getvalue()


def repeated(value: bytes, num: int, kind: pa.DataType) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * num, pa.int32()), pa.array([value], kind))


def lying_page() -> bytes:
    """Return a page whose header says that it unpacks to a megabyte; it has 40,000 bytes."""
    data = parquet(pa.array([os.urandom(10) * 4000]), use_dictionary=False, compression="zstd")
    at = re.search(rb"\x15\x00\x15(...)", data, re.DOTALL)
    assert at is not None
    return data[: at.start(1)] + b"\xff\xff\x7f" + data[at.end(1) :]


def write_sidecar(path: Path, data: bytes) -> None:
    path.mkdir()
    (path / "a.jpg").write_bytes(jpeg(1))
    (path / "a.json").write_bytes(data)


def write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)


WIDE = b"[" + b"[],{}," * (4 * MIB // 6 - 10) + b"0]"

BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    # Name: bytes, and words of the error.
    "sparse.tar": (lambda: tar_of(b"S", 2 << 30), "sparse"),
    "sparse-pax.tar": (lambda: tar_of(b"0", 0, {"GNU.sparse.realsize": "99999999999"}), "sparse"),
    "size.tar": (lambda: tar_of(b"0", 15 << 30), "stops|cut"),
    "size-pax.tar": (lambda: tar_of(b"0", 0, {"size": "9" * 18}), "limit|stops"),
    "name.tar": (lambda: tar_of(b"L", 1 << 33), "limit|stops"),
    "gzip.tar": (lambda: gzipped(b"", 64), "gzip"),
    "line.jsonl.gz": (lambda: gzipped(b'{"a": "', 64), "longer|limit"),
    "cell.csv.gz": (lambda: gzipped(b'a,b\n1,"', 64, b"x\n" * 8), "larger|longer|limit"),
    "header.tsv.gz": (lambda: gzipped(b"a\tb", 64, b"\tc"), "longer|limit"),
    "deep.jsonl": (lambda: b'{"a":' + b"[" * (3 * MIB), "JSON"),
    "deep.json": (lambda: b'{"images":' + b"[" * (3 * MIB), "JSON"),
    "wide.jsonl": (lambda: WIDE, "list"),
    "deep.sidecar": (lambda: b'{"a":' + b"[" * (3 * MIB), "a.json"),
    "wide.sidecar": (lambda: WIDE, "list"),
    "pixels.tar": (lambda: tar_bytes({"a": {"png": large_png()}}), "4294967296 pixels"),
    "pixels.parquet": (lambda: parquet(pa.array([large_png()])), "4294967296 pixels"),
    "page.parquet": (
        lambda: parquet(pa.array([bytes(48 * MIB)]), compression="zstd", use_dictionary=False),
        "bomb|limit",
    ),
    "repeated.parquet": (lambda: parquet(repeated(bytes(4 * MIB), 100_000, pa.binary())), "not a|no image"),
    "words.parquet": (lambda: parquet(repeated(b"a" * 4 * MIB, 100_000, pa.string())), "extension|path|file"),
    "lying.parquet": (lying_page, "Parquet"),
}
WRITERS = {".sidecar": write_sidecar}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, int]]:
    """For each bomb, the error that it ended with, and the largest memory of its process."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, (make, _) in BOMBS.items():
        WRITERS.get(Path(name).suffix, write_file)(folder / name, make())
    words = [sys.executable, "-c", PROGRAM, json.dumps([str(folder / name) for name in BOMBS])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    lines = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(lines) == len(BOMBS), done.stderr
    return dict(zip(BOMBS, lines, strict=True))


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_a_named_error_in_little_memory(told: dict[str, tuple[str, str, int]], name: str) -> None:
    kind, message, num_mib = told[name]
    assert kind, message
    assert name.partition(".")[0] in message
    assert re.search(BOMBS[name][1], message), message
    assert num_mib < MOST_MIB, [(bomb, mib) for bomb, (_, _, mib) in told.items()]
