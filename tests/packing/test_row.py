"""Packing rows from Python, lists and generators, and refusals."""

from __future__ import annotations

import collections
import json
import shutil
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import image_bytes
from pack_cases import staged, without_temp_files
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, WdskitError, pack


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
        "left.JPEG": image_bytes(),
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
        "left.jpeg": image_bytes(),
    }


def test_members_stand_in_the_order_of_their_names_whatever_that_of_the_row(tmp_path):
    fields = {"b": b"1", "a": b"2", "json": {"z": 1, "a": 2}}
    pack([{"__key__": "k", **fields}], tmp_path / "x", pattern="p-%d.tar")
    pack([{**dict(reversed(fields.items())), "__key__": "k"}], tmp_path / "y", pattern="p-%d.tar")
    assert bytes_in(tmp_path / "x") == bytes_in(tmp_path / "y")
    assert list(samples_in(tmp_path / "x")["k"]) == ["a", "b", "json"]


def test_bytes_of_any_kind_and_rows_of_any_mapping_are_taken(tmp_path):
    rows = collections.deque(
        [
            types.MappingProxyType({"__key__": "a", "bin": bytearray(b"1")}),
            collections.OrderedDict({"__key__": "b", "bin": memoryview(b"2")}),
            {"__key__": "c", "bin": np.frombuffer(b"3", np.uint8).data},
        ]
    )
    pack(rows, tmp_path / "out")
    assert [sample["bin"] for sample in samples_in(tmp_path / "out").values()] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (5, "row 0: it is of type int"),
        (None, "it is of type NoneType"),
        ({"cls": 1}, r"a dict without a text `__key__`: \['cls'\]"),
        ({"__key__": 5, "cls": 1}, "a dict without a text `__key__`"),
        ({"__key__": b"a", "cls": 1}, "a dict without a text `__key__`"),
        ({"__key__": "a"}, "it has no field"),
        ({"__key__": "a", "__url__": "x"}, "it has no field"),
        ({"__key__": "", "cls": 1}, r"row 0 \(''\): key '': it is empty"),
        ({"__key__": "a", 5: b"x"}, "its field 5 is not text"),
        ({"__key__": "a", None: b"x"}, "its field None is not text"),
        ({"__key__": "a", "cls": "many"}, r"row 0 \('a'\): its field 'cls': 'many' is not a whole number"),
        ({"__key__": "a", "cls": True}, r"row 0 \('a'\): its field 'cls': True is a bool"),
        ({"__key__": "a", "cls": 1.5}, r"row 0 \('a'\): its field 'cls': 1.5 is not a whole number"),
        ({"__key__": "a", "pkl": {"x": 1}}, r"row 0 \('a'\): pkl: this field is written from bytes"),
        ({"__key__": "a", "jpg": "x.jpg"}, r"row 0 \('a'\): jpg: this field is written from bytes, not from str"),
        ({"__key__": "a", "json": {"x": float("nan")}}, "json: cannot be written"),
        ({"__key__": "a", "json": [{"y": {1: "one", "1": "1"}}]}, "its keys 1 and '1' have the same name in JSON"),
        ({"__key__": "a", "json": {True: 1, "true": 2}}, "its keys True and 'true' have the same name in JSON"),
        ({"__key__": "a", "json": {"x": object()}}, "json: cannot be written"),
        ({"__key__": "a", "npy": np.array([object()])}, r"row 0 \('a'\): npy: "),
        ({"__key__": "a", "txt": "\ud800"}, "txt: cannot be written"),
        ({"__key__": "\ud800", "txt": "x"}, "it cannot be written as UTF-8"),
        ({"__key__": "a", "jpg": Path("nowhere.jpg")}, r"row 0 \('a'\): nowhere.jpg: No such file"),
        ({"__key__": "a", "bin": Path("/")}, r"row 0 \('a'\): / is not a file"),
        ({"__key__": "a", "JPG": b"1", "jpeg": b"2"}, "the field 'jpg' twice"),
        ({"__key__": "a/../b", "txt": "x"}, "plain relative path"),
        ({"__key__": "a" * 97, "txt": "x"}, "takes 101 bytes, more than the 100"),
        ({"__key__": "a", "t xt": b"x"}, r"row 0 \('a'\): field 't xt'"),
        ({"__key__": "a", "": b"x"}, r"row 0 \('a'\): field ''"),
        ({"__key__": "a", "jpg": b"no jpeg"}, r"row 0 \('a'\): not an image"),
        ({"__key__": "a", "jpg": image_bytes()[:-2]}, r"row 0 \('a'\): JPEG, byte"),
    ],
)
def test_a_bad_row_is_named_by_its_number_or_listed(tmp_path, row, problem):
    with pytest.raises(RowError, match=problem) as caught:
        pack([row], tmp_path / "out")
    assert str(caught.value).startswith("row 0")
    for rows in ([row, {"__key__": "good", "cls": 1}], iter([row, {"__key__": "good", "cls": 1}])):
        folder = tmp_path / type(rows).__name__
        result = pack(rows, folder, skip_bad=True)
        (line,) = (folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
        assert json.loads(line) == {"where": caught.value.where, "reason": caught.value.problem}
        assert [err.where for err in result.rejected] == [caught.value.where]
        assert list(samples_in(folder)) == ["good"]


@pytest.mark.parametrize("source", [5, None, 1.5, object()])
def test_what_holds_no_rows_is_an_error(tmp_path, source):
    with pytest.raises(PackError, match="is not a source"):
        pack(source, tmp_path / "out")


def test_one_row_is_not_taken_for_many(tmp_path):
    with pytest.raises(RowError, match=r"row 0: it is of type str.\n  A row is a dict"):
        pack({"__key__": "a", "cls": 1}, tmp_path / "out")


@pytest.mark.parametrize("rows", [[], (), iter([])])
def test_no_rows_are_an_error(tmp_path, rows):
    with pytest.raises(PackError, match="the rows: there is nothing to pack"):
        pack(rows, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_rows_of_one_key_are_an_error_wherever_they_stand(tmp_path):
    rows = [{"__key__": key, "cls": 1} for key in ("a", "b", "c", "d", "a")]
    for source in (rows, iter(rows)):
        with pytest.raises(RowError, match=r"row 4 \('a'\): its key 'a' is also the key of row 0 \('a'\)"):
            pack(source, tmp_path / "out", max_samples=2, skip_bad=True)
    assert not (tmp_path / "out" / "index.json").exists()


# Hashed keys.


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cls": 1}, {"key": "a b.c"}),
        ({"json": {"x": 1}}, {"x": 1, "key": "a b.c"}),
        ({"JSON": {"x": 1}}, {"x": 1, "key": "a b.c"}),
        ({"json": {"key": "a b.c", "x": 1}}, {"key": "a b.c", "x": 1}),
        ({"json": b"{}"}, {"key": "a b.c"}),
    ],
)
def test_a_key_that_is_hashed_stands_in_json(tmp_path, fields, expected):
    from wdskit.dataset.keys import hashed_key

    pack([{"__key__": "a b.c", **fields}], tmp_path / "out", keys="hashed")
    ((key, sample),) = samples_in(tmp_path / "out").items()
    assert key == hashed_key("a b.c")
    assert json.loads(sample["json"]) == expected


@pytest.mark.parametrize("value", [{"key": "mine"}, [1], b"[]", b"{", None, 5])
def test_json_that_has_no_room_for_the_key_is_an_error(tmp_path, value):
    """No member of the user's JSON is replaced, and no key is lost."""
    with pytest.raises(RowError, match=r"row 0 \('a'\): its json: "):
        pack([{"__key__": "a", "json": value}], tmp_path / "out", keys="hashed")


def test_hashing_makes_no_field_of_a_row_without_one(tmp_path):
    with pytest.raises(RowError, match="it has no field"):
        pack([{"__key__": "a"}], tmp_path / "out", keys="hashed")


# Rows that come one by one.


def test_a_generator_is_packed_in_one_pass(tmp_path):
    rows = ({"__key__": f"{n:03d}", "cls": n} for n in range(7))
    assert len(pack(rows, tmp_path / "out", max_samples=3).entries) == 3
    assert list(samples_in(tmp_path / "out")) == [f"{n:03d}" for n in range(7)]
    for option in ({"shuffle": 1}, {"workers": 2}):
        with pytest.raises(PackError, match="read only once"):
            pack(iter([{"__key__": "a", "cls": 1}]), tmp_path / "other", **option)


@pytest.mark.parametrize("append", [False, True])
def test_rows_of_a_generator_are_not_collected(tmp_path, append):
    """A shard is on the disk before the second row after it is requested."""
    if append:
        pack([{"__key__": "first", "cls": 1}], tmp_path / "out", pattern="old-%d.tar")
    seen = []

    def rows():
        for n in range(9):
            seen.append(len(list((tmp_path / "out").glob(".wdskit-run/*/out-*.tar"))))
            yield {"__key__": f"{n}", "cls": n}

    pack(rows(), tmp_path / "out", max_samples=2, append=append, pattern="out-%d.tar")
    assert seen == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_a_list_and_a_generator_give_the_same_bytes(tmp_path):
    rows = [{"__key__": f"{n}", "cls": n, "bin": bytes(n)} for n in range(20)]
    options = {"max_samples": 7, "max_bytes": 12_000, "pattern": "p-%d.tar"}
    pack(rows, tmp_path / "list", **options)
    pack(iter(rows), tmp_path / "iterator", **options)
    assert bytes_in(tmp_path / "list") == bytes_in(tmp_path / "iterator")


@pytest.mark.parametrize("error", [RuntimeError("broken"), OSError(5, "broken"), KeyboardInterrupt("broken")])
def test_a_generator_that_fails_leaves_whole_shards_and_no_index(tmp_path, error):
    """Its error is raised unchanged, because it is not an error of the destination."""

    def rows():
        yield {"__key__": "a", "cls": 1}
        yield {"__key__": "b", "cls": 2}
        raise error

    with pytest.raises(type(error), match="broken") as caught:
        pack(rows(), tmp_path / "out", max_samples=1)
    assert caught.value is error
    assert {path.name for path in staged(tmp_path / "out").iterdir() if ".tar" in path.name} == {
        "out-000000.tar",
        "out-000000.tar.idx",
    }
    assert not without_temp_files(bytes_in(tmp_path / "out"))


def test_an_error_of_the_progress_function_comes_through(tmp_path):
    def fail(now):
        if now.stage == "packing" and now.num_samples:
            raise RuntimeError("nobody looks")

    with pytest.raises(RuntimeError, match="nobody looks"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out", progress=fail)
    assert list(bytes_in(tmp_path / "out")) == []


# Any rows.

anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
nested = st.recursive(
    anything, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(anything, inner, max_size=2)
)
field_names = st.sampled_from(["cls", "json", "txt", "bin", "jpg", "npy", "JSON", "__x__", "a.b", "é"]) | anything
any_row = st.dictionaries(field_names, nested, max_size=3).flatmap(
    lambda row: st.just(row) | st.text(max_size=6).map(lambda key: {**row, "__key__": key})
)


@given(st.lists(any_row | nested, max_size=4), st.sampled_from(["given", "hashed"]), st.booleans())
@settings(max_examples=150)
def test_any_rows_are_packed_whole_or_refused(rows, keys, skip_bad):
    folder = Path(tempfile.mkdtemp())
    try:
        result = pack(rows, folder / "out", keys=keys, skip_bad=skip_bad)
    except WdskitError as err:
        assert str(err)  # noqa: PT017 (any other error fails the test)
    else:
        samples = samples_in(folder / "out")
        assert len(samples) == result.num_samples == len(rows) - len(result.rejected)
        assert all(samples.values())
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_bytes": "1 TB"}, "max_bytes: '1 TB' is not a size"),
        ({"max_samples": 2.5}, "max_samples: 2.5 is not a whole number"),
        ({"workers": "2"}, "workers: '2' is not a number of processes"),
        ({"shuffle": "7"}, "shuffle: the seed '7' must be"),
    ],
)
def test_options_of_another_kind_are_refused_by_name(tmp_path, options, problem):
    with pytest.raises(PackError, match=problem):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out", **options)


def test_a_path_as_text_is_told_what_a_path_is(tmp_path):
    with pytest.raises(RowError, match=r"Pass bytes, a pathlib.Path of a file, or a value"):
        pack([{"__key__": "a", "jpg": "photos/cat.jpg"}], tmp_path / "out")
