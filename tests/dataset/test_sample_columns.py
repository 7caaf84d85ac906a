"""Samples read together equal samples read one by one, or give the same error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_shard

from tests.dataset.test_shard import (
    SHARDS,
    Truth,
    cut,
    each_to_every_block,
    plain,
    read_truth,
    write_raw,
    write_right_offsets,
)
from wdskit import Pipeline, verify
from wdskit.dataset.index import read_index, write_index
from wdskit.dataset.sample_columns import read_natively
from wdskit.dataset.shard import LocalShard, digest_offsets, offsets_path
from wdskit.errors import FolderIndexError, ShardError, WdskitError
from wdskit.shards.index import index_folder


def opened(path: Path, *, known: bool = True) -> LocalShard:
    """Open a shard with or without the digest of its offsets."""
    if not known:
        return LocalShard(path)
    offsets = np.frombuffer(offsets_path(path).read_bytes(), dtype="<u8")
    return LocalShard(path, idx_sha256=digest_offsets(offsets.tolist()))


def together(shard: LocalShard, numbers: Sequence[int]) -> Truth | None:
    """Read samples as a pipeline does: natively, or one by one if that gives nothing. None: their fields differ."""
    many = read_natively([shard], np.zeros(len(numbers), np.int64), np.array(numbers))
    if many is not None:
        return [(key, {name: raw[at] for name, raw in many.fields.items()}) for at, key in enumerate(many.keys)]
    alone = [(key, plain(fields)) for key, fields in map(shard.read, numbers)]
    return alone if is_uniform(alone) else None


def is_uniform(rows: Truth) -> bool:
    return len({tuple(fields) for _, fields in rows}) == 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("make", SHARDS, ids=lambda make: make.__name__)
def test_every_pair_of_samples_is_read_as_one_by_one(make: Callable[[Path], Path], tmp_path: Path, known: bool) -> None:
    """All kinds of tar are read; the second time, edges are verified also without a digest."""
    path = make(tmp_path / "s.tar")
    write_right_offsets(path)
    truth = read_truth(path)
    with opened(path, known=known) as shard:
        for _ in range(2):
            for a in range(len(truth)):
                for b in range(len(truth)):
                    wanted = [truth[a], truth[b]]
                    assert together(shard, [a, b]) == (wanted if is_uniform(wanted) else None)


keys = st.text("abc/", min_size=1, max_size=6).filter(lambda key: not key.endswith("/"))
uniform_fields = st.sampled_from([("cls",), ("a.b", "cls"), ("cls", "a.b", "txt"), ("JPG",)])


@settings(max_examples=60)
@given(data=st.data(), names=uniform_fields, known=st.booleans())
def test_any_shard_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    names: tuple[str, ...],
    known: bool,
) -> None:
    fields = st.fixed_dictionaries({name: st.binary(max_size=1100) for name in names})
    samples = data.draw(st.dictionaries(keys, fields, min_size=1, max_size=9))
    samples = {f"{data.draw(st.sampled_from(['', './']))}{key}": fields for key, fields in samples.items()}
    path = write_shard(tmp_path_factory.getbasetemp() / "many.tar", samples)
    write_right_offsets(path)
    truth = read_truth(path)
    numbers = data.draw(st.lists(st.integers(0, len(truth) - 1), min_size=1, max_size=20))
    with opened(path, known=known) as shard:
        wanted = [truth[number] for number in numbers]
        assert together(shard, numbers) == (wanted if is_uniform(wanted) else None)


def test_samples_of_other_fields_or_another_order_of_them_are_not_columns(tmp_path: Path) -> None:
    samples = {"a": {"x": b"1", "y": b"2"}, "b": {"y": b"1", "x": b"2"}, "c": {"x": b""}, "d": {"x": b"", "z": b""}}
    path = write_shard(tmp_path / "s.tar", samples)
    write_right_offsets(path)
    with opened(path) as shard:
        for a in range(4):
            for b in range(4):
                assert (together(shard, [a, b]) is None) == (a != b)


# Damaged shards and wrong offsets.


def check_as_one_by_one(path: Path, truth: Truth, *, known: bool, only: int | None = None) -> int:
    """Check that reads of one and of all samples are right or an error, as one by one; return the number of errors."""
    num_errors = 0
    try:
        opened(path, known=known).close()
    except WdskitError:
        return 1
    for number in range(len(truth)) if only is None else [only]:
        with opened(path, known=known) as shard:
            try:
                alone = (shard.key(number), plain(shard[number]))
            except WdskitError:
                alone = None
        with opened(path, known=known) as shard:
            try:
                found = together(shard, [number])
            except WdskitError:
                found = None
        num_errors += found is None
        assert found is None or found == [truth[number]] == [alone]
        assert (found is None) == (alone is None)
    return num_errors


def small(path: Path) -> Path:
    samples = {key: {"cls": b"", "txt": key.encode()} for key in ("a", "ab", "b/a", "b/ab")}
    return write_shard(path, samples)


@pytest.mark.parametrize("known", [True, False])
def test_damage_to_any_byte_of_a_header_is_an_error(tmp_path: Path, known: bool) -> None:
    path = small(tmp_path / "s.tar")
    data, truth = bytearray(path.read_bytes()), read_truth(path)
    offsets = write_right_offsets(path)
    num_errors = 0
    for at in [*range(offsets[1], offsets[2])]:
        data[at] ^= 0x10
        if at % 1536 < 512:
            path.write_bytes(data)
            num_errors += check_as_one_by_one(path, truth, known=known, only=1)
        data[at] ^= 0x10
    assert num_errors >= 500


@pytest.mark.parametrize("moves", [each_to_every_block, cut])
def test_offsets_that_are_moved_are_an_error_or_harmless(tmp_path: Path, moves: Callable) -> None:
    """No digest is known, so the neighbours of a sample are checked, as in reads one by one."""
    path = small(tmp_path / "s.tar")
    truth = read_truth(path)
    offsets = list(write_right_offsets(path))
    num_errors = 0
    for moved in moves(offsets):
        write_raw(path, moved)
        if len(moved) == len(offsets):
            num_errors += check_as_one_by_one(path, truth, known=False)
    assert num_errors or moves is cut


def test_another_shard_of_the_same_size_is_an_error(tmp_path: Path) -> None:
    """The digest only proves the offsets: to notice another shard in the same place, the member after a sample is
    checked too.
    """
    path = write_shard(tmp_path / "s.tar", {key: {"cls": b""} for key in "abcd"})
    write_right_offsets(path)
    with opened(path) as shard:
        write_shard(path, {"a": {"cls": b"", "txt": b""}, "b": {"cls": b"", "txt": b""}})  # same inode, other content
        for number in (0, 2):
            with pytest.raises(ShardError, match=f"samples {number} and {number + 1} have the same key"):
                together(shard, [number])
            with pytest.raises(ShardError, match=f"samples {number} and {number + 1} have the same key"):
                shard[number]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(2):
        write_shard(tmp_path / f"s-{number}.tar", {f"k{number}{at}": {"cls": b"%d" % at} for at in range(8)})
    index_folder(tmp_path, workers=1)
    return tmp_path


def read_all(folder: Path) -> list[str]:
    pipe = Pipeline().sequential(str(folder)).batched(4).loader(workers=0)
    return [key for batch in pipe for key in batch["__key__"]]


def test_offsets_that_are_not_those_of_the_index_are_an_error_when_the_shard_is_opened(folder: Path) -> None:
    """The offsets are those of another shard, or this shard's shifted offsets; both are plausible."""
    assert len(read_all(folder)) == 16
    idx = folder / "s-0.tar.idx"
    data = idx.read_bytes()
    other = write_shard(folder / "other", {f"p{at}": {"cls": bytes(at % 2 * 600)} for at in range(8)})
    foreign = write_right_offsets(other)
    assert (len(foreign), foreign[-1]) == (9, 8192)
    shifted = [*np.frombuffer(data, dtype="<u8").tolist()]
    shifted[3] -= 512
    for offsets in (foreign, shifted):
        write_raw(folder / "s-0.tar", list(offsets))
        with pytest.raises(FolderIndexError, match=r"s-0\.tar\.idx: it"):
            read_all(folder)
    idx.write_bytes(data)
    assert len(read_all(folder)) == 16


def test_what_verify_says_of_an_index_with_another_digest_of_offsets(folder: Path) -> None:
    assert not verify(folder).findings
    entries = read_index(folder).entries
    write_index(folder, [replace(entries[0], idx_sha256="0" * 63 + "1"), entries[1]])
    found = verify(folder).findings
    assert [(one.kind, Path(one.file).name) for one in found] == [("offsets", "s-0.tar.idx")]


def test_an_index_without_digests_of_offsets_still_works(tmp_path: Path) -> None:
    """Neighbours of a sample are checked instead."""
    golden = shutil.copytree(GOLDEN / "folder", tmp_path / "old")
    write_index(golden, [replace(entry, idx_sha256=None) for entry in read_index(golden).entries])
    pipe = Pipeline().sequential(str(golden / "s-000.tar")).batched(2).loader(workers=0)
    assert [batch["__key__"] for batch in pipe] == [batch["__key__"] for batch in pipe]


def test_a_reader_that_checks_less_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes every edge for known."""
    init = LocalShard.__init__

    def init_and_trust(self, *args, **settings):
        init(self, *args, **settings)
        self.edges[:] = b"\1" * len(self.edges)

    monkeypatch.setattr(LocalShard, "__init__", init_and_trust)
    with pytest.raises(AssertionError):
        test_offsets_that_are_moved_are_an_error_or_harmless(tmp_path, each_to_every_block)
