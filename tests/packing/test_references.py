"""Sources that are rewritten with equal size, during packing or between two runs of one process."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_server import BODY, FaultServer
from shards import samples_in, write_shard

from wdskit import PackError, RowError, StorageError, WdskitError, pack, reshard
from wdskit.packing import references
from wdskit.packing.references import ObjectBytes, PartBytes, SourceFiles
from wdskit.packing.row import file_bytes
from wdskit.packing.sources import parquet
from wdskit.storage import urls
from wdskit.storage.file_identity import FileIdentity
from wdskit.storage.objects import ObjectFile
from wdskit.storage.urls import LocalFile

NUM = 6


@pytest.fixture(autouse=True)
def _closed_groups():
    yield
    parquet.close_all()


def photo(number: int, version: str) -> bytes:
    """Return bytes that begin like a JPEG file, with the same size for every number and version."""
    return b"\xff\xd8\xff\xe0" + f"{number:04d} {version}".encode() * 400


def write_folder(folder: Path, version: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for number in range(NUM):
        (folder / f"{number}.jpg").write_bytes(photo(number, version))
    return [folder / f"{number}.jpg" for number in range(NUM)]


def write_table(path: Path, version: str) -> list[Path]:
    files = write_folder(path.parent / "images", version)
    path.write_text("".join(json.dumps({"image": f"images/{file.name}"}) + "\n" for file in files))
    return files


def write_parquet(path: Path, version: str, **options) -> list[Path]:
    pq.write_table(pa.table({"image": [photo(n, version) for n in range(NUM)]}), path, compression="none", **options)
    return [path]


def write_deltas(path: Path, version: str) -> list[Path]:
    """Write pages that only pyarrow reads."""
    return write_parquet(path, version, use_dictionary=False, column_encoding={"image": "DELTA_BYTE_ARRAY"})


def write_arrow(folder: Path, version: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "dataset_info.json").write_text("{}")
    table = pa.table({"image": [photo(n, version) for n in range(NUM)]})
    with pa.ipc.new_stream(folder / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    return [folder / "data.arrow"]


def write_tar(path: Path, version: str) -> list[Path]:
    return [write_shard(path, {f"{n}": {"jpg": photo(n, version)} for n in range(NUM)})]


def write_zip(path: Path, version: str, method: int = zipfile.ZIP_STORED) -> list[Path]:
    with zipfile.ZipFile(path, "w", method) as file:
        for number in range(NUM):
            file.writestr(f"{number}.jpg", photo(number, version))
    return [path]


def write_deflated(path: Path, version: str) -> list[Path]:
    return write_zip(path, version, zipfile.ZIP_DEFLATED)


KINDS = {
    "photos": write_folder,
    "table.jsonl": write_table,
    "pages.parquet": write_parquet,
    "groups.parquet": write_deltas,
    "saved": write_arrow,
    "s-0.tar": write_tar,
    "stored.zip": write_zip,
    "deflated.zip": write_deflated,
}
NEXT_NS = 1_000_000_000


class Source:
    """A source of one kind, and its files after a rewrite."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write = KINDS[path.name]
        self.new = {file: file.read_bytes() for file in write(path, "new")}
        write(path, "old")

    def write_again(self, by: str) -> None:
        """Rewrite with equal size: by another file of the same time that takes the name, or in place."""
        for file, data in self.new.items():
            now = file.stat().st_mtime_ns
            assert file.stat().st_size == len(data), "the test needs versions of equal size"
            if by == "rename":
                other = file.with_name(f"{file.name}.other")
                other.write_bytes(data)
                os.utime(other, ns=(now, now))
                other.replace(file)
            else:
                file.write_bytes(data)
                os.utime(file, ns=(now + NEXT_NS, now + NEXT_NS))


@pytest.mark.parametrize("by", ["rename", "writing"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_source_that_is_written_again_at_equal_size_is_never_packed_under_the_planned_keys(
    tmp_path, name, by, threads
):
    source = Source(tmp_path / name)

    def change(now):
        if (now.stage, now.num_samples) == ("packing", 1):
            source.write_again(by)

    options = {"validate": "none", "threads": threads, "max_samples": 1 if threads == 2 else NUM}
    is_kept = by == "rename" and threads == 1 and name in {"s-0.tar", "saved"}
    if is_kept:  # an open file keeps the planned bytes
        pack(source.path, tmp_path / "out", progress=change, **options)
        found = sorted(sample["jpg"] for sample in samples_in(tmp_path / "out").values())
        assert found == [photo(number, "old") for number in range(NUM)]
    else:
        with pytest.raises(RowError, match="was replaced or rewritten after packing began") as caught:
            pack(source.path, tmp_path / "out", progress=change, **options)
        assert "Pack again when no other program writes it." in str(caught.value)
    written = [file.read_bytes() for file in (tmp_path / "out").glob("*.tar")]
    assert not any(b"new" in data for data in written)


@pytest.mark.parametrize("shuffle", [None, 1])
@pytest.mark.parametrize("by", ["rename", "writing"])
@pytest.mark.parametrize("name", KINDS)
def test_a_source_that_is_written_again_between_two_runs_is_read_anew(tmp_path, name, by, shuffle):
    """Cached parts of the first version, such as pages of a table, are not used again."""
    source = Source(tmp_path / name)
    for version in ("old", "new"):
        pack(source.path, tmp_path / version, validate="none", shuffle=shuffle)
        found = sorted(sample["jpg"] for sample in samples_in(tmp_path / version).values())
        assert found == [photo(number, version) for number in range(NUM)]
        source.write_again(by)


@pytest.mark.parametrize("by", ["rename", "writing"])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("options", [{}, {"rename": "jpg=jpeg"}, {"shuffle": 1}])
def test_a_shard_that_is_written_again_at_equal_size_is_never_resharded(tmp_path, by, indexed, options):
    if indexed:
        old, new = ([{"__key__": str(n), "jpg": photo(n, version)} for n in range(NUM)] for version in ("old", "new"))
        for rows, folder in ((new, "other"), (old, "source")):
            pack(rows, tmp_path / folder, validate="none", pattern="s-%d.tar")
        source = Source.__new__(Source)
        source.path = tmp_path / "source" / "s-0.tar"
        source.new = {source.path: (tmp_path / "other" / "s-0.tar").read_bytes()}
    else:
        source = Source(tmp_path / "s-0.tar")

    def change(now):
        if now.stage == "reading":
            source.write_again(by)

    with pytest.raises(WdskitError, match=r"s-0.tar.*was replaced or rewritten"):
        reshard(str(source.path), tmp_path / "out", progress=change, **options)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_a_table_that_changes_while_it_is_planned_is_an_error(tmp_path, monkeypatch):
    """Its rows could be of two versions, even if no image refers to the table."""
    path = tmp_path / "t.parquet"
    for version in (1, 2):
        pq.write_table(pa.table({"n": [version] * NUM}), path, row_group_size=2)
        if version == 1:
            first = path.read_bytes()
    new = path.read_bytes()
    path.write_bytes(first)
    os.utime(path, ns=(NEXT_NS, NEXT_NS))
    assert len(new) == len(first)

    def change(now):
        if now.stage == "reading":
            path.write_bytes(new)

    monkeypatch.setattr("wdskit.packing.plan._BATCH_ROWS", 3)
    with pytest.raises(PackError, match=r"t.parquet: the file was replaced or rewritten after packing began"):
        pack(path, tmp_path / "out", progress=change, allow_no_image=True)


def test_no_call_reads_more_than_macos_allows(tmp_path, monkeypatch):
    """On macOS a call for 2 GiB fails; in this test, a call for more than 1,000 bytes fails."""
    (tmp_path / "file").write_bytes(data := bytes(range(256)) * 10)

    def limited(real, fd, asked, *offset):
        if (asked if isinstance(asked, int) else sum(map(len, asked))) > 1000:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, asked, *offset)

    for name in ("pread", "readv", "preadv"):
        monkeypatch.setattr(os, name, functools.partial(limited, getattr(os, name)))
    for module in (references, urls):
        monkeypatch.setattr(module, "MAX_READ_BYTES", 1000)
    reference, file = file_bytes(str(tmp_path / "file"), where="file"), LocalFile(str(tmp_path / "file"))
    memory, part = bytearray(len(data)), bytearray(len(data) - 7)
    reference.read_into(memoryview(memory))
    tail = PartBytes(str(tmp_path / "file"), len(part), 7, *FileIdentity.of(str(tmp_path / "file")))
    with contextlib.closing(SourceFiles()) as files:
        files.read_into(tail, memoryview(part))
        assert files.read([tail]) == [data[7:]]
    assert [reference.read(), bytes(memory), file.read_at(0, len(data)), bytes(part)] == [data, data, data, data[7:]]
    file.close()


def test_an_object_without_an_etag_is_compared_by_its_last_change():
    with FaultServer() as server:
        for name in ("replaced_without_etag", "anonymous"):
            url = f"{server.url}/{name}.tar"
            file = ObjectFile(url)
            assert file.num_bytes == len(BODY)
            assert file.etag is None
            if name == "anonymous":
                assert file.modified is None
                assert ObjectBytes(url, 700, 5, len(BODY), "", "").read() == BODY[5:705]
                continue
            assert file.modified is not None
            part = ObjectBytes(url, 700, 5, len(BODY), "", file.modified.isoformat())
            with pytest.raises(StorageError, match=r"replaced while it was read: its last change is"):
                part.read()
