"""`index_folder` makes the index of foreign shards: complete, the same each time, or not at all."""

from __future__ import annotations

import errno
import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from disks import FailingDisk, WatchedDisk, on
from shards import write_members

from wdskit import Pipeline, pack, split
from wdskit.dataset.index import read_index
from wdskit.dataset.lock import LOCK_NAME, lock_folder
from wdskit.dataset.patterns import check_found, find_shards
from wdskit.dataset.shard import LocalShard
from wdskit.errors import FolderIndexError, PackError, ShardError, StorageError
from wdskit.shards.index import index_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "train"
    folder.mkdir()
    for number in (2, 0, 1):
        members = {f"{number}/{i}.{field}": bytes(i + 1) for i in range(number + 1) for field in ("cls", "jpg")}
        write_members(folder / f"s-{number}.tar", members)
    return folder


def index_bytes(folder: Path) -> dict[str, bytes]:
    paths = [*folder.glob("*.idx"), *folder.glob("index.*")]
    return {path.name: path.read_bytes() for path in sorted(paths)}


def test_every_shard_is_indexed_in_the_order_of_names_with_any_workers(folder: Path) -> None:
    report = index_folder(folder, workers=2)
    index = read_index(folder)
    assert [entry.name for entry in index.entries] == ["s-0.tar", "s-1.tar", "s-2.tar"]
    assert index.num_samples == 6
    assert report.index.entries == index.entries
    check_found(find_shards(str(folder)), with_sizes=True)
    first = index_bytes(folder)
    index_folder(folder, workers=1)
    assert index_bytes(folder) == first
    with LocalShard(folder / "s-2.tar") as shard:
        assert [shard.key(i) for i in range(len(shard))] == ["2/0", "2/1", "2/2"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_shard_is_named_and_nothing_is_written(folder: Path, workers: int) -> None:
    for name in ("s-0.tar", "s-2.tar"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-600])
    with pytest.raises(ShardError) as caught:
        index_folder(folder, workers=workers)
    assert "s-0.tar, byte" in str(caught.value)
    assert not index_bytes(folder)


def test_a_full_folder_for_temporary_files_is_named_and_nothing_is_written(folder: Path, monkeypatch) -> None:
    write_members(folder / "s-3.tar", {"a.json": bytes(3 << 20)})
    full = Mock(**{"flush.side_effect": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))})
    monkeypatch.setattr("tempfile.tempdir", "/t")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: full)
    with pytest.raises(StorageError, match=r"^TMPDIR=/t: no place for a large field: No space left on device\."):
        index_folder(folder, columns="x=json.x", workers=1)
    assert not index_bytes(folder)


def test_one_writer_at_a_time_by_any_name_and_from_any_thread(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    with lock_folder(folder), ThreadPoolExecutor(1) as pool:
        for name in (folder, link, folder / "." / ".." / folder.name):
            with pytest.raises(FolderIndexError, match="another wdskit process is writing in this folder"):
                index_folder(name)
        with pytest.raises(FolderIndexError, match="another wdskit process"):
            pool.submit(index_folder, folder).result()
    with lock_folder(link):
        pass
    assert (folder / LOCK_NAME).read_bytes() == b""


def test_a_disk_that_fails_at_any_operation_leaves_no_wrong_index(folder: Path) -> None:
    counting = WatchedDisk()
    on(counting, index_folder, folder)
    right = index_bytes(folder)
    for name in right:
        (folder / name).unlink()
    for fail_at in range(len(counting.operations)):
        with pytest.raises(StorageError, match="cannot be written: No space left"):
            on(FailingDisk(fail_at, errno.ENOSPC), index_folder, folder)
        left = index_bytes(folder)
        assert left.items() <= right.items()  # whole files only
        assert "index.json" not in left or left == right  # and the index is the last file
        for name in left:
            (folder / name).unlink()
    index_folder(folder)
    assert index_bytes(folder) == right


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_only_looks_like_a_shard_is_named(folder: Path, make) -> None:
    """A named pipe would hang, a folder cannot be read."""
    make(folder / "s-9.tar")
    with pytest.raises(StorageError, match=r"s-9.tar: (this is not a plain file|reading failed: Is a directory)"):
        index_folder(folder)


def test_an_index_keeps_the_order_of_the_shards_it_had(tmp_path):
    """A saved state of a loader depends on this order. A small append gives some of its splits no sample."""
    rows = [{"__key__": f"k{n}", "cls": n} for n in range(6)]
    pack(rows[:4], tmp_path, split={"m": 1}, max_samples=2)
    pack(rows[4:5], tmp_path, split={"c": 0.5, "d": 0.5}, append=True)
    state = Pipeline().exact(str(tmp_path), seed=1).to_tuple("cls").batched(1).loader(workers=0).state_dict()
    index_folder(tmp_path, columns="cls")
    names = [entry.name for entry in read_index(tmp_path).entries]
    assert names == ["m-000000.tar", "m-000001.tar", "c-000000.tar"]
    Pipeline().exact(str(tmp_path), seed=1).to_tuple("cls").batched(1).loader(workers=0).load_state_dict(state)
    write_members(tmp_path / "a.tar", {"a.cls": b"1"})
    index_folder(tmp_path)
    assert [entry.name for entry in read_index(tmp_path).entries] == [*names, "a.tar"]


def test_a_damaged_index_is_replaced_with_a_warning(tmp_path, caplog):
    pack([{"__key__": "k", "cls": 1}], tmp_path, split={"m": 1})
    data = (tmp_path / "index.json").read_bytes()
    (tmp_path / "index.json").write_bytes(data[:-9])
    (tmp_path / "m-000000.tar.idx").write_bytes(b"")
    with pytest.raises(FolderIndexError, match=r"m-000000\.tar\.idx: this file is in the way"):
        index_folder(tmp_path)
    (tmp_path / "m-000000.tar.idx").unlink()
    caplog.clear()
    index_folder(tmp_path)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("The index is replaced, and the shards are in the order of their names.")
    assert (tmp_path / "index.json").read_bytes() == data


def test_a_folder_whose_commit_was_stopped_is_neither_indexed_nor_split(tmp_path: Path) -> None:
    """The same `wdskit pack` would replace the index by its own."""
    rows = [{"__key__": f"{number}", "cls": number} for number in range(4)]
    num_refused = 0
    for number in itertools.count():
        dest = tmp_path / f"{number}" / "d"
        try:
            on(FailingDisk(number, errno.EIO, for_good=True), pack, rows, dest, max_samples=2)
            break
        except (OSError, PackError):
            if not [*dest.glob("*.tar")] or (dest / "index.json").exists():
                continue
        num_refused += 1
        for change in (index_folder, functools.partial(split, shares="a=0.5,b=0.5")):
            with pytest.raises(FolderIndexError, match=r"a run of `wdskit pack` here is unfinished.\n.*same command"):
                change(dest)
        pack(rows, dest, max_samples=2)
        index_folder(dest)
        assert [entry.num_samples for entry in read_index(dest).entries] == [2, 2]
    assert num_refused > 4
