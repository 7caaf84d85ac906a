"""`index.bin`: damage is found when the file is opened, and its content is that of `index.json`."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from wdskit.dataset import binary_index as binary
from wdskit.dataset.binary_index import BINARY_NAME, BinaryIndex, ShardEntry, build_binary
from wdskit.dataset.index import INDEX_NAME, read_index, write_index
from wdskit.errors import FolderIndexError

GOLDEN_FOLDER = GOLDEN / "folder"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN_FOLDER, tmp_path / "folder")


def entries(num: int) -> list[ShardEntry]:
    return [
        ShardEntry(f"train-{at:06d}.tar", at * 7, at << 20, hashlib.sha256(b"%d" % at).hexdigest(), ("cls", "jpg"))
        for at in range(num)
    ]


def test_the_layout_is_as_documented(folder: Path) -> None:
    """The file is parsed by hand, as the module's docstring describes it."""
    data = (folder / BINARY_NAME).read_bytes()
    index = read_index(folder)
    names = b"".join(entry.name.encode() for entry in index.entries)
    stop = 128 + 3 * 56 + len(names)
    assert struct.unpack_from("<QQ", data, 8) == (3, len(names))
    assert data[24:56] == hashlib.sha256((folder / INDEX_NAME).read_bytes()).digest()
    assert data[56:88] == hashlib.sha256(data[128:stop]).digest()
    assert data[120:128] == bytes(8)
    assert (data[:8], data[88:120]) == (b"WDSKIDX2", hashlib.sha256(data[stop:]).digest())
    assert data[stop:].hex() == "".join(entry.idx_sha256 or "" for entry in index.entries)
    assert struct.unpack_from("<3Q", data, 128) == tuple(entry.num_samples for entry in index.entries)
    assert struct.unpack_from("<3Q", data, 152) == tuple(entry.num_bytes for entry in index.entries)
    assert data[176:272].hex() == "".join(entry.sha256 for entry in index.entries)
    assert struct.unpack_from("<3Q", data, 272) == (9, 18, 27)
    assert data[296:stop] == names


def test_an_index_may_know_the_offsets_of_some_shards_only(tmp_path: Path) -> None:
    """An example is a folder after `pack --append`, whose first index was made without offsets."""
    shards = [*entries(2), replace(entries(3)[2], idx_sha256="ab" * 32)]
    write_index(tmp_path, shards)
    assert read_index(tmp_path).entries == tuple(shards)
    index = BinaryIndex(tmp_path)
    assert [index.idx_sha256(at) for at in range(3)] == [None, None, "ab" * 32]


def test_ten_thousand_shards_are_all_there(tmp_path: Path) -> None:
    shards = entries(10_000)
    write_index(tmp_path, shards)
    index = BinaryIndex(tmp_path)
    assert len(index) == 10_000
    assert np.array_equal(index.counts, [shard.num_samples for shard in shards])
    assert np.array_equal(index.sizes, [shard.num_bytes for shard in shards])
    assert index.digests.tobytes().hex() == "".join(shard.sha256 for shard in shards)
    assert [index.name(at) for at in range(10_000)] == [shard.name for shard in shards]


def test_its_arrays_cannot_be_written(folder: Path) -> None:
    index = BinaryIndex(folder)
    for array in (index.counts, index.sizes, index.digests):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_it_outlives_its_replacement(folder: Path) -> None:
    """A mapped file that is replaced, not overwritten, does not change."""
    index = BinaryIndex(folder)
    write_index(folder, entries(2))
    assert index.counts.tolist() == [2, 2, 0]
    assert BinaryIndex(folder).counts.tolist() == [0, 7]


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_damage_to_any_byte_is_found(folder: Path, change: int) -> None:
    path = folder / BINARY_NAME
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= change
        path.write_bytes(data)
        with pytest.raises(FolderIndexError, match=r"index\.bin: (it|its) .*\n.*Run `wdskit index"):
            BinaryIndex(folder)
        data[at] ^= change


def test_an_index_of_any_other_length_is_refused(folder: Path) -> None:
    path = folder / BINARY_NAME
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(FolderIndexError, match=r"less than its header|it is damaged"):
            BinaryIndex(folder)
    for more in (b"\0", bytes(56), data):
        path.write_bytes(data + more)
        with pytest.raises(FolderIndexError, match="it is damaged"):
            BinaryIndex(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / BINARY_NAME).unlink()
    with pytest.raises(FolderIndexError, match=r"index\.bin: cannot be read: No such file.*\n.*wdskit index"):
        BinaryIndex(folder)


def test_without_its_json_it_is_not_taken(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    with pytest.raises(FolderIndexError, match="cannot be read: No such file"):
        BinaryIndex(folder)


def test_the_twin_of_another_index_is_refused(folder: Path, tmp_path: Path) -> None:
    write_index(tmp_path, entries(3))
    shutil.copy(tmp_path / BINARY_NAME, folder / BINARY_NAME)
    with pytest.raises(FolderIndexError, match=r"does not belong to the index\.json beside it"):
        BinaryIndex(folder)


def test_a_twin_that_was_left_behind_by_a_newer_json_is_refused(folder: Path) -> None:
    """A writer that is killed between the two files leaves them like this."""
    old = (folder / INDEX_NAME).read_bytes()
    write_index(folder, entries(3))
    (folder / INDEX_NAME).write_bytes(old)
    with pytest.raises(FolderIndexError, match="does not belong"):
        BinaryIndex(folder)


@pytest.mark.parametrize("version", "13")
def test_another_version_is_named(folder: Path, version: str) -> None:
    path = folder / BINARY_NAME
    data = path.read_bytes()
    path.write_bytes(b"WDSKIDX" + version.encode() + data[8:])
    problem = f"it has format version '{version}', but this wdskit reads version '2'.\n  Run `wdskit index {folder}`."
    with pytest.raises(FolderIndexError, match=re.escape(problem)):
        BinaryIndex(folder)


def forge(folder: Path, data: bytes) -> None:
    """Write an `index.bin` with right digests."""
    digest = hashlib.sha256((folder / INDEX_NAME).read_bytes()).digest()
    num_shards, num_name_bytes = struct.unpack_from("<QQ", data, 8)
    stop = 128 + num_shards * 56 + num_name_bytes
    digests = hashlib.sha256(data[128:stop]).digest() + data[88:128]
    (folder / BINARY_NAME).write_bytes(data[:24] + digest + digests + data[128:])


@pytest.mark.parametrize("name", ["../s-0.tar", "/etc/passwd", "s\0.tar", "s\n.tar", "s\x1b[2J.tar", ""])
def test_a_forged_name_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    bad = ShardEntry(name, 1, 1024, hashlib.sha256(b"").hexdigest(), ())
    forge(folder, build_binary([*entries(1), bad, *entries(1)], bytes(32)))
    with pytest.raises(FolderIndexError, match="its names are not file names"):
        BinaryIndex(folder)


@pytest.mark.parametrize("ends", [(9, 18, 26), (9, 5, 27), (9, 9, 27), (27, 18, 27), (9, 1 << 63, 27), (28, 29, 27)])
def test_forged_ends_of_names_are_refused(folder: Path, ends: tuple[int, int, int]) -> None:
    data = bytearray((folder / BINARY_NAME).read_bytes())
    struct.pack_into("<3Q", data, 272, *ends)
    forge(folder, bytes(data))
    with pytest.raises(FolderIndexError, match="its names are not file names"):
        BinaryIndex(folder)


def test_a_forged_name_that_is_no_text_is_refused_when_it_is_asked_for(folder: Path) -> None:
    data = bytearray((folder / BINARY_NAME).read_bytes())
    data[296] = 0xFF
    forge(folder, bytes(data))
    index = BinaryIndex(folder)
    assert index.name(1) == "s-001.tar"
    with pytest.raises(FolderIndexError, match="its names are not file names"):
        index.name(0)


@pytest.mark.parametrize(
    ("num_shards", "num_name_bytes"), [(1 << 62, 27), (2, 27 + 56), (4, 27 - 56 + (1 << 64)), (0, 195)]
)
def test_a_forged_number_of_shards_is_refused(folder: Path, num_shards: int, num_name_bytes: int) -> None:
    """The last three have the right sum, and would confuse digests and names."""
    data = bytearray((folder / BINARY_NAME).read_bytes())
    struct.pack_into("<QQ", data, 8, num_shards, num_name_bytes)
    forge(folder, bytes(data))
    with pytest.raises(FolderIndexError, match=r"it is damaged|its names are not file names"):
        BinaryIndex(folder)


def test_without_its_own_digest_damage_would_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: only the digest finds a count that is wrong by one."""
    data = bytearray((folder / BINARY_NAME).read_bytes())
    data[128] ^= 1
    (folder / BINARY_NAME).write_bytes(data)
    true_digest = binary._digest

    def digest_but_of_columns(file, num_bytes=None):
        digest = true_digest(file, num_bytes)
        return digest if num_bytes is None else bytes(data[56:88])

    monkeypatch.setattr(binary, "_digest", digest_but_of_columns)
    assert BinaryIndex(folder).counts.tolist() == [3, 2, 0]


def test_names_come_together_as_they_do_one_by_one(tmp_path, monkeypatch):
    """This holds for any division into parts, and for names with and without ASCII."""
    names = ["a.tar", "b-\u00e4\u00f6.tar", "c.tar", "\u65e5\u672c.tar", "e.tar"]
    write_index(tmp_path, [ShardEntry(name, 1, 2, "0" * 64, ()) for name in names])
    index = BinaryIndex(tmp_path)
    assert [index.name(at) for at in range(5)] == names
    for at_once in range(1, 7):
        monkeypatch.setattr("wdskit.dataset.binary_index._NAMES_AT_ONCE", at_once)
        assert [name for part in index.names() for name in part] == names


@pytest.mark.parametrize("at_once", [1, 2, 100])
@given(shards=st.lists(st.integers(0, 4), max_size=8))
def test_hashed_names_are_the_names_and_their_lengths(tmp_path_factory, at_once, shards):
    names = ["a.tar", "bb.tar", "\u65e5\u672c.tar", "d.tar", "eeeee.tar"]
    folder = tmp_path_factory.mktemp("index")
    write_index(folder, [ShardEntry(name, 1, 2, "0" * 64, ()) for name in names])
    told, expected = hashlib.sha256(), hashlib.sha256()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wdskit.dataset.binary_index._NAMES_AT_ONCE", at_once)
        BinaryIndex(folder).hash_names(told, np.array(shards, dtype=np.int64))
    chosen = [names[at].encode() for at in shards]
    expected.update(b"".join(chosen) + np.array([len(name) for name in chosen], dtype="<i8").tobytes())
    assert told.digest() == expected.digest()
