"""One rule for labels: the same values become the same labels in every kind of source."""

from __future__ import annotations

import csv
import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from disks import HastyDisk
from images import encoded, make_folder, photo
from shards import samples_in, write_shard

import wdskit
from wdskit import PackError, RowError, WdskitError
from wdskit.dataset.classes import read_classes
from wdskit.packing.labels import ClassNames, classes_of, find_class_names, label_number, read_label
from wdskit.shards.index import index_folder

PIXELS = encoded(photo(8, 8), "JPEG")
Outcome = tuple[list[bytes | None], tuple[str, ...] | None]

# Each kind of source stores values, which are packed as `cls`.


def _pack(source: Any, out: Path, **options: Any) -> None:
    wdskit.pack(source, out, allow_no_image=True, disk=HastyDisk(), **options)


def _rows(values: list[Any], column: str = "label") -> list[dict[str, Any]]:
    return [{"key": f"k{number}", column: value} for number, value in enumerate(values)]


def _csv(path: Path, values: list[Any], column: str = "label") -> Path:
    with path.open("w", newline="") as file:
        how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        writer = csv.DictWriter(file, ["key", column], **how)
        writer.writeheader()
        writer.writerows(_rows(values, column))
    return path


def _jsonl(path: Path, values: list[Any], column: str = "label") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(values, column)))
    return path


def _parquet(path: Path, values: list[Any], column: str = "label") -> Path:
    pq.write_table(pa.table({"key": [f"k{number}" for number in range(len(values))], column: values}), path)
    return path


def _saved(path: Path, values: list[Any], column: str = "label") -> Path:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (path / "dataset_info.json").write_text("{}")
    table = pa.table({"key": [f"k{number}" for number in range(len(values))], column: values})
    with pa.ipc.new_stream(path / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    return path


TABLES: dict[str, Callable[..., Path]] = {
    "t.csv": _csv, "t.tsv": _csv, "t.jsonl": _jsonl, "t.parquet": _parquet, "saved": _saved
}  # fmt: skip


def _table(name: str) -> Callable[..., None]:
    def pack(folder: Path, values: list[Any], classes: Any) -> None:
        path = TABLES[name](folder / name, values)
        _pack(path, folder / "out", fields=["cls=label"], classes=classes)

    return pack


def _implied(name: str) -> Callable[..., None]:
    """Pack a column called `cls`, which no option names."""

    def pack(folder: Path, values: list[Any], classes: Any) -> None:
        path = TABLES[name](folder / name, values, "cls")
        _pack(path, folder / "out", **({} if classes is None else {"fields": ["cls=cls"], "classes": classes}))

    return pack


def _stdin(folder: Path, values: list[Any], classes: Any) -> None:
    text = _jsonl(folder / "t.jsonl", values).read_bytes()
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(text))
    try:
        _pack("-", folder / "out", from_="table", fields=["cls=label"], classes=classes)
    finally:
        sys.stdin = before


def _members(values: list[Any]) -> dict[str, dict[str, bytes]]:
    return {f"k{number}": {"json": json.dumps({"label": value}).encode()} for number, value in enumerate(values)}


def _tar(folder: Path, values: list[Any], classes: Any) -> None:
    _pack(write_shard(folder / "in.tar", _members(values)), folder / "out", fields=["cls=label"], classes=classes)


def _zip(folder: Path, values: list[Any], classes: Any) -> None:
    with zipfile.ZipFile(folder / "in.zip", "w") as file:
        for key, fields in _members(values).items():
            file.writestr(f"{key}.json", fields["json"])
    _pack(folder / "in.zip", folder / "out", fields=["cls=label"], classes=classes)


def _own(values: list[Any]) -> dict[str, dict[str, bytes]]:
    texts = [None if value is None else str(value) for value in values]
    return {
        f"k{number}": {"txt": b"x", **({} if text is None else {"cls": text.encode()})}
        for number, text in enumerate(texts)
    }


def _own_tar(folder: Path, values: list[Any], classes: Any) -> None:
    _pack(write_shard(folder / "in.tar", _own(values)), folder / "out", classes=classes)


def _own_zip(folder: Path, values: list[Any], classes: Any) -> None:
    with zipfile.ZipFile(folder / "in.zip", "w") as file:
        for key, fields in _own(values).items():
            for field, data in fields.items():
                file.writestr(f"{key}.{field}", data)
    _pack(folder / "in.zip", folder / "out", classes=classes)


def _reshard(folder: Path, values: list[Any], classes: Any) -> None:
    shard = write_shard(folder / "in.tar", _members(values))
    wdskit.reshard(str(shard), folder / "out", fields=["cls=label"], classes=classes, disk=HastyDisk())


def _python(make: Callable[[Any], Any]) -> Callable[..., None]:
    def pack(folder: Path, values: list[Any], classes: Any) -> None:
        rows = [{"__key__": f"k{number}", "txt": "x", "cls": value} for number, value in enumerate(values)]
        _pack(make(rows), folder / "out", classes=classes)

    return pack


READ_TWICE = {**{name: _table(name) for name in TABLES}, **{f"{name}, cls": _implied(name) for name in TABLES}}
READ_ONCE = {
    "stdin": _stdin, "tar": _tar, "zip": _zip, "tar, cls": _own_tar, "zip, cls": _own_zip,
    "reshard": _reshard, "rows": _python(list), "generator": _python(iter),
}  # fmt: skip
KINDS = READ_TWICE | READ_ONCE
TEXT = {"t.csv", "t.tsv", "t.csv, cls", "t.tsv, cls", "tar, cls", "zip, cls"}
ARROW = {"t.parquet", "saved", "t.parquet, cls", "saved, cls"}


def outcome(kind: str, folder: Path, values: list[Any], classes: Any) -> Outcome:
    folder.mkdir()
    KINDS[kind](folder, values, classes)
    labels = {key: fields.get("cls") for key, fields in samples_in(folder / "out").items()}
    return [labels.get(f"k{number}") for number in range(len(values))], read_classes(folder / "out")


NUMBERED = [b"0", b"2", b"10"]
LISTED = ["1", "2", "3"]
ANIMALS = ["cat", "dog", "eel"]
TABLE: list[tuple[list[Any], Any, Any]] = [
    # Values, `classes`, and the labels or the error. Names that `classes` does not list are written to `classes.json`.
    ([0, 2, 10], None, NUMBERED),
    ([0.0, 2.0, 10.0], None, NUMBERED),
    (["0", "2", "10"], None, NUMBERED),
    (["0.0", "2.0", " 10 "], None, NUMBERED),
    ([0, None, 10], None, [b"0", None, b"10"]),
    ([-1, 0, -100], None, [b"-1", b"0", b"-100"]),
    (["dog", "cat", "dog"], None, [b"1", b"0", b"1"]),
    (["dog", None, "cat"], None, [b"1", None, b"0"]),
    (["dog", " ", "cat"], None, [b"1", None, b"0"]),
    (["0", "unknown", "10"], None, "unknown"),
    (["N/A", "2.0", "10.0"], None, "N/A"),
    ([1, 2.5, 3], None, "2.5"),
    (["1", "2.5", "3"], None, "2.5"),
    (["cat", "2.5", "dog"], None, "2.5|'cat' is not a whole number"),
    ([True, False, True], None, "True"),
    ([2**63, 1, 2], None, "9223372036854775808"),
    ([1e300, 1, 2], None, "is not a whole number"),
    ([[1], [2], [1, 2]], None, "label"),
    ([1, 2, 3], LISTED, [b"0", b"1", b"2"]),
    ([1.0, 2.0, 3.0], LISTED, [b"0", b"1", b"2"]),
    (["1", "2.0", "3"], LISTED, [b"0", b"1", b"2"]),
    ([-1, None, 3], LISTED, [b"-1", None, b"2"]),
    ([0, 1, 2], LISTED, "'0' is not one of the 3 classes"),
    (["0", "1", "2"], LISTED, "'0' is not one of the 3 classes"),
    (["eel", "cat", "dog"], ANIMALS, [b"2", b"0", b"1"]),
    ([2, 0, 1], ANIMALS, [b"2", b"0", b"1"]),
    (["2", "0.0", "1"], ANIMALS, [b"2", b"0", b"1"]),
    (["2", "cat", ""], ANIMALS, [b"2", b"0", None]),
    ([0, 3, 1], ANIMALS, "3 is not a number of one of the 3 classes"),
    ([0, -2, 1], ANIMALS, "-2 is not a number of one of the 3 classes"),
    (["cat", "god", "dog"], ANIMALS, "'god' is not one of the 3 classes"),
    ([0.5, 1.0, 0.5], ["0.5", "1"], [b"0", b"1", b"0"]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_values_are_the_same_labels_in_every_kind_of_source(tmp_path, kind):
    num_checked = 0
    for number, (values, classes, expected) in enumerate(TABLE):
        try:
            if kind in ARROW:
                pa.array(values)
        except (pa.ArrowException, OverflowError):  # an Arrow column has one type
            continue
        if kind in TEXT and any(
            isinstance(value, list | bool | float) and value in ([1], True, 1e300) for value in values
        ):
            continue  # the text of these values is a name
        names = classes or sorted({value for value in values if isinstance(value, str) and value.strip().isalpha()})
        if kind in READ_ONCE and names and not classes and isinstance(expected, list):
            expected = "Name the classes: --classes FILE"
        folder = tmp_path / str(number)
        if isinstance(expected, str):
            with pytest.raises(WdskitError, match=expected):
                outcome(kind, folder, values, classes)
            assert not (folder / "out" / "index.json").exists()
        else:
            assert outcome(kind, folder, values, classes) == (expected, tuple(names) or None), values
        num_checked += 1
    assert num_checked > 20


def test_a_mixture_shows_a_value_of_each_kind_with_its_row(tmp_path):
    path = _csv(tmp_path / "t.csv", ["3", "2.0", "unknown"])
    message = r"t.csv: its column 'label' has whole numbers, such as '3' \(.*t.csv:2\), and names, such as 'unknown' \("
    with pytest.raises(PackError, match=rf"{message}.*t.csv:4\)\.\n.*--classes FILE"):
        _pack(path, tmp_path / "out", fields=["cls=label"])
    with pytest.raises(PackError, match="whole numbers"):
        _pack(path, tmp_path / "out", fields=["cls=label"], skip_bad=True)
    _pack(path, tmp_path / "out", fields=["cls=label"], classes=["2", "3", "unknown"])
    assert [fields["cls"] for fields in samples_in(tmp_path / "out").values()] == [b"1", b"0", b"2"]
    path = _parquet(tmp_path / "t.parquet", ["3", "2.0", "unknown"])
    with pytest.raises(PackError, match=r"'3' \(.*t.parquet, row 0\), and names, such as 'unknown' \(.*, row 2\)"):
        _pack(path, tmp_path / "other", fields=["cls=label"])


def test_values_that_are_no_labels_are_errors_of_their_row_and_can_be_left_out(tmp_path):
    for number, (values, problem) in enumerate(
        [
            ([1, "\ud800", 2], "half of a surrogate pair"),
            ([1, [2], 2], "is a list"),
            ([1, {"a": 2}, 2], "is a dict"),
            ([1, True, 2], "True is a bool"),
            ([1, 2.5, 2], "2.5 is not a whole number"),
        ]
    ):
        path = _jsonl(tmp_path / "t.jsonl", values, "cls")
        with pytest.raises(RowError, match=rf"t.jsonl:2: .*({problem}|surrogates not allowed)"):
            _pack(path, tmp_path / f"bad{number}")
        _pack(path, tmp_path / f"out{number}", skip_bad=True)
        assert [fields["cls"] for fields in samples_in(tmp_path / f"out{number}").values()] == [b"1", b"2"]


def test_a_column_of_bytes_or_lists_is_not_taken_for_labels(tmp_path):
    for number, values in enumerate([[b"cat", b"dog"], [[1], [0, 1]], [{"a": 1}, {"a": 2}]]):
        for column in ("cls", "label"):
            path = _parquet(tmp_path / f"{number}.parquet", values, column)
            with pytest.raises(PackError, match=rf"its column '{column}' has the type .*, which is not a label"):
                _pack(path, tmp_path / "out", **({"fields": ["cls=label"]} if column == "label" else {}))
        _pack(_parquet(tmp_path / f"{number}.parquet", values, "cls"), tmp_path / f"out{number}", omit=["cls"])
        assert all(fields.keys() == {"json"} for fields in samples_in(tmp_path / f"out{number}").values())
    with pytest.raises(RowError, match="its field 'cls': 'cat' is not a whole number"):
        _pack([{"__key__": "a", "cls": b"cat"}], tmp_path / "rows")


def test_bytes_of_a_field_that_is_read_as_text_or_a_number_are_such(tmp_path):
    path = _parquet(tmp_path / "t.parquet", [b"good", b"\xff\xfe"], "x")
    for field, problem in (("txt", "row 1: .*can't decode"), ("index", "row 0: .*not an integer"), ("npy", "row 0")):
        with pytest.raises(RowError, match=problem):
            _pack(path, tmp_path / "out", fields={field: "x"})


def test_labels_of_numpy_are_those_of_python():
    for value in (np.int64(3), np.uint8(3), np.float32(3), np.float64(3.0), 3, 3.0, "3", "3.0", " +3 ", "03"):
        assert read_label(value) == 3
        assert isinstance(read_label(value), int)
    assert [read_label(value) for value in (None, "", " \t", float("nan"), np.float32("nan"))] == [None] * 5
    assert [read_label(value) for value in ("n01440764", "1e3", "\u0663", "1_000", "+-1", "nan")] == [
        "n01440764", "1e3", "\u0663", "1_000", "+-1", "nan"
    ]  # fmt: skip
    for value in (True, np.True_, b"1", [1], {"a": 1}, (1,), 1j, "\udcff"):
        with pytest.raises(ValueError, match=r"label|surrogate"):
            read_label(value)
    assert read_label(2.0**53) == 2**53
    for value in (2.0**53 + 2, 2.5, float("inf"), "9007199254740994.0"):
        with pytest.raises(ValueError, match="is not a whole number"):
            label_number(value, None)


def test_names_that_mean_one_label_are_refused(tmp_path):
    for names in (["1", "1.0"], ["cat", "cat"], ["7", "07", "x"]):
        with pytest.raises(PackError, match="appears twice"):
            find_class_names(names)
    for names in (["a", " "], ["a", "\ud800"]):
        with pytest.raises(PackError, match=r"has no name|surrogate"):
            find_class_names(names)
    assert classes_of([("b", "1"), ("a", "2"), ("b", "3"), (None, "4")], "x") == ClassNames(
        ("a", "b"), "the column 'x'"
    )


def test_class_labels_of_a_saved_data_set_are_numbers_whatever_their_names(tmp_path):
    """MNIST's classes are called 0 to 9."""
    said = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["5", "7", "0"]}}}}
    table = pa.table({"label": [0, 2, None, -1], "key": list("abcd")})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(said)}), tmp_path / "t.parquet")
    _pack(tmp_path / "t.parquet", tmp_path / "out")
    assert [fields.get("cls") for fields in samples_in(tmp_path / "out").values()] == [b"0", b"2", None, b"-1"]
    assert read_classes(tmp_path / "out") == ("5", "7", "0")


# COCO and folders, which have names.


def test_folders_of_numbers_are_names_as_torchvision_has_them_and_a_message_says_so(tmp_path, caplog):
    folder = make_folder(tmp_path / "digits", {"0": 1, "2": 1, "10": 1})
    _ = wdskit.pack(folder, tmp_path / "out", disk=HastyDisk())
    assert read_classes(tmp_path / "out") == ("0", "10", "2")
    assert "the folder '10' is class 1, because class folders are numbered in sorted order" in caplog.text
    caplog.clear()
    wdskit.pack(folder, tmp_path / "listed", classes=["0", "1", "2", *map(str, range(3, 11))], disk=HastyDisk())
    assert [fields["cls"] for fields in samples_in(tmp_path / "listed").values()] == [b"0", b"10", b"2"]
    wdskit.pack(make_folder(tmp_path / "few", {"0": 1, "1": 1}), tmp_path / "few-out", disk=HastyDisk())
    assert not caplog.text


@pytest.mark.parametrize("name", [None, "", " ", 7, "\ud800"])
def test_a_category_without_a_name_is_not_a_class(tmp_path, name):
    make_folder(tmp_path, {"images": 1})
    category = {"id": 3} if name is None else {"id": 3, "name": name}
    found = {
        "images": [{"id": 1, "file_name": "images/0000.jpg"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 3}],
        "categories": [category],
    }
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(PackError, match=r"a.json: the category with the id 3 has the name .*\n  Give each category"):
        wdskit.pack(tmp_path / "a.json", tmp_path / "out", fields=["cls=category"])


# Labels of existing shards.


def test_labels_made_of_json_do_not_inherit_the_names_of_other_labels(tmp_path):
    rows = [{"__key__": f"k{n}", "cls": n % 2, "json": {"num": 9, "kind": "b"}} for n in range(2)]
    _pack(rows, tmp_path / "in", classes=["cat", "dog"])
    assert read_classes(tmp_path / "in") == ("cat", "dog")
    found = wdskit.reshard(tmp_path / "in", tmp_path / "a", drop="cls", fields=["cls=num"])
    assert "cls is made of 'num'" in found.classes_lost
    assert read_classes(tmp_path / "a") is None
    with pytest.raises(RowError, match="9 is not a number of one of the 2 classes"):
        wdskit.reshard(str(tmp_path / "in"), tmp_path / "b", drop="cls", fields=["cls=num"], classes=tmp_path / "in")
    found = wdskit.reshard(str(tmp_path / "in"), tmp_path / "c", drop="cls", rename="json=x.json")
    assert not found.classes_lost
    rows = [{"__key__": "k", "id": 1, "cls": 0}]
    _pack(rows, tmp_path / "ids", classes=["cat"])
    found = wdskit.reshard(str(tmp_path / "ids"), tmp_path / "d", rename="cls=old.cls,id=cls")
    assert "cls is made of 'id'" in found.classes_lost
    assert read_classes(tmp_path / "d") is None


def test_a_label_that_was_a_text_is_made_again(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_shard(folder / "a.tar", {"k": {"cls": b"cat", "json": b'{"cls":3,"class":5}'}})
    index_folder(folder, workers=1)
    wdskit.reshard([folder / "a.tar"], tmp_path / "out", drop="cls", fields=["cls=class"])
    assert samples_in(tmp_path / "out") == {"k": {"cls": b"5", "json": b'{"cls":3,"class":5}'}}


def test_classes_of_a_reshard_that_makes_no_labels_are_refused_and_can_be_applied(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 1, "dog": 1})
    wdskit.pack(tmp_path / "photos", tmp_path / "in")
    with pytest.raises(PackError, match=r"classes: nothing becomes `cls`.*\n.*--drop cls --field cls=class"):
        wdskit.reshard(str(tmp_path / "in"), tmp_path / "out", classes=["dog", "cat"])
    options: Any = {"drop": "cls", "fields": ["cls=class"], "classes": ["dog", "bird", "cat"]}
    wdskit.reshard(str(tmp_path / "in"), tmp_path / "out", **options)
    samples = samples_in(tmp_path / "out")
    assert {key: fields["cls"] for key, fields in samples.items()} == {"cat/0000": b"2", "dog/0000": b"0"}
    assert samples["cat/0000"]["json"] == b'{"cls":2,"class":"cat","path":"cat/0000.jpg"}'
    assert read_classes(tmp_path / "out") == ("dog", "bird", "cat")


def test_unlabelled_samples_are_added_to_labelled_ones_and_labels_without_names_are_not(tmp_path):
    first = [{"__key__": "a", "txt": "x", "cls": "cat"}]
    unlabelled = [{"__key__": "b", "txt": "x"}]
    labelled = [{"__key__": "c", "txt": "x"}, {"__key__": "d", "txt": "x", "cls": 0}]
    for number, make in enumerate((list, iter)):
        out = tmp_path / f"out{number}"
        _pack(make(first), out, classes=["cat", "dog"], pattern="p-%d.tar")
        _pack(make(unlabelled), out, append=True, pattern="p-%d.tar")
        with pytest.raises((PackError, RowError), match=rf"(?s)names.*--classes {out}|label.*--classes {out}"):
            _pack(make(labelled), out, append=True, pattern="p-%d.tar")
        _pack(make(labelled), out, append=True, restart=True, classes=out, pattern="p-%d.tar")
        found = {key: fields.get("cls") for key, fields in samples_in(out).items()}
        assert found == {"a": b"0", "b": None, "c": None, "d": b"0"}
        assert read_classes(out) == ("cat", "dog")
    shards = [
        write_shard(tmp_path / f"{key}.tar", {key: {"txt": b"x", **more}})
        for key, more in (("e", {}), ("f", {"cls": b"1"}))
    ]
    wdskit.reshard(str(shards[0]), out, append=True, pattern="p-%d.tar", disk=HastyDisk())
    with pytest.raises(PackError, match="the labels that you add have no names"):
        wdskit.reshard(str(shards[1]), out, append=True, pattern="p-%d.tar", disk=HastyDisk())
    _pack([{"__key__": "a", "cls": 1}], tmp_path / "numbers", pattern="p-%d.tar")
    with pytest.raises(PackError, match="its labels have no names, but those that you add do"):
        _pack([{"__key__": "b", "cls": "cat"}], tmp_path / "numbers", append=True, classes=["cat"], pattern="p-%d.tar")


def test_other_classes_are_shown_by_their_names(tmp_path):
    path = _csv(tmp_path / "t.csv", ["cat", "dog"])
    _pack(path, tmp_path / "out", fields=["cls=label"])
    with pytest.raises(PackError, match=r"classes was None and is 'dog, cat \(2 classes, sha256 [0-9a-f]{16}\)'"):
        _pack(path, tmp_path / "out", fields=["cls=label"], classes=["dog", "cat"])


def test_text_that_is_not_utf8_is_an_error_of_its_row_and_no_class(tmp_path):
    path = _jsonl(tmp_path / "t.jsonl", ["cat", "\ud800", "dog"])
    _pack(path, tmp_path / "out", fields=["cls=label"], skip_bad=True)
    assert read_classes(tmp_path / "out") == ("cat", "dog")
    assert samples_in(tmp_path / "out").keys() == {"k0", "k2"}


def test_the_labels_are_all_numbers_of_64_bits():
    for label in (-(2**63), 2**63 - 1):
        assert label_number(label, None) == label
    for label in (-(2**63) - 1, 2**63):
        with pytest.raises(ValueError, match="is not a whole number of 64 bits"):
            label_number(label, None)


@pytest.mark.parametrize("good", [b"3", b" -1\n"])
def test_a_file_that_becomes_cls_holds_a_whole_number(tmp_path, good):
    """What `pack` writes, `verify` passes: sidecars and files of rows from Python, too."""
    photos = make_folder(tmp_path / "photos", {"": 2})
    images = sorted(photos.rglob("*.jpg"))
    for image, data in zip(images, (good, b"cat"), strict=True):
        image.with_suffix(".cls").write_bytes(data)
    rows = [{"__key__": image.stem, "jpg": image, "cls": image.with_suffix(".cls")} for image in images]
    for number, (source, options) in enumerate([(photos, {"sidecars": "cls"}), (rows, {})]):
        out = tmp_path / f"out{number}"
        with pytest.raises(RowError, match=r"cls: not an integer in decimal digits: b'cat'"):
            wdskit.pack(source, out, disk=HastyDisk(), **options)
        wdskit.pack(source, out, disk=HastyDisk(), skip_bad=True, **options)
        assert wdskit.verify(str(out)).is_clean
        assert wdskit.info(str(out)).num_samples == 1


def test_a_reshard_checks_labels_that_it_makes_or_is_asked_to_check(tmp_path):
    """Labels of finished shards are copied, whatever they are."""
    source = write_shard(tmp_path / "a.tar", {f"k{n}": {"cls": b"cat", "txt": b"dog", "jpg": PIXELS} for n in range(3)})
    wdskit.reshard(source, tmp_path / "copied")
    wdskit.reshard(source, tmp_path / "resized", resize=8)
    for options in ({"validate": "magic"}, {"drop": "cls", "rename": "txt=cls"}):
        with pytest.raises(RowError, match=r"cls: not an integer in decimal digits: b'(cat|dog)'"):
            wdskit.reshard(source, tmp_path / "out", **options)
