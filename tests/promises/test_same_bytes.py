"""The same source and options give the same bytes, on every machine, in every version, however the run went.

`pins.json` holds digests that the second version wrote. WDSKIT_UPDATE_PINS=1 writes them again: a changed digest is a
change of the format and needs a line in CHANGELOG.md.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import TESTS
from formats import (
    TINY,
    Samples,
    data_names,
    digests,
    jpeg,
    make_photos,
    png,
    read_classes,
    read_columns,
    read_folder,
    read_index,
    read_npy,
    sha256,
    shard_names,
    tar_bytes,
    write_files,
    write_tar,
)
from writing import pack, reshard

from wdskit import WdskitError

PINS_FILE = TESTS / "promises" / "pins.json"
IS_UPDATE = bool(os.environ.get("WDSKIT_UPDATE_PINS"))

NUM_ROWS = 11
CAPTIONS = [f"number {number}, ä “{'x' * number}”" for number in range(NUM_ROWS)]
LABELS = ["eel", "cat", "Zebra", "cat", "ox", "eel", "ähre", "cat", "dog", "eel", "cat"]


def records(**more: Any) -> list[dict[str, Any]]:
    """Return the rows of all tables: a path, a text, a name of a class, and a number as text (as a CSV has it)."""
    paths = [f"photos/{'cat' if number < 9 else 'dog'}/{number % 9:04d}.jpg" for number in range(NUM_ROWS)]
    columns = zip(paths, CAPTIONS, LABELS, strict=True)
    return [
        {"image": path, "caption": caption, "label": label, "size": str(3 * number), **more}
        for number, (path, caption, label) in enumerate(columns)
    ]


def rows() -> list[dict[str, Any]]:
    """Return rows from Python: bytes, texts, numbers and JSON values, not each field in each row."""
    return [
        {
            "__key__": f"{'ab'[number % 2]}/{number:02d}",
            ("png" if number % 3 else "jpg"): png(number) if number % 3 else jpeg(number),
            "cls": number % 5 - 1,
            **({"txt": CAPTIONS[number]} if number != 4 else {}),
            "json": {"n": number, "name": LABELS[number], "list": [number, None, 0.5]},
            "mask.bin": bytes(range(number)),
        }
        for number in range(NUM_ROWS)
    ]


def as_samples() -> Samples:
    """Return the rows as members of a tar that other programs wrote."""
    kinds: dict[str, Callable[[Any], bytes]] = {
        "json": lambda value: json.dumps(value).encode(),
        "txt": lambda value: str(value).encode(),
        "cls": lambda value: b"%d" % value,
    }
    return {
        row["__key__"]: {name: kinds.get(name, bytes)(value) for name, value in row.items() if name != "__key__"}
        for row in rows()
    }


COCO = {
    "info": {"year": 2017},
    "images": [{"id": 9 - n, "file_name": f"cat/{n:04d}.jpg", "width": 12, "height": 8} for n in range(7)],
    "annotations": [
        {"id": n, "image_id": 3 + n % 6, "category_id": 1 + n % 2 * 17, "bbox": [1.5, 2, n, 4.25]} for n in range(12)
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}, {"id": 90, "name": "brush"}],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one source of each kind."""
    base = tmp_path_factory.mktemp("same")
    make_photos(base / "photos", {"cat": 9, "dog": 5, "Z": 1, "ünicode": 3})
    write_files(base / "photos", {"cat/deep/5.jpg": jpeg(90), "dog/notes.txt": "no image", "dog/.hidden.jpg": TINY})
    write_files(base / "flat", {f"{number}.{'jpeg' if number % 2 else 'png'}": (jpeg, png)[1 - number % 2](number)
                                for number in range(9)})  # fmt: skip
    for number in range(20):
        name = f"sides/{'ab'[number % 2]}/{number}"
        write_files(base, {f"{name}.jpg": jpeg(number), f"{name}.seg.png": png(number), f"{name}.txt": f"{number}\n"})
        write_files(base, {f"sounds/{number}.wav": b"RIFF%d" % number, f"sounds/{number}.txt": f"ä{number}"})
    table = records()
    jsonl = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in table)
    csv = "\n".join([",".join(table[0]), *(f'{r["image"]},"{r["caption"]}",{r["label"]},{r["size"]}' for r in table)])
    tsv = "\n".join(["\t".join(table[0]), *("\t".join(row.values()) for row in table)])
    write_files(base, {"t.csv": csv, "t.tsv": tsv, "t.jsonl": jsonl})
    for name in ("t.csv", "t.tsv", "t.jsonl"):
        (base / f"{name}.gz").write_bytes(gzip.compress((base / name).read_bytes(), mtime=0))
    keyed = [f'{{"id":"k{n}","vector":[{n},0.5],"file":"flat/{n}.{"jpeg" if n % 2 else "png"}"}}\n' for n in range(9)]
    write_files(base, {"keyed.jsonl": "".join(keyed), "names.txt": "\n".join(sorted({*LABELS}, reverse=True))})
    pq.write_table(pa.Table.from_pylist(table), base / "paths.parquet", row_group_size=4)
    inside = [
        {
            "image": {"bytes": jpeg(number), "path": f"{number}.jpg"},
            "caption": caption,
            "n": number,
            "score": number / 4,
        }
        for number, caption in enumerate(CAPTIONS)
    ]
    pq.write_table(pa.Table.from_pylist(inside), base / "bytes.parquet", row_group_size=4)
    (base / "many").mkdir()
    pq.write_table(pa.Table.from_pylist(inside[:6]), base / "many" / "0.parquet")
    pq.write_table(pa.Table.from_pylist(inside[6:]), base / "many" / "1.parquet")
    (base / "coco.json").write_text(json.dumps(COCO))
    samples = [*as_samples().items()]
    write_tar(base / "one.tar", dict(samples))
    write_tar(base / "tars" / "p-0.tar", dict(samples[:4]))
    write_tar(base / "tars" / "p-1.tar", dict(samples[4:]))
    return base


PHOTOS = "photos"
LABELLED = {"fields": {"cls": "label", "txt": "caption"}}
SOURCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Name: name of the pins (equal for sources that hold the same rows), source, options.
    "folder": ("folder", PHOTOS, {}),
    "flat folder": ("flat folder", "flat", {}),
    "folder with sidecars": ("sidecars", "sides", {"sidecars": ["txt", "seg.png"]}),
    "folder of other files": ("files", "sounds", {"files": "wav", "sidecars": "txt"}),
    **{name: ("table", name, LABELLED) for name in ("t.csv", "t.tsv", "t.jsonl", "t.csv.gz", "t.tsv.gz", "t.jsonl.gz")},
    "parquet of paths": ("table", "paths.parquet", LABELLED),
    "table with classes": ("table with classes", "t.csv", {**LABELLED, "classes": "names.txt"}),
    "table with key and image": ("keyed", "keyed.jsonl", {"image": "file", "key": "id", "fields": {"npy": "vector"}}),
    "parquet of images": ("parquet", "bytes.parquet", {"fields": {"txt": "caption", "cls": "n"}}),
    "folder of parquet": ("many parquet", "many", {"fields": {"txt": "caption"}}),
    "coco": ("coco", "coco.json", {"images": PHOTOS}),
    "tar": ("tars", "one.tar", {}),
    "tars": ("tars", "tars", {}),
    "pattern of tars": ("tars", "tars/p-{0..1}.tar", {}),
    "glob of tars": ("tars", "tars/p-*.tar", {}),
    "rows": ("rows", "list", {}),
    "generator": ("rows", "iter", {}),
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "samples": {"max_samples": 4},
    "bytes": {"max_bytes": 9000},
    "number": {"num_shards": 3},
    "shuffle": {"shuffle": 7},
    "split": {"split": "train=0.6,val=0.4"},
    "decode": {"validate": "decode"},
    "none": {"validate": "none"},
}
PAIRS = [
    pair
    for pair in itertools.combinations(["samples", "bytes", "number", "shuffle", "split"], 2)
    if pair not in {("bytes", "number"), ("samples", "number")}
]
TRIPLES = [("samples", "shuffle", "split"), ("bytes", "shuffle", "split")]


def source_of(base: Path, name: str) -> tuple[Any, dict[str, Any]]:
    _, path, options = SOURCES[name]
    if path in {"list", "iter"}:
        return (rows() if path == "list" else iter(rows())), options
    options = {name: str(base / value) if name in {"images", "classes"} else value for name, value in options.items()}
    return str(base / path), options


class Pins:
    """The digests in pins.json. In an update they are collected and written."""

    def __init__(self) -> None:
        self.pins: dict[str, Any] = {} if IS_UPDATE else json.loads(PINS_FILE.read_text())
        self.used: set[str] = set()

    def check(self, name: str, found: Any) -> None:
        """Compare a value that JSON can hold with its pin."""
        self.used.add(name)
        if IS_UPDATE:
            assert self.pins.setdefault(name, found) == found, f"{name} has two values"
        assert found == self.pins[name]

    def check_folder(self, name: str, folder: Path) -> None:
        """Check the files of a packed folder: each file by its digest, many pairs of options by one digest of all."""
        found = {file: digest[:20] for file, digest in digests(folder).items()}
        self.check(name, sha256(json.dumps(found).encode())[:20] if "+" in name else found)


@pytest.fixture(scope="module")
def pins() -> Iterator[Pins]:
    pins = Pins()
    yield pins
    if IS_UPDATE:
        PINS_FILE.write_text(json.dumps(pins.pins, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


SINGLES = [(name,) for name in OPTIONS]


FIRST = {SOURCES[name][0]: name for name in reversed(SOURCES)}
"""The first source of each name of pins. The others are tried with single options only."""

CASES = [
    (names, source)
    for names in [*SINGLES, *PAIRS, *TRIPLES]
    for source in SOURCES
    if len(names) == 1 or FIRST[SOURCES[source][0]] == source or names == ("samples", "shuffle")
]


@pytest.mark.parametrize(("names", "source"), CASES, ids=[f"{'+'.join(names)}-{source}" for names, source in CASES])
def test_source_with_options_gives_the_pinned_bytes(
    tmp_path: Path, base: Path, pins: Pins, source: str, names: tuple[str, ...]
) -> None:
    found, options = source_of(base, source)
    for name in names:
        options = {**options, **OPTIONS[name]}
    pack(found, tmp_path / "d", **options)
    assert read_folder(tmp_path / "d")
    pins.check_folder(f"{SOURCES[source][0]}: {'+'.join(names)}", tmp_path / "d")


RESHARDS: dict[str, dict[str, Any]] = {
    "": {},
    "samples": {"max_samples": 3},
    "bytes": {"max_bytes": 9000},
    "number": {"num_shards": 3},
    "shuffle": {"shuffle": 7},
    "split": {"split": "train=0.6,val=0.4"},
    "where": {"where": "cls >= 1"},
    "drop": {"drop": ["txt", "json"]},
    "keep": {"keep": ["jpg", "png", "cls"]},
    "rename": {"rename": {"txt": "caption.txt", "cls": "label.cls"}},
}
RESHARD_PAIRS = [
    pair
    for pair in itertools.combinations(["samples", "number", "shuffle", "split", "where", "drop", "keep", "rename"], 2)
    if pair not in {("samples", "number"), ("drop", "keep")}
]
RESHARD_PAIRS = [pair for pair in RESHARD_PAIRS if pair not in {("drop", "rename"), ("keep", "rename")}]


@pytest.mark.parametrize("names", [*((name,) for name in RESHARDS), *RESHARD_PAIRS], ids="+".join)
def test_reshard_with_options_gives_the_pinned_bytes(
    tmp_path: Path, base: Path, pins: Pins, names: tuple[str, ...]
) -> None:
    """A packed folder and one tar that another program wrote hold the same rows."""
    options: dict[str, Any] = {}
    for name in names:
        options |= RESHARDS[name]
    pack(rows(), tmp_path / "in", max_samples=3, columns="cls")
    reshard(str(tmp_path / "in"), tmp_path / "d", **options)
    assert read_folder(tmp_path / "d")
    pins.check_folder(f"reshard: {'+'.join(names)}", tmp_path / "d")


def test_reshard_of_classes_keeps_classes_json(tmp_path: Path, base: Path, pins: Pins) -> None:
    pack(base / PHOTOS, tmp_path / "in", max_samples=4)
    reshard(tmp_path / "in", tmp_path / "d", shuffle=3, max_samples=5)
    assert read_classes(tmp_path / "d") == read_classes(tmp_path / "in") != None  # noqa: E711
    pins.check_folder("reshard: classes", tmp_path / "d")


def test_reshard_of_two_folders_and_of_tars_gives_the_pinned_bytes(tmp_path: Path, base: Path, pins: Pins) -> None:
    pack(rows()[:5], tmp_path / "a")
    pack(rows()[5:], tmp_path / "b")
    reshard([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "d", max_samples=4)
    pins.check_folder("reshard: two folders", tmp_path / "d")
    reshard(str(base / "tars" / "p-{0..1}.tar"), tmp_path / "other" / "d", max_samples=4)
    pins.check_folder("reshard: tars", tmp_path / "other" / "d")


@pytest.mark.parametrize("names", [("",), ("samples",), ("shuffle",), ("split",)], ids="+".join)
def test_columns_hold_a_value_of_each_sample(tmp_path: Path, pins: Pins, names: tuple[str, ...]) -> None:
    columns = ["cls", "json.n", "json.name", "txt.length", "width"]
    written = [{**row, "txt": "x" * at, "png": png(at, width=at + 1)} for at, row in enumerate(rows())]
    for row in written:
        row.pop("jpg", None)
    pack(written, tmp_path / "d", columns=columns, **OPTIONS[names[0]])
    found = read_columns(tmp_path / "d")
    samples = read_folder(tmp_path / "d")
    numbers = [json.loads(fields["json"]) for fields in samples.values()]
    assert found["cls"] == [int(fields["cls"]) for fields in samples.values()]
    assert found["json.n"] == [number["n"] for number in numbers]
    assert found["json.name"] == [number["name"] for number in numbers]
    assert found["txt.length"] == [len(fields["txt"]) for fields in samples.values()]
    assert found["width"] == [number["n"] + 1 for number in numbers]


ADDED = [{"__key__": f"c/{number}", "txt": f"added {number}", "cls": number} for number in range(5)]


@pytest.mark.parametrize("names", [("",), ("samples",), ("bytes",), ("number",), ("shuffle",), ("samples", "shuffle")],
                         ids="+".join)  # fmt: skip
def test_append_gives_the_pinned_bytes_and_keeps_each_old_shard(
    tmp_path: Path, pins: Pins, names: tuple[str, ...]
) -> None:
    options: dict[str, Any] = {}
    for name in names:
        options |= OPTIONS[name]
    pack(rows(), tmp_path / "d", max_samples=4)
    before = digests(tmp_path / "d")
    pack(ADDED, tmp_path / "d", append=True, **options)
    after = digests(tmp_path / "d")
    assert before.items() <= after.items()
    assert shard_names(tmp_path / "d")[:3] == [name for name in sorted(before) if name.endswith(".tar")]
    pins.check_folder(f"append: {'+'.join(names)}", tmp_path / "d")


def test_append_of_a_folder_keeps_the_numbers_of_classes(tmp_path: Path, base: Path, pins: Pins) -> None:
    pack(base / PHOTOS, tmp_path / "d", max_samples=8)
    make_photos(tmp_path / "more", {"dog": 2, "Z": 1})
    (tmp_path / "more" / "dog" / "0000.jpg").rename(tmp_path / "more" / "dog" / "new0.jpg")
    (tmp_path / "more" / "dog" / "0001.jpg").rename(tmp_path / "more" / "dog" / "new1.jpg")
    (tmp_path / "more" / "Z" / "0000.jpg").rename(tmp_path / "more" / "Z" / "new2.jpg")
    pack(tmp_path / "more", tmp_path / "d", append=True, classes=tmp_path / "d")
    labels = {key: fields["cls"] for key, fields in read_folder(tmp_path / "d").items() if "new" in key}
    assert labels == {"Z/new2": b"0", "dog/new0": b"2", "dog/new1": b"2"}
    pins.check_folder("append: folder", tmp_path / "d")


@pytest.mark.parametrize("source", ["folder", "t.csv", "parquet of images", "coco", "tars", "rows"])
@pytest.mark.parametrize("names", [("samples",), ("samples", "shuffle"), ("samples", "split")], ids="+".join)
def test_parts_in_any_order_give_the_bytes_of_one_run(
    tmp_path: Path, base: Path, pins: Pins, source: str, names: tuple[str, ...]
) -> None:
    found, options = source_of(base, source)
    for name in names:
        options = {**options, **OPTIONS[name]}
    for part in ("2/3", "0/3", "1/3"):
        pack(found, tmp_path / "d", part=part, **options)
        assert not (tmp_path / "d" / "index.json").exists()
    pack(found, tmp_path / "d", **options)
    pins.check_folder(f"{SOURCES[source][0]}: {'+'.join(names)}", tmp_path / "d")


@pytest.mark.parametrize("source", ["folder", "t.csv", "parquet of images", "coco", "tars", "rows"])
def test_workers_change_no_byte(tmp_path: Path, base: Path, pins: Pins, source: str) -> None:
    found, options = source_of(base, source)
    pack(found, tmp_path / "d", workers=2, max_samples=4, shuffle=7, **options)
    pins.check_folder(f"{SOURCES[source][0]}: samples+shuffle", tmp_path / "d")


def test_bad_rows_that_are_skipped_are_listed_and_change_no_other_byte(tmp_path: Path, pins: Pins) -> None:
    bad = [*rows(), {"__key__": "bad", "jpg": b"no image", "cls": 1}]
    pack(bad, tmp_path / "d", skip_bad=True)
    found = digests(tmp_path / "d")
    assert "rejected.jsonl" in found
    del found["rejected.jsonl"]
    pins.check("rows: ", {name: digest[:20] for name, digest in found.items()})


def test_shard_has_the_bytes_of_a_plain_tar_and_no_others(tmp_path: Path, base: Path) -> None:
    """Fields sorted, one header of 512 bytes each, 1,024 zero bytes at the end; no time, owner or padding."""
    for source in (rows(), base / "t.csv", base / PHOTOS, base / "tars"):
        pack(source, tmp_path / "d")
        found = read_folder(tmp_path / "d")
        assert (tmp_path / "d" / "d-000000.tar").read_bytes() == tar_bytes(found)
        assert all([*fields] == sorted(fields) for fields in found.values())
        shutil.rmtree(tmp_path / "d")


# What is in the samples, said once for each kind of source.


def test_json_sidecar_keeps_its_own_members_first(tmp_path: Path) -> None:
    """Then come the class and the path."""
    write_files(
        tmp_path / "in", {"b/1.jpg": jpeg(1), "b/1.json": ' {"n": 1.0, "big": 12345678901234567890, "s": "ä"} '}
    )
    pack(tmp_path / "in", tmp_path / "d", sidecars="json")
    text = read_folder(tmp_path / "d")["b/1"]["json"].decode()
    assert text == '{"n":1.0,"big":12345678901234567890,"s":"ä","cls":0,"class":"b","path":"b/1.jpg"}'


def test_jsonl_row_becomes_json_as_it_is_written(tmp_path: Path) -> None:
    """No number, space or escape changes on the way."""
    line = '{"key": "a",  "n": 1.50, "big": 12345678901234567890123, "s": "\\u00e4", "e": 1E2}'
    write_files(tmp_path, {"t.jsonl": f"{line}\n"})
    pack(tmp_path / "t.jsonl", tmp_path / "d")
    assert read_folder(tmp_path / "d")["a"]["json"].decode() == line


def test_npy_field_has_one_dtype_in_all_rows(tmp_path: Path) -> None:
    """Whole numbers beside fractions are fractions, in each row."""
    text = '{"key":"a","v":[1,0]}\n{"key":"b","v":[0.5,1]}\n{"key":"c","v":[2,2]}\n'
    write_files(tmp_path, {"t.jsonl": text})
    pack(tmp_path / "t.jsonl", tmp_path / "d", fields={"npy": "v"})
    found = [read_npy(fields["npy"])[:2] for fields in read_folder(tmp_path / "d").values()]
    assert found == [(found[0][0], (2,))] * 3
    assert found[0][0] == "<f8"


def test_hashed_keys_of_two_downloads_with_counters_differ(tmp_path: Path) -> None:
    """The hash covers the source's name, so that both can be merged."""
    for name in ("first", "second"):
        write_tar(tmp_path / f"{name}.tar", {"000000": {"txt": name.encode()}})
    pack(f"{tmp_path}/first.tar::{tmp_path}/second.tar", tmp_path / "d", keys="hashed")
    assert sorted(fields["txt"] for fields in read_folder(tmp_path / "d").values()) == [b"first", b"second"]


def test_hashed_keys_are_the_same_in_each_run_and_keep_the_path_in_json(tmp_path: Path, base: Path) -> None:
    found = []
    for name in ("one", "two"):
        pack(base / PHOTOS, tmp_path / name / "d", keys="hashed", max_samples=5)
        found.append(digests(tmp_path / name / "d"))
    assert found[0] == found[1]
    samples = read_folder(tmp_path / "one" / "d")
    assert all(re.fullmatch("[0-9a-f]{16,40}", key) for key in samples)
    images = {json.loads(fields["json"])["path"]: fields["jpg"] for fields in samples.values()}
    assert images == {path: (base / PHOTOS / path).read_bytes() for path in images}
    assert len(images) == 19


def test_odd_characters_of_keys_are_cleaned_by_default(tmp_path: Path) -> None:
    """The path stays in json; `keys="given"` refuses such keys."""
    make_photos(tmp_path / "in", {"a b": 1, "c.d": 1, "e": 1})
    assert pack(tmp_path / "in", tmp_path / "d").num_cleaned == 2
    samples = read_folder(tmp_path / "d")
    assert [*samples] == ["a_b/0000", "c_d/0000", "e/0000"]
    assert json.loads(samples["a_b/0000"]["json"])["path"] == "a b/0000.jpg"
    with pytest.raises(WdskitError, match="a b"):
        pack(tmp_path / "in", tmp_path / "given", keys="given")


def test_index_lists_the_files_of_the_data_set_only(tmp_path: Path, base: Path) -> None:
    pack(base / PHOTOS, tmp_path / "d", max_samples=5)
    names = {*data_names(tmp_path / "d"), "index.json"}
    found = {path.name for path in (tmp_path / "d").iterdir()}
    assert names <= found
    assert {name for name in found - names if not name.startswith(".wdskit.")} == set()
    assert [line["url"] for line in read_index(tmp_path / "d")["shardlist"]] == [f"d-{n:06d}.tar" for n in range(4)]


def test_each_pin_belongs_to_a_case(pins: Pins) -> None:
    """Only one process that ran all tests above can compare: there the pins in use are all pins."""
    if len(pins.used) > 300:
        assert {*pins.pins} == pins.used
