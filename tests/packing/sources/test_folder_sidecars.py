"""Files beside an image that belong to its sample, and the walk that finds them."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import image_bytes, make_folder
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, pack
from wdskit.dataset.keys import check_key
from wdskit.packing.facts import add_facts
from wdskit.packing.rows import clean_key
from wdskit.packing.sources.folder import FileNames, walk_files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


# What stands beside an image.


def test_files_beside_an_image_become_fields_of_its_sample(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 2, "dog": 1})
    mask = image_bytes("PNG")
    write(
        source / "cat",
        {"0000.json": b'{"a": 1.50}', "0000.txt": b"a cat", "0000.seg.PNG": mask, "0001.TXT": b"x", "alone.txt": b""},
    )
    result = pack(source, tmp_path / "out", side_cars=["json", "txt", "seg.png"])
    samples = samples_in(tmp_path / "out")
    assert samples["cat/0000"] == {
        "cls": b"0",
        "jpg": (source / "cat" / "0000.jpg").read_bytes(),
        "json": b'{"cls":0,"class":"cat","path":"cat/0000.jpg","a": 1.50}',
        "seg.png": mask,
        "txt": b"a cat",
    }
    assert {key: sorted(fields) for key, fields in samples.items()} == {
        "cat/0000": ["cls", "jpg", "json", "seg.png", "txt"],
        "cat/0001": ["cls", "jpg", "json", "txt"],
        "dog/0000": ["cls", "jpg", "json"],
    }
    assert (result.num_samples, result.num_other) == (3, 1)  # alone.txt


def test_without_the_option_files_beside_an_image_are_counted_and_change_nothing(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    pack(source, tmp_path / "before", pattern="s-%d.tar")
    write(source / "cat", {"0000.json": b"{}", "0000.txt": b"a cat"})
    result = pack(source, tmp_path / "after", pattern="s-%d.tar")
    assert result.num_other == 2
    assert bytes_in(tmp_path / "before") == bytes_in(tmp_path / "after")
    pack(source, tmp_path / "other", pattern="s-%d.tar", side_cars=["npy"])
    assert bytes_in(tmp_path / "before") == bytes_in(tmp_path / "other")


def test_keys_with_dots_are_not_cut_and_find_their_own_side_cars(tmp_path):
    source = write(
        tmp_path / "photos",
        {"22.05.jpg": image_bytes(number=5), "22.06.jpg": image_bytes(number=6), "22.05.txt": b"5", "22.06.txt": b"6"},
    )
    with pytest.raises(RowError, match=r"22.05.jpg: key '22.05': it holds a dot"):
        pack(source, tmp_path / "out", side_cars=["txt"])
    pack(source, tmp_path / "out", side_cars=["txt"], keys="hashed")
    found = {json.loads(sample["json"])["path"]: sample["txt"] for sample in samples_in(tmp_path / "out").values()}
    assert found == {"22.05.jpg": b"5", "22.06.jpg": b"6"}


def test_a_folder_whose_name_sorts_between_an_image_and_its_side_car_parts_them_not(tmp_path):
    source = write(
        tmp_path / "photos", {"c/a.jpg": image_bytes(), "c/a.json": b'{"x":1}', "c/a.js/b.jpg": image_bytes()}
    )
    pack(source, tmp_path / "out", side_cars=["json"], keys="hashed")
    assert sum(b'"x":1' in sample["json"] for sample in samples_in(tmp_path / "out").values()) == 1
    assert [list(group) for group in walk_files(str(source), together=True)] == [
        ["c/a.jpg", "c/a.json"],
        ["c/a.js/b.jpg"],
    ]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"path": "elsewhere"}', r"it says 'path' is 'elsewhere', and it is 'cat/0000.jpg'"),
        (b'{"cls": 1}', r"it says 'cls' is 1, and it is 0"),
        (b'{"cls": false}', r"it says 'cls' is False, and it is 0"),
        (b"[1]", "it holds a list, where cls, class, path could not be added"),
        (b'{"path": "cat/0000.jpg", "path": "cat/0000.jpg"}', "the name 'path' stands twice"),
        (b'{"path": "b", "path": "cat/0000.jpg"}', "it says 'path' is 'b', and it is 'cat/0000.jpg'"),
        (b'{"a": "\xff"}', "codec can't decode"),
        (b"", "Expecting value"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply|maximum recursion"),
        (b'{"a": "' + b"x" * (4 << 20) + b'"}', "over the 4194304 that the JSON of one sample may have"),
    ],
)
def test_json_that_cannot_stand_with_what_is_known_is_an_error_of_its_row(tmp_path, data, problem):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    write(source / "cat", {"0000.json": data})
    with pytest.raises(RowError, match=rf"0000.jpg: .*0000.json: .*({problem})"):
        pack(source, tmp_path / "out", side_cars=["json"])
    result = pack(source, tmp_path / "out", side_cars=["json"], skip_bad=True)
    assert (result.num_samples, len(result.rejected)) == (1, 1)


def test_facts_that_are_stated_already_are_not_said_twice():
    assert add_facts(b' {"b": 1e5, "a" : 1}\n', {"a": 1, "c": 2}) == b' {"c":2,"b": 1e5, "a" : 1}\n'
    assert add_facts(b'\xef\xbb\xbf{"a":1}', {"a": 1}) == b'\xef\xbb\xbf{"a":1}'
    assert add_facts(b"{ }", {"a": 1}) == b'{"a":1 }'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4), st.sampled_from([None, 1]))
def test_nothing_of_an_object_is_lost_when_facts_are_added(own, indent):
    text = json.dumps(own, indent=indent).encode()
    both = add_facts(text, {"path": "p", "cls": 3})
    assert json.loads(both) == {"path": "p", "cls": 3, **own}
    assert both.endswith(text[1:])


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"0000.cls": b"7"}, "has the field 'cls' already"),
        ({"0000.txt": b"1", "0000.TXT": b"2"}, "has the field 'txt' already"),
    ],
)
def test_two_files_for_one_field_are_an_error(tmp_path, files, problem):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    write(source / "cat", files)
    with pytest.raises(RowError, match=problem):
        pack(source, tmp_path / "out", side_cars=["txt", "cls"])


@pytest.mark.parametrize("names", [["JSON"], ["a b"], [""], [".txt"], ["txt", "txt"]])
def test_what_is_no_extension_is_refused(tmp_path, names):
    with pytest.raises(PackError, match="side_cars: "):
        pack(make_folder(tmp_path / "photos", {"cat": 1}), tmp_path / "out", side_cars=names)


def test_side_cars_belong_to_image_folders(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"key": "a"}\n')
    with pytest.raises(PackError, match="side_cars belongs to an image folder, and this is a table of text"):
        pack(tmp_path / "m.jsonl", tmp_path / "out", side_cars=["txt"])
    with pytest.raises(PackError, match="side_cars belongs to an image folder, and these are rows from Python"):
        pack([], tmp_path / "out", side_cars=["txt"])


def test_every_file_is_an_image_a_side_car_of_one_or_counted():
    """All sets of up to four of these names."""
    names = ["a.jpg", "a.png", "a.seg.png", "a.b.jpg", "a.b.txt", "a.txt", "a.gif.txt", "a"]
    cars = FileNames(["txt", "seg.png"])
    for size in range(5):
        for paths in itertools.combinations(names, size):
            images, num_other = cars.group(paths)
            used = [image.path for image in images] + [path for image in images for _, path in image.sidecars]
            assert len(set(used)) + num_other == len(paths)
            assert all(path == f"{image[:-4]}.{car}" for image, beside in images for car, path in beside)


# The walk.


def test_the_walk_is_in_the_order_of_the_paths_bytes(tmp_path):
    """As if all paths were sorted: a slash stands between a dash and a dot, and 0 comes behind it."""
    names = ["a.jpg", "a/b.jpg", "a-b/c.jpg", "a0/c.jpg", "a/b/c.jpg", "a/b-/c", "ä/x", "B/x", "a/b.d/x", "a.d/y"]
    for name in names:
        write(tmp_path, {name: b""})
    found = [path for [path] in walk_files(str(tmp_path))]
    assert found == sorted(names, key=os.fsencode)
    together = [path for paths in walk_files(str(tmp_path), together=True) for path in paths]
    assert sorted(together) == sorted(names)


# Files that are no images.


def test_files_of_other_kinds_are_samples_where_they_are_asked_for(tmp_path):
    source = write(
        tmp_path / "sounds",
        {
            "bark/a.wav": b"RIFFa",
            "bark/a.txt": b"a dog",
            "bark/b.FLAC": b"fLaC",
            "meow/c.wav": b"RIFFc",
            "meow/d.jpg": b"",
        },
    )
    result = pack(source, tmp_path / "out", files=["wav", "flac"], side_cars=["txt"])
    assert result.classes == {"bark": 0, "meow": 1}
    assert result.num_other == 1
    assert samples_in(tmp_path / "out") == {
        "bark/a": {
            "cls": b"0",
            "json": b'{"cls":0,"class":"bark","path":"bark/a.wav"}',
            "txt": b"a dog",
            "wav": b"RIFFa",
        },
        "bark/b": {"cls": b"0", "flac": b"fLaC", "json": b'{"cls":0,"class":"bark","path":"bark/b.FLAC"}'},
        "meow/c": {"cls": b"1", "json": b'{"cls":1,"class":"meow","path":"meow/c.wav"}', "wav": b"RIFFc"},
    }
    with pytest.raises(PackError, match=r"there is no \.mp3 file in this folder"):
        pack(source, tmp_path / "other", files=["mp3"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"files": ["WAV"]}, "files: .*\n  Write extensions: wav,flac"),
        ({"files": ["wav", "wav"]}, "files: wav,wav names one twice"),
        ({"files": ["seg.png"]}, "files: 'seg.png' has a dot"),
        ({"files": ["wav"], "side_cars": ["wav"]}, "files: 'wav' is in side_cars too"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path, options, problem):
    with pytest.raises(PackError, match=problem):
        pack(make_folder(tmp_path / "photos", {"cat": 1}), tmp_path / "out", **options)


# Keys that are cleaned.


def test_cleaned_keys_are_those_that_all_readers_take_and_are_counted(tmp_path):
    source = write(tmp_path / "photos", dict.fromkeys(["a b/22.05.jpg", "a b/plain.jpg", "ä/x.jpg"], image_bytes()))
    with pytest.raises(RowError, match="--keys clean"):
        pack(source, tmp_path / "out")
    result = pack(source, tmp_path / "out", keys="clean")
    found = {key: json.loads(fields["json"])["path"] for key, fields in samples_in(tmp_path / "out").items()}
    assert found == {"a_b/22_05": "a b/22.05.jpg", "a_b/plain": "a b/plain.jpg", "_/x": "ä/x.jpg"}
    assert result.num_cleaned == 3
    write(source, {"a.b/plain.jpg": image_bytes()})
    with pytest.raises(RowError, match=r"a.b/plain.jpg: its key .a_b/plain. is that of .*a b/plain.jpg too"):
        pack(source, tmp_path / "twice", keys="clean")


@given(st.text(max_size=20))
def test_a_cleaned_key_is_plain_and_stays(key):
    cleaned = clean_key(key)
    assert cleaned == clean_key(cleaned)
    if cleaned:
        check_key(cleaned)
    if key.isascii() and key.replace("/", "").isalnum() and key.strip("/") == key and "//" not in key:
        assert cleaned == key


def test_the_key_that_was_given_stands_in_json(tmp_path):
    rows = [{"__key__": "a b", "cls": 1}, {"__key__": "c", "cls": 2, "json": {"n": 1}}]
    result = pack(rows, tmp_path / "out", keys="clean")
    assert result.num_cleaned == 1
    assert {key: fields["json"] for key, fields in samples_in(tmp_path / "out").items()} == {
        "a_b": b'{"key":"a b"}',
        "c": b'{"key":"c","n":1}',
    }
    (tmp_path / "m.csv").write_text("key,x\na b,1\n")
    pack(tmp_path / "m.csv", tmp_path / "table", keys="clean", allow_no_image=True)
    assert samples_in(tmp_path / "table") == {"a_b": {"json": b'{"key":"a b","x":"1"}'}}
