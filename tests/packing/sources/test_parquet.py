"""Parquet: the rows of a table whatever its encoding, in little memory, and errors that name the row."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats import png, read_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wdskit import PackError, RowError, WdskitError, pack
from wdskit.packing.row import Reading, Row
from wdskit.packing.sources import find_source

pytestmark = pytest.mark.usefixtures("hasty_disk")

KEEP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
QUICK: dict[str, Any] = {"workers": 1}
VIEWS = pa.__version__ >= "18"  # the oldest versions do not write `binary_view`
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
COLUMNS: dict[str, tuple[Any, Any]] = {
    "n": (pa.int64(), st.none() | st.integers(-(2**63), 2**63 - 1)),
    "x": (pa.float64(), st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    "text": (pa.string(), st.none() | st.text(st.characters(codec="utf-8"), max_size=6)),
    "flag": (pa.bool_(), st.booleans()),
    "list": (pa.list_(pa.int32()), st.none() | st.lists(st.integers(0, 9), max_size=3)),
    "o": (pa.struct([("a", pa.int8())]), st.none() | st.fixed_dictionaries({"a": st.integers(0, 9)})),
}


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


@st.composite
def tables(draw: Any) -> list[dict[str, Any]]:
    names = draw(st.lists(st.sampled_from([*COLUMNS]), unique=True, max_size=4))
    return draw(st.lists(st.fixed_dictionaries({name: COLUMNS[name][1] for name in names}), min_size=1, max_size=9))


@KEEP
@given(
    tables(), st.sampled_from(["none", "snappy", "zstd"]), st.booleans(), st.sampled_from(["1.0", "2.0"]),
    st.sampled_from(["binary", "large", "struct", "dictionary", *["view"] * VIEWS]), st.integers(1, 4),
)  # fmt: skip
def test_rows_are_those_of_the_table_however_it_is_written(
    tmp_path: Path, table: list[dict[str, Any]], codec: str, has_dictionary: bool, page: str, kind: str, group: int
) -> None:
    images = [png(number) for number in range(len(table))]
    types = {"binary": pa.binary(), "large": pa.large_binary(), "view": pa.binary_view(), "struct": STRUCT}
    cells = [{"bytes": data, "path": "p.png"} for data in images] if kind == "struct" else images
    column = pa.array(images).dictionary_encode() if kind == "dictionary" else pa.array(cells, types[kind])
    columns: dict[str, Any] = {"key": [f"k{number}" for number in range(len(table))], "path": column}
    columns |= {"image": [""] * len(table), "file_name": ["t.parquet"] * len(table)}  # empty, and of another field
    columns |= {name: pa.array([row[name] for row in table], COLUMNS[name][0]) for name in table[0]}
    how = {"compression": codec, "use_dictionary": has_dictionary, "data_page_version": page, "row_group_size": group}
    source = find_source(write(tmp_path / "t.parquet", columns, **how), Reading(fields={"wav": "file_name"}))
    found = [*source.rows()]
    for number, (row, record) in enumerate(zip(found, table, strict=True)):
        assert isinstance(row, Row), row
        assert (row.key, row.fields["png"]) == (f"k{number}", images[number])
        extra = {"image": "", "file_name": "t.parquet"} | ({"path": "p.png"} if kind == "struct" else {})
        assert json.loads(row.fields["json"]) == {"key": row.key, **extra, **record}  # type: ignore[arg-type]


def test_dates_decimals_and_nan_become_json(tmp_path: Path) -> None:
    columns = {
        "key": ["a"],
        "day": pa.array([19000], pa.date32()),
        "time": pa.array([10**15], pa.timestamp("us", "Europe/Berlin")),
        "local": pa.array([10**15], pa.timestamp("us")),
        "price": pa.array([Decimal("1.00")], pa.decimal128(9, 2)),
        "score": [float("nan")],
    }
    pack(write(tmp_path / "t.parquet", columns), tmp_path / "d", **QUICK)
    assert json.loads(read_folder(tmp_path / "d")["a"]["json"]) == {
        "key": "a", "day": "2022-01-08", "time": "2001-09-09T03:46:40+02:00", "local": "2001-09-09T01:46:40",
        "price": "1.00", "score": None,
    }  # fmt: skip


def test_tensors_whose_shape_would_be_lost_are_refused(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    cells = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2, 3, 4], None], pa.list_(pa.float32(), 4)))
    with pytest.raises(PackError, match="'t' is extension"):
        pack(write(tmp_path / "t.parquet", {"key": ["a", "b"], "t": cells}), tmp_path / "d", fields={"npy": "t"})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"key": ["a"], "image": [png(0)], "path": [b"x"]}, {}, r"t\.parquet, row 0: bytes, such as b'x'"),
        ({"key": ["a"]}, {"fields": {"txt": "none"}}, "'none'"),
        ({"key": ["a"]}, {"image": "none"}, r"t\.parquet"),
        ({"key": ["a"], "image": [None]}, {}, r"t\.parquet, row 0: it has no image: all rows"),
        ({"key": ["a"], "image": [b"text"]}, {}, r"t\.parquet, row 0: .*b'text'"),
        ({"key": ["a"], "time": pa.array([1 << 62], pa.timestamp("ms"))}, {}, r"t\.parquet: it cannot be read"),
        ({"key": ["a"], "l": [[1, None]]}, {"fields": {"npy": "l"}}, r"t\.parquet, row 0: "),
        ({"key": ["a"], "image": [png(0)], "b": [png(1)]}, {"fields": {"png": "b"}}, r"t\.parquet, row 0: .*'png'"),
    ],
)
def test_a_column_that_cannot_be_packed_is_named(tmp_path: Path, columns: Any, options: Any, message: str) -> None:
    with pytest.raises((PackError, RowError), match=message):
        pack(write(tmp_path / "t.parquet", columns), tmp_path / "d", **QUICK, **options)


def test_files_of_two_schemas_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"key": ["a"], "n": [1]})
    write(tmp_path / "b.parquet", {"key": ["b"], "n": ["x"]})
    with pytest.raises(PackError, match=r"b\.parquet"):
        pack(f"{tmp_path}/*.parquet", tmp_path / "d", **QUICK)


def test_damaged_pages_give_rows_or_an_error_and_never_a_traceback(tmp_path: Path) -> None:
    """In every seventh byte of a small file, a random bit is changed."""
    whole = write(tmp_path / "t.parquet", {"key": ["a", "b"], "image": [png(0), png(1)]}).read_bytes()
    draws, num_read = random.Random(0), 0
    for at in range(4, len(whole), 7):
        (tmp_path / "t.parquet").write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << draws.randrange(8)]) + whole[at + 1 :]
        )
        with contextlib.suppress(WdskitError):
            num_read += len([*find_source(tmp_path / "t.parquet", Reading()).rows()]) == 2
    assert num_read > 3


MEMORY = """
import re, sys
from wdskit import pack

def kb(name):
    with open("/proc/self/status") as status:
        return int(re.search(name + r":\\s*(\\d+)", status.read())[1])

if __name__ == "__main__":
    seed = 1 if sys.argv[2] == "shuffled" else None
    how = {"validate": "none", "shuffle": seed, "max_bytes": 50_000_000, "workers": 1}
    pack("few.parquet", "few", **how)  # what is loaded stays
    before = kb("VmRSS")
    pack("t.parquet", sys.argv[1], **how)
    print(kb("VmHWM") - before >> 10)
"""


@pytest.mark.parametrize(("order", "pages"), [("rows", 8), ("shuffled", 8), ("rows", 1024)])
def test_a_row_group_of_250_mb_is_packed_in_little_memory(tmp_path: Path, order: str, pages: int) -> None:
    """A page of 1,024 values of 100 KB is decoded as a whole, beside its compressed bytes and a dictionary."""
    noise = os.urandom(100_000)
    images = [b"\xff\xd8\xff\xe0%06d" % number + noise for number in range(2500)]
    table = pa.table({"image": images, "key": [f"k{number}" for number in range(2500)]})
    options: dict[str, Any] = {"write_batch_size": pages, "use_dictionary": pages > 8}
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2500, **options)
    pq.write_table(table.slice(0, 3), tmp_path / "few.parquet")
    del table, images
    (tmp_path / "m.py").write_text(MEMORY)
    words = [sys.executable, "m.py", str(tmp_path / "d"), order]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=200, cwd=tmp_path)
    assert int(done.stdout) < (120 if pages == 8 else 320)
    assert len(list((tmp_path / "d").glob("*.tar"))) > 4
