"""`LocalShard`: samples read by number, one by one or together, equal those read sequentially, or are an error."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from disks import HastyDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import open_descriptors
from shards import write_shard

from wdskit import Pipeline
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import LocalShard, offsets_path, write_offsets
from wdskit.engine.reader import read_natively
from wdskit.errors import FolderIndexError, ShardError, WdskitError
from wdskit.shards.index import index_folder, scan_shard

Truth = list[tuple[str, dict[str, bytes]]]


def write_tar(path: Path, members: list[tuple[str, bytes | None]], **options: Any) -> Path:
    """Write a shard with Python's tarfile; None is a directory."""
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data or b"")
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(data or b""))
    return path


def small(path: Path) -> Path:
    """Write a shard with empty fields, fields of a whole block, samples of one and of three members."""
    samples: dict[str, dict[str, bytes]] = {
        "a": {"cls": b"", "txt": b"A"},
        "b": {"cls": b"", "jpg": bytes(512), "txt": b""},
        "c": {"txt": b"C"},
        "d": {"cls": b"", "txt": b"D"},
    }
    return write_shard(path, samples)


def strangers(path: Path) -> Path:
    """Write a shard with directories and foreign files before, between, inside and after the samples."""
    members: list[tuple[str, bytes | None]] = [
        ("./", None),
        ("README", b"read me"),
        ("x/", None),
        ("x/1.cls", b""),
        (".hidden", b""),
        ("x/1.txt", b"one"),
        ("y/", None),
        ("LICENSE", bytes(700)),
        ("y/2.cls", b""),
        ("y/2.txt", b"two"),
        ("Makefile", b""),
    ]
    return write_tar(path, members, format=tarfile.USTAR_FORMAT)


def long_names(path: Path) -> Path:
    """Write a shard with GNU long names: each member has three header blocks."""
    members: list[tuple[str, bytes | None]] = [
        (f"{'long' * 30}/{key}.{field}", data)
        for key, field, data in [("a", "cls", b""), ("a", "txt", b"A"), ("b", "cls", b""), ("b", "txt", b"B")]
    ]
    return write_tar(path, members, format=tarfile.GNU_FORMAT)


def prefixes(path: Path) -> Path:
    """Write a shard with ustar's prefix field. The name field alone is a wrong key, the same for two samples."""
    members: list[tuple[str, bytes | None]] = [
        (f"{'long' * 24}{folder}/k.{field}", b"") for folder in "ab" for field in ("cls", "txt")
    ]
    return write_tar(path, members, format=tarfile.USTAR_FORMAT)


def by_webdataset(path: Path) -> Path:
    """Write a shard with webdataset's writer, which puts a pax header before each member."""
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(3):
            writer.write({"__key__": f"{number}", "bin": b"", "cls": number})
    return path


def empty(path: Path) -> Path:
    return write_shard(path, {})


SHARDS = [small, strangers, long_names, prefixes, by_webdataset, empty]


def write_right_offsets(shard: Path) -> tuple[int, ...]:
    offsets = scan_shard(str(shard)).offsets
    write_offsets(shard, offsets, disk=HastyDisk())
    return offsets


def write_raw(shard: Path, offsets: list[int]) -> None:
    offsets_path(shard).write_bytes(struct.pack(f"<{len(offsets)}Q", *(offset % (1 << 64) for offset in offsets)))


def read_truth(shard: Path) -> Truth:
    """Return the samples, read sequentially."""
    with shard.open("rb") as file:
        samples = [*ShardReader(file.read, shard=str(shard))]
    return [
        (sample["__key__"], {name: data for name, data in sample.items() if not name.startswith("__")})
        for sample in samples
    ]


def plain(fields: dict[str, memoryview]) -> dict[str, bytes]:
    return {name: bytes(view) for name, view in fields.items()}


def together(opened: LocalShard, numbers: Sequence[int]) -> Truth | None:
    """Read samples as a pipeline does: natively, or one by one if that gives nothing. None: their fields differ."""
    many = read_natively([opened], np.zeros(len(numbers), np.int64), np.array(numbers))
    if many is not None:
        return [(key, {name: raw[at] for name, raw in many.fields.items()}) for at, key in enumerate(many.keys)]
    alone = [(key, plain(fields)) for key, fields in map(opened.read, numbers)]
    return uniform(alone)


def uniform(rows: Truth) -> Truth | None:
    """Return the rows, or None if their fields differ."""
    return rows if len({tuple(fields) for _, fields in rows}) <= 1 else None


def check_right_or_error(shard: Path, truth: Truth) -> int:
    """Check that every sample, from a new or an open shard, is right or an error; return the number of errors."""
    num_errors = 0
    try:
        with LocalShard(shard) as opened:
            num_samples = len(opened)
    except WdskitError:
        return 1
    assert num_samples == len(truth)
    for number in range(num_samples):
        with LocalShard(shard) as opened:
            is_error = _is_error(opened, number, truth)
        with LocalShard(shard) as opened:
            try:
                found = together(opened, [number])
            except ShardError:
                found = None
        assert found == (None if is_error else [truth[number]])
        num_errors += is_error
    with LocalShard(shard) as opened:
        for number in [*range(num_samples), *reversed(range(num_samples))]:
            num_errors += _is_error(opened, number, truth)
    return num_errors


def _is_error(opened: LocalShard, number: int, truth: Truth) -> bool:
    try:
        found = opened.key(number), plain(opened[number])
    except ShardError as err:
        error = err
    else:
        assert found == truth[number]
        return False
    assert error.shard == opened.path
    assert "Run `wdskit index" in str(error) or "damaged" in str(error) or "cut short" in str(error)
    return True


@pytest.fixture(params=SHARDS, ids=lambda make: make.__name__)
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = request.param(tmp_path / "s.tar")
    write_right_offsets(path)
    return path


# Reads.


def test_every_sample_is_that_of_a_sequential_reading(shard: Path) -> None:
    truth = read_truth(shard)
    with LocalShard(shard) as opened:
        assert len(opened) == len(truth)
        for number in [*range(len(truth)), *reversed(range(len(truth)))]:
            assert (opened.key(number), plain(opened[number])) == truth[number]
            assert [*opened[number]] == [*truth[number][1]]
    assert check_right_or_error(shard, truth) == 0


keys = st.text("abc/", min_size=1, max_size=6).filter(lambda key: not key.endswith("/"))
values = st.binary(max_size=1100)
fields_of_sample = st.dictionaries(st.sampled_from(["cls", "txt", "a.b"]), values, min_size=1)
fields_alike = st.fixed_dictionaries({"a.b": values, "cls": values, "JPG": values})
samples_of_shard = st.dictionaries(keys, fields_of_sample, max_size=6) | st.dictionaries(keys, fields_alike, max_size=9)


@settings(max_examples=120)
@given(samples=samples_of_shard, data=st.data())
def test_any_shard_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, samples: dict[str, dict[str, bytes]], data: st.DataObject
) -> None:
    path = write_shard(tmp_path_factory.getbasetemp() / "any.tar", samples)
    write_right_offsets(path)
    truth = [(key, {name.lower(): data for name, data in fields.items()}) for key, fields in samples.items()]
    with LocalShard(path) as opened:
        numbers = data.draw(st.permutations(range(len(truth))))
        for number in numbers:
            assert (opened.key(number), plain(opened[number])) == truth[number]
        if numbers:
            assert together(opened, numbers) == uniform([truth[number] for number in numbers])


def test_views_belong_to_the_caller(shard: Path) -> None:
    """The views share one buffer, are read-only, and outlive the shard."""
    truth = read_truth(shard)
    opened = LocalShard(shard)
    samples = [opened[number] for number in range(len(opened))]
    opened.close()
    del opened
    shard.write_bytes(bytes(shard.stat().st_size))
    assert [plain(fields) for fields in samples] == [fields for _, fields in truth]
    for fields in samples:
        assert len({id(view.obj) for view in fields.values()}) == 1
        assert all(view.readonly and view.contiguous and view.format == "B" for view in fields.values())


def test_only_the_headers_of_the_samples_beside_a_large_one_are_read(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "s.tar", {f"k{number}": {"bin": bytes(1 << 20)} for number in range(9)})
    write_right_offsets(path)
    with LocalShard(path) as opened:
        sizes, read_at = [], opened.file.read_at
        opened.file.read_at = lambda at, size: sizes.append(size) or read_at(at, size)
        opened.read(4)
    assert sum(sizes) < 3 << 19


# Wrong offsets.


def one_to_every_block_or_with_a_bit_flipped(offsets: list[int]) -> Iterator[list[int]]:
    for number, offset in enumerate(offsets):
        for other in (*range(0, offsets[-1] + 2048, 512), *(offset ^ (1 << bit) for bit in range(64))):
            yield [*offsets[:number], other, *offsets[number + 1 :]]


def one_or_several_left_out(offsets: list[int]) -> Iterator[list[int]]:
    for number in range(len(offsets)):
        yield [*offsets[:number], *offsets[number + 1 :]]
        yield offsets[:number]
        yield offsets[number:]


def one_more(offsets: list[int]) -> Iterator[list[int]]:
    for block in range(offsets[-1] // 512 + 4):
        if block * 512 not in offsets:
            yield sorted([*offsets, block * 512])


def two_to_every_block(offsets: list[int]) -> Iterator[list[int]]:
    for first, second in product(range(len(offsets) - 1), repeat=2):
        for block, other in product(range(offsets[-1] // 512), repeat=2):
            moved = list(offsets)
            moved[first], moved[second] = block * 512, other * 512
            if moved == sorted(set(moved)):
                yield moved


@pytest.mark.parametrize("moves", [one_to_every_block_or_with_a_bit_flipped, two_to_every_block])
def test_a_moved_offset_gives_the_right_sample_or_an_error(shard: Path, moves) -> None:
    truth = read_truth(shard)
    for moved in moves([*write_right_offsets(shard)]):
        write_raw(shard, moved)
        check_right_or_error(shard, truth)


@pytest.mark.parametrize("moves", [one_or_several_left_out, one_more])
def test_more_or_fewer_offsets_give_no_wrong_sample(shard: Path, moves) -> None:
    """The number of samples then differs: some sample has to fail, and none may be another or a partial sample."""
    truth = read_truth(shard)
    offsets = list(write_right_offsets(shard))
    for moved in moves(offsets):
        write_raw(shard, moved)
        try:
            opened = LocalShard(shard)
        except FolderIndexError:
            continue
        with opened:
            errors = 0
            for number in range(len(opened)):
                try:
                    assert (opened.key(number), plain(opened[number])) in truth
                except ShardError:
                    errors += 1
            assert errors or moved == offsets


# Damaged shards.


def test_a_shard_cut_at_any_byte_after_it_was_opened(shard: Path) -> None:
    data, truth = shard.read_bytes(), read_truth(shard)
    offsets = write_right_offsets(shard)
    for size in range(0, len(data), 64):
        shard.write_bytes(data)
        with LocalShard(shard) as opened:
            os.truncate(shard, size)
            for number in range(len(truth)):
                is_error = _is_error(opened, number, truth)
                assert is_error or size >= offsets[number + 1] + 512
                assert not is_error or size < offsets[-1] + 512


def test_a_file_that_is_replaced_while_it_is_open_stays_as_it_was(shard: Path, tmp_path: Path) -> None:
    truth = read_truth(shard)
    other = write_shard(tmp_path / "other.tar", {f"z{at}": {"cls": b"z"} for at in range(9)})
    with LocalShard(shard) as opened:
        other.replace(shard)
        for number in range(len(truth)):
            assert (opened.key(number), plain(opened[number])) == truth[number]


def test_offsets_that_are_not_those_of_the_index_are_an_error_when_the_shard_is_opened(tmp_path: Path) -> None:
    shard = small(tmp_path / "s.tar")
    index_folder(tmp_path, workers=1)
    offsets = [*write_right_offsets(shard)]
    write_raw(shard, [*offsets[:2], offsets[2] - 512, *offsets[3:]])
    with pytest.raises(FolderIndexError, match=r"s\.tar\.idx: it is not the file that the folder's index"):
        next(iter(Pipeline().sequential(str(tmp_path)).loader(workers=0)))


# Descriptors and processes.


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    """This holds after `close`, at the end of the block, when opening fails, and when the shard is garbage."""
    shard = small(tmp_path / "s.tar")
    gc.collect()
    before = open_descriptors()
    with pytest.raises(FolderIndexError):
        LocalShard(shard)
    assert open_descriptors() <= before
    offsets = write_right_offsets(shard)
    write_raw(shard, [512, *offsets[1:]])
    with pytest.raises(FolderIndexError):
        LocalShard(shard)
    assert open_descriptors() <= before
    write_right_offsets(shard)
    with pytest.raises(ValueError, match="mine"), LocalShard(shard) as opened:
        raise ValueError("mine")
    assert open_descriptors() <= before
    opened = LocalShard(shard)
    view = opened[0]["txt"]
    assert not open_descriptors() <= before
    del opened
    gc.collect()
    assert open_descriptors() <= before
    assert bytes(view) == b"A"


def test_a_pickled_shard_opens_its_file_again(shard: Path) -> None:
    """A descriptor sent as a number could be another file's, and closing one shard would close both."""
    truth = read_truth(shard)
    opened = LocalShard(shard)
    data = pickle.dumps(opened)
    copies = [pickle.loads(data), copy.copy(opened), copy.deepcopy(opened)]
    opened.close()
    for other in copies:
        with other:
            assert other.path == str(shard)
            assert [other.key(number) for number in range(len(truth))] == [key for key, _ in truth]
    offsets_path(shard).unlink()
    with pytest.raises(FolderIndexError):
        pickle.loads(data)


def test_a_shard_of_another_size_than_its_index_says_is_named_before_its_offsets(tmp_path: Path) -> None:
    shard = small(tmp_path / "s.tar")
    write_right_offsets(shard)
    whole = shard.stat().st_size
    with LocalShard(shard, num_bytes=whole) as opened:
        pickle.loads(pickle.dumps(opened)).close()
    os.truncate(shard, 1024)
    problem = f"it has 1024 bytes, but the folder's index says {whole}: it was truncated or replaced"
    with pytest.raises(ShardError) as caught:
        LocalShard(shard, num_bytes=whole)
    assert (caught.value.shard, caught.value.problem) == (str(shard), problem)
    with pytest.raises(ShardError, match="truncated or replaced"):
        pickle.loads(pickle.dumps(opened))
