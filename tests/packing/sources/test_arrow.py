"""Packing Parquet files and data sets that `datasets` saved, and refusals."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from images import image_bytes, make_folder
from shards import bytes_in, samples_in

import wdskit
from wdskit import PackError, RowError
from wdskit.packing.sources import arrow, parquet
from wdskit.packing.sources.arrow import read_parquet, read_saved_dataset
from wdskit.packing.sources.records import Records

pack = functools.partial(wdskit.pack, allow_no_image=True)
"""Most tables here do not test images."""

ANY = Records("", allow_no_image=True)
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(autouse=True)
def _closed_groups():
    """Close the files of other tests."""
    yield
    parquet.close_all()


def write(path: Path, columns: dict[str, object], **options) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def jsons(folder: Path) -> list[object]:
    return [json.loads(sample["json"]) for sample in samples_in(folder).values()]


def images(num: int) -> list[bytes]:
    return [image_bytes("PNG" if number % 3 else "JPEG", number=number) for number in range(num)]


# Parquet.


def test_images_as_paths_are_those_of_a_table_of_text(tmp_path):
    make_folder(tmp_path / "images", {".": 2})
    rows = [{"image": "images/0000.jpg", "cls": 3, "t": "ä"}, {"image": "images/0001.jpg", "cls": None, "t": None}]
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    (tmp_path / "m.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    pack(tmp_path / "m.jsonl", tmp_path / "text", pattern="s-%d.tar")
    pack(tmp_path / "m.parquet", tmp_path / "parquet", pattern="s-%d.tar")
    assert bytes_in(tmp_path / "text") == bytes_in(tmp_path / "parquet")


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "compression": "zstd", "row_group_size": 3}])
def test_images_as_bytes_are_named_by_what_they_are(tmp_path, kind, options):
    data = images(8)
    columns = {"photo": pa.array([*data, None], kind), "id": [f"k{number}" for number in range(9)]}
    path = write(tmp_path / "m.parquet", columns, **options)
    for name, more in {"turn": {}, "shuffled": {"shuffle": 3}, "workers": {"workers": 2, "max_samples": 4}}.items():
        if name == "workers" and kind != pa.binary():
            continue
        pack(path, tmp_path / name, image_column="photo", key_column="id", **more)
        samples = samples_in(tmp_path / name)
        assert {key: sample.get("jpg", sample.get("png")) for key, sample in samples.items()} == {
            f"k{number}": each for number, each in enumerate([*data, None])
        }
        assert samples["k1"] == {"png": data[1], "json": b'{"id":"k1"}'}


def test_images_of_structs_keep_their_path_or_are_read_from_it(tmp_path):
    make_folder(tmp_path / "images", {".": 1})
    one, two = images(2)
    cells = [
        {"bytes": one, "path": "x/1.jpg"},
        {"bytes": two, "path": None},
        {"bytes": None, "path": "images/0000.jpg"},
    ]
    write(tmp_path / "m.parquet", {"img": pa.array([*cells, None], IMAGE), "n": range(4)})
    pack(tmp_path / "m.parquet", tmp_path / "out")
    assert list(samples_in(tmp_path / "out").values()) == [
        {"jpg": one, "json": b'{"n":0,"img":"x/1.jpg"}'},
        {"png": two, "json": b'{"n":1}'},
        {"jpg": (tmp_path / "images" / "0000.jpg").read_bytes(), "json": b'{"n":2,"img":"images/0000.jpg"}'},
        {"json": b'{"n":3}'},
    ]
    assert list(samples_in(tmp_path / "out")) == [f"row-{number:09d}" for number in range(4)]


def test_files_of_a_folder_or_pattern_follow_one_another(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, start in (("b", 5), ("a", 0)):
        write(folder / f"{name}.parquet", {"n": range(start, start + 5)}, row_group_size=2)
    pack(folder, tmp_path / "folder", pattern="s-%d.tar")
    pack(folder / "[ab].parquet", tmp_path / "glob", pattern="s-%d.tar")
    assert [row["n"] for row in jsons(tmp_path / "folder")] == list(range(10))
    assert list(samples_in(tmp_path / "folder")) == [f"row-{number:09d}" for number in range(10)]
    assert bytes_in(tmp_path / "folder") == bytes_in(tmp_path / "glob")
    write(folder / "c.parquet", {"m": [1]})
    with pytest.raises(PackError, match=r"c.parquet: its columns or types differ from those of .*a.parquet"):
        pack(folder, tmp_path / "other")


def test_types_that_json_has_not_are_written_as_the_documentation_says(tmp_path):
    when = dt.datetime(2024, 2, 29, 12, 30, 1, 5)  # noqa: DTZ001 (the file has times without a zone)
    columns = {
        "us": pa.array([when], pa.timestamp("us")),
        "s": pa.array([when.replace(microsecond=0)], pa.timestamp("s", tz="Europe/Berlin")),
        "ns": pa.array([-1], pa.timestamp("ns")),
        "date": pa.array([when.date()]),
        "decimal": pa.array([decimal.Decimal("1.50")], pa.decimal128(5, 2)),
        "float": pa.array([0.1], pa.float32()),
        "large": pa.array([2**64 - 1], pa.uint64()),
        "list": [[1, None]],
        "struct": [{"a": {"b": "c"}}],
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())),
        "words": pa.array(["w"]).dictionary_encode(),
        "none": pa.nulls(1),
        "flag": [True],
    }
    pack(write(tmp_path / "m.parquet", columns), tmp_path / "out")
    assert jsons(tmp_path / "out") == [
        {
            "us": "2024-02-29T12:30:01.000005",
            "s": "2024-02-29T12:30:01.000Z",
            "ns": "1969-12-31T23:59:59.999999999",
            "date": "2024-02-29",
            "decimal": "1.50",
            "float": 0.10000000149011612,
            "large": 2**64 - 1,
            "list": [1, None],
            "struct": {"a": {"b": "c"}},
            "map": [["k", 1]],
            "words": "w",
            "none": None,
            "flag": True,
        }
    ]
    nulls = {name: pa.nulls(1, pa.array(value).type) for name, value in columns.items()}
    pack(write(tmp_path / "m.parquet", nulls), tmp_path / "nulls")
    assert jsons(tmp_path / "nulls") == [dict.fromkeys(columns)]


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        ({"x": [b"1"]}, {}, "its column 'x' holds bytes .*\n.*--image-column x"),
        ({"x": [[b"1"]]}, {}, "its column 'x' has the type list"),
        ({"x": pa.array([1], pa.duration("s"))}, {}, "has the type duration"),
        ({"x": [dt.time(1)]}, {}, "has the type time64"),
        ({"x": pa.array([[1]], pa.list_(pa.timestamp("s")))}, {}, "has the type list"),
        ({"x": [1]}, {"image_column": "y"}, "it has no column 'y'; it has 'x'. Correct --image-column"),
        ({"x": [1]}, {"sidecars": ["txt"]}, "sidecars is for an image folder, but this is a Parquet table"),
    ],
)
def test_columns_that_cannot_be_packed_are_errors_before_any_row(tmp_path, columns, options, problem):
    path = write(tmp_path / "m.parquet", columns)
    with pytest.raises(PackError, match=problem):
        pack(path, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"image": [image_bytes(), b"none"]}, r"row 1: its image begins with b'none', which is not a known format"),
        ({"image": [image_bytes(), b""]}, r"row 1: its image begins with b''"),
        ({"image": [image_bytes(), image_bytes()[:-9]]}, r"row 1: .*JPEG"),
        ({"x": [1.0, float("nan")]}, r"row 1: its column 'x' cannot be written as JSON: Out of range"),
        ({"x": pa.array([1, 10**15], pa.timestamp("ms"))}, r"row 1: one of its values cannot be written as JSON"),
        ({"x": ["a", "b" * (4 << 20)]}, r"row 1: its json has 4194312 bytes, more than"),
        ({"key": ["a", ".b"]}, r"row 1: key '.b'"),
        ({"key": ["a", "a"]}, r"row 1: its key 'a' is also the key of .*row 0"),
        ({"path": ["m.png", "gone.png"], "key": ["a", "b"]}, r"row 1: .*gone.png: No such file"),
    ],
)
def test_a_bad_row_names_its_file_and_number(tmp_path, columns, problem):
    (tmp_path / "m.png").write_bytes(image_bytes("PNG"))
    path = write(tmp_path / "m.parquet", columns)
    with pytest.raises(RowError, match=rf"m.parquet, {problem}"):
        pack(path, tmp_path / "out")
    if "is also the key of" not in problem:
        assert pack(path, tmp_path / "out", skip_bad=True).num_samples == 1


def test_text_that_is_no_utf8_is_the_fault_of_its_row(tmp_path):
    text = pa.array([b"good", b"\xff", b"fine"]).view(pa.string())
    path = write(tmp_path / "m.parquet", {"x": text})
    assert [err.where for err in pack(path, tmp_path / "out", skip_bad=True).rejected] == [f"{path}, row 1"]
    assert jsons(tmp_path / "out") == [{"x": "good"}, {"x": "fine"}]


def test_a_parquet_file_cut_at_any_byte_is_an_error(tmp_path):
    path = write(tmp_path / "m.parquet", {"n": range(9)}, compression="none")
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(PackError, match=r"m.parquet: it cannot be read as Parquet"):
            read_parquet([str(path)], ANY)


def test_a_table_that_changes_while_it_is_packed_is_an_error(tmp_path):
    path = write(tmp_path / "m.parquet", {"image": images(4)})
    size = path.stat().st_size

    def change(now):
        if (now.stage, now.num_samples) == ("packing", 2):
            with path.open("ab") as file:
                file.write(b"x")

    with pytest.raises(RowError, match=f"m.parquet, row 2: .*has {size + 1} bytes now, but had {size}"):
        pack(path, tmp_path / "out", progress=change)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path / "m.parquet", {"n": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PackError, match=r"pip install '\.\[tables\]'` in a clone of wdskit"):
        pack(tmp_path / "m.parquet", tmp_path / "out")


# Data sets of Hugging Face.


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A data set of seven rows in two files, one row without image, one without label."""
    import datasets  # takes a second, which processes that only collect tests should not spend

    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    make_folder(folder / "images", {".": 1})
    columns = {
        "image": [*({"bytes": each, "path": None} for each in images(5)), str(folder / "images" / "0000.jpg"), None],
        "label": [0, 1, 0, 1, 0, 1, -1],
        "text": ["a", "b", "c", "d", "e", "f", None],
    }
    classes = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": classes, "text": datasets.Value("string")})
    found = datasets.Dataset.from_dict(columns, features=features)
    found.save_to_disk(folder / "set", num_shards=2)
    datasets.DatasetDict({"train": found, "test": found.select([5, 0])}).save_to_disk(folder / "splits")
    found.to_parquet(folder / "set.parquet")
    return folder


def test_a_saved_data_set_is_packed_without_datasets(tmp_path, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = pack(saved / "set", tmp_path / "out")
    assert result.classes == {"cat": 0, "dog": 1}
    samples = list(samples_in(tmp_path / "out").values())
    assert [sample.get("jpg") or sample.get("png") for sample in samples] == [
        *images(5),
        (saved / "images" / "0000.jpg").read_bytes(),
        None,
    ]
    assert [sample.get("cls") for sample in samples] == [b"0", b"1", b"0", b"1", b"0", b"1", b"-1"]
    assert json.loads(samples[5]["json"]) == {"label": 1, "text": "f", "label_name": "dog", "image": "0000.jpg"}
    assert json.loads(samples[6]["json"]) == {"label": -1, "text": None, "label_name": None}


def test_a_saved_data_set_gives_what_datasets_gives(tmp_path, saved):
    """The result is the same with a shuffle, and in workers."""
    import datasets

    pack(saved / "set", tmp_path / "out", shuffle=5, workers=2, max_samples=3)
    there = datasets.load_from_disk(str(saved / "set")).cast_column("image", datasets.Image(decode=False))
    expected = {
        f"row-{number:09d}": (row["image"] and row["image"]["bytes"], row["label"], row["text"])
        for number, row in enumerate(there)
    }
    found = {
        key: (sample.get("jpg", sample.get("png")), int(sample["cls"]), json.loads(sample["json"])["text"])
        for key, sample in samples_in(tmp_path / "out").items()
    }
    assert found == expected


def test_the_names_of_classes_are_known_from_parquet_too(tmp_path, saved):
    assert pack(saved / "set.parquet", tmp_path / "out").classes == {"cat": 0, "dog": 1}
    assert [row["label_name"] for row in jsons(tmp_path / "out")][:2] == ["cat", "dog"]


def test_splits_are_packed_each_by_itself(tmp_path, saved):
    with pytest.raises(PackError, match=r"has splits. Pack each separately: .*splits/train, .*splits/test"):
        pack(saved / "splits", tmp_path / "out")
    assert pack(saved / "splits" / "test", tmp_path / "out").num_samples == 2


@pytest.mark.parametrize("forgets", [True, False])
def test_a_large_data_file_does_not_stay_in_memory(tmp_path, monkeypatch, forgets):
    """The file has 64 MB. The mutant keeps all of it."""
    monkeypatch.setattr(arrow, "_HELD_BYTES", 4 << 20 if forgets else 1 << 40)
    cells = pa.array([{"bytes": b"\xff\xd8\xff\xe0" + bytes(100_000), "path": None}] * 10, IMAGE)
    batch = pa.record_batch({"image": cells, "label": pa.array(range(10))})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, batch.schema) as out:
        for _ in range(64):
            out.write_batch(batch)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "dataset_info.json").write_text("{}")
    found, most, before = 0, 0, mapped_bytes()
    for row in read_saved_dataset(str(tmp_path), ANY).rows(keys="given"):
        assert not isinstance(row, RowError)
        found, most = found + 1, max(most, mapped_bytes() - before)
    assert found == 640
    assert (most < 24 << 20) == forgets


def mapped_bytes() -> int:
    """Return the bytes of mapped files that are in memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:")]
    return int(line.split()[1]) * 1024


def changed(saved: Path, tmp_path: Path, name: str, change) -> Path:
    folder = tmp_path / "set"
    shutil.copytree(saved / "set", folder)
    path = next(folder.glob(name))
    path.write_bytes(change(path.read_bytes()))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("state.json", lambda _: b"{}", "it names no data files"),
        ("state.json", lambda _: b"[", "it is not JSON"),
        ("state.json", lambda _: b"[" * 100_000, "it is not JSON"),
        ("state.json", lambda _: b"7", "it holds a int"),
        ("state.json", lambda _: b" " * (5 << 20), "more than 4194304 bytes"),
        ("state.json", lambda data: data.replace(b"data-00000", b"../data-00"), "is not in its folder"),
        ("state.json", lambda data: data.replace(b"data-00000", b"data-99999"), "cannot be read as an Arrow stream"),
        ("state.json", lambda data: data.replace(b"{", b'{"_indices_files": [1],', 1), "selects rows"),
        ("dataset_info.json", lambda _: b'{"features": {"label": {"_type": "ClassLabel"}}}', "there are 0 classes"),
        ("dataset_info.json", lambda _: b"x", "not JSON from `datasets`"),
        ("data-00000*", lambda data: data[:300], "cannot be read as an Arrow stream"),
        ("data-00001*", lambda data: data[:-400], "cannot be read as an Arrow stream"),
        ("data-00000*", lambda _: b"", "cannot be read as an Arrow stream"),
    ],
)
def test_a_data_set_that_is_not_as_it_was_saved_is_an_error(tmp_path, saved, name, change, problem):
    with pytest.raises(PackError, match=problem):
        pack(changed(saved, tmp_path, name, change), tmp_path / "out")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_refused(tmp_path, saved, compression):
    folder = changed(saved, tmp_path, "state.json", lambda data: data)
    path = next(folder.glob("data-00000*"))
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (
            pa.OSFile(str(tmp_path / "new"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema, options=options) as out,
        ):
            out.write_table(table)
    (tmp_path / "new").replace(path)
    with pytest.raises(PackError, match=r"it is compressed\. Save it again"):
        pack(folder, tmp_path / "out")


def test_a_flipped_byte_of_a_data_file_is_an_error_or_other_data_and_never_a_crash(tmp_path, saved):
    """Offsets outside of their buffers are found before they are used."""
    folder = changed(saved, tmp_path, "state.json", lambda data: data)
    path = next(folder.glob("data-00000*"))
    whole = path.read_bytes()
    num_errors = 0
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        try:
            rows = list(read_saved_dataset(str(folder), ANY).rows(keys="given"))
            num_errors += any(isinstance(row, RowError) for row in rows)
        except PackError:
            num_errors += 1
    assert num_errors > 10


def test_a_value_that_is_no_label_is_an_error_of_its_row(tmp_path):
    told = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}
    table = pa.table({"label": [True, False], "key": ["a", "b"]}).replace_schema_metadata(
        {"huggingface": json.dumps(told)}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(PackError, match=r"a.parquet, row 0: its column 'label': True is a bool"):
        pack(tmp_path / "a.parquet", tmp_path / "out", allow_no_image=True)


def test_parquet_files_whose_labels_mean_different_classes_are_never_packed_together(tmp_path):
    for name, classes in (("a", ["cat", "dog"]), ("b", ["cat", "eel"]), ("c", ["cat", "dog", "eel"])):
        told = {"info": {"features": {"label": {"_type": "ClassLabel", "names": classes}}}}
        table = pa.table({"label": [1], "key": [name]}).replace_schema_metadata({"huggingface": json.dumps(told)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    a, b, c = (tmp_path / f"{name}.parquet" for name in "abc")
    with pytest.raises(PackError, match=r"b.parquet: class 1 of its column 'label' is 'eel', but 'dog' in .*a.parquet"):
        pack(f"{a}::{b}", tmp_path / "out")
    pack(f"{a}::{c}", tmp_path / "out")
    assert [fields["cls"] for fields in samples_in(tmp_path / "out").values()] == [b"1", b"1"]


# Several images, and unused columns.


def test_further_images_of_structs_become_fields(tmp_path):
    one, two, three, four = images(4)
    cells = [[{"bytes": data, "path": None} for data in pair] for pair in ((one, two), (three, four))]
    columns = {"left": pa.array(cells[0], IMAGE), "right": pa.array(cells[1], IMAGE), "key": ["a", "b"]}
    path = write(tmp_path / "m.parquet", columns)
    with pytest.raises(
        PackError, match=r"its column 'left' has the type .*\n.*--image-column COLUMN --field right.jpg=left"
    ):
        pack(path, tmp_path / "out")
    pack(path, tmp_path / "out", image_column="left", fields={"right.png": "right"}, validate="none")
    assert [sample["right.png"] for sample in samples_in(tmp_path / "out").values()] == [three, four]
    pack(path, tmp_path / "few", image_column="left", omit=["right"])
    assert [sorted(sample) for sample in samples_in(tmp_path / "few").values()] == [["jpg", "json"], ["json", "png"]]


def test_a_list_of_class_labels_is_not_a_label(tmp_path):
    said = {"info": {"features": {"cls": {"feature": {"_type": "ClassLabel", "names": ["a"]}, "_type": "Sequence"}}}}
    table = pa.table({"cls": [[0], [0]], "key": ["a", "b"]}).replace_schema_metadata({"huggingface": json.dumps(said)})
    pq.write_table(table, tmp_path / "m.parquet")
    for fields in ({}, {"cls": "cls"}):
        with pytest.raises(PackError, match=r"its column 'cls' has the type list<.*, which is not a label.\n"):
            pack(tmp_path / "m.parquet", tmp_path / "out", fields=fields)


def test_a_sound_of_a_struct_is_a_field_and_not_the_image(tmp_path):
    cells = pa.array([{"bytes": b"RIFF", "path": "a.wav"}], IMAGE)
    pack(write(tmp_path / "m.parquet", {"audio": cells, "key": ["a"]}), tmp_path / "out", fields={"wav": "audio"})
    assert samples_in(tmp_path / "out") == {"a": {"json": b'{"key":"a"}', "wav": b"RIFF"}}


def test_an_image_is_not_replaced_by_a_field_of_its_name(tmp_path):
    one, two = images(3)[1:]
    path = write(tmp_path / "m.parquet", {"image": [one], "mask": [two], "key": ["a"]})
    with pytest.raises(RowError, match="its image is 'png', and --field makes 'png' of another column"):
        pack(path, tmp_path / "out", fields={"png": "mask"})


def test_a_number_that_json_does_not_have_is_named_with_its_column(tmp_path):
    path = write(tmp_path / "m.parquet", {"score": [1.0, float("nan")], "key": ["a", "b"]})
    with pytest.raises(RowError, match=r"row 1: its column 'score' cannot be written as JSON.*\n.*--omit score"):
        pack(path, tmp_path / "out")
    assert pack(path, tmp_path / "out", omit=["score"]).num_samples == 2
