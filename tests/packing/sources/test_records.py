"""Columns of every kind of table that become fields."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from images import image_bytes, make_folder
from shards import samples_in

from wdskit import PackError, RowError, pack
from wdskit.codecs.fields import decode_field
from wdskit.dataset.classes import read_classes
from wdskit.packing.sources.records import parse_fields

KINDS = ["jsonl", "csv", "tsv", "parquet", "hf"]
COLUMNS = {
    "filepath": ["images/0000.jpg", "images/0001.jpg", "images/0002.jpg"],
    "title": ["a cat", "", "an eel"],
    "label": ["cat", "eel", "cat"],
}
FIELDS = {"txt": "title", "cls": "label"}


def write_table(folder: Path, kind: str, columns: dict[str, object]) -> Path:
    """Write a table next to `images/`; a saved data set is a folder there."""
    make_folder(folder / "images", {".": 3})
    path = folder / f"t.{kind}"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind in ("csv", "tsv"):
        mark = {"csv": ",", "tsv": "\t"}[kind]
        lines = [mark.join(columns), *(mark.join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines))
    elif kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        make_folder(path / "images", {".": 3})
        (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        (path / "dataset_info.json").write_text("{}")
        with pa.ipc.new_stream(path / "data.arrow", pa.table(columns).schema) as stream:
            stream.write_table(pa.table(columns))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_texts_become_fields_and_their_classes_numbers(tmp_path, kind):
    result = pack(write_table(tmp_path, kind, COLUMNS), tmp_path / "out", fields=FIELDS)
    assert result.classes == {"cat": 0, "eel": 1}
    assert read_classes(tmp_path / "out") == ("cat", "eel")
    samples = samples_in(tmp_path / "out")
    assert [sample.get("txt") for sample in samples.values()] == [b"a cat", None, b"an eel"]
    assert [sample["cls"] for sample in samples.values()] == [b"0", b"1", b"0"]
    assert json.loads(samples["images/0000"]["json"]) == {key: values[0] for key, values in COLUMNS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_given_classes_fix_the_numbers_of_a_column(tmp_path, kind):
    path = write_table(tmp_path, kind, COLUMNS)
    result = pack(path, tmp_path / "out", fields=["cls=label"], classes=["ape", "cat", "dog", "eel"])
    assert [sample["cls"] for sample in samples_in(tmp_path / "out").values()] == [b"1", b"3", b"1"]
    assert [*result.classes] == ["ape", "cat", "dog", "eel"]
    with pytest.raises(RowError, match=r"'eel' is not one of the 2 classes of `classes` \(cat, eels\)\. Did you"):
        pack(path, tmp_path / "other", fields=["cls=label"], classes=["cat", "eels"])


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_stay_what_they_are(tmp_path, kind):
    path = write_table(tmp_path, kind, {**COLUMNS, "label": [7, 0, 7]})
    assert pack(path, tmp_path / "out", fields=["cls=label"]).classes == {}
    assert [sample["cls"] for sample in samples_in(tmp_path / "out").values()] == [b"7", b"0", b"7"]
    with pytest.raises(RowError, match="7 is not a number of one of the 2 classes of `classes`"):
        pack(path, tmp_path / "other", fields=["cls=label"], classes=["a", "b"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_arrays_are_npy_of_their_type(tmp_path, kind):
    values = [[0.5, 1.5], [2.0, 3.0], [4.0, 5.0]]
    column = values if kind == "jsonl" else pa.array(values, pa.list_(pa.float32(), 2))
    nested = [[[1, 2], [3, 4]]] * 3
    path = write_table(tmp_path, kind, {**COLUMNS, "embedding": column, "grid": nested})
    pack(path, tmp_path / "out", fields={"npy": "embedding", "grid.npy": "grid"})
    sample = samples_in(tmp_path / "out")["images/0001"]
    found, grid = decode_field("npy", sample["npy"]), decode_field("npy", sample["grid.npy"])
    assert (found.tolist(), found.dtype) == (values[1], np.float64 if kind == "jsonl" else np.float32)
    assert (grid.tolist(), grid.dtype) == (nested[1], np.int64)
    assert ("embedding" in json.loads(sample["json"])) == (kind == "jsonl")


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_bytes_of_a_column_are_a_field(tmp_path, kind):
    masks = [image_bytes("PNG", number=number) for number in range(3)]
    path = write_table(tmp_path, kind, {**COLUMNS, "mask": [*masks[:2], None]})
    with pytest.raises(PackError, match=r"its column 'mask' holds bytes .*\n.*--field EXT=mask"):
        pack(path, tmp_path / "out")
    pack(path, tmp_path / "out", fields={"mask.png": "mask"})
    assert [sample.get("mask.png") for sample in samples_in(tmp_path / "out").values()] == [*masks[:2], None]


@pytest.mark.parametrize("kind", KINDS)
def test_other_fields_are_the_files_that_a_column_names(tmp_path, kind):
    folder = tmp_path / "t.hf" if kind == "hf" else tmp_path
    path = write_table(tmp_path, kind, {**COLUMNS, "sound": ["a.WAV", "b.wav", "a.WAV"]})
    (folder / "a.WAV").write_bytes(b"RIFF1")
    (folder / "b.wav").write_bytes(b"RIFF22")
    pack(path, tmp_path / "out", fields={"wav": "sound"})
    assert [sample["wav"] for sample in samples_in(tmp_path / "out").values()] == [b"RIFF1", b"RIFF22", b"RIFF1"]
    (folder / "b.wav").unlink()
    with pytest.raises(RowError, match=r"b.wav: No such file"):
        pack(path, tmp_path / "other", fields={"wav": "sound"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_is_not_there_is_an_error_with_those_that_are(tmp_path, kind):
    path = write_table(tmp_path, kind, COLUMNS)
    message = r"it has no column 'caption'; it has 'filepath', 'title', 'label'.*Correct --field"
    with pytest.raises((RowError, PackError), match=f"(?s){message}"):
        pack(path, tmp_path / "out", fields={"txt": "caption"})


@pytest.mark.parametrize(
    ("field", "values", "problem"),
    [
        ("npy", [[1, 2], [1, "x"], [1]], "its column 'x': it holds .*, not a list of numbers"),
        ("npy", [[1, 2], 7, [1]], "its column 'x': it holds 7, not a list of numbers"),
        ("npy", [[1, 2], [1, None], [1]], "its column 'x'"),
        ("npy", [[[1, 2]], [[1], [1, 2]], [[1]]], "its column 'x'"),
        ("txt", ["a", 7, "c"], "its column 'x': .*written from str"),
        ("index", [1, "b", 2], "its column 'x': .*written from int"),
        ("cls", [1, [2], 3], r"its column 'x': \[2\] is a list, but a label is one whole number or one name"),
    ],
)
def test_a_value_that_a_field_does_not_take_is_an_error_of_its_row(tmp_path, field, values, problem):
    path = write_table(tmp_path, "jsonl", {**COLUMNS, "x": values})
    with pytest.raises(RowError, match=rf"t.jsonl:2: {problem}"):
        pack(path, tmp_path / "out", fields={field: "x"})
    assert pack(path, tmp_path / "out", fields={field: "x"}, skip_bad=True).num_samples == 2


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_an_array_is_a_list_in_json_in_a_cell_of_text(tmp_path, kind):
    quote = '"' if kind == "csv" else ""
    cells = [f"{quote}{cell}{quote}" for cell in ("[0, 0.5]", "[[1, 2], [3, 4]]", "")]
    path = write_table(tmp_path, kind, {**COLUMNS, "x": cells})
    pack(path, tmp_path / "out", fields={"npy": "x"})
    arrays = [decode_field("npy", sample["npy"]) for sample in samples_in(tmp_path / "out").values() if "npy" in sample]
    assert [(array.tolist(), array.dtype.str) for array in arrays] == [([0, 0.5], "<f8"), ([[1, 2], [3, 4]], "<i8")]
    for cell in ("0 0.5", "[1, NaN]", "7", "[" * 100_000, "['1']"):
        path = write_table(tmp_path, kind, {**COLUMNS, "x": [f"{quote}{cell}{quote}"] * 3})
        with pytest.raises(RowError, match=r"its column 'x': it holds .*, not a list of numbers"):
            pack(path, tmp_path / "bad", fields={"npy": "x"})


@pytest.mark.parametrize(
    ("values", "problem"),
    [([[1.0], [None], [2.0]], "its numbers is null"), ([[[1], [2]], [[1], []], []], "row 1")],
)
def test_arrays_with_holes_are_errors_of_their_row(tmp_path, values, problem):
    path = write_table(tmp_path, "parquet", {**COLUMNS, "x": values})
    with pytest.raises(RowError, match=problem):
        pack(path, tmp_path / "out", fields={"npy": "x"})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (["caption"], "'caption' names no column. Write FIELD=COLUMN"),
        (["TXT=caption"], "field 'TXT': a field name has"),
        (["txt=a", "txt=b"], "'txt' appears twice"),
        (["jpg=a", "jpeg=b"], "'jpg' appears twice"),
        ({"json": "x"}, "'json' holds all columns already"),
    ],
)
def test_fields_that_cannot_be_are_refused(tmp_path, fields, problem):
    with pytest.raises(PackError, match=problem):
        parse_fields(fields)


def test_fields_may_be_one_text_with_commas():
    assert parse_fields("txt=caption, cls=label") == parse_fields(["txt=caption", "cls=label"])
    assert parse_fields({"txt": "a,b"}) == {"txt": "a,b"}


def test_fields_belong_to_tables(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 1})
    with pytest.raises(PackError, match=r"fields is for a table of text or .*, but this is an image folder"):
        pack(tmp_path / "photos", tmp_path / "out", fields={"txt": "x"})


def test_a_column_of_class_labels_keeps_its_names(tmp_path):
    said = {"info": {"features": {"kind": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}
    columns = {"kind": [1, None, 0], "other": [5, 6, 7], "key": ["a", "b", "c"]}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(said)})
    pq.write_table(table, tmp_path / "t.parquet")
    options = {"fields": {"cls": "kind"}, "allow_no_image": True}
    assert pack(tmp_path / "t.parquet", tmp_path / "out", **options).classes == {"cat": 0, "dog": 1}
    assert [sample.get("cls") for sample in samples_in(tmp_path / "out").values()] == [b"1", None, b"0"]
    with pytest.raises(PackError, match="classes: its column 'kind' already has class names"):
        pack(tmp_path / "t.parquet", tmp_path / "other", classes=["cat", "dog"], **options)


def test_parquet_files_have_their_classes_together_and_a_shuffle_changes_none(tmp_path):
    for name, labels in (("a", ["eel", "cat"]), ("b", ["dog", "eel"])):
        pq.write_table(pa.table({"l": labels, "key": [f"{name}{n}" for n in range(2)]}), tmp_path / f"{name}.parquet")
    for name, more in {"plain": {}, "shuffled": {"shuffle": 1}}.items():
        result = pack(tmp_path / "*.parquet", tmp_path / name, fields={"cls": "l"}, allow_no_image=True, **more)
        assert result.classes == {"cat": 0, "dog": 1, "eel": 2}
        found = {key: sample["cls"] for key, sample in samples_in(tmp_path / name).items()}
        assert found == {"a0": b"2", "a1": b"0", "b0": b"1", "b1": b"2"}


def test_texts_on_stdin_need_classes(tmp_path, monkeypatch):
    import io
    import sys

    rows = b'{"key": "a", "l": "dog"}\n{"key": "b", "l": "cat"}\n'
    options = {"from_": "table", "fields": {"cls": "l"}, "allow_no_image": True}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows)))
    with pytest.raises(RowError, match=r"'dog' is not a whole number. Name the classes: --classes FILE"):
        pack("-", tmp_path / "out", **options)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows)))
    pack("-", tmp_path / "out", classes=["cat", "dog"], restart=True, **options)
    assert [sample["cls"] for sample in samples_in(tmp_path / "out").values()] == [b"1", b"0"]


@pytest.mark.parametrize("values", [[2**53 + 1, 0.5], [-(2**53) - 1, 1e300], [2**63 + 1, -1]])
def test_whole_numbers_are_not_rounded_in_an_array(tmp_path, values):
    path = write_table(tmp_path, "jsonl", {**COLUMNS, "x": [values] * 3})
    with pytest.raises(RowError, match=r"its column 'x': -?[0-9]+ would be rounded"):
        pack(path, tmp_path / "out", fields={"npy": "x"})


@pytest.mark.parametrize("values", [[2**53 + 1, 5], [2**63, 1], [2**53, 0.5], [1e300, 1], [2**60, 0.5]])
def test_whole_numbers_that_are_exact_stay_in_an_array(tmp_path, values):
    path = write_table(tmp_path, "jsonl", {**COLUMNS, "x": [values] * 3})
    pack(path, tmp_path / "out", fields={"npy": "x"})
    assert decode_field("npy", samples_in(tmp_path / "out")["images/0000"]["npy"]).tolist() == values
