"""A shard that was replaced after indexing gives an error, never a partial sample or fields of another sample."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from wdskit import Pipeline, pack, reshard
from wdskit.dataset import binary_index as binary
from wdskit.dataset.index import read_index
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import LocalShard
from wdskit.errors import ShardError, WdskitError
from wdskit.shards.index import index_folder
from wdskit.storage.urls import LocalFile

FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"format": tarfile.USTAR_FORMAT},
    "pax": {"format": tarfile.PAX_FORMAT},  # a float mtime needs a header per member, as webdataset's writer has
    "gnu": {"format": tarfile.GNU_FORMAT},
}
KEYS = {"plain": "n{}", "pax": "n{}", "gnu": "n" * 120 + "{}"}
FIELDS = ["a", "b", "c"]


def shard_bytes(kind: str, groups: Iterable[int], size: int) -> bytes:
    """Return a shard of members of one size; each of `groups` is the number of members of a sample."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **FORMATS[kind]) as tar:
        for sample, count in enumerate(groups):
            for field in FIELDS[:count]:
                info = tarfile.TarInfo(f"{KEYS[kind].format(sample)}.{field}")
                info.size, info.mtime = size, 1.5 if kind == "pax" else 1
                tar.addfile(info, io.BytesIO(f"{sample}{field}".encode() * (size // 2)))
    return stream.getvalue()


def replace_in_place(path: Path, data: bytes) -> None:
    """Write other bytes; all metadata of the file system stay the same."""
    before = path.stat()
    assert len(data) == before.st_size
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def groupings(num_members: int) -> list[tuple[int, ...]]:
    """Return all ways to divide this number of members into samples of 1 to 3 members."""
    sizes = range(1, num_members + 1)
    return [one for length in sizes for one in itertools.product((1, 2, 3), repeat=length) if sum(one) == num_members]


def samples_of(path: Path) -> list[dict[str, bytes]]:
    file = LocalFile(str(path))
    found = [{k: v for k, v in sample.items() if k != "__url__"} for sample in ShardReader(file.read, shard=str(path))]
    file.close()
    return found


@pytest.mark.parametrize("size", [10, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("kind", FORMATS)
def test_no_sample_of_a_regrouped_shard_is_a_half_one(tmp_path, kind, size):
    """All pairs of groupings of four members; each sample is read as the first sample of an open shard."""
    shards = {groups: shard_bytes(kind, groups, size) for groups in groupings(4)}
    path = tmp_path / "s.tar"
    num_wrong = 0
    for old, new in itertools.permutations(shards, 2):
        path.write_bytes(shards[old])
        index_folder(tmp_path, workers=1)
        [entry] = read_index(tmp_path).entries
        replace_in_place(path, shards[new])
        whole = samples_of(path)
        for number in range(len(old)):
            with LocalShard(path, idx_sha256=entry.idx_sha256) as shard:
                try:
                    key, fields = shard.read(number)
                except WdskitError:
                    num_wrong += 1
                    continue
                assert {"__key__": key, **{name: bytes(view) for name, view in fields.items()}} in whole
            if size < 100:
                check_pipeline(tmp_path, number, whole)
    assert num_wrong


def check_pipeline(folder: Path, first: int, whole: list[dict[str, bytes]]) -> None:
    """Read one sample, and all from that one on, by columns and one by one."""
    base = Pipeline().sequential(str(folder), range=[first, "100%"])
    for pipe in (base.batched(2), base.map(dict).batched(4)):
        try:
            for batch in pipe.loader(workers=0):
                valid = batch.pop("__valid__").tolist()
                rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
                for row, is_sample in zip(rows, valid, strict=True):
                    row.pop("__url__")
                    assert not is_sample or row in whole
        except WdskitError:
            continue


def payload(number: int, fill: bytes) -> bytes:
    return shard_bytes("plain", (2, 2, 2), 10).replace(b"1a1a", fill * 4, number)


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in ("s-0.tar", "s-1.tar"):
        (folder / name).write_bytes(payload(1, b"A"))
    index_folder(folder, workers=1)
    return folder / "s-1.tar"


def pipes(folder: Path) -> list[Pipeline]:
    return [
        Pipeline().exact(str(folder)),
        Pipeline().sequential(str(folder)).batched(2),
        Pipeline().stream(str(folder)),
    ]


def by_rename(path: Path, data: bytes) -> None:
    """Replace the file by another inode of the same size and time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def by_writing(path: Path, data: bytes) -> None:
    """Overwrite the same inode at another time."""
    path.write_bytes(data)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("replace", [by_rename, by_writing])
@pytest.mark.parametrize("way", range(3), ids=["exact", "sequential", "stream"])
def test_other_bytes_in_the_same_places_are_found_by_the_file_that_is_another(tmp_path, replace, way):
    path = write_folder(tmp_path / "d")
    replace(path, payload(1, b"B"))
    with pytest.raises(ShardError, match=r"s-1\.tar.*its sha256 is .*, but the index says"):
        list(pipes(path.parent)[way].loader(workers=0))
    index_folder(path.parent, workers=1)
    assert list(pipes(path.parent)[way].loader(workers=0))


@pytest.mark.parametrize("way", range(3), ids=["exact", "sequential", "stream"])
def test_a_shard_that_was_only_touched_is_digested_once_and_read(tmp_path, way, caplog, monkeypatch):
    path = write_folder(tmp_path / "d")
    before = [list(map(repr, pipe.loader(workers=0))) for pipe in pipes(path.parent)]
    digested: list[str] = []
    check = binary.check_digest
    monkeypatch.setattr(binary, "check_digest", lambda file, sha: digested.append(file.url) or check(file, sha))
    by_rename(path, path.read_bytes())
    loader = pipes(path.parent)[way].loader(workers=0)
    for _ in range(3):
        found = list(map(repr, loader))
    assert len(found) == len(before[way])
    assert digested == [str(path)]
    assert "was replaced or touched since it was indexed" in caplog.text


def copied(folder: Path, to: Path) -> None:
    shutil.copytree(folder, to, copy_function=shutil.copy)


def copied_with_times(folder: Path, to: Path) -> None:
    shutil.copytree(folder, to)


def moved(folder: Path, to: Path) -> None:
    folder.rename(to)


@pytest.mark.parametrize("how", [copied, copied_with_times, moved])
@pytest.mark.parametrize("way", range(3), ids=["exact", "sequential", "stream"])
def test_a_folder_that_was_copied_or_moved_is_not_digested(tmp_path, how, way, monkeypatch):
    path = write_folder(tmp_path / "d")
    monkeypatch.setattr(binary, "check_digest", lambda *_: pytest.fail("digested"))
    how(path.parent, tmp_path / "e")
    assert list(pipes(tmp_path / "e")[way].loader(workers=0))


def test_a_shard_that_was_replaced_in_a_copy_that_kept_the_times_is_found(tmp_path):
    path = write_folder(tmp_path / "d")
    copied_with_times(path.parent, tmp_path / "e")
    copy = tmp_path / "e" / path.name
    data = bytearray(copy.read_bytes())
    data[512] ^= 1
    by_writing(copy, bytes(data))
    for pipe in pipes(tmp_path / "e"):
        with pytest.raises(ShardError, match="its sha256"):
            list(pipe.loader(workers=0))


def test_a_shard_that_was_replaced_is_never_written_anew(tmp_path):
    """A new index with digests of wrong bytes would declare these bytes right for ever."""
    path = write_folder(tmp_path / "d")
    data = bytearray(path.read_bytes())
    data[512] ^= 1
    by_rename(path, bytes(data))
    with pytest.raises(ShardError, match="its sha256"):
        reshard(str(tmp_path / "d"), tmp_path / "resharded")
    with pytest.raises(ShardError, match="its sha256"):
        pack(tmp_path / "d", tmp_path / "packed", from_="tar")


def test_what_was_replaced_before_an_addition_is_still_found_behind_it(tmp_path):
    """The index of an addition keeps the entries and the file identities of the earlier shards."""
    folder = tmp_path / "d"
    pack([{"__key__": f"a{n}", "cls": n} for n in range(4)], folder)
    path = folder / "d-000000.tar"
    data = bytearray(path.read_bytes())
    data[512] ^= 1
    by_rename(path, bytes(data))
    pack([{"__key__": "b", "cls": 1}], folder, append=True)
    with pytest.raises(ShardError, match=r"d-000000\.tar.*its sha256"):
        list(Pipeline().exact(str(folder)).loader(workers=0))


@pytest.mark.parametrize("data", [b"", b"x" * 100, None])
def test_a_damaged_or_missing_note_of_files_says_nothing(tmp_path, data):
    path = write_folder(tmp_path / "d")
    note = path.parent / binary.IDENTITIES_NAME
    note.unlink()
    if data is not None:
        note.write_bytes(data)
    for pipe in pipes(path.parent):
        assert list(pipe.loader(workers=0))
