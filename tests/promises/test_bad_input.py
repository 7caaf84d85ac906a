"""A bad row is an error that begins with its file and line; with `skip_bad` rejected.jsonl lists it.

What a loader cannot decode is bad for `pack` and `verify`, too. No input ends in a traceback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats import files_in, jpeg, png, read_folder, read_rejected, tar_bytes, write_files, write_tar
from writing import pack, reshard

from wdskit import WdskitError, verify

CUT_JPEG = jpeg(1)[:400]
CUT_PNG = png(1)[:60]
NPY = b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }            \n"
CUT_NPY = NPY + bytes(9)

Written = tuple[Any, dict[str, Any]]


def _table(name: str, bad: str | bytes, **options: Any) -> Callable[[Path], Written]:
    """A table of three rows; the second is bad. Columns: key, image, v."""

    def write(folder: Path) -> Written:
        if name.endswith("jsonl"):
            good = [json.dumps({"key": f"k{n}", "image": f"{n}.jpg", "v": [n]}) for n in (0, 2)]
            lines = [good[0], bad, good[1]]
        else:
            between = "\t" if name.endswith("tsv") else ","
            lines = [between.join(cells) for cells in (("key", "image", "v"), ("k0", "0.jpg", "[0]"))]
            lines += [bad, between.join(("k2", "2.jpg", "[2]"))]
        data = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
        write_files(folder, {"0.jpg": jpeg(0), "1.jpg": jpeg(1), "2.jpg": jpeg(2), "cut.jpg": CUT_JPEG, name: data})
        return folder / name, options

    return write


def _parquet(bad: dict[str, Any], kind: pa.DataType, **options: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        write_files(folder, {"0.jpg": jpeg(0), "1.jpg": jpeg(1), "2.jpg": jpeg(2)})
        is_path = pa.types.is_string(kind)
        images = [f"{n}.jpg" if is_path else jpeg(n) for n in range(3)]
        images[1] = bad.get("image", images[1])
        columns = {"key": ["k0", "k1", "k2"], "image": pa.array(images, kind), "v": ["a", bad.get("v", "b"), "c"]}
        pq.write_table(pa.table(columns), folder / "t.parquet")
        return folder / "t.parquet", options

    return write


def _folder(bad: dict[str, bytes], **options: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        sides: dict[str, bytes] = {}
        for name in options.get("sidecars", ()):
            good = {"json": b"{}", "txt": b"x", "npy": NPY + bytes(16), "seg.png": png(1)}[name]
            sides |= {f"in/k{n}.{name}": good for n in range(3)}
        write_files(folder, {f"in/k{n}.jpg": jpeg(n) for n in range(3)} | sides)
        write_files(folder / "in", bad)
        return folder / "in", options

    return write


def _tar(bad: dict[str, bytes], **options: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        samples = {f"k{n}": {"json": b'{"a":"1"}', "txt": b"x"} for n in range(3)}
        samples["k1"] |= bad
        return write_tar(folder / "in.tar", samples), options

    return write


def _rows(bad: Any) -> Callable[[Path], Written]:
    return lambda folder: ([{"__key__": "k0", "txt": "x"}, bad, {"__key__": "k2", "txt": "x"}], {})


def _coco(bad: dict[str, Any], annotation: dict[str, Any] | None = None) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        images = [{"id": n, "file_name": f"k{n}.jpg"} for n in range(3)]
        images[1] = {"id": 1, **bad}
        boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 3, 4]} for n in range(3)]
        boxes[1] |= annotation or {}
        found = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
        write_files(folder, {"k0.jpg": jpeg(0), "k1.jpg": jpeg(1), "k2.jpg": jpeg(2), "c.json": json.dumps(found)})
        return folder / "c.json", {}

    return write


ROW = r"row 1\b.*"
BAD: dict[str, tuple[Callable[[Path], Written], str]] = {
    # Name: a source of three rows, the second of which is bad; what the message says of the place.
    "csv, missing file": (_table("t.csv", "k1,none.jpg,1"), r"t\.csv:3: .*none\.jpg"),
    "csv, cut image": (_table("t.csv", "k1,cut.jpg,1"), r"t\.csv:3: .*cut\.jpg"),
    "csv, few cells": (_table("t.csv", "k1,1.jpg"), r"t\.csv:3: "),
    "csv, many cells": (_table("t.csv", "k1,1.jpg,1,2"), r"t\.csv:3: "),
    "csv, latin-1": (_table("t.csv", b"k1,1.jpg,\xe9"), r"t\.csv:3: "),
    "csv, npy of text": (_table("t.csv", "k1,1.jpg,x", fields={"npy": "v"}), r"t\.csv:3: "),
    "tsv, missing file": (_table("t.tsv", "k1\tnone.jpg\t1"), r"t\.tsv:3: .*none\.jpg"),
    "tsv, few cells": (_table("t.tsv", "k1\t1.jpg"), r"t\.tsv:3: "),
    "jsonl, no JSON": (_table("t.jsonl", '{"key": "k1", '), r"t\.jsonl:2: "),
    "jsonl, list": (_table("t.jsonl", "[1]"), r"t\.jsonl:2: "),
    "jsonl, text": (_table("t.jsonl", '"k1"'), r"t\.jsonl:2: "),
    "jsonl, latin-1": (_table("t.jsonl", b'{"key": "\xe9", "image": "1.jpg"}'), r"t\.jsonl:2: "),
    "jsonl, name twice": (_table("t.jsonl", '{"key":"k1","image":"1.jpg","image":"0.jpg"}'), r"t\.jsonl:2: "),
    "jsonl, number for a path": (_table("t.jsonl", '{"key": "k1", "image": 3}'), r"t\.jsonl:2: "),
    "jsonl, missing file": (_table("t.jsonl", '{"key": "k1", "image": "none.jpg"}'), r"t\.jsonl:2: .*none\.jpg"),
    "jsonl, key is a number": (_table("t.jsonl", '{"key": [1], "image": "1.jpg"}'), r"t\.jsonl:2: "),
    "jsonl, ragged npy": (_table("t.jsonl", '{"key":"k1","image":"1.jpg","v":[[1],[1,2]]}', fields={"npy": "v"}),
                          r"t\.jsonl:2: "),
    "jsonl, number for npy": (_table("t.jsonl", '{"key":"k1","image":"1.jpg","v":3}', fields={"x.npy": "v"}),
                              r"t\.jsonl:2: "),
    "parquet, missing file": (_parquet({"image": "none.jpg"}, pa.string()), r"t\.parquet, row 1: .*none\.jpg"),
    "parquet, cut image": (_parquet({"image": CUT_JPEG}, pa.binary()), r"t\.parquet, row 1: "),
    "parquet, no image": (_parquet({"image": b"text"}, pa.binary()), r"t\.parquet, row 1: "),
    "folder, cut image": (_folder({"k1.jpg": CUT_JPEG}), r"in/k1\.jpg: "),
    "folder, png called jpg": (_folder({"k1.jpg": png(1)}), r"in/k1\.jpg: "),
    "folder, empty image": (_folder({"k1.jpg": b""}), r"in/k1\.jpg: "),
    "sidecar, no JSON": (_folder({"k1.json": b"{"}, sidecars=["json"]), r".*in/k1\.json: "),
    "sidecar, cut mask": (_folder({"k1.seg.png": CUT_PNG}, sidecars=["seg.png"]), r".*in/k1\.seg\.png: "),
    "sidecar, no UTF-8": (_folder({"k1.txt": b"\xff\xfe"}, sidecars=["txt"]), r".*in/k1\.txt: "),
    "sidecar, cut npy": (_folder({"k1.npy": CUT_NPY}, sidecars=["npy"]), r".*in/k1\.npy: "),
    "tar, no JSON": (_tar({"json": b"{"}), r"in\.tar: k1: "),
    "tar, cut image": (_tar({"jpg": CUT_JPEG}), r"in\.tar: k1: "),
    "tar, no UTF-8": (_tar({"txt": b"\xff\xfe"}), r"in\.tar: k1: "),
    "tar, cut npy": (_tar({"npy": CUT_NPY}), r"in\.tar: k1: "),
    "tar, no number": (_tar({"id": b"not a number"}), r"in\.tar: k1: "),
    "tar, missing column": (_tar({"json": b"{}"}, fields={"x.txt": "a"}), r"in\.tar: k1: "),
    "coco, missing file": (_coco({"file_name": "none.jpg"}), r"c\.json.*none\.jpg"),
    "coco, no file name": (_coco({}), r"c\.json"),
    "coco, file name is a list": (_coco({"file_name": [1]}), r"c\.json"),
    **{f"rows, {name}": (_rows(bad), ROW) for name, bad in {
        "no key": {"txt": "x"}, "no field": {"__key__": "k1"}, "no dict": 5, "empty key": {"__key__": "", "txt": "x"},
        "key is a number": {"__key__": 3, "txt": "x"}, "number for txt": {"__key__": "k1", "txt": 3},
        "no image": {"__key__": "k1", "jpg": b"x"}, "object for json": {"__key__": "k1", "json": object()},
        "no JSON": {"__key__": "k1", "json": b"{"}, "cut npy": {"__key__": "k1", "npy": CUT_NPY},
        "no UTF-8": {"__key__": "k1", "txt": b"\xff"}, "no number": {"__key__": "k1", "id": b"x"},
        "missing file": {"__key__": "k1", "jpg": Path("none.jpg")}, "field name": {"__key__": "k1", "a/b": b"x"},
        "empty field name": {"__key__": "k1", "": b"x"}, "None": None,
        "key too long for its json": {"__key__": "a." + "b" * 94, "txt": "x"},
        "rounded number": {"__key__": "k1", "npy": [float("nan"), 2**60 + 1]},
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_row_is_an_error_that_begins_with_its_place(tmp_path: Path, name: str) -> None:
    """With `skip_bad` the other rows are packed, and rejected.jsonl has the place and the reason."""
    make, where = BAD[name]
    source, options = make(tmp_path)
    with pytest.raises(WdskitError) as caught:
        pack(source, tmp_path / "d", **options)
    place = where if name.startswith("rows") else f"{re.escape(str(tmp_path))}/{where}"
    assert re.match(f"({re.escape(str(tmp_path))}[^ ]*: )?{place}", str(caught.value)), caught.value
    assert not (tmp_path / "d" / "index.json").exists()

    pack(source, tmp_path / "d", skip_bad=True, **options)
    assert {*read_folder(tmp_path / "d")} == {"k0", "k2"}
    [rejected] = read_rejected(tmp_path / "d")
    assert rejected.keys() == {"where", "reason"}
    assert re.search(where, f"{rejected['where']}: {rejected['reason']}")
    assert verify(tmp_path / "d").is_clean


WHOLE: dict[str, tuple[dict[str, bytes | str], str, dict[str, Any], str]] = {
    # Name: files, source, options, words of the message.
    "no such source": ({}, "nothing", {}, "nothing"),
    "empty folder": ({"in/x.txt": "x"}, "in", {}, r"/in\b"),
    "empty csv": ({"t.csv": ""}, "t.csv", {}, r"t\.csv"),
    "csv of a header": ({"t.csv": "image,n\n"}, "t.csv", {}, r"t\.csv"),
    "csv without a header": ({"t.csv": "0.jpg,1\n2.jpg,2\n", "0.jpg": jpeg(0), "2.jpg": jpeg(2)}, "t.csv", {},
                             r"t\.csv.*header|t\.csv.*looks like data"),
    "csv with a column twice": ({"t.csv": "key,n,n\na,1,2\n"}, "t.csv", {}, r"t\.csv:1"),
    "csv with an open quote": ({"t.csv": 'key,n\na,"1\nb,2\n'}, "t.csv", {}, r"t\.csv:[23]"),
    "key twice": ({"t.jsonl": '{"key":"a"}\n{"key":"a"}\n'}, "t.jsonl", {}, r"t\.jsonl:2.*'a'.*t\.jsonl:1"),
    "no such column": ({"t.jsonl": '{"key":"a"}\n'}, "t.jsonl", {"fields": {"txt": "w"}}, r"t\.jsonl.*'w'"),
    "no parquet": ({"t.parquet": "text"}, "t.parquet", {}, r"t\.parquet"),
    "no tar": ({"t.tar": "text"}, "t.tar", {}, r"t\.tar"),
    "no coco": ({"c.json": '{"a": 1}'}, "c.json", {}, r"c\.json"),
    "dots in a tar": ({"t.tar": tar_bytes({"a": {"rf.0a.jpg": jpeg(0), "rf.ff.jpg": jpeg(1)}})}, "t.tar", {}, r"dot"),
    "tar of tars": ({"t.tar": tar_bytes({"a": {"tar": tar_bytes({"x": {"txt": b"x"}})}})}, "t.tar", {}, r"t\.tar.*a"),
    "split of one sample": ({"t.jsonl": '{"key":"a"}\n'}, "t.jsonl", {"split": "train=0.5,val=0.5"}, "train|val"),
    "more shards than samples": ({"t.jsonl": '{"key":"a"}\n'}, "t.jsonl", {"num_shards": 2}, "2"),
    "sample over the limit": ({"t.jsonl": f'{{"key":"a","x":"{"x" * 5000}"}}\n'}, "t.jsonl", {"max_bytes": 4096},
                              r"t\.jsonl:1.*(4096|4\.1|max.bytes)"),
    "no such sidecar": ({"in/a.jpg": jpeg(0)}, "in", {"sidecars": "json"}, "json"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_source_that_cannot_be_packed_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    """With `skip_bad`, too; no data set is made."""
    files, source, options, words = WHOLE[name]
    write_files(tmp_path, files)
    for skips in (False, True):
        with pytest.raises(WdskitError, match=words):
            pack(str(tmp_path / source), tmp_path / "d", **options, **({"skip_bad": True} if skips else {}))
        assert not (tmp_path / "d" / "index.json").exists()


ACCEPTED: dict[str, tuple[Callable[[Path], Written], list[str]]] = {
    # Name: an unusual source that is sound, and the keys of its samples.
    "csv with semicolons in quotes": (_table("t.csv", '"k1","1.jpg","a;b,c"'), ["k0", "k1", "k2"]),
    "csv with CRLF": (_table("t.csv", "k1,1.jpg,1\r"), ["k0", "k1", "k2"]),
    "csv with a cell of 200 kB": (_table("t.csv", f"k1,1.jpg,{'x' * 200_000}"), ["k0", "k1", "k2"]),
    "blank line": (_table("t.jsonl", ""), ["k0", "k2"]),
    "NaN is null": (_table("t.jsonl", '{"key": "k1", "image": "1.jpg", "v": NaN}'), ["k0", "k1", "k2"]),
    "coco, text for an id": (_coco({"id": "seq-1", "file_name": "k1.jpg"}, {"image_id": "seq-1"}), ["k0", "k1", "k2"]),
    "coco, address in place of a name": (_coco({"coco_url": "http://x.org/val/k1.jpg"}), ["k0", "k1", "k2"]),
    "coco, box of no image": (_coco({"file_name": "k1.jpg"}, {"image_id": 99}), ["k0", "k1", "k2"]),
    "coco, NaN as area": (_coco({"file_name": "k1.jpg"}, {"area": float("nan")}), ["k0", "k1", "k2"]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_source_that_is_sound_is_packed(tmp_path: Path, name: str) -> None:
    make, keys = ACCEPTED[name]
    source, options = make(tmp_path)
    pack(source, tmp_path / "d", **options)
    assert [*read_folder(tmp_path / "d")] == keys
    assert all(b"NaN" not in fields["json"] for fields in read_folder(tmp_path / "d").values())


def test_panoptic_coco_keeps_the_names_of_its_categories(tmp_path: Path) -> None:
    segments = [{"id": 1, "category_id": 3, "bbox": [0, 0, 5, 5], "area": 25, "iscrowd": 0}]
    found = {
        "images": [{"id": 0, "file_name": "k0.jpg"}],
        "annotations": [{"image_id": 0, "file_name": "k0.png", "segments_info": segments}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 3, "name": "dog"}],
    }
    write_files(tmp_path, {"k0.jpg": jpeg(0), "c.json": json.dumps(found)})
    pack(tmp_path / "c.json", tmp_path / "d")
    assert json.loads(read_folder(tmp_path / "d")["k0"]["json"])["categories"] == {"3": "dog"}


def test_reshard_refuses_equal_keys_with_other_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_tar(tmp_path / f"{name}.tar", {"000000": {"txt": name.encode()}})
    with pytest.raises(WdskitError, match="000000"):
        reshard([str(tmp_path / "first.tar"), str(tmp_path / "second.tar")], tmp_path / "d")


def test_index_does_not_replace_files_of_other_programs(tmp_path: Path) -> None:
    """An index.json or .idx that wdskit did not write is in the way."""
    from wdskit import index_folder

    files = {"index.json": '{"shards": []}', "a.tar.idx": "v1.2 1\n"}
    for name, data in files.items():
        folder = tmp_path / name
        write_tar(folder / "a.tar", {"k": {"txt": b"x"}})
        (folder / name).write_text(data)
        with pytest.raises(WdskitError, match=re.escape(name)):
            index_folder(folder, workers=1)
        assert (folder / name).read_text() == data


@pytest.mark.parametrize("name", ["run:1", "run\u202f1", "run\udcff"])
def test_a_folder_of_any_name_is_packed_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Only `word://` is a URL. An index has no name that cannot be printed."""
    monkeypatch.chdir(tmp_path)
    pack([{"__key__": "a", "txt": "x"}], Path(name))
    assert verify(name).is_clean
    reshard(name, Path("copy"))
    assert [*read_folder(tmp_path / "copy")] == ["a"]


# The command line.


@pytest.mark.parametrize("name", [name for name in BAD if not name.startswith("rows") and "coco, no" not in name][::3])
def test_command_prints_the_place_and_no_traceback(run: Any, tmp_path: Path, name: str) -> None:
    make, where = BAD[name]
    source, options = make(tmp_path)
    words = [f"--field={field}={column}" for field, column in options.get("fields", {}).items()]
    words += [f"--sidecars={','.join(options['sidecars'])}"] if "sidecars" in options else []
    command = ["pack", str(source), str(tmp_path / "d"), *words, "--workers", "1"]
    code, out, err = run(*command)
    assert code in (1, 2)
    assert re.search(where.replace(" ", r"\s+"), " ".join(err.split()))
    assert "Traceback" not in out + err
    code, out, err = run(*command, "--skip-bad")
    assert code == 0
    assert "Traceback" not in out + err
    assert {*read_folder(tmp_path / "d")} == {"k0", "k2"}


def test_command_that_is_given_again_says_that_all_is_packed_already(run: Any, tmp_path: Path) -> None:
    source, _ = _table("t.csv", "k1,1.jpg,1")(tmp_path)
    commands = {
        "d": ["pack", str(source), str(tmp_path / "d"), "--max-samples", "2", "--workers", "1"],
        "r": ["reshard", str(tmp_path / "d"), str(tmp_path / "r"), "--shuffle", "1", "--workers", "1"],
    }
    for name, command in commands.items():
        assert run(*command)[0] == 0
        before = files_in(tmp_path / name)
        code, out, err = run(*command)
        assert code == 0
        assert "already" in out + err
        assert files_in(tmp_path / name) == before


def test_each_bad_row_is_listed_once_in_the_order_of_the_source(tmp_path: Path) -> None:
    """Whatever finds the fault: the source, the type of a whole column, or the bytes of a file."""
    rows: list[dict[str, Any]] = [
        {"__key__": "a", "npy": [0.5]},
        {"__key__": "b", "jpg": tmp_path / "cut.jpg"},
        {"__key__": "c", "npy": [2**53 + 1]},
        {"__key__": "d", "cls": 2.5},
        {"__key__": "e", "npy": [1]},
        {"__key__": "f", "jpg": tmp_path / "cut.jpg"},
    ]
    (tmp_path / "cut.jpg").write_bytes(b"\xff\xd8\xff" + bytes(9000))
    result = pack(rows, tmp_path / "d", skip_bad=True, workers=1, max_bytes=4096)  # a bad row may be of any size
    places = ["row 1 ('b')", "row 2 ('c')", "row 3", "row 5 ('f')"]
    assert [err.where for err in result.rejected] == places
    listed = (tmp_path / "d" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["where"] for line in listed] == places
    assert result.num_samples == 2
