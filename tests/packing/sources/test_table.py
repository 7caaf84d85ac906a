"""Tables of text: the rows that a writer wrote, whatever the format, and an error for what is no table."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, on
from formats import jpeg, read_folder, write_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wdskit import PackError, RowError, pack
from wdskit.packing.row import Reading, Row
from wdskit.packing.sources import find_source

KEEP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)
NAMES = st.text("abcxyz_ é", min_size=1, max_size=6).filter(lambda name: name.strip() == name and name != "key")


def rows_of(path: Path, **how: Any) -> list[Row]:
    found = [*find_source(path, Reading(**how)).rows()]
    for row in found:
        assert isinstance(row, Row), row
    return found  # type: ignore[return-value]


def records_in(rows: list[Row]) -> list[Any]:
    return [json.loads(row.fields["json"]) for row in rows]  # type: ignore[arg-type]


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@st.composite
def tables(draw: Any, cells: Any = CELLS) -> tuple[list[str], list[list[str]]]:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    return names, draw(st.lists(st.lists(cells, min_size=len(names), max_size=len(names)), min_size=1, max_size=5))


@KEEP
@given(tables(), st.sampled_from(["t.csv", "t.csv.gz", "T.CSV"]), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_a_csv_is_read_as_the_csv_module_wrote_it(
    tmp_path: Path, table: tuple[list[str], list[list[str]]], name: str, end: str, has_mark: bool
) -> None:
    """Quotes, commas and lines in cells; tabs as separators; a byte order mark."""
    names, rows = table
    file = io.StringIO()
    writer = csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([["key", *names], *([f"k{n}", *row] for n, row in enumerate(rows))])
    found = rows_of(write(tmp_path / name, "\ufeff" * has_mark + file.getvalue()))
    assert [row.key for row in found] == [f"k{n}" for n in range(len(rows))]
    expected = [{"key": f"k{n}", **dict(zip(names, row, strict=True))} for n, row in enumerate(rows)]
    assert records_in(found) == expected


@KEEP
@given(
    tables(st.text("ab\"',é ", max_size=6)),
    st.sampled_from(["t.tsv", "t.tsv.gz"]),
)
def test_a_tsv_has_no_quotes(tmp_path: Path, table: tuple[list[str], list[list[str]]], name: str) -> None:
    names, rows = table
    lines = ["\t".join(["key", *names]), *("\t".join([f"k{n}", *row]) for n, row in enumerate(rows))]
    found = rows_of(write(tmp_path / name, "\n".join(lines)))
    expected = [{"key": f"k{n}", **dict(zip(names, row, strict=True))} for n, row in enumerate(rows)]
    assert records_in(found) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | CELLS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CELLS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=5)


@KEEP
@given(OBJECTS, st.sampled_from(["t.jsonl", "t.ndjson", "t.jsonl.gz", "t.json"]), st.booleans(), st.integers(0, 2))
def test_json_is_read_as_it_was_written_and_keeps_its_text(
    tmp_path: Path, objects: list[dict[str, Any]], name: str, ascii_only: bool, blank: int
) -> None:
    objects = [{"key": f"k{n}", **each} for n, each in enumerate(objects)]
    lines = [json.dumps(each, ensure_ascii=ascii_only) for each in objects]
    is_list = name == "t.json"
    found = rows_of(
        write(tmp_path / name, json.dumps(objects) if is_list else ("\n" * (blank + 1)).join(["", *lines, ""]))
    )
    assert [row.key for row in found] == [each["key"] for each in objects]
    assert records_in(found) == objects
    assert is_list or [row.fields["json"].decode() for row in found] == lines  # type: ignore[union-attr]


def test_a_row_is_named_by_the_line_it_begins_in(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", 'key,x\n\n"a","1\n2\n3"\nb,4\n')
    write(tmp_path / "t.jsonl", '\n\n{"key": "a"}\n\n{"key": "b"}')
    assert [row.where.rpartition(":")[2] for row in rows_of(tmp_path / "t.csv")] == ["3", "6"]
    assert [row.where.rpartition(":")[2] for row in rows_of(tmp_path / "t.jsonl")] == ["3", "5"]


def test_images_are_found_beside_the_table_and_name_the_sample(tmp_path: Path) -> None:
    """Columns: image, file_name, path, filepath or the option."""
    write_files(tmp_path / "in", {"a/1.jpg": jpeg(1), "a/2.jpeg": jpeg(2)})
    for column in ("image", "file_name", "path", "filepath", "photo"):
        write(tmp_path / "in" / "t.csv", f"{column},n\na/1.jpg,1\n./a//2.jpeg,2\n")
        how = {"image": "photo"} if column == "photo" else {}
        found = rows_of(tmp_path / "in" / "t.csv", **how)
        assert [(row.key, *row.fields) for row in found] == [("a/1", "jpg", "json"), ("a/2", "jpg", "json")]
    write(tmp_path / "in" / "t.csv", "id,n\nx,1\ny,2\n")
    assert [row.key for row in rows_of(tmp_path / "in" / "t.csv")] == ["row-000000000", "row-000000001"]
    assert [row.key for row in rows_of(tmp_path / "in" / "t.csv", key="id")] == ["x", "y"]


BAD: dict[str, tuple[str, bytes, str]] = {
    # Name: file, bytes, and the place in the error of the whole table.
    "pandas index": ("t.csv", b",a,b\n0,1,2\n", r"t\.csv:1: "),
    "semicolons": ("t.csv", b"a;b\n1;2\n", r"t\.csv:1: .*;"),
    "header latin-1": ("t.csv", b"a,\xe9\n1,2\n", r"(?is)t\.csv.*UTF-8"),
    "empty name": ("t.csv", b"a,,b\n1,2,3\n", r"t\.csv:1: .*'a', '', 'b'"),
    "quoted tsv": ("t.tsv", b'"a"\t"b"\n1\t2\n', r"t\.tsv:1: "),
    "UTF-16": ("t.csv", "a,b\n1,2\n".encode("utf-16-le"), r"t\.csv:1: "),
    "UTF-16 with a mark": ("t.csv", "a,b\n1,2\n".encode("utf-16"), r"t\.csv"),
    "quote in a cell": ("t.csv", b'a,b\n"1"x,2\n', r"t\.csv:2: "),
    "cut gzip": ("t.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 99)[:-9], r"t\.csv\.gz"),
    "no gzip": ("t.jsonl.gz", b"{}", r"t\.jsonl\.gz"),
    "no JSON list": ("t.json", b"[1,", r"t\.json: .*JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_table_is_an_error_with_its_line(tmp_path: Path, name: str) -> None:
    file, data, message = BAD[name]
    (tmp_path / file).write_bytes(data)
    with pytest.raises(PackError, match=message):
        on(HastyDisk(), pack, tmp_path / file, tmp_path / "d", skip_bad=True, workers=1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"a": Infinity}\n', r"t\.jsonl:1: "),
        ("t.jsonl", '{"a": ' + "[" * 100_000 + "\n", r"t\.jsonl:1: "),
        ("t.jsonl", '{"a": "\\ud800"}\n', r"t\.jsonl:1: "),
        ("t.json", "[3]", r"t\.json, item 0: "),
        ("t.jsonl", '{"key": true}\n', r"t\.jsonl:1: .*key"),
        ("t.csv", "key,b\na,1,2\n", r"t\.csv:2: it has 3 cells, and the header has 2"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(RowError, match=message):
        on(HastyDisk(), pack, write(tmp_path / name, text), tmp_path / "d", workers=1)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_path_in_another_unicode_form_is_named(tmp_path: Path, form: str) -> None:
    import unicodedata

    other = {"NFC": "NFD", "NFD": "NFC"}[form]
    write_files(tmp_path, {unicodedata.normalize(form, "é.jpg"): jpeg(0)})
    path = unicodedata.normalize(other, "é.jpg")
    write(tmp_path / "t.csv", f"image\n{path}\n")
    with pytest.raises(RowError, match="Unicode"):
        on(HastyDisk(), pack, tmp_path / "t.csv", tmp_path / "d", workers=1)


def test_fields_are_made_of_columns_by_their_names(tmp_path: Path) -> None:
    record = {"key": "a", "t": "ä", "v": [[1, 2], [3, 4]], "n": 7, "f": "x.bin", "o": {"a": [None]}}
    write(tmp_path / "t.jsonl", json.dumps(record))
    write_files(tmp_path, {"x.bin": b"bytes"})
    fields = {"txt": "t", "npy": "v", "id": "n", "bin": "f", "o.json": "o", "cls": "n", "n.txt": "n"}
    with pytest.raises(RowError, match=r"t\.jsonl:1: n\.txt"):
        on(HastyDisk(), pack, tmp_path / "t.jsonl", tmp_path / "bad", fields=fields, workers=1)
    del fields["n.txt"]
    on(HastyDisk(), pack, tmp_path / "t.jsonl", tmp_path / "d", fields=fields, workers=1)
    [found] = read_folder(tmp_path / "d").values()
    assert {*found} == {*fields, "json"}
    assert (found["txt"], found["id"], found["cls"], found["bin"], found["o.json"]) == (
        "ä".encode(), b"7", b"7", b"bytes", b'{"a":[null]}'
    )  # fmt: skip
