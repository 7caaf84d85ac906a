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
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from images import image_bytes

MIB = 1 << 20
MOST_MIB = 200

PROGRAM = """
import gc, json, re, sys
import wdskit
from wdskit import pack
for path in json.loads(sys.argv[1]):
    options = {"sidecars": ["json"]} if path.endswith("sidecar") else {}
    try:
        pack(path, path + ".out", **options)
        told = ["", "it was packed"]
    except wdskit.WdskitError as err:
        told = [type(err).__name__, str(err)]
    gc.collect()
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    with open("/proc/self/status") as status, open("/proc/self/clear_refs", "w") as peak:
        num_kib = re.search(r"VmHWM:\\s*(\\d+)", status.read())[1]
        peak.write("5")  # proc(5): the most that was resident begins anew
    print(json.dumps([*told, int(num_kib) >> 10]), flush=True)
"""


def zeros_deflated(num_bytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = bytes(MIB)
    return b"".join([*(packer.compress(block) for _ in range(num_bytes >> 20)), packer.flush()])


def zip_of(packed: bytes, num_bytes: int, *, num_records: int = 1) -> bytes:
    """Return a zip with one deflated member, to which many entries of the zip's directory point."""
    name = b"a0000.txt"
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 0, 0, len(packed), num_bytes, len(name), 0) + name + packed
    records = b"".join(
        struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 0, 0, len(packed), num_bytes, len(name), 0, 0, 0, 0, 0, 0
        )
        + b"a%04d.txt" % number
        for number in range(num_records)
    )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, num_records, num_records, len(records), len(local), 0)
    return local + records + end


def nested_zip() -> bytes:
    """Return zips of zips, as 42.zip; only their names look like files to pack."""
    data = zip_of(zeros_deflated(4 * MIB), 4 * MIB)
    for number in range(3):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
            for copy in range(16):
                file.writestr(f"lib {copy:x}{number}.zip", data)
        data = stream.getvalue()
    return data


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
    data = image_bytes("PNG")
    head = b"IHDR" + struct.pack(">2L", 1 << 16, 1 << 16) + data[24:29]
    return data[:12] + head + struct.pack(">L", zlib.crc32(head)) + data[33:]


def parquet(column: pa.Array, **options: object) -> bytes:
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
    (path / "a.jpg").write_bytes(image_bytes())
    (path / "a.json").write_bytes(data)


def write_saved(path: Path, _: bytes) -> None:
    """Write a saved data set whose only batch is compressed and claims 48 MiB."""
    path.mkdir()
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (path / "dataset_info.json").write_text("{}")
    table = pa.table({"image": pa.array([bytes(48 * MIB)])})
    with pa.ipc.new_stream(
        str(path / "data.arrow"), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as out:
        out.write_table(table)


def write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)


WIDE = b"[" + b"[],{}," * (4 * MIB // 6 - 10) + b"0]"

BOMBS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    # Name: bytes, class of the error, text of the error.
    "declared.zip": (lambda: zip_of(zeros_deflated(64 * MIB), 64 * MIB), "RowError", "like a decompression bomb"),
    "lying.zip": (lambda: zip_of(zeros_deflated(64 * MIB), 9000), "RowError", "does not have the 9000 bytes"),
    "overlapping.zip": (lambda: zip_of(zeros_deflated(MIB), MIB, num_records=2000), "PackError", "overlap"),
    "records.zip": (
        lambda: b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 65535, 65535, 0, 0, 0),
        "PackError",
        "nothing to pack",
    ),
    "nested.zip": (nested_zip, "RowError", "holds white space"),
    "sparse.tar": (lambda: tar_of(b"S", 2 << 30), "UnsupportedMember", "a sparse file"),
    "sparse-pax.tar": (
        lambda: tar_of(b"0", 0, {"GNU.sparse.realsize": "99999999999"}),
        "UnsupportedMember",
        "a sparse file",
    ),
    "size.tar": (lambda: tar_of(b"0", 15 << 30), "RowError", "stops inside"),
    "size-pax.tar": (lambda: tar_of(b"0", 0, {"size": "9" * 18}), "RowError", "over the limit"),
    "name.tar": (lambda: tar_of(b"L", 1 << 33), "RowError", "over the limit"),
    "gzip.tar": (lambda: gzipped(b"", 64), "RowError", "this is a gzip file"),
    "line.jsonl.gz": (lambda: gzipped(b'{"a": "', 64), "PackError", "this line is longer than"),
    "cell.csv.gz": (lambda: gzipped(b'a,b\n1,"', 64, b"x\n" * 8), "PackError", "field larger than"),
    "header.tsv.gz": (lambda: gzipped(b"a\tb", 64, b"\tc"), "PackError", "this line is longer than"),
    "deep.jsonl": (lambda: b'{"a":' + b"[" * (3 * MIB), "RowError", "it is not JSON"),
    "deep.json": (lambda: b'{"images":' + b"[" * (3 * MIB), "PackError", "it is not JSON"),
    "wide.jsonl": (lambda: WIDE, "RowError", "it holds a list"),
    "deep.sidecar": (lambda: b'{"a":' + b"[" * (3 * MIB), "RowError", "a.json: "),
    "wide.sidecar": (lambda: WIDE, "RowError", "it holds a list"),
    "pixels.parquet": (lambda: parquet(pa.array([large_png()])), "RowError", "4294967296 pixels"),
    "page.parquet": (
        lambda: parquet(pa.array([bytes(48 * MIB)]), compression="zstd", use_dictionary=False),
        "PackError",
        "like a decompression bomb",
    ),
    "repeated.parquet": (
        lambda: parquet(repeated(bytes(4 * MIB), 100_000, pa.binary())),
        "RowError",
        "not a known",
    ),
    "words.parquet": (
        lambda: parquet(repeated(b"a" * 4 * MIB, 100_000, pa.string())),
        "RowError",
        "does not have the extension",
    ),
    "lying.parquet": (lying_page, "PackError", "it cannot be read as Parquet"),
    "compressed.saved": (lambda: b"", "PackError", "it is compressed"),
}
WRITERS = {".sidecar": write_sidecar, ".saved": write_saved}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, int]]:
    """For each bomb, the error that it ended with, and the largest memory of its process."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, (make, _, _) in BOMBS.items():
        WRITERS.get(Path(name).suffix, write_file)(folder / name, make())
    words = [sys.executable, "-c", PROGRAM, json.dumps([str(folder / name) for name in BOMBS])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    lines = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(lines) == len(BOMBS), done.stderr
    return dict(zip(BOMBS, lines, strict=True))


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_a_named_error_in_little_memory(told, name):
    kind, message, num_mib = told[name]
    assert (kind, BOMBS[name][1]) == (BOMBS[name][1], kind), message
    assert name.partition(".")[0] in message
    assert BOMBS[name][2] in message
    assert num_mib < MOST_MIB, [(bomb, mib) for bomb, (_, _, mib) in told.items()]
