"""One rule makes labels from the values of every source.

A value is a whole number or a name, and a column holds one of both. Names are numbered once, in sorted order of their
UTF-8 bytes. `2.5`, `true`, lists and the text `2.0` are errors of their row; `01440764` is a name; a missing value, NaN
or empty text is no label. `classes` looks every value up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats import files_in, jpeg, make_photos, read_classes, read_folder, read_rejected, write_files, write_tar
from writing import pack

from wdskit import WdskitError, verify

Values = list[Any]
LABEL = {"fields": {"cls": "label"}}

# Each kind of source: write the values, return source and options, and the text that names row n in a message.


def _table(name: str) -> Callable[[Path, Values], tuple[Any, dict[str, Any]]]:
    def write(folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
        between = "\t" if ".tsv" in name else ","
        lines = [f"key{between}label", *(f"k{n}{between}{value}" for n, value in enumerate(values))]
        write_files(folder, {name: "\n".join(lines)})
        return folder / name, LABEL

    return write


def _jsonl(folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
    write_files(
        folder, {"t.jsonl": "".join(json.dumps({"key": f"k{n}", "label": v}) + "\n" for n, v in enumerate(values))}
    )
    return folder / "t.jsonl", LABEL


def _parquet(folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"key": [f"k{n}" for n in range(len(values))], "label": values}), folder / "t.parquet")
    return folder / "t.parquet", LABEL


def _rows(kind: Callable[[list[Any]], Any]) -> Callable[[Path, Values], tuple[Any, dict[str, Any]]]:
    def write(folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
        return kind([{"__key__": f"k{n}", "txt": "x", "cls": value} for n, value in enumerate(values)]), {}

    return write


def _tar(folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
    samples = {f"k{n}": {"cls": value.encode(), "txt": b"x"} for n, value in enumerate(values)}
    return write_tar(folder / "in.tar", samples), {}


def _tar_json(folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
    samples = {f"k{n}": {"json": json.dumps({"label": value}).encode()} for n, value in enumerate(values)}
    return write_tar(folder / "in.tar", samples), LABEL


def _sidecar(folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
    files = {f"in/k{n}.{name}": data for n, v in enumerate(values) for name, data in (("jpg", jpeg(n)), ("cls", v))}
    return write_files(folder, files) / "in", {"sidecars": "cls"}


KINDS: dict[str, tuple[Callable[[Path, Values], tuple[Any, dict[str, Any]]], str]] = {
    "csv": (_table("t.csv"), r"t\.csv:{line}"),
    "tsv": (_table("t.tsv"), r"t\.tsv:{line}"),
    "tar": (_tar, r"in\.tar.*k{n}"),
    "sidecar": (_sidecar, r"k{n}"),
    "jsonl": (_jsonl, r"t\.jsonl:{number}"),
    "parquet": (_parquet, r"t\.parquet, row {n}"),
    "tar json": (_tar_json, r"in\.tar.*k{n}"),
    "rows": (_rows(list), r"row {n}"),
    "generator": (_rows(iter), r"row {n}"),
}
OF_TEXT = ("csv", "tsv", "tar", "sidecar")

NONE = None
CASES: dict[str, tuple[Values, Any, Any, list[str] | None]] = {
    # Name: values, `classes`, labels or the number of the bad row, names in classes.json.
    "numbers": ([0, 2, 10], None, [0, 2, 10], None),
    "numbers as text": (["0", "2", "10"], None, [0, 2, 10], None),
    "negative numbers": ([-1, 0, -100], None, [-1, 0, -100], None),
    "64 bits": ([2**63 - 1, -(2**63)], None, [2**63 - 1, -(2**63)], None),
    "whole floats": ([0.0, 2.0, 10.0], None, [0, 2, 10], None),
    "missing numbers": ([0, None, 10], None, [0, NONE, 10], None),
    "missing floats": ([2.0, math.nan, 1.0], None, [2, NONE, 1], None),
    "empty text beside numbers": (["3", "", "1"], None, [3, NONE, 1], None),
    "names": (["dog", "cat", "dog"], None, [1, 0, 1], ["cat", "dog"]),
    "missing names": (["dog", None, "cat"], None, [1, NONE, 0], ["cat", "dog"]),
    "empty names": (["dog", "", "cat"], None, [1, NONE, 0], ["cat", "dog"]),
    "order of UTF-8": (["é", "z", "Z", "\U00010330", "\uff41"], None, [2, 1, 0, 4, 3],
                       ["Z", "z", "é", "\uff41", "\U00010330"]),
    "leading zeros are names": (["01443537", "01440764"], None, [1, 0], ["01440764", "01443537"]),
    "names that look like numbers": (["1e3", "n0", "\u0663"], None, [0, 1, 2], ["1e3", "n0", "\u0663"]),
    "names beside numbers": (["0", "unknown", "10"], None, "unknown", None),
    "leading zeros beside numbers": (["5", "01440764"], None, "01440764", None),
    "text of a float": (["1", "2.0"], None, 1, None),
    "text of a float beside names": (["cat", "2.5"], None, "2.5", None),
    "fraction": ([1.0, 2.5, 3.0], None, 1, None),
    "fraction as text": (["1", "2.5", "3"], None, 1, None),
    "bool": ([True, False], None, 0, None),
    "list": ([[1], [2]], None, "label", None),
    "65 bits": ([1, 2**64], None, 1, None),
    "listed names": (["eel", "cat", "dog"], ["cat", "dog", "eel"], [2, 0, 1], ["cat", "dog", "eel"]),
    "listed in another order": (["eel", "cat"], ["eel", "dog", "cat"], [0, 2], ["eel", "dog", "cat"]),
    "listed names, one is missing": (["eel", None, "cat"], ["eel", "cat"], [0, NONE, 1], ["eel", "cat"]),
    "listed numbers": ([1, 2, 3], ["1", "2", "3"], [0, 1, 2], ["1", "2", "3"]),
    "listed numbers as text": (["3", "1"], ["1", "2", "3"], [2, 0], ["1", "2", "3"]),
    "listed leading zeros": (["007", "7"], ["7", "007"], [1, 0], ["7", "007"]),
    "name that is not listed": (["cat", "god"], ["cat", "dog"], 1, None),
    "number that is not listed": (["1", "0"], ["1", "2", "3"], 1, None),
    "number beyond the names": (["0", "3"], ["cat", "dog", "eel"], 1, None),
}  # fmt: skip


def _can_hold(kind: str, values: Values) -> bool:
    """Whether a source of this kind can hold these values as they are meant."""
    if kind in OF_TEXT:
        return all(isinstance(value, str) and (value or kind not in {"tar", "sidecar"}) for value in values)
    if kind == "parquet":  # a column has one type
        try:
            return pa.array(values) is not None
        except (pa.ArrowException, OverflowError):
            return False
    return kind != "jsonl" or not any(isinstance(value, float) and math.isnan(value) for value in values)


def write(kind: str, folder: Path, values: Values) -> tuple[Any, dict[str, Any]]:
    return KINDS[kind][0](folder / "source", values)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind}: {case}")
        for kind in KINDS
        for case, (values, *_) in CASES.items()
        if _can_hold(kind, [str(v) for v in values] if kind in OF_TEXT and {*map(type, values)} == {int} else values)
    ],
)
def test_same_values_are_the_same_labels_in_every_source(tmp_path: Path, kind: str, case: str) -> None:
    values, classes, expected, names = CASES[case]
    if kind in OF_TEXT:
        values = [str(value) for value in values]
    source, options = write(kind, tmp_path, values)
    if isinstance(expected, list):
        pack(source, tmp_path / "d", classes=classes, **options)
        found = {key: fields.get("cls") for key, fields in read_folder(tmp_path / "d").items()}
        assert found == {f"k{n}": None if v is None else b"%d" % v for n, v in enumerate(expected)}
        assert read_classes(tmp_path / "d") == (None if names is None else {name: n for n, name in enumerate(names)})
        assert verify(tmp_path / "d").is_clean
        return
    where = expected
    if isinstance(expected, int):
        where = KINDS[kind][1].format(n=expected, number=expected + 1, line=expected + 2)
    with pytest.raises(WdskitError, match=where):
        pack(source, tmp_path / "d", classes=classes, **options)
    assert not (tmp_path / "d" / "index.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_bad_label_can_be_left_out_and_is_listed(tmp_path: Path, kind: str) -> None:
    source, options = write(kind, tmp_path, ["1", "2.5", "3"])
    pack(source, tmp_path / "d", skip_bad=True, **options)
    assert [fields["cls"] for fields in read_folder(tmp_path / "d").values()] == [b"1", b"3"]
    [rejected] = read_rejected(tmp_path / "d")
    assert "2.5" in json.dumps(rejected)


def test_empty_member_and_sidecar_are_no_label(tmp_path: Path) -> None:
    for kind in ("tar", "sidecar"):
        source, options = write(kind, tmp_path / kind, ["1", "", "3"])
        pack(source, tmp_path / kind / "d", **options)
        found = [fields.get("cls") for fields in read_folder(tmp_path / kind / "d").values()]
        assert found == [b"1", None, b"3"]


def test_mixture_shows_a_value_of_each_kind(tmp_path: Path) -> None:
    for kind in ("csv", "jsonl", "parquet", "rows", "tar"):
        source, options = write(kind, tmp_path / kind, ["3", "2", "unknown"])
        with pytest.raises(WdskitError, match=r"(?s)'?3'?.*'?unknown'?|'?unknown'?.*'?3'?"):
            pack(source, tmp_path / kind / "d", **options)
        pack(source, tmp_path / kind / "d", classes=["2", "3", "unknown"], **options)
        assert [fields["cls"] for fields in read_folder(tmp_path / kind / "d").values()] == [b"1", b"0", b"2"]


# Folders, whose classes are the names of sub-folders.


def test_class_folders_are_numbered_in_sorted_order_also_if_their_names_are_numbers(tmp_path: Path) -> None:
    make_photos(tmp_path / "in", {"10": 1, "9": 1, "ä": 1, "Z": 1})
    pack(tmp_path / "in", tmp_path / "d")
    assert read_classes(tmp_path / "d") == {"10": 0, "9": 1, "Z": 2, "ä": 3}
    labels = {key: fields["cls"] for key, fields in read_folder(tmp_path / "d").items()}
    assert labels == {"10/0000": b"0", "9/0000": b"1", "Z/0000": b"2", "ä/0000": b"3"}


@pytest.mark.parametrize("name", ["__MACOSX", "@eaDir", "lost+found", ".cache"])
def test_folder_of_a_system_is_no_class_and_shifts_no_label(tmp_path: Path, name: str) -> None:
    make_photos(tmp_path / "in", {"zebra": 1, "cat": 1})
    write_files(tmp_path / "in", {f"{name}/._0000.jpg": "resource fork"})
    pack(tmp_path / "in", tmp_path / "d")
    assert read_classes(tmp_path / "d") == {"cat": 0, "zebra": 1}


def test_folder_that_holds_no_image_is_no_class_and_is_named(tmp_path: Path) -> None:
    make_photos(tmp_path / "in", {"zebra": 1, "cat": 1})
    write_files(tmp_path / "in", {"Logs/run.log": "text"})
    assert "folder Logs is no class" in pack(tmp_path / "in", tmp_path / "d").notes[0]
    assert read_classes(tmp_path / "d") == {"cat": 0, "zebra": 1}


def test_empty_class_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_photos(tmp_path / "in", {"zebra": 1, "cat": 1})
    (tmp_path / "in" / "bird").mkdir()
    with pytest.raises(WdskitError, match="bird"):
        pack(tmp_path / "in", tmp_path / "d")


@pytest.mark.parametrize(
    "classes",
    [
        {"train": 2, "val": 1},
        {"train": 2, "val": 1, "extra": 1},
        {"seg_train": 1, "seg_test": 1},
        {"train/cat": 1, "train/dog": 1, "val/cat": 1},
    ],
    ids=str,
)
def test_splits_are_not_taken_for_classes(tmp_path: Path, classes: dict[str, int]) -> None:
    make_photos(tmp_path / "in", classes)
    with pytest.raises(WdskitError, match="train"):
        pack(tmp_path / "in", tmp_path / "d")


def test_classes_two_levels_deep_are_named_with_an_example(tmp_path: Path) -> None:
    make_photos(tmp_path / "in", {"animal/cat": 1, "animal/dog": 1, "plant/oak": 1})
    with pytest.raises(WdskitError, match=r"animal/cat|animal/dog|plant/oak"):
        pack(tmp_path / "in", tmp_path / "d")


def test_folder_with_classes_gives_val_the_numbers_of_train(tmp_path: Path) -> None:
    pack(make_photos(tmp_path / "train", {"bird": 1, "cat": 1, "dog": 1}), tmp_path / "t")
    make_photos(tmp_path / "val", {"dog": 1, "cat": 1})
    for number, classes in enumerate((tmp_path / "t", tmp_path / "t" / "classes.json", ["bird", "cat", "dog"])):
        pack(tmp_path / "val", tmp_path / f"v{number}", classes=classes)
        assert [fields["cls"] for fields in read_folder(tmp_path / f"v{number}").values()] == [b"1", b"2"]
        assert read_classes(tmp_path / f"v{number}") == {"bird": 0, "cat": 1, "dog": 2}
    for wrong, match in (("t", "eel"), ("train", r"train/classes\.json: cannot be opened")):
        with pytest.raises(WdskitError, match=match):
            pack(make_photos(tmp_path / "val", {"eel": 1}), tmp_path / "bad", classes=tmp_path / wrong)


# Labels of data sets that grow.


def named(*names: str | int | None, start: int = 0) -> list[dict[str, Any]]:
    return [{"__key__": f"k{start + n}", "txt": "x", "cls": name} for n, name in enumerate(names)]


def test_append_looks_names_up_in_classes_json_and_keeps_it(tmp_path: Path) -> None:
    pack(named("dog", "ant", "cat"), tmp_path / "d", classes=["cat", "dog", "ant"])
    pack(named("cat", None, "ant", start=3), tmp_path / "d", append=True)
    labels = [fields.get("cls") for fields in read_folder(tmp_path / "d").values()]
    assert labels == [b"1", b"2", b"0", b"0", None, b"2"]
    assert read_classes(tmp_path / "d") == {"cat": 0, "dog": 1, "ant": 2}
    pack(named(None), tmp_path / "e")
    assert [pack(named("dog", start=3), tmp_path / "e", append=True).was_done for _ in range(2)] == [False, True]


def test_append_refuses_names_to_numbers_new_names_and_other_classes(tmp_path: Path) -> None:
    pack(named(1, 0), tmp_path / "numbers")
    with pytest.raises(WdskitError, match="names"):
        pack(named("cat", start=3), tmp_path / "numbers", append=True, classes=["cat"])
    pack(named("cat"), tmp_path / "d", classes=["cat", "dog"])
    pack(named(None), tmp_path / "without")
    (tmp_path / "without/classes.json").write_text('["cat", "dog"]')
    for folder in (tmp_path / "d", tmp_path / "without"):
        before = files_in(folder)
        with pytest.raises(WdskitError, match=r"classes|dog"):
            pack(named("cat", start=3), folder, append=True, classes=["dog", "cat"])
        for classes, told in ((folder, "eel"), (5, "classes: it is not a list of class names")):
            with pytest.raises(WdskitError, match=told):
                pack(named("cat", "eel", start=3), folder, append=True, classes=classes)
        assert files_in(folder) == before
