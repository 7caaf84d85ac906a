"""The folder's index: wdskit's own and those of other writers are read correctly, all else is refused."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from disks import HastyDisk
from folders import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_shard

from wdskit import Pipeline
from wdskit.dataset import index as index_module
from wdskit.dataset.index import INDEX_NAME, Index, ShardEntry, read_index, write_index
from wdskit.errors import FolderIndexError, StorageError
from wdskit.shards.index import index_folder

GOLDEN_FOLDER = GOLDEN / "folder"
DIGEST = hashlib.sha256(b"x").hexdigest()

plain_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
names = plain_text.filter(lambda name: name.isprintable() and "/" not in name and name not in (".", ".."))
counts = st.integers(0, 2**63 - 1)
shard_entries = st.builds(
    ShardEntry,
    name=names,
    num_samples=counts,
    num_bytes=counts,
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    idx_sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    fields=st.lists(plain_text, max_size=3, unique=True).map(lambda fields: tuple(sorted(fields))),
)


@settings(max_examples=100)
@given(st.lists(shard_entries, max_size=5, unique_by=lambda entry: entry.name))
def test_what_is_written_comes_back(entries: list[ShardEntry]) -> None:
    with TemporaryDirectory() as folder:
        write_index(Path(folder), entries, disk=HastyDisk())
        index = read_index(folder)
        assert index.entries == tuple(entries)
        assert index.num_samples == sum(entry.num_samples for entry in entries)
        assert index.names == tuple(entry.name for entry in entries)
        assert index.counts.tolist() == [entry.num_samples for entry in entries]
        assert index.sizes.tolist() == [entry.num_bytes for entry in entries]
        assert [bytes(digest).hex() for digest in index.digests] == [entry.sha256 for entry in entries]
        again = pickle.loads(pickle.dumps(index))
        assert (again.entries, again.digest) == (index.entries, Index.of("elsewhere", entries).digest)


def test_the_digest_is_of_counts_sizes_digests_and_names(tmp_path: Path) -> None:
    """Columns and states of older versions are bound to this digest."""
    entries = [ShardEntry("ä.tar", 3, 4096, DIGEST, ("cls",), DIGEST), ShardEntry("b.tar", 1, 2048, DIGEST, (), DIGEST)]
    body = struct.pack("<4Q", 3, 1, 4096, 2048) + bytes.fromhex(DIGEST) * 2 + struct.pack("<2Q", 6, 11)
    assert Index.of("d", entries).digest == hashlib.sha256(body + "ä.tarb.tar".encode()).digest()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the committed folder of three shards, one of them empty, with its index and offsets."""
    return shutil.copytree(GOLDEN_FOLDER, tmp_path / "folder")


def index_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".idx")}


def test_a_committed_folder_still_has_the_same_index_to_the_byte(golden: Path) -> None:
    """A change of the format needs a new version number and a new golden folder."""
    expected = index_files(golden)
    assert len(expected) == 4
    for name in expected:
        (golden / name).unlink()
    index_folder(golden)
    assert index_files(golden) == expected


def entry(**changes: Any) -> dict[str, Any]:
    digests = {"sha256": DIGEST, "idx_sha256": DIGEST}
    return {"url": "s.tar", "nsamples": 1, "filesize": 2, **digests, "fields": ["cls"], **changes}


def document(*shards: Any, **changes: Any) -> dict[str, Any]:
    head = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "wdskit_index_version": 1}
    return {**head, "shardlist": list(shards), **changes}


def without(part: str) -> dict[str, Any]:
    return {name: value for name, value in entry().items() if name != part}


REFUSED = {
    "cut": (json.dumps(document(entry())).encode()[:-5], "it is not an index of wdskit"),
    "deep": (b"[" * 200_000, "it is not an index of wdskit"),
    "deep and closed": (b"[" * 200_000 + b"]" * 200_000, "it is not an index of wdskit"),
    "an endless number": (b'{"a": 1' + b"0" * 5000 + b"}", "it is not an index of wdskit"),
    "a list": ([], "`__kind__` is not"),
    "another kind": (document(__kind__="wids-v2"), "`__kind__` is not"),
    "a plain wids index": (document(wdskit_index_version=None), "is None, but this wdskit reads 1"),
    "newer": (document(wdskit_index_version=2), "`wdskit_index_version` is 2, but this wdskit reads 1"),
    "version as text": (document(wdskit_index_version="1"), "`wdskit_index_version` is '1'"),
    "no shards": ({**document(), "shardlist": None}, "`shardlist` is None, not a list"),
    "a name only": (document("s.tar"), "entry 0 of its shardlist is 's.tar': TypeError"),
    **{
        f"no {part}": (document(without(part)), f"entry 0 of its shardlist is .*: KeyError: '{part}'")
        for part in entry()
    },
    "parent": (document(entry(url="../s.tar")), r"'url': '../s.tar'.*not that of a file in this folder"),
    "absolute": (document(entry(url="/etc/passwd")), "'url': '/etc/passwd'.*not that of a file in this folder"),
    "URL": (document(entry(url="http://h/s.tar")), "'url': 'http://h/s.tar'.*not that of a file in this folder"),
    "NUL": (document(entry(url="s\0.tar")), r"'url': 's\\x00.tar'.*not that of a file in this folder"),
    "right to left": (document(entry(url="s\u202e.tar")), r"'url': 's\\u202e.tar'.*not that of a file in this folder"),
    "surrogate": (document(entry(url="s\ud800.tar")), "it is not an index of wdskit: no low surrogate"),
    "twice": (document(entry(), entry(nsamples=2)), "its shardlist: 's.tar' appears twice"),
    "negative": (document(entry(nsamples=-1)), "'nsamples': -1"),
    "negative size": (document(entry(filesize=-1)), "'filesize': -1"),
    "huge": (document(entry(nsamples=1 << 63)), "'nsamples': 9223372036854775808"),
    "true": (document(entry(nsamples=True)), "'nsamples': True"),
    "fraction": (document(entry(nsamples=1.0)), "'nsamples': 1.0"),
    "NaN": (document(entry(nsamples=float("nan"))), "it is not an index of wdskit: unexpected character"),
    "short digest": (document(entry(sha256=DIGEST[:-1])), "'sha256': '"),
    "fields as text": (document(entry(fields="cls")), "'fields': 'cls'"),
    "long text": (document("x" * 10_000_000), r"entry 0 of its shardlist is 'x+\.\.\.x+': TypeError"),
}


@pytest.mark.parametrize(("content", "problem"), REFUSED.values(), ids=REFUSED)
def test_an_index_that_is_not_right_is_refused_by_name_and_problem(tmp_path: Path, content: Any, problem: str) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / INDEX_NAME).write_bytes(data)
    with pytest.raises(FolderIndexError, match=problem) as caught:
        read_index(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/index.json: ")
    assert str(caught.value).endswith(f"\n  Move it away, and run `wdskit index {tmp_path}`.")
    (tmp_path / INDEX_NAME).rename(tmp_path / "away")
    write_shard(tmp_path / "s.tar", {"a": {"cls": b"1"}})
    assert len(index_folder(tmp_path).index) == len(read_index(tmp_path)) == 1
    assert len(str(caught.value)) < 2000
    assert caught.value.folder == str(tmp_path)


@settings(max_examples=150)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.sampled_from(["s.tar", DIGEST]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(sorted({*document(), *entry()})), inner, max_size=6)
        ),
        max_leaves=15,
    )
)
def test_any_json_is_an_index_or_a_folder_index_error(content: Any) -> None:
    for whole in (content, document(content), document(entry(), entry(**content) if isinstance(content, dict) else 0)):
        with TemporaryDirectory() as folder:
            (Path(folder) / INDEX_NAME).write_text(json.dumps(whole))
            try:
                entries = read_index(folder).entries
            except FolderIndexError:
                continue
            assert all(type(entry.num_samples) is int and entry.num_samples >= 0 for entry in entries)
            assert all(Path(folder, entry.name).parent == Path(folder) for entry in entries)


def test_an_index_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_index(tmp_path, [ShardEntry("s.tar", 1, 2, DIGEST, ("cls",), DIGEST)])
    size = (tmp_path / INDEX_NAME).stat().st_size
    monkeypatch.setattr(index_module, "MAX_INDEX_BYTES", size)
    assert read_index(tmp_path).num_samples == 1
    monkeypatch.setattr(index_module, "MAX_INDEX_BYTES", size - 1)
    with pytest.raises(FolderIndexError, match=f"it holds more than {size - 1} bytes.*\n  Move it away, and"):
        read_index(tmp_path)


# Names.


@pytest.mark.parametrize("name", ["file:%2e%2e%2fsecret.tar", "http:x.tar"])
def test_a_name_in_the_current_folder_is_never_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A shard called `file:%2e%2e%2fsecret.tar` would lead out of its folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_shard(folder / name, {"a": {"cls": b"1"}})
    write_shard(tmp_path / "secret.tar", {"a": {"cls": b"2"}})
    index_folder(folder)
    expected = read_index(folder).entries
    monkeypatch.chdir(folder)
    assert index_folder(".").index.entries == expected
    with pytest.raises(StorageError, match="an empty path"):
        index_folder("")
    assert read_index("").url(0) == name
    assert [sample["cls"] for sample in Pipeline().stream("*.tar").loader(workers=0)] == [b"1"]
