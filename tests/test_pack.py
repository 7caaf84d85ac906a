"""What `pack` makes of folders, manifests and rows, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import image_bytes, make_folder

from wdskit import FolderIndexError, LocalShard, PackError, RowError, pack
from wdskit.dataset.grouping import ShardReader
from wdskit.dataset.index import read_index
from wdskit.packing.plan import Limits, Names, fill_in_turn
from wdskit.packing.rows import Row
from wdskit.storage.urls import LocalFile
from wdskit.tar.writer import TarWriter


def samples_in(folder: Path) -> dict[str, dict[str, bytes]]:
    """All samples of a packed folder in order, read as a stream and again by number, which must agree."""
    found = {}
    for entry in read_index(str(folder)).entries:
        path = str(folder / entry.name)
        file = LocalFile(path)
        streamed = list(ShardReader(file.read, shard=path))
        file.close()
        assert len(streamed) == entry.num_samples
        assert Path(path).stat().st_size == entry.num_bytes
        with LocalShard(path) as shard:
            for number, sample in enumerate(streamed):
                fields = {name: data for name, data in sample.items() if not name.startswith("__")}
                assert {name: bytes(view) for name, view in shard[number].items()} == fields
                assert sample["__key__"] not in found
                found[sample["__key__"]] = fields
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".wdskit.lock")


# Image folders.


def test_a_folder_of_classes_becomes_images_with_numbers_and_json(tmp_path):
    source = make_folder(tmp_path / "photos", {"dog": 2, "cat": 1})
    (source / "empty").mkdir()
    (source / "cat" / "notes.txt").write_text("no image")
    (source / "cat" / ".hidden.jpg").write_bytes(b"no image")
    result = pack(source, tmp_path / "out")
    assert result.classes == {"cat": 0, "dog": 1, "empty": 2}
    assert (result.num_samples, result.num_other) == (3, 1)
    samples = samples_in(tmp_path / "out")
    assert list(samples) == ["cat/0000", "dog/0000", "dog/0001"]
    assert samples["dog/0001"] == {
        "cls": b"1",
        "jpg": (source / "dog" / "0001.jpg").read_bytes(),
        "json": b'{"cls":1,"class":"dog","path":"dog/0001.jpg"}',
    }
    assert json.loads((tmp_path / "out" / "classes.json").read_bytes()) == {"cat": 0, "dog": 1, "empty": 2}
    assert names_in(tmp_path / "out") == [
        "classes.json", "index.bin", "index.json", "out-000000.tar", "out-000000.tar.idx",
    ]  # fmt: skip


def test_a_flat_folder_has_no_classes(tmp_path):
    source = make_folder(tmp_path / "photos", {".": 2})
    assert pack(source, tmp_path / "out").classes == {}
    assert samples_in(tmp_path / "out")["0001"].keys() == {"jpg", "json"}
    assert not (tmp_path / "out" / "classes.json").exists()


def test_images_beside_class_folders_are_refused(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1, ".": 1})
    with pytest.raises(PackError, match=r"0000.jpg: it stands beside the class folders"):
        pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_deeper_folders_belong_to_their_class_and_extensions_are_lowered(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat/indoor": 1, "cat": 1}, suffix=".JPEG")
    (source / "cat" / "a.PNG").write_bytes(image_bytes("PNG"))
    pack(source, tmp_path / "out")
    samples = samples_in(tmp_path / "out")
    assert {key: sorted(fields) for key, fields in samples.items()} == {
        "cat/0000": ["cls", "jpg", "json"],
        "cat/a": ["cls", "json", "png"],
        "cat/indoor/0000": ["cls", "jpg", "json"],
    }


def test_links_are_followed_and_rings_end(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    (source / "cat" / "again").symlink_to(source)
    (source / "linked").symlink_to(make_folder(tmp_path / "elsewhere", {".": 1}))
    pack(source, tmp_path / "out")
    assert list(samples_in(tmp_path / "out")) == ["cat/0000", "linked/0000"]


def test_two_files_of_one_key_are_refused_with_both_names(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    (source / "cat" / "0000.png").write_bytes(image_bytes("PNG"))
    with pytest.raises(RowError, match=r"0000.png: its key 'cat/0000' is that of .*0000.jpg too"):
        pack(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["a b", "a.b", "ä" * 60, "__a", "a\x01b"])
def test_names_that_some_reader_loses_are_refused_or_hashed(tmp_path, name):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    (source / "cat" / f"{name}.jpg").write_bytes(image_bytes())
    with pytest.raises(RowError, match="--keys hashed"):
        pack(source, tmp_path / "out")
    pack(source, tmp_path / "hashed", keys="hashed")
    samples = samples_in(tmp_path / "hashed")
    assert {json.loads(sample["json"])["path"] for sample in samples.values()} == {"cat/0000.jpg", f"cat/{name}.jpg"}
    assert all(key.isascii() and "." not in key for key in samples)


# Images that are none.

BAD_IMAGES = {
    "cut": image_bytes()[:-20],
    "empty": b"",
    "text": b"<html>404</html>",
    "png cut": image_bytes("PNG")[:-12],
    "png flipped": image_bytes("PNG")[:50] + b"\xff" + image_bytes("PNG")[51:],
    "bomb": image_bytes("PNG")[:16] + b"\x00\x01\x00\x00" * 2 + image_bytes("PNG")[24:],
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_an_error_that_names_its_file_or_is_listed(tmp_path, kind, workers):
    if workers == 2 and kind != "cut":
        workers = 1  # once is enough: spawning takes a second
    source = make_folder(tmp_path / "photos", {"cat": 2})
    bad = source / "cat" / "0001.jpg"
    bad.write_bytes(BAD_IMAGES[kind])
    with pytest.raises(RowError, match=r"0001.jpg: ") as caught:
        pack(source, tmp_path / "out", workers=workers, max_samples=1)
    assert caught.value.where == str(bad)
    assert not (tmp_path / "out" / "index.json").exists()

    result = pack(source, tmp_path / "out2", skip_bad=True, workers=workers)
    assert [err.where for err in result.rejected] == [str(bad)]
    (line,) = (tmp_path / "out2" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line) == {"where": str(bad), "reason": result.rejected[0].problem}
    assert list(samples_in(tmp_path / "out2")) == ["cat/0000"]


def test_when_every_image_is_bad_nothing_is_packed(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    for path in source.rglob("*.jpg"):
        path.write_bytes(b"none")
    with pytest.raises(PackError, match=r"nothing to pack \(2 rows were rejected\)"):
        pack(source, tmp_path / "out", skip_bad=True)
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_while_it_is_packed_is_an_error(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 2})

    def grow(*_):
        with (source / "cat" / "0001.jpg").open("ab") as file:
            file.write(b"more")

    with pytest.raises(RowError, match=r"0001.jpg: it has \d+ bytes now and had \d+ when packing began"):
        pack(source, tmp_path / "out", progress=grow)


# Manifests.


def manifest(tmp_path: Path, name: str, text: str | bytes) -> Path:
    make_folder(tmp_path / "images", {".": 3})
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_jsonl_keeps_its_columns_and_rows_without_an_image(tmp_path):
    lines = [
        {"image": "images/0000.jpg", "caption": "a “cat”", "boxes": [[1, 2.5], None], "cls": 3},
        {"key": "text-only", "caption": "no picture", "n": 2**70},
        {"image": None, "caption": "neither"},
    ]
    path = manifest(tmp_path, "m.jsonl", "\n\n".join(json.dumps(line) for line in lines) + "\n")
    pack(path, tmp_path / "out")
    samples = samples_in(tmp_path / "out")
    assert list(samples) == ["images/0000", "text-only", "row-000000002"]
    assert [json.loads(sample["json"]) for sample in samples.values()] == lines
    assert samples["images/0000"]["cls"] == b"3"
    assert samples["images/0000"]["jpg"] == (tmp_path / "images" / "0000.jpg").read_bytes()
    assert samples["text-only"].keys() == {"json"}


def test_csv_keeps_quotes_newlines_and_a_bom(tmp_path):
    text = '\ufeffimage,caption,cls\r\nimages/0000.jpg,"two\nlines, ""quoted""",7\r\n\r\n,plain,x\r\n'
    path = manifest(tmp_path, "m.csv", text)
    pack(path, tmp_path / "out")
    samples = samples_in(tmp_path / "out")
    rows = [json.loads(sample["json"]) for sample in samples.values()]
    assert rows == [
        {"image": "images/0000.jpg", "caption": 'two\nlines, "quoted"', "cls": "7"},
        {"image": "", "caption": "plain", "cls": "x"},
    ]
    assert [sample.get("cls") for sample in samples.values()] == [b"7", None]


def test_columns_can_be_named(tmp_path):
    path = manifest(tmp_path, "m.csv", "photo,id\nimages/0000.jpg,a\nimages/0001.jpg,b\n")
    pack(path, tmp_path / "out", image_column="photo", key_column="id")
    assert {key: sorted(sample) for key, sample in samples_in(tmp_path / "out").items()} == {
        "a": ["jpg", "json"],
        "b": ["jpg", "json"],
    }


@pytest.mark.parametrize(
    ("name", "text", "line", "problem"),
    [
        ("m.jsonl", '{"key": "a"}\n{"key": }\n', 2, "it is no JSON"),
        ("m.jsonl", '{"key": "a"}\n\n[1]\n', 3, "it holds a list"),
        ("m.jsonl", '{"key": "a", "key": "b"}\n', 1, "the name 'key' stands twice"),
        ("m.jsonl", '{"x": NaN}\n', 1, "NaN is no JSON"),
        ("m.jsonl", '{"x": 1e999}\n', 1, "cannot be written as JSON"),
        ("m.jsonl", '{"x": "\\ud800"}\n', 1, "cannot be written as JSON"),
        ("m.jsonl", '{"image": 5}\n', 1, "column 'image' holds 5, no path"),
        ("m.jsonl", '{"image": "a\\u0000.jpg"}\n', 1, "no path"),
        ("m.jsonl", '{"image": "m.jsonl"}\n', 1, "has no extension of an image"),
        ("m.jsonl", '{"key": [1]}\n', 1, "neither text nor a whole number"),
        ("m.jsonl", '{"key": "a.b"}\n', 1, "holds a dot"),
        ("m.jsonl", '{"key": "a"}\n{"key": "a"}\n', 2, "its key 'a' is that of .*m.jsonl:1 too"),
        ("m.jsonl", "[" * 100_000 + "\n", 1, "it is no JSON"),
        ("m.csv", "image,x\nimages/0000.jpg,1\nimages/gone.jpg,2\n", 3, "No such file"),
        ("m.csv", 'image,x\n"images/0000.jpg","a\nb"\nimages,2\n', 4, "has no extension of an image"),
        ("m.csv", "image,x\nimages/0000.jpg\n", 2, "it has 1 columns, the header 2"),
        ("m.csv", "image,x\nimages/0000.jpg,1,2\n", 2, "it has 3 columns, the header 2"),
    ],
)
def test_a_bad_row_is_an_error_that_names_its_line_or_is_listed(tmp_path, name, text, line, problem):
    path = manifest(tmp_path, name, text)
    with pytest.raises(RowError, match=problem) as caught:
        pack(path, tmp_path / "out")
    assert caught.value.where == f"{path}:{line}"
    assert str(caught.value).startswith(f"{path}:{line}: ")
    if "is that of" in problem:
        return  # two rows of one key are no bad row, but a data set that cannot be
    path.write_bytes(path.read_bytes() + (b'{"key": "good"}\n' if name == "m.jsonl" else b",good\n"))
    result = pack(path, tmp_path / "out", skip_bad=True)
    assert [err.where for err in result.rejected] == [f"{path}:{line}"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("m.csv", "a,a\n1,2\n", "must name each column once"),
        ("m.csv", "", "must name each column once"),
        ("m.csv", 'a,b\n"open,2\n', "it is no CSV"),
        ("m.jsonl", b'{"a": "\xff"}\n', "it is no UTF-8"),
        ("m.jsonl", "", "nothing to pack"),
        ("m.parquet", "", "neither a folder nor a manifest"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path, name, text, problem):
    with pytest.raises(PackError, match=problem):
        pack(manifest(tmp_path, name, text), tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"image_column": "photo"}, "no column 'photo'; it has 'image'"), ({"key_column": "id"}, "no column 'id'")],
)
def test_a_column_that_is_not_there_is_an_error_with_those_that_are(tmp_path, options, problem):
    path = manifest(tmp_path, "m.csv", "image\nimages/0000.jpg\n")
    with pytest.raises(RowError, match=problem):
        pack(path, tmp_path / "out", **options)


# Rows from Python.


def test_values_are_encoded_by_their_field(tmp_path):
    image = tmp_path / "x.jpeg"
    image.write_bytes(image_bytes())
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    row = {
        "__key__": "a",
        "__url__": "x",
        "cls": 5,
        "json": {"ä": [1]},
        "txt": "grüße",
        "npy": array,
        "bin": b"\x00",
        "jpeg": image,
    }
    pack([row], tmp_path / "out")
    (sample,) = samples_in(tmp_path / "out").values()
    assert sample.pop("npy")[:6] == b"\x93NUMPY"
    assert sample == {
        "cls": b"5",
        "json": '{"ä":[1]}'.encode(),
        "txt": "grüße".encode(),
        "bin": b"\x00",
        "jpg": image_bytes(),
    }


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (5, "it is a int"),
        ({"cls": 1}, "a dict without a text `__key__`"),
        ({"__key__": 5, "cls": 1}, "a dict without a text `__key__`"),
        ({"__key__": "a"}, "it has no field"),
        ({"__key__": "a", "cls": "many"}, "row 0 \\('a'\\)"),
        ({"__key__": "a", "pkl": {"x": 1}}, "row 0 \\('a'\\)"),
        ({"__key__": "a", "jpg": Path("nowhere.jpg")}, "No such file"),
        ({"__key__": "a", "JPG": b"1", "jpeg": b"2"}, "the field 'jpg' twice"),
        ({"__key__": "a/../b", "txt": "x"}, "no plain relative path"),
        ({"__key__": "a", "t xt": b"x"}, "row 0"),
        ({"__key__": "a", "jpg": b"no jpeg"}, "row 0"),
    ],
)
def test_a_bad_python_row_is_named_by_its_number(tmp_path, row, problem):
    with pytest.raises(RowError, match=problem) as caught:
        pack([row], tmp_path / "out")
    assert str(caught.value).startswith("row 0")


def test_a_generator_is_packed_in_one_pass(tmp_path):
    rows = ({"__key__": f"{n:03d}", "cls": n} for n in range(7))
    assert len(pack(rows, tmp_path / "out", max_samples=3).entries) == 3
    assert list(samples_in(tmp_path / "out")) == [f"{n:03d}" for n in range(7)]
    for option in ({"shuffle": 1}, {"workers": 2}):
        with pytest.raises(PackError, match="read once only"):
            pack(iter([{"__key__": "a", "cls": 1}]), tmp_path / "other", **option)


def test_a_row_that_fails_in_the_middle_leaves_no_index(tmp_path):
    def rows():
        yield {"__key__": "a", "cls": 1}
        yield {"__key__": "b", "cls": 2}
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        pack(rows(), tmp_path / "out", max_samples=1)
    assert names_in(tmp_path / "out") == ["out-000000.tar", "out-000000.tar.idx"]


# How rows are spread over shards.


@given(
    sizes=st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), min_size=1, max_size=30),
    max_samples=st.integers(1, 8),
    max_bytes=st.integers(16_000, 40_000),
)
@settings(deadline=None, max_examples=200)
def test_no_file_is_over_a_limit_and_none_could_have_held_the_next_row(sizes, max_samples, max_bytes):
    """`max_bytes` is the true size of the file: headers, padding and end marker are in it."""
    rows = [
        Row(f"k{number}", tuple((f"f{at}", bytes(size)) for at, size in enumerate(fields)), "here")
        for number, fields in enumerate(sizes)
    ]

    def file_bytes(some):
        written = []
        writer = TarWriter(lambda data: written.append(len(data)))
        for row in some:
            for name, data in row.read():
                writer.add(name, data)
        writer.finish()
        return sum(written)

    shards = list(fill_in_turn(rows, Limits(max_samples, max_bytes)))
    assert [row for shard in shards for row in shard] == rows
    for number, shard in enumerate(shards):
        assert 1 <= len(shard) <= max_samples
        assert file_bytes(shard) <= max_bytes
        if number + 1 < len(shards):
            more = [*shard, shards[number + 1][0]]
            assert len(more) > max_samples or file_bytes(more) > max_bytes


def test_a_row_over_the_limit_alone_is_an_error(tmp_path):
    with pytest.raises(RowError, match=r"row 1 \('b'\): its shard would have 12288 bytes, over max_bytes 12287"):
        pack([{"__key__": "a", "bin": b""}, {"__key__": "b", "bin": bytes(10752)}], tmp_path / "out", max_bytes=12287)
    pack([{"__key__": "b", "bin": bytes(10752)}], tmp_path / "out", max_bytes=12288)
    assert (tmp_path / "out" / "out-000000.tar").stat().st_size == 12288


def test_a_shuffle_is_a_permutation_by_its_seed(tmp_path):
    rows = [{"__key__": f"{n:03d}", "cls": n} for n in range(50)]
    orders = {}
    for seed in (None, 0, 1, 2**63):
        pack(rows, tmp_path / f"{seed}", shuffle=seed)
        orders[seed] = tuple(samples_in(tmp_path / f"{seed}"))
    assert orders[None] == tuple(sorted(orders[0])) == tuple(sorted(orders[1]))
    assert len(set(orders.values())) == 4


@pytest.mark.parametrize(
    "pattern", ["a.tar", "%d-%d.tar", "a-%06d", "a/%06d.tar", "%s.tar", ".%06d.tar", "a-%06d.tar.gz", "", "%%06d.tar"]
)
def test_patterns_that_name_no_shards_are_refused(pattern):
    with pytest.raises(PackError, match="must be a file name with one %0Nd"):
        Names(pattern)


def test_names_that_would_not_sort_are_refused():
    assert Names("a-%03d.tar")[999] == "a-999.tar"
    with pytest.raises(PackError, match="no name for shard 1000"):
        Names("a-%03d.tar")[1000]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_samples": 0}, "max_samples: 0"),
        ({"max_bytes": 1000}, "max_bytes: 1000"),
        ({"workers": 0}, "workers: 0"),
        ({"keys": "random"}, "keys: 'random'"),
        ({"shuffle": -1}, "seed -1"),
        ({"pattern": "x"}, "pattern: 'x'"),
        ({"image_column": "x"}, "belong to a manifest"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, options, problem):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    with pytest.raises(PackError, match=problem):
        pack(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_not_there(tmp_path):
    with pytest.raises(PackError, match="there is no such folder or file"):
        pack(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PackError, match="there is no image in this folder"):
        pack(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(PackError, match="the rows: there is nothing to pack"):
        pack([], tmp_path / "out")


# Where it is packed to.


def test_a_packed_folder_is_added_to_only_when_that_is_said(tmp_path):
    rows = [{"__key__": f"{n}", "cls": n} for n in range(4)]
    pack(rows[:2], tmp_path / "out", max_samples=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar*")}
    with pytest.raises(PackError, match="packed and indexed already"):
        pack(rows[2:], tmp_path / "out")
    with pytest.raises(RowError, match=r"its key '1' is in .*out already"):
        pack(rows[1:3], tmp_path / "out", append=True)
    result = pack(rows[2:], tmp_path / "out", append=True)
    assert [entry.name for entry in result.entries] == ["out-000002.tar"]
    assert list(samples_in(tmp_path / "out")) == ["0", "1", "2", "3"]
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in before.items())


def test_added_classes_must_be_the_same(tmp_path):
    pack(make_folder(tmp_path / "a", {"cat": 1, "dog": 1}), tmp_path / "out")
    more = make_folder(tmp_path / "b", {"cat": 3})
    (more / "cat" / "0000.jpg").unlink()
    with pytest.raises(PackError, match="other classes"):
        pack(more, tmp_path / "out", append=True)
    (more / "dog").mkdir()
    pack(more, tmp_path / "out", append=True)
    assert [fields["cls"] for fields in samples_in(tmp_path / "out").values()] == [b"0", b"1", b"0", b"0"]


def test_adding_to_a_folder_without_an_index_is_an_error(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FolderIndexError, match=r"index.json"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out", append=True)


def test_rejected_rows_of_an_addition_are_added_too(tmp_path):
    pack([{"__key__": "a", "cls": 1}, 5], tmp_path / "out", skip_bad=True)
    pack([{"__key__": "b", "cls": 1}, 6, 7], tmp_path / "out", skip_bad=True, append=True)
    assert len((tmp_path / "out" / "rejected.jsonl").read_text().splitlines()) == 3


def test_foreign_shards_and_files_in_the_way_are_errors(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.tar").write_bytes(b"")
    with pytest.raises(PackError, match=r"other.tar: this shard is not one of those being packed"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PackError, match="file"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "file")
    with pytest.raises(PackError, match="file"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "file" / "below")


def test_a_shard_of_another_run_is_never_overwritten(tmp_path):
    pack([{"__key__": "a", "cls": 1}], tmp_path / "out")
    for name in ("index.json", "index.bin"):
        (tmp_path / "out" / name).unlink()
    before = (tmp_path / "out" / "out-000000.tar").read_bytes()
    with pytest.raises(PackError, match=r"out-000000.tar: this shard exists already and holds something else"):
        pack([{"__key__": "b", "cls": 1}], tmp_path / "out")
    assert (tmp_path / "out" / "out-000000.tar").read_bytes() == before
    pack([{"__key__": "a", "cls": 1}], tmp_path / "out")
    assert list(samples_in(tmp_path / "out")) == ["a"]


def test_two_packers_do_not_meet(tmp_path):
    from wdskit.shards.locking import lock_folder

    (tmp_path / "out").mkdir()
    with lock_folder(tmp_path / "out"), pytest.raises(FolderIndexError, match="another wdskit process"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out")


def test_progress_counts_up_to_the_whole(tmp_path):
    told = []
    rows = [{"__key__": f"{n}", "cls": n} for n in range(5)]
    result = pack(rows, tmp_path / "out", max_samples=2, progress=lambda *numbers: told.append(numbers))
    assert [numbers[0] for numbers in told] == [1, 2, 3, 4, 5]
    assert told[-1][:3] == (5, told[-1][3], 5)
    assert told[-1][1] <= result.num_bytes
