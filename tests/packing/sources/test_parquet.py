"""Cells of Parquet files equal pyarrow's, in any order, and row groups take little memory."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from images import image_bytes
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, WdskitError, pack
from wdskit.codecs.fields import decode_field
from wdskit.packing import plan
from wdskit.packing.references import CellBytes
from wdskit.packing.sources import parquet
from wdskit.packing.sources.arrow import read_parquet
from wdskit.packing.sources.parquet import open_parquet, read_cell, read_group
from wdskit.packing.sources.records import Records
from wdskit.storage.file_identity import FileIdentity

NUM = 60
VALUES = [None if number % 7 == 3 else bytes([number]) * (number * 37 % 200) for number in range(NUM)]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
ANY = Records("", allow_no_image=True)


@pytest.fixture(autouse=True)
def _closed_groups():
    yield
    parquet.close_all()


def column_of(values, kind: str) -> pa.Array:
    """Return a column of bytes, or of structs with bytes, some of which are null."""
    if kind == "struct":
        return pa.array([None if n % 11 == 5 else {"bytes": v, "path": "p"} for n, v in enumerate(values)], STRUCT)
    return pa.array(values, {"bytes": pa.binary(), "large": pa.large_binary(), "view": pa.binary_view()}[kind])


def write(path: Path, column: pa.Array, **options) -> Path:
    pq.write_table(pa.table({"other": np.arange(len(column)), "image": column}), path, **options)
    return path


def check_cells(path: Path, order: str) -> None:
    table = pq.read_table(path)["image"].to_pylist()
    sizes = [pq.ParquetFile(path).metadata.row_group(n).num_rows for n in range(pq.ParquetFile(path).num_row_groups)]
    places = [(group, row) for group, num_rows in enumerate(sizes) for row in range(num_rows)]
    pairs = [*zip(places, table, strict=True)]
    if order == "random":
        random.Random(1).shuffle(pairs)
    identity = FileIdentity.of(str(path))
    for (group, row), value in pairs:
        expected = value["bytes"] if isinstance(value, dict) else value
        if expected is None:
            with pytest.raises(ValueError, match=f"row {row} of row group {group} has no bytes"):
                read_cell(str(path), identity, group, row, "image")
        else:
            assert read_cell(str(path), identity, group, row, "image") == expected


@pytest.mark.parametrize(
    ("codec", "order"), [("none", "rows"), ("snappy", "random"), ("zstd", "rows"), ("lz4", "rows")]
)
def test_each_way_to_write_pages_gives_back_the_cells(tmp_path, codec, order):
    for encoding, version, kind in itertools.product(
        ["dictionary", "PLAIN", "DELTA_BYTE_ARRAY"], ["1.0", "2.0"], ["bytes", "large", "struct", "view"]
    ):
        how = {"use_dictionary": encoding == "dictionary", "data_page_version": version, "data_page_size": 300}
        if encoding != "dictionary" and kind != "struct":
            how["column_encoding"] = {"image": encoding}
        path = tmp_path / f"{encoding}{version}{kind}.parquet"
        check_cells(
            write(path, column_of(VALUES, kind), compression=codec, row_group_size=25, write_batch_size=7, **how), order
        )


@pytest.mark.parametrize("held", [0, 1 << 30])
def test_cells_that_were_passed_over_are_read_again(tmp_path, monkeypatch, held):
    monkeypatch.setattr(parquet, "_HELD_BYTES", held)
    data = [image_bytes("PNG", number=number) for number in range(20)]
    path = write(tmp_path / "m.parquet", pa.array(data), row_group_size=7)
    rows = list(read_parquet([str(path)], ANY).rows(keys="given"))
    for number in [*range(20), *range(19, -1, -1), 3, 3, 15, 2, 6]:
        assert dict(rows[number].fields)["png"].read() == data[number]


def test_a_row_group_is_decoded_once_for_rows_in_their_order(tmp_path, monkeypatch):
    """This includes requests by threads, with every tenth row left out."""
    begun = []
    true_open = parquet.open_parquet
    monkeypatch.setattr(parquet, "open_parquet", lambda path: begun.append(path) or true_open(path))
    data = [os.urandom(1000) for _ in range(900)]
    path = write(tmp_path / "m.parquet", pa.array(data), row_group_size=300)
    identity = FileIdentity.of(str(path))
    numbers = [number for number in range(900) if number % 10]
    pending: deque = deque()
    found = []
    with ThreadPoolExecutor(8) as pool:
        for number in numbers:
            pending.append(pool.submit(read_cell, str(path), identity, number // 300, number % 300, "image"))
            if len(pending) > 16:  # as in `read_transformed`
                found.append(pending.popleft().result())
        found += [each.result() for each in pending]
    assert found == [data[number] for number in numbers]
    assert len(begun) == 3


@pytest.mark.parametrize("use_dictionary", [False, True])
def test_damaged_pages_give_bytes_or_a_named_error(tmp_path, use_dictionary):
    """In every third byte of a small file, a random bit is changed."""
    options = {"compression": "snappy", "store_schema": False}
    path = write(tmp_path / "m.parquet", column_of(VALUES[:9], "struct"), use_dictionary=use_dictionary, **options)
    whole, rng = path.read_bytes(), random.Random(use_dictionary)
    stop = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")  # pyarrow reads the footer
    num_known = 0
    for at in range(4, stop, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        identity = FileIdentity.of(str(path))
        for row in range(9):
            try:
                read_cell(str(path), identity, 0, row, "image")
                num_known += 1
            except (ValueError, OSError):
                pass
    assert num_known > stop // 3


def test_a_cell_of_another_size_than_was_planned_is_an_error(tmp_path):
    path = write(tmp_path / "m.parquet", pa.array([b"abc"]))
    with pytest.raises(ValueError, match="its cell has 3 bytes now, but had 4 when packing began"):
        CellBytes(str(path), 4, 0, 0, "image", *FileIdentity.of(str(path))).read()
    with pytest.raises(ValueError, match="it has no row 1 in row group 0"):
        read_cell(str(path), FileIdentity.of(str(path)), 0, 1, "image")


# Memory.


def most_allocated(path: Path) -> int:
    """Return the largest memory of pyarrow while the rows are listed."""
    most = 0
    with open_parquet(str(path)) as file:
        for batch in read_group(file, 0):
            assert batch.num_rows
            most = max(most, pa.total_allocated_bytes())
            del batch
    return most


def test_a_large_row_group_is_listed_in_little_memory(tmp_path):
    path = write(tmp_path / "m.parquet", pa.array([os.urandom(100_000) for _ in range(640)]), write_batch_size=8)
    assert most_allocated(path) < 16 << 20


def test_values_that_a_page_repeats_are_there_a_few_times(tmp_path, monkeypatch):
    """The mutant reads as many rows as their bytes in the file allow."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array([bytes(1 << 20)]))
    path = write(tmp_path / "m.parquet", column, store_schema=False)
    assert most_allocated(path) < 48 << 20
    assert read_cell(str(path), FileIdentity.of(str(path)), 0, 999, "image") == bytes(1 << 20)
    monkeypatch.setattr(parquet, "_FEW_ROWS", 200)
    assert most_allocated(path) > 48 << 20


MEMORY = """
import re, sys
from wdskit import pack
pack(sys.argv[1], sys.argv[2], validate="none", shuffle=1 if sys.argv[3] == "shuffled" else None, max_bytes=50_000_000)
with open("/proc/self/status") as status:
    print(int(re.search(r"VmHWM:\\s*(\\d+)", status.read())[1]) >> 10)
"""


@pytest.mark.parametrize("order", ["rows", "shuffled"])
def test_a_row_group_larger_than_the_memory_that_packing_takes(tmp_path, order):
    data = b"\xff\xd8\xff\xe0" + os.urandom(100_000)
    schema = pa.schema([("image", pa.binary()), ("key", pa.string())])
    with pq.ParquetWriter(tmp_path / "m.parquet", schema, write_batch_size=8, use_dictionary=False) as writer:
        columns = {"image": [data] * 2500, "key": [f"k{number}" for number in range(2500)]}
        writer.write_table(pa.table(columns, schema), row_group_size=2500)
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "m.parquet"), str(tmp_path / "out"), order]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 240, "the group has 250 MB"
    assert len(list((tmp_path / "out").glob("*.tar"))) > 4


GROWTH = """
import re, sys
from wdskit import pack
def kb(name):
    with open("/proc/self/status") as status:
        return int(re.search(name + r":\\s*(\\d+)", status.read())[1])
how = {"validate": "none", "shuffle": 1 if sys.argv[3] == "shuffled" else None, "max_bytes": 50_000_000}
pack("few.parquet", "few", **how)  # what is loaded stays
before = kb("VmRSS")
pack(sys.argv[1], sys.argv[2], **how)
print(kb("VmHWM") - before >> 10)
"""


@pytest.mark.parametrize("order", ["rows", "shuffled"])
def test_large_pages_are_packed_in_little_more_memory_than_pyarrow_needs(tmp_path, order):
    """A page of pyarrow has 1,024 values, here 98 MiB, kept compressed and decompressed, next to such a dictionary."""
    noise = os.urandom(100_000)
    table = pa.table({"image": [b"\xff\xd8\xff\xe0%06d" % number + noise for number in range(4096)]})
    pq.write_table(table, tmp_path / "m.parquet", row_group_size=4096)
    pq.write_table(table.slice(0, 3), tmp_path / "few.parquet")
    del table
    words = [sys.executable, "-c", GROWTH, str(tmp_path / "m.parquet"), str(tmp_path / "out"), order]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path)
    assert int(done.stdout) < 294 + 20
    assert len(list((tmp_path / "out").glob("*.tar"))) > 7


# Another order.


def images_of(num: int) -> list[bytes]:
    return [image_bytes("PNG", number=number) for number in range(num)]


@pytest.mark.parametrize(("most", "most_bytes"), [(plan.ROWS_IN_MEMORY, 1 << 30), (plan.ROWS_IN_MEMORY, 1000), (1, 1)])
def test_after_a_shuffle_a_row_group_is_decoded_once(tmp_path, monkeypatch, most, most_bytes):
    """This holds for a plan, which has the references of images, in memory and on disk."""
    monkeypatch.setattr(plan, "ROWS_IN_MEMORY", most)
    monkeypatch.setattr(plan, "_HELD_BYTES", most_bytes)
    monkeypatch.setattr(parquet, "read_cell", pytest.fail)
    data = images_of(60)
    cells = [*data[:58], None, data[58], None, data[59]]
    path = write(tmp_path / "m.parquet", column_of(cells, "bytes"), row_group_size=11, use_dictionary=False)
    pack(path, tmp_path / "out", shuffle=1, allow_no_image=True, max_samples=20)
    samples = samples_in(tmp_path / "out")
    assert sorted(sample["png"] for sample in samples.values() if "png" in sample) == sorted(data)
    assert list(samples) != sorted(samples)
    assert not list((tmp_path / "out").glob(".*plan*"))


def test_splits_and_workers_change_no_byte(tmp_path):
    path = write(tmp_path / "m.parquet", pa.array(images_of(40)), row_group_size=11)
    for name, more in {"one": {}, "two": {"workers": 2}, "threads": {"threads": 4}}.items():
        pack(path, tmp_path / name, max_samples=7, split="train=0.7,val=0.3", **more)
    assert bytes_in(tmp_path / "one") == bytes_in(tmp_path / "two") == bytes_in(tmp_path / "threads")


def test_a_row_group_that_unpacks_as_bombs_do_is_refused(tmp_path):
    path = write(tmp_path / "m.parquet", pa.array([bytes(40 << 20)]), compression="zstd", use_dictionary=False)
    with pytest.raises(
        PackError, match=r"m.parquet: row group 0, column 'image' claims to unpack .* like a decompression bomb"
    ):
        pack(path, tmp_path / "out")
    assert issubclass(PackError, WdskitError)


def test_a_column_may_become_an_array_and_another_field(tmp_path):
    """As for JSONL; alone, it is not repeated in `json`."""
    pq.write_table(pa.table({"key": ["a", "b"], "l": [[1, 2], [3]]}), tmp_path / "t.parquet")
    options = {"allow_no_image": True, "key_column": "key"}
    pack(tmp_path / "t.parquet", tmp_path / "both", fields={"npy": "l", "x.json": "l"}, **options)
    found = samples_in(tmp_path / "both")
    assert [sorted(fields) for fields in found.values()] == [["json", "npy", "x.json"]] * 2
    assert [fields["x.json"] for fields in found.values()] == [b"[1,2]", b"[3]"]
    pack(tmp_path / "t.parquet", tmp_path / "one", fields={"npy": "l"}, **options)
    assert [fields["json"] for fields in samples_in(tmp_path / "one").values()] == [b'{"key":"a"}', b'{"key":"b"}']


@pytest.mark.parametrize(("omit", "classes"), [((), "label"), (("label",), "kind"), (("label", "kind"), None)])
def test_a_class_column_that_is_left_out_gives_no_classes(tmp_path, omit, classes):
    names = {"label": ["x", "y"], "kind": ["p", "q", "r"]}
    features = {name: {"names": each, "_type": "ClassLabel"} for name, each in names.items()}
    table = pa.table({"key": ["a", "b"], "label": [0, 1], "kind": [2, 0]})
    stored = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": stored}), tmp_path / "t.parquet")
    found = pack(tmp_path / "t.parquet", tmp_path / "out", allow_no_image=True, omit=omit, key_column="key")
    assert list(found.classes) == (names[classes] if classes else [])
    expected = table[classes].to_pylist() if classes else [None, None]
    labels = [fields.get("cls") for fields in samples_in(tmp_path / "out").values()]
    assert labels == [None if each is None else b"%d" % each for each in expected]


def test_a_column_of_tensors_keeps_their_shape(tmp_path):
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    cells = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2, 3, 4], None], pa.list_(pa.float32(), 4)))
    pq.write_table(pa.table({"key": ["a", "b"], "e": cells}), tmp_path / "t.parquet")
    options = {"allow_no_image": True, "key_column": "key"}
    pack(tmp_path / "t.parquet", tmp_path / "own", fields={"npy": "e"}, **options)
    found = samples_in(tmp_path / "own")
    array = decode_field("npy", found["a"]["npy"])
    assert (array.dtype, array.tolist()) == (np.float32, [[1, 2], [3, 4]])
    assert "npy" not in found["b"]
    pack(tmp_path / "t.parquet", tmp_path / "json", **options)
    found = samples_in(tmp_path / "json")
    assert [json.loads(found[key]["json"])["e"] for key in "ab"] == [[[1, 2], [3, 4]], None]
    cells = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2, 3, None]], pa.list_(pa.float32(), 4)))
    pq.write_table(pa.table({"key": ["a"], "e": cells}), tmp_path / "t.parquet")
    with pytest.raises(RowError, match="'e': one of its numbers is null"):
        pack(tmp_path / "t.parquet", tmp_path / "null", fields={"npy": "e"}, **options)
    pack(tmp_path / "t.parquet", tmp_path / "null", **options)
    assert json.loads(samples_in(tmp_path / "null")["a"]["json"])["e"] == [[1, 2], [3, None]]


@pytest.mark.parametrize("dtype", [pa.int16(), pa.int32(), pa.float64(), pa.bool_()])
def test_a_tensor_whose_axes_are_stored_in_another_order(tmp_path, dtype):
    """Pyarrow 26 computes wrong strides for one cell of such a column."""
    kind = pa.fixed_shape_tensor(dtype, [2, 3], permutation=[1, 0])
    values = [[True, False, True, True, False, False]] if dtype == pa.bool_() else [[1, 2, 3, 4, 5, 6]]
    cells = pa.ExtensionArray.from_storage(kind, pa.array(values, pa.list_(dtype, 6)))
    pq.write_table(pa.table({"key": ["a"], "e": cells}), tmp_path / "t.parquet")
    wanted = np.array(values[0]).reshape(2, 3).T.tolist()
    options = {"allow_no_image": True, "key_column": "key"}
    pack(tmp_path / "t.parquet", tmp_path / "own", fields={"npy": "e"}, **options)
    assert decode_field("npy", samples_in(tmp_path / "own")["a"]["npy"]).tolist() == wanted
    pack(tmp_path / "t.parquet", tmp_path / "json", **options)
    assert json.loads(samples_in(tmp_path / "json")["a"]["json"])["e"] == wanted
