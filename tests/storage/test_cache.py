"""Parts of remote shards on a local disk: right bytes or none, after kills, damage and full disks."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pickle
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import DATA, NAME, SHA, STARTS, Object, keep

from wdskit.errors import StorageError
from wdskit.limits import BLOCK_BYTES
from wdskit.storage import cache as cache_module
from wdskit.storage.cache import PartCache, PartName, part_bytes, parts_of


def read_all(cache: PartCache, name: PartName = NAME, starts: Any = STARTS) -> list[bytes | None] | None:
    if not cache.has(name):
        return None
    return [cache.read(name, at, *starts[at : at + 2]) for at in range(len(starts) - 1)]


def expected(starts: Any = STARTS) -> list[bytes]:
    return [DATA[start : stop + BLOCK_BYTES] for start, stop in itertools.pairwise(starts)]


def test_a_part_gives_its_samples_in_every_process(tmp_path):
    cache = PartCache(tmp_path / "cache", 10**6)
    assert not cache.has(NAME)
    file = keep(cache)
    assert read_all(cache) == expected()
    keep(cache, file=file)
    assert file.num_reads == 1  # it is in the cache
    again = pickle.loads(pickle.dumps(cache))
    assert read_all(again) == expected()
    [found] = parts_of(tmp_path / "cache")
    assert found.name == NAME
    assert [*found.path.parent.iterdir()] == [found.path]  # no lock, no temporary file


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_any_samples_come_back(sizes, first):
    starts = [first * 512]
    for size in sizes:
        starts.append(starts[-1] + size * 512)
    data = os.urandom(starts[-1] + 2048)
    name = PartName(SHA, starts[0], starts[-1])
    with tempfile.TemporaryDirectory() as folder:
        cache = PartCache(folder, 10**6)
        keep(cache, name, starts, Object(data))
        for at, (start, stop) in enumerate(itertools.pairwise(starts)):
            assert cache.read(name, at, start, stop) == data[start : stop + BLOCK_BYTES]


def test_every_byte_that_changes_is_seen(tmp_path):
    """Changes in samples, checksums, the number of samples and the magic are found; none gives another sample."""
    cache = PartCache(tmp_path, 10**6)
    keep(cache)
    path = NAME.path(tmp_path)
    whole = path.read_bytes()
    cache = PartCache(tmp_path, 10**6)
    for at in (*range(0, len(whole) - 200, 41), *range(len(whole) - 200, len(whole))):
        write(path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        cache._open.clear()
        found = read_all(cache) or [None] * 3
        assert None in found
        assert all(one in (None, good) for one, good in zip(found, expected(), strict=True))
        assert not path.exists()  # it is fetched again
        write(path, whole)
    cache._open.clear()
    assert read_all(cache) == expected()
    for size in (0, 5, 16, len(whole) // 2, len(whole) - 1):
        write(path, whole[:size])
        assert None in (read_all(PartCache(tmp_path, 10**6)) or [None])
        assert not path.exists()
        write(path, whole)
    for lost in (slice(0, 4096), slice(4096, None), slice(None)):  # pages lost in a power cut
        left = bytearray(whole)
        left[lost] = bytes(len(left[lost]))
        write(path, left)
        found = read_all(PartCache(tmp_path, 10**6)) or [None] * 3
        assert None in found
        assert all(one in (None, good) for one, good in zip(found, expected(), strict=True))
        write(path, whole)


def write(path: Path, data: bytes | bytearray, mode: int = 0o600) -> None:
    """Write a file that only this user may write, as the cache does; an existing file is replaced."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def test_a_store_that_fails_keeps_nothing_and_is_asked_again(tmp_path):
    cache = PartCache(tmp_path, 10**6)
    keep(cache, file=Object(error=StorageError("s3://bucket/a.tar: there is no such object.", url="s3://bucket/a.tar")))
    keep(cache, file=Object(DATA[:3000]))  # an object that is shorter than in its index
    assert not [*parts_of(tmp_path)]
    keep(cache)
    assert read_all(cache) == expected()


def hold(name: PartName, folder: Path) -> int:
    """Claim a part, as a process that fetches it. Closing the returned file is like a kill of that process."""
    lock = name.path(folder).with_suffix(".lock")
    lock.parent.mkdir(exist_ok=True)
    fd = os.open(lock, os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def in_background(call: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    return thread


def test_a_part_that_another_process_brings_is_waited_for_and_not_fetched(tmp_path):
    cache, file = PartCache(tmp_path, 10**6), Object()
    keep(PartCache(tmp_path / "other", 10**6))
    fd = hold(NAME, tmp_path)
    keep(cache, file=file)
    waiting = in_background(cache.wait_for, NAME)
    time.sleep(0.1)
    assert waiting.is_alive()
    NAME.path(tmp_path / "other").replace(NAME.path(tmp_path))
    waiting.join(10)
    assert read_all(cache) == expected()
    assert file.num_reads == 0
    os.close(fd)


def test_a_process_that_is_killed_while_it_fetches_is_not_waited_for(tmp_path):
    cache, file = PartCache(tmp_path, 10**6), Object()
    fd = hold(NAME, tmp_path)
    begun = NAME.path(tmp_path).with_name(f".{NAME.path(tmp_path).name}.0123abcd")
    begun.write_bytes(DATA[:1000])
    os.utime(begun, (1, 1))
    keep(cache, file=file)
    waiting = in_background(cache.wait_for, NAME)
    time.sleep(0.1)
    assert waiting.is_alive()
    os.close(fd)
    waiting.join(10)
    assert not cache.has(NAME)  # the part is read by ranges, and
    keep(cache, file=file)  # fetched when its next sample is read
    assert read_all(cache) == expected()
    assert (file.num_reads, begun.exists()) == (1, False)


def test_a_process_that_is_stopped_while_it_fetches_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "CLAIM_S", 0.2)
    cache = PartCache(tmp_path, 10**6)
    fd = hold(NAME, tmp_path)
    assert keep(cache).num_reads == 0
    waiting = in_background(cache.wait_for, NAME)
    time.sleep(0.1)
    assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()
    os.close(fd)


def test_a_full_disk_is_said_once_and_not_tried_for_a_while(tmp_path, monkeypatch, caplog):
    cache = PartCache(tmp_path, 10**6)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "_write_part", refuse)
        file = keep(cache)
        keep(cache, file=file)
    assert file.num_reads == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: parts cannot be stored now: No space left on device."
    ]
    cache._full_until = 0.0
    keep(cache)
    assert read_all(cache) == expected()


def test_what_was_not_used_for_long_makes_room_and_what_is_in_use_does_not(tmp_path):
    size = part_bytes(NAME, 3)
    cache = PartCache(tmp_path, 4 * size)
    names = [PartName(f"{at:064x}", *NAME[1:]) for at in range(10)]
    files = [keep(cache, name) for name in names]
    assert {part.name for part in parts_of(tmp_path)} == {*names[:4]}  # all are in use: no further part is kept
    assert [file.num_reads for file in files] == [1] * 4 + [0] * 6  # or fetched
    old = time.time() - 1000
    for name in names[:2]:
        os.utime(name.path(tmp_path), (old, old))
    assert (cache._make_room(5 * size), len([*parts_of(tmp_path)])) == (False, 4)  # it can never be in the cache
    other = PartCache(tmp_path, 4 * size)  # another process, which sees the parts of this one
    state = random.getstate()
    keep(other, names[5])
    assert random.getstate() == state  # the draws of a program that seeds `random` do not change
    there = {part.name for part in parts_of(tmp_path)}
    assert len(there) == 4
    assert {*names[2:4], names[5]} < there
    name = names[0] if cache.has(names[0]) else names[1]
    assert cache.read(name, 0, *STARTS[:2]) == expected()[0]
    for each in parts_of(tmp_path):
        each.path.unlink()
    assert cache.read(name, 0, *STARTS[:2]) == expected()[0]  # an open part can still be read


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "0-512.part").write_bytes(b"x" * 4096)
    (tmp_path / SHA).mkdir()
    (tmp_path / SHA / "notes.txt").write_text("mine")
    cache = PartCache(tmp_path, 100)
    keep(cache)
    assert not [*parts_of(tmp_path)]
    assert (tmp_path / "mine" / "0-512.part").exists()
    assert (tmp_path / SHA / "notes.txt").exists()


def many_parts(cache: PartCache, num: int = 8) -> list[PartName]:
    names = [PartName(f"{at:064x}", *NAME[1:]) for at in range(num)]
    for name in names:
        keep(cache, name)
        assert read_all(cache, name) == expected()
    return names


@pytest.mark.parametrize("change", ["removed", "stored again", "forged", "linked"])
def test_a_part_that_changes_after_it_was_checked(tmp_path, monkeypatch, caplog, change):
    """The file of a known part that is closed is checked again if it is another file."""
    monkeypatch.setattr(cache_module, "MAX_OPEN", 1)
    cache = PartCache(tmp_path / "own", 10**6)
    name = many_parts(cache, 2)[0]  # the second part closes the first
    path = name.path(cache.folder)
    (tmp_path / "other").mkdir(mode=0o700)
    data = {"stored again": path.read_bytes(), "removed": b""}.get(change) or forge(tmp_path / "other").read_bytes()
    write(tmp_path / "new", data, 0o666 if change == "forged" else 0o600)
    if change == "removed":
        path.unlink()
    elif change == "linked":
        path.unlink()
        path.symlink_to(tmp_path / "new")
    else:
        (tmp_path / "new").replace(path)
    assert (read_all(cache, name) or [None] * 3) == (expected() if change == "stored again" else [None] * 3)
    assert len(caplog.records) == (change in {"forged", "linked"})
    keep(cache, name)
    assert read_all(cache, name) == expected()


FORGED = bytes(len(DATA))


def forge(folder: Path, name: PartName = NAME) -> Path:
    """Write a part with right checksums and wrong bytes, as any attacker can make."""
    keep(PartCache(folder, 10**6), name, file=Object(FORGED))
    return name.path(folder)


def link_file(path: Path, other: Path) -> None:
    forge(other).replace(other / "moved")
    path.symlink_to(other / "moved")


def link_folder(path: Path, other: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(forge(other).parent)


def make_pipe(path: Path, _: Path) -> None:
    os.mkfifo(path, 0o600)


def writable(mode: int) -> Any:
    return lambda path, other: write(path, forge(other).read_bytes(), mode)


def writable_folder(path: Path, other: Path) -> None:
    write(path, forge(other).read_bytes())
    path.parent.chmod(0o777)


def another_range(path: Path, other: Path) -> None:
    name = NAME._replace(start=NAME.start + 512, stop=NAME.stop + 512)
    keep(PartCache(other, 10**6), name, [start + 512 for start in STARTS])
    name.path(other).replace(path)


def another_shard(path: Path, other: Path) -> None:
    forge(other, NAME._replace(shard="cd" * 32)).replace(path)


FOREIGN = {
    "a file that its group may write": writable(0o660),
    "a file that all may write": writable(0o602),
    "a folder that all may write": writable_folder,
    "a link": link_file,
    "a link to a folder": link_folder,
    "a pipe": make_pipe,
    "the part of another shard": another_shard,
    "another part of the shard": another_range,
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_part_that_somebody_else_could_have_written_is_no_part(tmp_path, case):
    """None of its bytes is read, and the target of a link is not changed."""
    folder, other = tmp_path / "kept", tmp_path / "other"
    cache = PartCache(folder, 10**6)
    NAME.path(folder).parent.mkdir(0o700)
    FOREIGN[case](NAME.path(folder), other)
    there = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} if other.exists() else {}
    assert None in (read_all(cache) or [None])
    keep(cache)
    assert read_all(cache) in (None, expected())
    assert (read_all(cache) is None) == (case in ("a link to a folder", "a folder that all may write"))
    assert all(path.read_bytes() == data for path, data in there.items())


def test_a_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    """The error comes at the start, with one message, not as two lines per sample."""
    for mode in (0o770, 0o757):
        (tmp_path / oct(mode)).mkdir()
        (tmp_path / oct(mode)).chmod(mode)
        with pytest.raises(StorageError, match=r"may write to it.\n  Name another folder"):
            PartCache(tmp_path / oct(mode), 10**6)
    monkeypatch.setattr(cache_module, "owner_of_new_files", lambda _: os.getuid() + 1)
    with pytest.raises(StorageError, match=r"other users own this folder or may write to it"):
        PartCache(tmp_path / "own", 10**6)

    def refuse(_: Path) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(cache_module, "owner_of_new_files", refuse)
    with pytest.raises(StorageError, match=r"cannot be stored here: Permission denied.\n  Name another folder"):
        PartCache(tmp_path / "own", 10**6)


def test_a_cache_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        cache = PartCache(tmp_path / "deep" / "kept", 10**6)
        keep(cache)
    finally:
        os.umask(before)
    assert read_all(cache) == expected()
    made = [tmp_path / "deep" / "kept", NAME.path(cache.folder).parent, NAME.path(cache.folder)]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_what_a_process_cannot_read_now_is_kept(tmp_path, monkeypatch, caplog, number):
    """An example is a process without a free descriptor. Only found damage removes a part."""
    keep(PartCache(tmp_path, 10**6))

    def refuse(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    for name in ("open", "pread"):
        cache = PartCache(tmp_path, 10**6)
        if name == "pread":
            assert cache.has(NAME)
        with monkeypatch.context() as patched:
            patched.setattr(f"wdskit.storage.cache.os.{name}", refuse)
            found = [cache.read(NAME, 0, *STARTS[:2]) for _ in range(3)]
        assert found == [None] * 3
        assert read_all(cache) == expected()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: parts cannot be read now: {os.strerror(number)}."
    ] * 2
