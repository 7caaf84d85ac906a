"""`publish`: large pieces, temporary files, folders, links. Faults and kills: `promises/test_kills.py`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from disks import FailingDisk, PowerLossDisk, SlowDisk, Stopped, StoppingDisk, WatchedDisk, on
from shards import write_shard

from wdskit.dataset.index import INDEX_NAME
from wdskit.files import (
    TEMP_SUFFIX,
    Disk,
    make_folders,
    publish,
    publish_bytes,
    remove_temp_files,
)
from wdskit.shards.index import index_folder

NEW = b"first second third"
OLD = b"what stood there before"


def temp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{TEMP_SUFFIX}")


def fresh(folder: Path, old: bytes | None) -> Path:
    """Return a path in a new folder of its own, with these bytes."""
    place = folder / f"{len(list(folder.iterdir()))}"
    place.mkdir()
    if old is not None:
        (place / "a.tar").write_bytes(old)
    return place / "a.tar"


def held(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# Indexes.


def test_indexing_shards_of_others_survives_a_power_loss(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path / f"s-{number}.tar", {f"{number}-{i}": {"cls": b"1"} for i in range(number + 1)})
    index_folder(tmp_path)
    names = [f"s-{number}.tar.idx" for number in range(3)] + [INDEX_NAME]
    right = {name: (tmp_path / name).read_bytes() for name in names}
    for name in names:
        (tmp_path / name).unlink()

    def check(disk: PowerLossDisk) -> None:
        found = {name: disk.survivors(tmp_path / name) for name in names}
        assert all(found[name] <= {None, right[name]} for name in names)
        assert found[INDEX_NAME] == {None} or all(found[name] == {right[name]} for name in names[:-1])

    disk = PowerLossDisk(check)
    on(disk, index_folder, tmp_path)
    assert disk.survivors(tmp_path / INDEX_NAME) == {right[INDEX_NAME]}


# Folders.


def test_a_folder_made_by_a_run_that_was_killed_is_flushed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for made in ([tmp_path / "a"], [tmp_path / "a", tmp_path / "a" / "b"]):
        disk = PowerLossDisk()
        for folder in made:
            if len(made) > 1 and folder == made[0]:
                make_folders(folder, disk=disk)
            else:
                disk.make_folder(folder)  # and killed before the flush
        make_folders(path.parent, disk=disk)
        publish_bytes(path, NEW, disk=disk)
        assert disk.survivors(path) == {NEW}
        path.unlink()
        path.parent.rmdir()
        path.parent.parent.rmdir()


def test_folders_that_are_not_flushed_are_caught(tmp_path: Path) -> None:
    disk = PowerLossDisk()
    disk.make_folder(tmp_path / "a")
    publish_bytes(tmp_path / "a" / "file", NEW, disk=disk)
    assert disk.survivors(tmp_path / "a" / "file") == {None, NEW}


# Real disks.


@pytest.mark.parametrize("refusal", [None, errno.ENOTSUP, errno.EIO], ids=["full", "not supported", "failed"])
def test_macos_is_asked_to_empty_the_cache_of_the_device(tmp_path: Path, monkeypatch, refusal: int | None) -> None:
    """On macOS fsync leaves bytes in the cache. A disk without the other call gets fsync, whose failure is an error."""
    called = []

    def control(fd: int, command: int) -> int:
        called.append(command)
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda _: called.append("fsync"))
    with contextlib.ExitStack() as stack:
        if refusal == errno.EIO:
            stack.enter_context(pytest.raises(OSError, match=os.strerror(errno.EIO)))
        publish_bytes(tmp_path / "file", NEW)
    assert called == {None: [51, 51], errno.ENOTSUP: [51, "fsync"] * 2, errno.EIO: [51]}[refusal]


@pytest.mark.parametrize("kind", [bytearray, lambda data: memoryview(bytearray(data)).toreadonly()])
def test_what_can_change_is_written_and_digested_before_the_next_write_returns(tmp_path: Path, kind) -> None:
    """So two buffers are enough, also on a slow disk."""
    parts = [os.urandom(size) for size in (1 << 20, 10, 0, 300_000)]
    with publish(tmp_path / "large", disk=SlowDisk(wait_s=0.005)) as temp:
        earlier = bytearray()
        for part in parts:
            data = kind(part)
            temp.write(data)
            earlier[:] = bytes(len(earlier))
            earlier = data if isinstance(data, bytearray) else data.obj
        assert temp.sha256 == hashlib.sha256(b"".join(parts)).hexdigest()
    assert (tmp_path / "large").read_bytes() == b"".join(parts)
    assert temp.num_bytes == len(b"".join(parts))


@pytest.mark.parametrize("fail_at", range(6))
def test_a_failed_operation_leaves_no_open_descriptor_and_no_draft(tmp_path: Path, fail_at: int) -> None:
    disk = FailingDisk(fail_at, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        publish_bytes(tmp_path / "a", NEW, disk=disk)
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert not [name for name in opened if name.startswith(str(tmp_path))]
    is_published = disk.operations[fail_at] == "fsync_folder"
    assert [*tmp_path.iterdir()] == [tmp_path / "a"] * is_published


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    class Stuck(Disk):
        def write(self, fd, data):
            return 0

    with pytest.raises(OSError, match="accepts no more bytes"):
        publish_bytes(tmp_path / "a", NEW, disk=Stuck())
    assert not [*tmp_path.iterdir()]


# Temporary files.


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a"
    path.write_bytes(OLD)
    with pytest.raises(error), publish(path, disk=SlowDisk(wait_s=0.005)) as temp:
        temp.write(NEW)
        raise error
    assert not [one for one in threading.enumerate() if "wdskit-write" in one.name]  # nobody writes later
    assert [*tmp_path.iterdir()] == [path]
    assert held(path) == OLD


class Interrupted(WatchedDisk):
    """A disk on which another process does something before operation number `at`."""

    def __init__(self, at: int, other: Callable[[], None]) -> None:
        super().__init__()
        self.at = at
        self.other = other

    def before(self, name, *args):
        if len(self.operations) == self.at:
            self.other()
        super().before(name, *args)


@pytest.mark.parametrize("old", [None, OLD])
def test_of_two_writers_of_one_path_each_publishes_its_whole_file(tmp_path: Path, old: bytes | None) -> None:
    """At each operation of the first writer, the second writes its file, or is killed in the middle of it."""
    other = b"what the second one writes"

    def come(path: Path, *, is_killed: bool) -> None:
        before = held(path) if path.exists() else None
        if is_killed:
            with pytest.raises(Stopped):
                publish_bytes(path, other, disk=StoppingDisk(2))
            assert (held(path) if path.exists() else None) == before
        else:
            publish_bytes(path, other)
            assert held(path) == other

    for is_killed in (False, True):
        number, disk = 0, WatchedDisk()
        while number <= len(disk.operations):
            path = fresh(tmp_path, old)
            disk = Interrupted(number, partial(come, path, is_killed=is_killed))
            publish_bytes(path, NEW, disk=disk)
            is_last = disk.operations.index("rename") < number < len(disk.operations) and not is_killed
            assert held(path) == (other if is_last else NEW)
            left = [*path.parent.glob(f".*{TEMP_SUFFIX}")]
            assert len(left) == (is_killed and number < len(disk.operations))
            number += 1
        assert number == 7  # before each of 6 operations, and after the last


def test_a_link_is_never_opened_for_writing(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", temp_path(tmp_path / "a")
    victim.write_bytes(OLD)
    for link in (path.symlink_to, path.hardlink_to):
        link(victim)
        with pytest.raises(FileExistsError):
            Disk().open(path)
        assert held(victim) == OLD
        path.unlink()


def test_a_final_name_that_is_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)
    (tmp_path / "a").symlink_to(victim)
    publish_bytes(tmp_path / "a", NEW)
    assert held(victim) == OLD
    assert not (tmp_path / "a").is_symlink()


def test_only_drafts_are_removed(tmp_path: Path) -> None:
    keep = [tmp_path / name for name in ("a.tar", ".hidden", "a.wdskit-temp", "sub", ".wdskit-temp.tar")]
    for path in keep:
        path.touch()
    of_a = [temp_path(tmp_path / "a.tar"), tmp_path / ".a.tar.0badcafe.wdskit-temp"]
    others = [temp_path(tmp_path / name) for name in ("index.json", "x y", "[z]*", "ä", "a", "a.tar.idx")]
    for path in (*of_a, *others, *(tmp_path / f"{path.name[:-12]}.0badcafe.wdskit-temp" for path in others)):
        path.touch()
    num_files = len([*tmp_path.iterdir()])
    remove_temp_files(tmp_path, of=["a.tar", "b.tar"])
    assert not any(path.exists() for path in of_a)
    assert len([*tmp_path.iterdir()]) == num_files - 2
    remove_temp_files(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(keep)


def test_files_are_made_with_the_users_umask_and_are_not_inherited(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        publish_bytes(tmp_path / "a", NEW)
        fd = Disk().open(tmp_path / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert not os.get_inheritable(fd)
    os.close(fd)
