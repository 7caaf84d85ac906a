"""Packing JSONL and CSV manifests, and refusals."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import image_bytes, make_folder
from shards import samples_in

import wdskit
from wdskit import PackError, RowError, WdskitError
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.packing.sources.records import IMAGE_COLUMNS, Records
from wdskit.packing.sources.tables import TextTable

pack = functools.partial(wdskit.pack, allow_no_image=True)
"""Most tables here do not test images."""


def manifest(tmp_path: Path, name: str, text: str | bytes) -> Path:
    """A function that writes a manifest next to `images/0000.jpg` to `0002.jpg`."""
    make_folder(tmp_path / "images", {".": 3})
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows_of(name: str, text: str | bytes) -> list[object]:
    """Return the rows of a manifest without images: the object in `json`, or the error."""
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / name
        path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        rows = list(TextTable(str(path), Records("", allow_no_image=True)).rows(keys="hashed"))
    finally:
        shutil.rmtree(folder)
    return [row if isinstance(row, RowError) else json.loads(dict(row.fields)["json"]) for row in rows]


# Values that are kept.


def test_jsonl_keeps_its_columns_and_rows_without_an_image(tmp_path):
    lines = [
        {"image": "images/0000.jpg", "caption": "a “cat”", "boxes": [[1, 2.5], None], "cls": 3},
        {"key": "text-only", "caption": "no picture", "n": 2**70},
        {"image": None, "caption": "neither", "nested": {"image": "x", "null": "\x00"}},
        {"image": "", "key": 7},
    ]
    path = manifest(tmp_path, "m.jsonl", "\n\n  \r\n".join(json.dumps(line) for line in lines) + "\r\n")
    pack(path, tmp_path / "out")
    samples = samples_in(tmp_path / "out")
    assert list(samples) == ["images/0000", "text-only", "row-000000002", "7"]
    assert [json.loads(sample["json"]) for sample in samples.values()] == lines
    assert samples["images/0000"]["cls"] == b"3"
    assert samples["images/0000"]["jpg"] == (tmp_path / "images" / "0000.jpg").read_bytes()
    assert samples["text-only"].keys() == {"json"}


def test_the_json_of_a_row_is_its_line_as_it_stands(tmp_path):
    line = '{"z": 1.50, "a": "\\u00e4",\t"key": "k" , "b": [ ]}'
    pack(manifest(tmp_path, "m.jsonl", f"  {line} \r\n"), tmp_path / "out")
    assert samples_in(tmp_path / "out")["k"]["json"] == line.encode()


def test_the_json_of_a_row_of_text_is_compact_in_the_order_of_its_columns(tmp_path):
    pack(manifest(tmp_path, "m.csv", "z,key,a\n1.50,k,ä\n"), tmp_path / "out")
    assert samples_in(tmp_path / "out")["k"]["json"] == '{"z":"1.50","key":"k","a":"ä"}'.encode()


def test_a_cell_is_as_long_as_a_row_may_be(tmp_path):
    """Python's csv refuses cells of over 131,072 characters by default; wdskit restores this limit after reading."""
    before = csv.field_size_limit()
    text = "long " * 400_000
    pack(manifest(tmp_path, "m.csv", f'image,caption\nimages/0000.jpg,"{text}"\n'), tmp_path / "out")
    (sample,) = samples_in(tmp_path / "out").values()
    assert json.loads(sample["json"])["caption"] == text
    assert csv.field_size_limit() == before


def test_a_quote_that_is_never_closed_is_still_told(tmp_path):
    rows = "".join(f"images/{number:04d}.jpg,text\n" for number in range(300_000))
    with pytest.raises(PackError, match="quote that is not doubled or not closed"):
        pack(manifest(tmp_path, "m.csv", f'image,caption\nimages/0000.jpg,"open\n{rows}'), tmp_path / "out")


def test_csv_keeps_quotes_newlines_and_a_bom(tmp_path):
    text = '\ufeffimage,caption,cls\r\nimages/0000.jpg,"two\nlines, ""quoted""",7\r\n\r\n,plain,\r\n'
    path = manifest(tmp_path, "m.csv", text)
    pack(path, tmp_path / "out")
    samples = samples_in(tmp_path / "out")
    rows = [json.loads(sample["json"]) for sample in samples.values()]
    assert rows == [
        {"image": "images/0000.jpg", "caption": 'two\nlines, "quoted"', "cls": "7"},
        {"image": "", "caption": "plain", "cls": ""},
    ]
    assert [sample.get("cls") for sample in samples.values()] == [b"7", None]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r", ""])
def test_csv_may_end_its_lines_as_any_system_does(tmp_path, ending):
    text = (ending or "\n").join(["image,n", "images/0000.jpg,1", "images/0001.jpg,2"]) + ending
    pack(manifest(tmp_path, "m.csv", text), tmp_path / "out")
    assert list(samples_in(tmp_path / "out")) == ["images/0000", "images/0001"]


@pytest.mark.parametrize("name", ["m.jsonl", "m.ndjson", "M.JSONL"])
def test_jsonl_may_begin_with_a_bom_and_end_without_a_newline(tmp_path, name):
    path = manifest(tmp_path, name, '\ufeff{"key": "a"}\n{"key": "b"}')
    pack(path, tmp_path / "out")
    assert list(samples_in(tmp_path / "out")) == ["a", "b"]


def test_columns_can_be_named(tmp_path):
    text = "photo,id,image\nimages/0000.jpg,a,nothing\nimages/0001.jpg,b,\n,c,images/0002.jpg\n"
    path = manifest(tmp_path, "m.csv", text)
    pack(path, tmp_path / "out", image_column="photo", key_column="id")
    assert {key: sorted(sample) for key, sample in samples_in(tmp_path / "out").items()} == {
        "a": ["jpg", "json"],
        "b": ["jpg", "json"],
        "c": ["json"],
    }


@pytest.mark.parametrize("column", ["image", "file_name", "path"])
def test_a_column_of_one_of_these_names_has_the_image(tmp_path, column):
    pack(manifest(tmp_path, "m.csv", f"x,{column}\n1,images/0001.jpg\n"), tmp_path / "out")
    assert samples_in(tmp_path / "out").keys() == {"images/0001"}


# Places of images.


def test_paths_are_relative_to_the_manifest_wherever_one_stands(tmp_path, monkeypatch):
    path = manifest(tmp_path, "m.csv", "image\nimages/0000.jpg\n./images//0001.jpg\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pack("../m.csv", "out", pattern="p-%d.tar")
    samples = samples_in(Path("out"))
    assert list(samples) == ["images/0000", "images/0001"]
    assert json.loads(samples["images/0001"]["json"]) == {"image": "./images//0001.jpg"}  # unchanged
    monkeypatch.chdir(tmp_path)
    pack("m.csv", "out", pattern="p-%d.tar")
    assert (tmp_path / "out" / "p-0.tar").read_bytes() == (tmp_path / "elsewhere" / "out" / "p-0.tar").read_bytes()
    assert path.exists()


@pytest.mark.parametrize("kind", ["absolute", "outside"])
def test_images_elsewhere_need_a_key_or_a_hash(tmp_path, kind):
    make_folder(tmp_path / "images", {".": 1})
    image = {"absolute": str(tmp_path / "images" / "0000.jpg"), "outside": "../images/0000.jpg"}[kind]
    (tmp_path / "tables").mkdir()
    path = manifest(tmp_path / "tables", "m.csv", f"image,id\n{image},a\n")
    with pytest.raises(
        RowError, match=r"m.csv:2: key .*: it is (an absolute|not a plain relative) path.\n.*--keys hashed"
    ):
        pack(path, tmp_path / "out")
    pack(path, tmp_path / "named", key_column="id")
    pack(path, tmp_path / "hashed", keys="hashed")
    for folder in ("named", "hashed"):
        (sample,) = samples_in(tmp_path / folder).values()
        assert sample["jpg"] == (tmp_path / "images" / "0000.jpg").read_bytes()
        assert json.loads(sample["json"])["image"] == image


def test_one_image_in_two_rows_needs_keys(tmp_path):
    """Tables of captions have such rows: five captions per image."""
    path = manifest(tmp_path, "m.csv", "image,id\nimages/0000.jpg,a\nimages/0000.jpg,b\n")
    for keys in ("given", "hashed"):
        with pytest.raises(RowError, match=r"m.csv:3: its key '.*' is also the key of .*m.csv:2"):
            pack(path, tmp_path / "out", keys=keys)
        pack(path, tmp_path / keys, keys=keys, key_column="id")
        assert len(samples_in(tmp_path / keys)) == 2


def test_a_hash_is_that_of_the_key_where_a_row_has_one_else_of_the_path(tmp_path):
    from wdskit.dataset.keys import hashed_key

    text = '{"image": "images/0000.jpg"}\n{"image": "images/0001.jpg", "key": "x y"}\n{"a": 1}\n{"key": 5}\n'
    pack(manifest(tmp_path, "m.jsonl", text), tmp_path / "out", keys="hashed")
    assert list(samples_in(tmp_path / "out")) == [
        hashed_key(text) for text in ("images/0000.jpg", "x y", "row-000000002", "5")
    ]


# Refusals.


@pytest.mark.parametrize(
    ("name", "text", "line", "problem"),
    [
        ("m.jsonl", '{"key": "a"}\n{"key": }\n', 2, "it is not JSON"),
        ("m.jsonl", '{"key": "a"}\n\n[1]\n', 3, "it holds a list"),
        ("m.jsonl", "7\n", 1, "it holds a int"),
        ("m.jsonl", '{"key": "a"} {"key": "b"}\n', 1, "it is not JSON: Extra data"),
        ("m.jsonl", '{"key": "a", "key": "b"}\n', 1, "the name 'key' appears twice"),
        ("m.jsonl", '{"key": "a", "x": [{"y": 1, "z": 2, "y": 1}]}\n', 1, "the name 'y' appears twice"),
        ("m.jsonl", '{"x": NaN}\n', 1, "NaN is not JSON"),
        ("m.jsonl", '{"x": [-Infinity]}\n', 1, "-Infinity is not JSON"),
        ("m.jsonl", '{"x": 1e999}\n', 1, "its column 'x' cannot be written as JSON: Out of range float"),
        ("m.jsonl", '{"x": "\\ud800"}\n', 1, "its column 'x' cannot be written as JSON: .*surrogates not allowed"),
        ("m.jsonl", '{"x": ' + "9" * 5000 + "}\n", 1, "it is not JSON"),
        ("m.jsonl", b'{"x": 1}\n{"x": "\xff"}\n', 2, "it is not UTF-8"),
        ("m.jsonl", b'{"x": "\xc3"}\n', 1, "it is not UTF-8"),
        ("m.jsonl", b'{"x": "a\x00b"}\n', 1, "it is not JSON: Invalid control character"),
        ("m.jsonl", b'{"x": 1}\n\xef\xbb\xbf{"x": 2}\n', 2, "it is not JSON"),
        ("m.jsonl", '{"image": 5}\n', 1, "column 'image' holds 5, not a path"),
        ("m.jsonl", '{"image": ["a.jpg"]}\n', 1, "not a path"),
        ("m.jsonl", '{"image": "a\\u0000.jpg"}\n', 1, "not a path"),
        ("m.jsonl", '{"image": "m.jsonl"}\n', 1, "does not have the extension of an image"),
        ("m.jsonl", '{"image": "http://x/y.jpg"}\n', 1, "No such file"),
        ("m.jsonl", '{"key": [1]}\n', 1, "neither text nor a whole number"),
        ("m.jsonl", '{"key": true}\n', 1, "neither text nor a whole number"),
        ("m.jsonl", '{"key": "a.b"}\n', 1, "holds a dot"),
        ("m.jsonl", '{"key": "a"}\n{"key": "a"}\n', 2, "its key 'a' is also the key of .*m.jsonl:1"),
        ("m.jsonl", "[" * 100_000 + "\n", 1, "it is not JSON"),
        ("m.csv", "image,x\nimages/0000.jpg,1\nimages/gone.jpg,2\n", 3, "No such file"),
        ("m.csv", 'image,x\n"images/0000.jpg","a\nb"\nimages,2\n', 4, "does not have the extension of an image"),
        ("m.csv", "image,x\nimages/0000.jpg\n", 2, "it has 1 columns, but the header has 2"),
        ("m.csv", "image,x\nimages/0000.jpg,1,2\n", 2, "it has 3 columns, but the header has 2"),
        ("m.csv", b"image,x\nimages/0000.jpg,1\nimages/0001.jpg,\xe4\n", 3, "it is not UTF-8"),
    ],
)
def test_a_bad_row_is_an_error_that_names_its_line_or_is_listed(tmp_path, name, text, line, problem):
    path = manifest(tmp_path, name, text)
    with pytest.raises(RowError, match=problem) as caught:
        pack(path, tmp_path / "out")
    assert caught.value.where == f"{path}:{line}"
    assert str(caught.value).startswith(f"{path}:{line}: ")
    if "is also the key of" in problem:
        return  # two rows with one key are not a bad row, but an invalid data set
    path.write_bytes(path.read_bytes() + (b'{"key": "good"}\n' if name == "m.jsonl" else b",good\n"))
    result = pack(path, tmp_path / "out", skip_bad=True)
    assert [err.where for err in result.rejected] == [f"{path}:{line}"]
    (listed,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(listed) == {"where": f"{path}:{line}", "reason": result.rejected[0].problem}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("m.csv", "a,a\n1,2\n", r"m.csv:1: the header \['a', 'a'\] must name each column once"),
        ("m.csv", "a,,b\n1,2,3\n", "must name each column once"),
        ("m.csv", "", "must name each column once"),
        ("m.csv", "\n", "must name each column once"),
        ("m.csv", b"\xe4,b\n1,2\n", "m.csv:1: the header is not UTF-8"),
        ("m.csv", "a,b\n1,2\n3,4\x00\n", "m.csv:3: it holds a NUL"),
        ("m.csv", "image,x\nimages/0000.jpg,1\n".encode("utf-16"), "m.csv:1: it holds a NUL, like text in UTF-16"),
        ("m.csv", 'a,b\n1,2\n"open,2\n3,4\n', "m.csv:3: it is not CSV: unexpected end of data.\n  Look for a quote"),
        ("m.csv", 'a,b\n"x"y,2\n', "m.csv:2: it is not CSV"),
        ("m.csv", 'a,b\n1,"' + ("x" * 999 + "\n") * 5_000, "m.csv:2: it is not CSV: field larger.*\n.*as JSONL"),
        ("m.csv", "a,b\n1," + "x" * 5_000_000 + "\n", "m.csv:2: this line is longer than the 4194304 bytes"),
        ("m.jsonl", "", "m.jsonl: there is nothing to pack"),
        ("m.jsonl", "\n\n", "m.jsonl: there is nothing to pack"),
        ("m.csv", "image\n", "m.csv: there is nothing to pack"),
        ("m.parquet", "", r"m.parquet: it cannot be read as Parquet"),
        ("jsonl", "", "neither a folder nor a file with a known suffix"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path, name, text, problem):
    path = manifest(tmp_path, name, text)
    for skip_bad in (False, True):
        with pytest.raises(PackError, match=problem):
            pack(path, tmp_path / "out", skip_bad=skip_bad)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"image_column": "photo"}, "no column 'photo'; it has 'image'"), ({"key_column": "id"}, "no column 'id'")],
)
def test_a_column_that_is_not_there_is_an_error_with_those_that_are(tmp_path, options, problem):
    path = manifest(tmp_path, "m.csv", "image\nimages/0000.jpg\n")
    with pytest.raises(RowError, match=problem):
        pack(path, tmp_path / "out", **options)


def test_a_row_without_the_key_that_was_asked_for_is_an_error(tmp_path):
    path = manifest(tmp_path, "m.csv", "image,id\nimages/0000.jpg,\n")
    with pytest.raises(RowError, match=r"m.csv:2: its column 'id' is empty"):
        pack(path, tmp_path / "out", key_column="id")


def test_a_row_that_is_nested_too_deeply_is_an_error_of_its_row(tmp_path):
    """Near the limit, JSON can be read, but not written."""
    (tmp_path / "a.jpg").write_bytes(image_bytes())
    texts = ['{"image":"a.jpg","x":' + "[" * depth + "]" * depth + "}" for depth in range(900, 1000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(texts))
    for row in TextTable(str(tmp_path / "rows.jsonl"), Records("")).rows(keys="hashed"):
        assert not isinstance(row, RowError) or "not JSON: maximum recursion" in str(row) or "too deeply" in str(row)


def test_a_row_with_100_000_names_of_which_two_are_one_is_refused_at_once():
    """The names are not compared in pairs."""
    text = json.dumps({f"n{n}": n for n in range(100_000)})[:-1] + ', "n99999": 1}'
    (error,) = rows_of("m.jsonl", text)
    assert "the name 'n99999' appears twice" in str(error)


def test_numbers_of_rows_do_not_depend_on_which_rows_are_bad(tmp_path):
    pack(manifest(tmp_path, "m.jsonl", '{"a": 1}\nbad\n{"a": 2}\n'), tmp_path / "out", skip_bad=True)
    assert list(samples_in(tmp_path / "out")) == ["row-000000000", "row-000000002"]


# Any table.

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name not in {"image", "key"})
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
tables = st.lists(st.dictionaries(names, values, max_size=4), max_size=4)


@given(tables.filter(lambda rows: not any(row.keys() & {*IMAGE_COLUMNS, CLASS_FIELD} for row in rows)), st.booleans())
@settings(max_examples=150)
def test_any_json_objects_come_back(rows, ascii_only):
    text = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    assert rows_of("m.jsonl", text) == rows


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), max_size=4)))
@settings(max_examples=150)
def test_any_cells_come_back(rows):
    header = [f"c{number}" for number in range(len(rows[0]) if rows else 1)]
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([header, *rows])
    expected = [dict(zip(header, row, strict=True)) for row in rows]
    assert rows_of("m.csv", stream.getvalue()) == expected


@given(
    st.binary(max_size=60) | st.text(st.sampled_from('{}[]",:;\\\n\r\t \x00\ufeffab1-.e'), max_size=40), st.booleans()
)
@settings(max_examples=400)
def test_any_bytes_give_rows_or_an_error_of_wdskit(data, is_csv):
    try:
        found = rows_of("m.csv" if is_csv else "m.jsonl", data)
    except WdskitError as err:
        assert "m.csv" in str(err)  # noqa: PT017 (a fault of the whole file; lines of JSONL are independent)
        assert is_csv
    else:
        assert all(isinstance(row, (dict, RowError)) for row in found)


# Missing images.

NO_COLUMN = (
    "it has no image: among its columns ({}), none is called image, file_name, path or filepath.\n"
    "  Name the one with the image: "
)


def saved_data_set(folder, columns):
    """Write a data set as `save_to_disk` does."""
    table = pa.table(columns)
    folder.mkdir()
    with pa.ipc.new_stream(folder / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_table(tmp_path, kind, columns):
    """Write the same table in each form."""
    path = tmp_path / f"table.{kind}"
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.table(columns), path)
    elif kind == "hf":
        saved_data_set(path, columns)
    else:
        separator = "," if kind == "csv" else "\t"
        lines = [columns, *(row.values() for row in rows)]
        path.write_text("".join(separator.join(value or "" for value in line) + "\n" for line in lines))
    return path


KINDS = ["csv", "tsv", "jsonl", "parquet", "hf"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_whose_image_column_is_called_otherwise_is_an_error_that_proposes_it(tmp_path, kind):
    make_folder(tmp_path, {"images": 2})
    base = f"{'../' if kind == 'hf' else ''}images"
    columns = {"caption": ["x", "y"], "photo": [f"{base}/0000.jpg", f"{base}/0001.jpg"]}
    path = write_table(tmp_path, kind, columns)
    with pytest.raises(RowError, match=re.escape(NO_COLUMN.format("'caption', 'photo'") + "--image-column photo.")):
        wdskit.pack(path, tmp_path / "out")
    with pytest.raises(PackError, match="none of its 2 rows is valid"):
        wdskit.pack(path, tmp_path / "out", skip_bad=True)
    result = wdskit.pack(path, tmp_path / "out", image_column="photo", keys="hashed")
    assert [entry.fields for entry in result.entries] == [("jpg", "json")]
    result = wdskit.pack(path, tmp_path / "text", allow_no_image=True)
    assert [entry.fields for entry in result.entries] == [("json",)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["image", "photo"])
def test_a_row_whose_image_is_missing_is_an_error_or_left_out(tmp_path, kind, name):
    make_folder(tmp_path, {"images": 1})
    path = write_table(tmp_path, kind, {"key": ["a", "b"], name: [("../" * (kind == "hf")) + "images/0000.jpg", None]})
    options = {} if name == "image" else {"image_column": name}
    with pytest.raises(RowError, match=f"it has no image: its column '{name}' is empty.\n  Give it one, pack it wi"):
        wdskit.pack(path, tmp_path / "out", **options)
    result = wdskit.pack(path, tmp_path / "skipped", skip_bad=True, **options)
    assert (result.num_samples, len(result.rejected)) == (1, 1)
    assert wdskit.pack(path, tmp_path / "both", allow_no_image=True, **options).num_samples == 2


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_an_image_of_bytes_that_is_missing_is_an_error(tmp_path, kind):
    images = pa.array([{"bytes": image_bytes(), "path": None}, None], pa.struct({"bytes": "binary", "path": "string"}))
    path = write_table(tmp_path, kind, {"key": ["a", "b"], "photo": images})
    with pytest.raises(RowError, match="row 1: it has no image: its column 'photo' is empty"):
        wdskit.pack(path, tmp_path / "out")


def test_rows_from_python_and_tars_name_their_fields_themselves(tmp_path):
    """In these sources, texts with labels are as valid as images."""
    rows = [{"__key__": "a", "json": {"x": 1}, "txt": "a text"}]
    for number, options in enumerate(({}, {"allow_no_image": True})):
        assert wdskit.pack(rows, tmp_path / f"rows{number}", **options).num_samples == 1
        assert wdskit.pack(tmp_path / f"rows{number}", tmp_path / f"tars{number}", **options).num_samples == 1


# Tables as other programs write them.


def test_a_csv_whose_columns_tabs_separate_is_that_of_open_clip(tmp_path):
    """CsvDataset of open_clip separates the columns filepath and title by a tab."""
    text = 'filepath\ttitle\nimages/0000.jpg\ta cat, sitting\nimages/0001.jpg\t"two ""big"" dogs"\n'
    pack(manifest(tmp_path, "m.csv", text), tmp_path / "out", fields=["txt=title"])
    assert [sample["txt"] for sample in samples_in(tmp_path / "out").values()] == [b"a cat, sitting", b'two "big" dogs']


def test_tabs_in_the_cells_of_a_csv_are_text(tmp_path):
    pack(manifest(tmp_path, "m.csv", "image,a\tb\nimages/0000.jpg,1\t2\n"), tmp_path / "out")
    (sample,) = samples_in(tmp_path / "out").values()
    assert json.loads(sample["json"])["a\tb"] == "1\t2"


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            'image\tt\n\t"""STOP"""\n',
            r"m.tsv:2: its column 't' is quoted as in CSV .*a .tsv has no quotes.\n.*Name the file",
        ),
        ('image\tt\n\t"a ""b"" c"\n', r"m.tsv:2: its column 't' is quoted as in CSV"),
        ('image\tt\n\t"a\tb"\n', r"m.tsv:2: it has 3 columns, but the header has 2.\n.*Name the file .csv"),
        ('image\tt\n\t"a\nb"\n', r"m.tsv:3: it has 1 columns"),
        ('"image"\t"t"\n""\t"a"\n', r"m.tsv:1: the header is quoted as in CSV"),
    ],
)
def test_a_tsv_that_is_quoted_as_csv_is_an_error_with_a_way_out(tmp_path, rows, problem):
    path = manifest(tmp_path, "m.tsv", rows)
    with pytest.raises((RowError, PackError), match=problem):
        pack(path, tmp_path / "out")
    pack(path.rename(tmp_path / "m.csv"), tmp_path / "out")


def test_quotes_that_no_csv_writer_would_write_stay_in_a_tsv(tmp_path):
    cells = ['"STOP"', 'say "hi"', '"', '""', 'a ""b""', '"a" and "b"']
    path = manifest(tmp_path, "m.tsv", "key\tt\n" + "".join(f"k{n}\t{cell}\n" for n, cell in enumerate(cells)))
    pack(path, tmp_path / "out", fields=["txt=t"])
    assert [sample["txt"].decode() for sample in samples_in(tmp_path / "out").values()] == cells


def test_the_index_column_of_pandas_is_named(tmp_path):
    with pytest.raises(PackError, match=r"m.csv:1: the first column of the header has no name, .*\n.*index=False"):
        pack(manifest(tmp_path, "m.csv", ",image\n0,images/0000.jpg\n"), tmp_path / "out")


@pytest.mark.parametrize("column", ["path", "audio"])
def test_a_table_of_sounds_is_packed(tmp_path, column):
    path = manifest(tmp_path, "m.csv", f"{column},speaker\na.wav,x\nsub/b.wav,y\n")
    (tmp_path / "sub").mkdir()
    for name in ("a.wav", "sub/b.wav"):
        (tmp_path / name).write_bytes(name.encode())
    if column == "path":
        with pytest.raises(
            RowError, match=r"does not have the extension of an image.\n.*--field wav=COLUMN --allow-no-image"
        ):
            pack(path, tmp_path / "out")
    pack(path, tmp_path / "out", fields=[f"wav={column}"])
    keys = ["a", "sub/b"] if column == "path" else ["row-000000000", "row-000000001"]
    samples = samples_in(tmp_path / "out")
    assert [*samples] == keys
    assert [sample["wav"] for sample in samples.values()] == [b"a.wav", b"sub/b.wav"]


def test_a_field_is_not_an_image_in_some_rows_and_a_mask_in_others(tmp_path):
    make_folder(tmp_path / "images", {".": 2})
    for name in ("a.png", "mask.png"):
        (tmp_path / name).write_bytes(image_bytes("PNG"))
    text = "image,mask\nimages/0000.jpg,mask.png\na.png,mask.png\n"
    path = manifest(tmp_path, "m.csv", text)
    with pytest.raises(
        RowError, match=r"m.csv:3: its image is 'png', and --field makes 'png' of another column.\n.*mask.png"
    ):
        pack(path, tmp_path / "out", fields=["png=mask"])
    pack(path, tmp_path / "out", fields=["mask.png=mask"])
    assert [sorted(sample) for sample in samples_in(tmp_path / "out").values()] == [
        ["jpg", "json", "mask.png"], ["json", "mask.png", "png"]
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl"])
def test_columns_can_be_left_out_of_json(tmp_path, name):
    text = "key,secret,t\na,1,x\n" if name == "m.csv" else '{"key": "a", "secret": "1", "t": "x"}'
    path = manifest(tmp_path, name, text)
    pack(path, tmp_path / "out", omit="secret,t", fields=["txt=t"])
    (sample,) = samples_in(tmp_path / "out").values()
    assert sample == {"json": b'{"key":"a"}', "txt": b"x"}
    with pytest.raises(RowError, match=r"it has no column 'other'; .*\n  Correct --omit"):
        pack(path, tmp_path / "other", omit=["other"])


def test_a_column_may_begin_with_a_space(tmp_path):
    pack(manifest(tmp_path, "m.csv", "key, c\na,x\n"), tmp_path / "out", fields=["txt= c"])
    assert samples_in(tmp_path / "out")["a"]["txt"] == b"x"
