"""Pages of Parquet files that are decoded here hold what pyarrow finds in them, and row groups take little memory."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from disks import HastyDisk
from hypothesis import given
from hypothesis import strategies as st
from images import image_bytes
from shards import bytes_in, samples_in

from wdskit import pack
from wdskit.packing import api, parquet_ahead, parquet_batches, parquet_cells, parquet_pages
from wdskit.packing.parquet import Parquet
from wdskit.packing.parquet_batches import Batches, open_parquet
from wdskit.packing.parquet_cells import read_cell
from wdskit.packing.parquet_headers import UnknownPages, _read_struct
from wdskit.packing.parquet_pages import _read_hybrid
from wdskit.packing.references import CellBytes
from wdskit.storage.identity import FileIdentity

NUM = 60
VALUES = [None if number % 7 == 3 else bytes([number]) * (number * 37 % 200) for number in range(NUM)]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(parquet_cells, "_pages", parquet_cells.Pages())
    yield
    parquet_cells.close_all()


def column_of(values, kind: str) -> pa.Array:
    """Bytes, texts, structs with bytes, some of which are null, or bytes that are never null."""
    if kind == "struct":
        return pa.array([None if n % 11 == 5 else {"bytes": v, "path": "p"} for n, v in enumerate(values)], STRUCT)
    return pa.array(values, {"bytes": pa.binary(), "large": pa.large_binary(), "text": pa.string()}[kind])


def write(path: Path, column: pa.Array, **options) -> Path:
    pq.write_table(pa.table({"other": np.arange(len(column)), "image": column}), path, **options)
    return path


def check_cells(path: Path, *, by_page: bool) -> None:
    """Each cell in a random order, whichever way it is read."""
    table = pq.read_table(path)["image"].to_pylist()
    sizes = [pq.ParquetFile(path).metadata.row_group(n).num_rows for n in range(pq.ParquetFile(path).num_row_groups)]
    places = [(group, row) for group, num_rows in enumerate(sizes) for row in range(num_rows)]
    pairs = [*zip(places, table, strict=True)]
    random.Random(1).shuffle(pairs)
    for (group, row), value in pairs:
        expected = value["bytes"] if isinstance(value, dict) else value
        if expected is None:
            with pytest.raises(ValueError, match=f"row {row} of row group {group} has no bytes"):
                read_cell(str(path), FileIdentity.of(str(path)), group, row, "image")
        else:
            expected = expected.encode() if isinstance(expected, str) else expected
            assert read_cell(str(path), FileIdentity.of(str(path)), group, row, "image") == expected
    assert by_page == (not parquet_cells._last), "the other way was taken"


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "brotli"])
def test_each_way_to_write_pages_gives_back_the_cells(tmp_path, codec):
    ways = itertools.product([False, True], ["1.0", "2.0"], ["bytes", "large", "struct", "text"], [300, 1 << 20])
    for use_dictionary, version, kind, page_bytes in ways:
        values = VALUES if kind != "text" else [None if v is None else "é" * (len(v) % 9) for v in VALUES]
        options = {"use_dictionary": use_dictionary, "data_page_version": version, "data_page_size": page_bytes}
        how = {"compression": codec, "row_group_size": 25, "write_batch_size": 7, "dictionary_pagesize_limit": 1200}
        path = tmp_path / f"{use_dictionary}{version}{kind}{page_bytes}.parquet"
        check_cells(write(path, column_of(values, kind), **options, **how), by_page=True)


@pytest.mark.parametrize(
    "options", [{"compression": "lz4"}, {"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}}]
)
def test_other_pages_are_left_to_pyarrow(tmp_path, options):
    check_cells(write(tmp_path / "m.parquet", column_of(VALUES, "bytes"), row_group_size=25, **options), by_page=False)


def test_pages_without_nulls_with_one_value_or_none_are_read(tmp_path):
    for name, values in {
        "full": [b"a", b"bc"] * 9,
        "same": [b"abc"] * 20,
        "nulls": [None] * 9,
        "empty": [b""] * 9,
    }.items():
        for use_dictionary in (False, True):
            path = write(tmp_path / f"{name}.parquet", column_of(values, "bytes"), use_dictionary=use_dictionary)
            check_cells(path, by_page=True)
    required = pa.schema([pa.field("other", pa.int64()), pa.field("image", pa.binary(), nullable=False)])
    table = pa.table({"other": range(3), "image": [b"a", b"", b"ccc"]}, schema=required)
    pq.write_table(table, tmp_path / "required.parquet")
    check_cells(tmp_path / "required.parquet", by_page=True)


@pytest.mark.parametrize("use_dictionary", [False, True])
def test_damaged_pages_give_bytes_or_a_named_error(tmp_path, use_dictionary):
    """Every byte of a small file in turn, and a bit of it at random."""
    path = write(
        tmp_path / "m.parquet",
        column_of(VALUES[:9], "struct"),
        use_dictionary=use_dictionary,
        compression="snappy",
        store_schema=False,
    )
    whole, rng = path.read_bytes(), random.Random(use_dictionary)
    stop = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")  # the footer is pyarrow's to read
    num_known = 0
    for at in range(4, stop):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        pages = parquet_cells.Pages()
        for row in range(9):
            try:
                pages.read(parquet_cells.Column(str(path), FileIdentity.of(str(path)), "image"), 0, row)
                num_known += 1
            except (UnknownPages, ValueError):
                pass
    assert num_known > stop


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_none(data):
    try:
        found, stop = _read_struct(data, 0, 0)
    except (UnknownPages, IndexError):
        return
    assert 0 < stop <= len(data) + 60
    assert all(isinstance(number, int) for number in found)


RUNS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5)), max_size=6)


@given(RUNS, st.integers(0, 20), st.integers(0, 7))
def test_numbers_in_runs_and_packed_come_back(runs, width, dropped):
    data, numbers = b"", []
    for is_packed, drawn in runs:
        values = [value % (1 << width) for value in drawn]
        if is_packed:
            values = (values * 8)[: -(-len(values) // 8) * 8]
            bits = sum(value << width * place for place, value in enumerate(values))
            data += bytes([len(values) // 8 << 1 | 1]) + bits.to_bytes(len(values) * width // 8, "little")
        else:
            values = values[:1] * len(values)
            data += bytes([len(values) << 1]) + values[0].to_bytes((width + 7) // 8, "little")
        numbers += values
    num = max(0, len(numbers) - dropped)
    assert _read_hybrid(data, 0, width, num).tolist() == numbers[:num]
    with pytest.raises(UnknownPages):
        _read_hybrid(data, 0, width, len(numbers) + 1)


# Memory.


def most_allocated(path: Path) -> int:
    """The most bytes that pyarrow holds while the rows are listed."""
    most = 0
    with open_parquet(str(path)) as file:
        for batch in Batches(file, str(path)).read(0):
            assert batch.num_rows
            most = max(most, pa.total_allocated_bytes())
            del batch
    return most


def test_a_large_row_group_is_listed_in_little_memory(tmp_path):
    values = [os.urandom(100_000) for _ in range(640)]
    path = write(tmp_path / "m.parquet", column_of(values, "bytes"), write_batch_size=8)
    del values
    assert most_allocated(path) < 48 << 20


def test_values_that_a_page_repeats_are_there_once(tmp_path):
    for size in (100_000, 4 << 20):
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 50_000, pa.int32()), pa.array([bytes(size)]))
        path = write(tmp_path / f"{size}.parquet", column, store_schema=False)
        assert most_allocated(path) < 48 << 20
        assert read_cell(str(path), FileIdentity.of(str(path)), 0, 49_999, "image") == bytes(size)


# Ahead.


def images_of(num: int) -> list[bytes]:
    return [image_bytes("PNG", number=number) for number in range(num)]


@pytest.mark.parametrize("most", [1, api.ROWS_IN_MEMORY])
def test_after_a_shuffle_each_page_is_read_once_in_a_window(tmp_path, monkeypatch, most):
    """Whether the plan is in memory or on disk. A window of all rows, and of some."""
    monkeypatch.setattr(api, "ROWS_IN_MEMORY", most)
    monkeypatch.setattr(parquet_cells, "_pages", parquet_cells.Pages(0))
    read = []
    true_read = parquet_pages.read_page
    monkeypatch.setattr(parquet_cells, "read_page", lambda *args: read.append(args) or true_read(*args))
    data = images_of(60)
    cells = [*data[:58], None, data[58], None, data[59]]  # in a shuffle the first row may have none
    path = write(tmp_path / "m.parquet", column_of(cells, "bytes"), row_group_size=11, use_dictionary=False)
    found = {}
    some = 12 * (len(data[0]) + parquet_ahead._ROW_BYTES)
    for window in (1 << 20, some, 1):
        monkeypatch.setattr(parquet_ahead, "_AHEAD_BYTES", window)
        read.clear()
        pack(path, tmp_path / f"{window}", shuffle=1, pattern="s-%d.tar", disk=HastyDisk(), allow_no_image=True)
        found[window] = len(read) - 6  # those of the plan
        assert bytes_in(tmp_path / f"{window}") == bytes_in(tmp_path / f"{1 << 20}")
        assert not parquet_cells.ahead
    assert found[1 << 20] == 6
    assert 6 < found[some] < found[1]
    samples = samples_in(tmp_path / "1")
    assert sorted(sample["png"] for sample in samples.values() if "png" in sample) == sorted(data)
    assert list(samples) != sorted(samples)


def test_a_cell_that_is_bad_is_told_when_its_row_comes(tmp_path):
    data = images_of(30)
    path = write(tmp_path / "m.parquet", column_of(data, "bytes"), use_dictionary=False, compression="none")
    whole, identity = path.read_bytes(), FileIdentity.of(str(path))
    rows = list(Parquet([str(path)], image_column=None, key_column=None, allow_no_image=True).rows(keys="given"))
    cells = [data for row in rows for _, data in row.fields if isinstance(data, CellBytes)]
    assert [cell.read() for cell in cells] == data
    done = []
    with pytest.raises(ValueError, match="bytes now and had"):
        for row in parquet_ahead.read_ahead(tuple(reversed(rows))):
            if len(done) == 9:
                path.write_bytes(whole + b"x")
                parquet_cells.ahead.pop((str(path), identity, 0, 20, "image"))
            done.append(dict(row.fields)["png"].read())
    assert done == data[:20:-1]
    assert not parquet_cells.ahead


# Mutants.


@pytest.mark.parametrize(("most", "caught"), [(0, "large"), (1 << 40, "repeats")])
def test_reading_all_through_dictionaries_or_none_is_caught(tmp_path, monkeypatch, most, caught):
    monkeypatch.setattr(parquet_batches, "_longest", lambda *_: ((1 << 40) - most, True))
    with pytest.raises(AssertionError):
        if caught == "large":
            test_a_large_row_group_is_listed_in_little_memory(tmp_path)
        else:
            test_values_that_a_page_repeats_are_there_once(tmp_path)


def test_nulls_that_are_not_counted_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_pages, "_read_hybrid", lambda data, at, width, num: np.ones(num, np.int64))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_each_way_to_write_pages_gives_back_the_cells(tmp_path, "none")
