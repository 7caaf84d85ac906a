"""`classes.json`: names by number, or an error if a number would get a wrong name."""

from __future__ import annotations

import itertools
import json
import logging

import pytest
from shards import write_shard

from wdskit import Pipeline, pack, reshard
from wdskit.dataset.classes import read_classes
from wdskit.errors import FolderIndexError
from wdskit.shards.index import index_folder


@pytest.mark.parametrize("numbers", [*itertools.product(range(-1, 3), repeat=2)])
def test_numbers_are_those_of_the_names_or_refused(tmp_path, numbers):
    (tmp_path / "classes.json").write_text(json.dumps(dict(zip(("dog", "cat"), numbers, strict=True))))
    if sorted(numbers) == [0, 1]:
        names = read_classes(tmp_path)
        assert names is not None
        assert [names[number] for number in numbers] == ["dog", "cat"]
    else:
        with pytest.raises(FolderIndexError, match="the numbers of its 2 classes are not 0 to 1, each once"):
            read_classes(tmp_path)


@pytest.mark.parametrize("text", ["7", '{"cat": "0"}', '{"cat": true}', '["cat", 1]', "{", "[" * 100_000])
def test_what_is_no_list_of_names_is_an_error(tmp_path, text):
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(FolderIndexError, match=r"classes\.json: it is not "):
        read_classes(tmp_path)


# Several folders: a label means the same class in all folders that are read together, or nothing is read.

CAT_DOG, DOG_CAT, COW = ["cat", "dog"], ["dog", "cat"], ["cat", "dog", "cow"]


def labelled(folder, names, *, label=b"0", indexed=True, **more):
    """Write a folder of one shard with one labelled sample."""
    folder.mkdir()
    write_shard(folder / f"{folder.name}.tar", {f"{folder.name}-0": {"cls": label, **more}})
    if names is not None:
        (folder / "classes.json").write_text(json.dumps(names))
    if indexed:
        index_folder(folder)
    return folder


def read_with(source, a, b, **more):
    """Build a loader of both folders and take its first batch."""
    pipe = Pipeline()
    if source == "stream":
        pipe = pipe.stream(f"{a}::{b}", **more)
    elif source == "mixture":
        pipe = pipe.exact(mixture=[{"shards": str(each), "repeat": 1} for each in (a, b)], **more)
    elif source == "weights":
        pipe = pipe.resampled(mixture=[{"shards": str(each)} for each in (a, b)], **more).with_epoch(2)
    else:
        pipe = getattr(pipe, source)([str(a), str(b)], **more)
    pipe = pipe.to_tuple("__key__", "cls", *(["__valid__"] if source == "sequential" else [])).batched(2)
    return [len(batch[0]) for batch in pipe.loader(workers=0)]


SOURCES = ["exact", "resampled", "sequential", "stream", "mixture", "weights"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_label_with_two_meanings_is_never_read(tmp_path, source):
    a, b = labelled(tmp_path / "a", CAT_DOG), labelled(tmp_path / "b", DOG_CAT)
    with pytest.raises(FolderIndexError, match=r"b/classes.json: class 0 is 'dog', but 'cat' in .*a/classes.json: one"):
        read_with(source, a, b)
    assert sum(read_with(source, a, b, classes="any")) == 2


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("names", [CAT_DOG, {"dog": 1, "cat": 0}, COW])
def test_classes_that_agree_on_each_number_are_read_together(tmp_path, source, names, caplog):
    a, b = labelled(tmp_path / "a", CAT_DOG), labelled(tmp_path / "b", names)
    assert sum(read_with(source, a, b)) == 2
    assert not caplog.records


@pytest.mark.parametrize("source", ["exact", "stream"])
def test_labels_without_names_beside_labels_with_names_are_reported(tmp_path, source, caplog):
    a, b = labelled(tmp_path / "a", CAT_DOG), labelled(tmp_path / "b", None)
    with caplog.at_level(logging.WARNING):
        read_with(source, a, b)
    assert "b has labels but no classes.json, which " in caplog.text
    caplog.clear()
    read_with(source, a, b, classes="any")
    (b / "classes.json").write_text(json.dumps(CAT_DOG))
    read_with(source, a, b)
    assert not caplog.records


@pytest.mark.parametrize("write", [pack, reshard])
def test_labels_with_two_meanings_are_never_written_together(tmp_path, write):
    a, b, c = (labelled(tmp_path / name, names) for name, names in (("a", CAT_DOG), ("b", DOG_CAT), ("c", COW)))
    with pytest.raises(FolderIndexError, match=r"b/classes.json: class 0 is 'dog', but 'cat' in .*a/classes.json: one"):
        write(f"{a}::{b}", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write(f"{a}::{c}", tmp_path / "out")
    assert list(read_classes(tmp_path / "out")) == COW


@pytest.mark.parametrize("write", [pack, reshard])
def test_names_are_written_where_they_are_those_of_all_labels(tmp_path, write):
    a, b = labelled(tmp_path / "a", CAT_DOG, txt=b"a"), labelled(tmp_path / "b", None)
    result = write(f"{a}::{b}", tmp_path / "out")
    assert read_classes(tmp_path / "out") is None
    assert any("b has labels but no classes.json" in note for note in result.notes), result.notes
    (tmp_path / "c").mkdir()
    write_shard(tmp_path / "c" / "c.tar", {"c-0": {"txt": b"c"}})
    index_folder(tmp_path / "c")
    write(f"{a}::{tmp_path}/c", tmp_path / "more")
    assert list(read_classes(tmp_path / "more")) == CAT_DOG
