"""The documented files, written and read without wdskit: tars with `tarfile`, indexes with `json` and `struct`.

A test that uses only this file and public names judges a rewrite as it judges today's code.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from folders import GOLDEN

Fields = dict[str, bytes]
Samples = dict[str, Fields]

TINY = (GOLDEN / "tiny.jpg").read_bytes()
"""A JPEG of 12 x 8 pixels."""

WORK_FOLDER = ".wdskit"
INTERNAL = (".wdskit.lock", ".wdskit.files", ".wdskit.last-run", "index.bin")
"""Files of a packed folder that are no part of the data set: a reader that knows index.json needs none of them."""


# Files to pack.


def jpeg(number: int) -> bytes:
    """Return a JPEG of 12 x 8 pixels; each number gives other bytes (a comment), whatever encoders are installed."""
    comment = f"number {number}".encode()
    return TINY[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + TINY[2:]


def png(number: int, *, width: int = 6, height: int = 4) -> bytes:
    """Return an RGB PNG of one colour."""
    return png_of((b"\0" + bytes([number % 256, number // 256 % 256, 99]) * width) * height, width, height)


def png_of(rows: bytes, width: int, height: int, *, bits: int = 8, colour: int = 2) -> bytes:
    """Return a PNG of rows with their filter bytes, in a stored block, so that no encoder decides its bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    stored = struct.pack("<BHH", 1, len(rows), len(rows) ^ 0xFFFF) + rows + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"\x78\x01" + stored) + chunk(b"IEND", b"")


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    """Write files by their paths below `folder`; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def make_photos(folder: Path, classes: Mapping[str, int]) -> Path:
    """Write a folder of JPEGs; `classes` maps each class to its number of images, which are 0000.jpg and so on."""
    names = [f"{name}/{at:04d}.jpg" for name, count in classes.items() for at in range(count)]
    return write_files(folder, {name: jpeg(number) for number, name in enumerate(names)})


# Tars.


class _Member(tarfile.TarInfo):
    """A member whose header has zeros as device numbers, as most programs write them; Python leaves them empty."""

    def tobuf(self, *args: Any, **keywords: Any) -> bytes:
        block = bytearray(super().tobuf(*args, **keywords))
        block[329:345] = b"0000000\0" * 2
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block)


def tar_bytes(samples: Mapping[str, Mapping[str, bytes]], *, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return a tar with one member for each field and 1,024 zero bytes at the end.

    In the format ustar the bytes are those that `pack` writes if the fields of each sample are sorted.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for key, fields in samples.items():
            for name, data in fields.items():
                info = (_Member if form == tarfile.USTAR_FORMAT else tarfile.TarInfo)(f"{key}.{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    return stream.getvalue()[: end + 1024]


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]], *, form: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(samples, form=form))
    return path


def split_name(name: str) -> tuple[str, str]:
    """Return key and field of a member: the first dot after the last slash divides them."""
    folder, slash, base = name.rpartition("/")
    key, _, field = base.partition(".")
    return folder + slash + key, field


def read_tar(path: Path) -> list[tuple[str, Fields]]:
    """Return the samples of a shard in order."""
    found: list[tuple[str, Fields]] = []
    with tarfile.open(path, mode="r:") as archive:
        for info in archive:
            key, field = split_name(info.name)
            if not found or found[-1][0] != key:
                found.append((key, {}))
            assert field not in found[-1][1], f"{path}: {info.name} appears twice"
            member = archive.extractfile(info)
            assert member is not None
            found[-1][1][field] = member.read()
    return found


def first_headers(path: Path) -> list[int]:
    """Return the offset of each sample's first header, then the end of the last member: what an .idx holds."""
    offsets: list[int] = []
    end, last = 0, None
    with tarfile.open(path, mode="r:") as archive:
        for info in archive:
            key, _ = split_name(info.name)
            if key != last:
                offsets.append(info.offset)
            last, end = key, info.offset_data + -(-info.size // 512) * 512
    return [*offsets, end]


# A packed folder.


def read_index(folder: Path) -> dict[str, Any]:
    """Return index.json."""
    index: dict[str, Any] = json.loads((folder / "index.json").read_bytes())
    assert index["__kind__"] == "wids-shard-index-v1"
    assert index["wids_version"] == 1
    assert index["wdskit_index_version"] == 1
    return index


def shard_names(folder: Path) -> list[str]:
    """Return the names of the shards that index.json lists, in its order."""
    return [line["url"] for line in read_index(folder)["shardlist"]]


def read_offsets(shard: Path) -> list[int]:
    """Return the offsets in a shard's .idx."""
    data = Path(f"{shard}.idx").read_bytes()
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


def read_classes(folder: Path) -> dict[str, int] | None:
    """Return the names in classes.json; None if there is no such file."""
    path = folder / "classes.json"
    return json.loads(path.read_bytes()) if path.exists() else None


def read_npy(data: bytes) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and values of an npy file of version 1."""
    assert data[:8] == b"\x93NUMPY\x01\x00"
    end = 10 + struct.unpack_from("<H", data, 8)[0]
    header = ast.literal_eval(data[10:end].decode())
    assert not header["fortran_order"]
    return header["descr"], header["shape"], data[end:]


def read_columns(folder: Path) -> dict[str, list[Any]]:
    """Return the columns beside an index: a value for each sample. Digests of files in columns.json are compared."""
    note = json.loads((folder / "columns.json").read_bytes())
    columns = {}
    for line in note["columns"]:
        data = (folder / f"{line['name']}.{line['sha256'][:16]}.npy").read_bytes()
        assert sha256(data) == line["sha256"]
        dtype, (num_samples,), values = read_npy(data)
        assert (dtype, num_samples) == (line["dtype"], note["num_samples"])
        letter = dict(zip(["b1", "u1", "i1", "u2", "i2", "u4", "i4", "i8", "f8"], "?BbHhIiqd", strict=True))[dtype[1:]]
        numbers = struct.unpack(f"<{num_samples}{letter}", values)
        columns[line["name"]] = [line["values"][number] for number in numbers] if "values" in line else [*numbers]
    return columns


def read_folder(folder: Path) -> Samples:
    """Return all samples of a packed folder in order, after comparing index.json, the .idx and the shards."""
    found: Samples = {}
    for line in read_index(folder)["shardlist"]:
        shard = folder / line["url"]
        data = shard.read_bytes()
        assert (len(data), sha256(data)) == (line["filesize"], line["sha256"]), shard
        assert sha256(Path(f"{shard}.idx").read_bytes()) == line["idx_sha256"]
        assert data[read_offsets(shard)[-1] :] == bytes(1024)
        assert read_offsets(shard) == first_headers(shard)
        samples = read_tar(shard)
        assert len(samples) == line["nsamples"]
        assert sorted({name for _, fields in samples for name in fields}) == line["fields"]
        for key, fields in samples:
            assert key not in found
            found[key] = fields
    return found


def read_rejected(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that `skip_bad` left out."""
    path = folder / "rejected.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def data_names(folder: Path) -> list[str]:
    """Return the names of the files of the data set, without index.json: what index.json and columns.json list."""
    names = [name for shard in shard_names(folder) for name in (shard, f"{shard}.idx")]
    return names + [name for name in ("classes.json", "rejected.jsonl") if (folder / name).exists()]


def digests(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Return the sha256 of files of a folder, by default of its data set without index.json, which may gain lines."""
    chosen = data_names(folder) if names is None else names
    return {name: sha256((folder / name).read_bytes()) for name in sorted(chosen)}


def files_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder by its relative path, without internal files; empty if there is no folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in INTERNAL]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
