"""Classes that `--classes` fixes, and classes in a table's column."""

from __future__ import annotations

import json

import pytest
from images import make_folder
from shards import samples_in

from wdskit import PackError, Pipeline, pack
from wdskit.dataset.classes import read_classes
from wdskit.dataset.index import read_index

# The class numbers of an image folder.


def ways_to_write(tmp_path):
    """Return the ways to pass the classes bird, cat, dog as `classes`."""
    pack(make_folder(tmp_path / "train", {"bird": 1, "cat": 1, "dog": 1}), tmp_path / "packed")
    (tmp_path / "names.txt").write_text("bird\r\ncat\ndog\n\n")
    (tmp_path / "names.json").write_text('{"cat": 1, "dog": 2, "bird": 0}')
    names = ["packed", "packed/classes.json", "names.txt", "names.json"]
    return [*(tmp_path / name for name in names), ["bird", "cat", "dog"], {"dog": 2, "bird": 0, "cat": 1}]


def test_a_val_set_without_a_class_gets_the_numbers_of_train(tmp_path):
    val = make_folder(tmp_path / "val", {"dog": 1, "cat": 1})
    for number, classes in enumerate(ways_to_write(tmp_path)):
        out = tmp_path / f"out{number}"
        result = pack(val, out, classes=classes, pattern="val-%06d.tar")
        assert result.classes == {"bird": 0, "cat": 1, "dog": 2}
        assert {key: fields["cls"] for key, fields in samples_in(out).items()} == {"cat/0000": b"1", "dog/0000": b"2"}
        assert json.loads(samples_in(out)["dog/0000"]["json"])["cls"] == 2
        assert (out / "classes.json").read_bytes() == (tmp_path / "packed" / "classes.json").read_bytes()
    pipe = Pipeline().exact([str(tmp_path / "packed"), str(tmp_path / "out0")]).to_tuple("cls").batched(5)
    assert sorted(next(iter(pipe.loader(workers=0)))[0]) == [b"0", b"1", b"1", b"2", b"2"]


def test_the_command_line_fixes_numbers_too(tmp_path, run):
    ways_to_write(tmp_path)
    val = make_folder(tmp_path / "val", {"dog": 1})
    code, _, err = run("pack", str(val), str(tmp_path / "out"), "--classes", str(tmp_path / "packed"))
    assert (code, err) == (0, "")
    assert samples_in(tmp_path / "out")["dog/0000"]["cls"] == b"2"
    (val / "dog" / "0000.jpg").rename(val / "dog" / "0001.jpg")
    code, _, err = run("pack", str(val), str(tmp_path / "out"), "--append")
    assert code == 1
    assert f"--classes {tmp_path / 'out'}" in err
    code, _, err = run("pack", str(val), str(tmp_path / "out"), "--append", "--classes", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert samples_in(tmp_path / "out")["dog/0001"]["cls"] == b"2"


def test_a_class_that_is_not_among_the_given_ones_is_an_error(tmp_path):
    val = make_folder(tmp_path / "val", {"dog": 1, "cta": 1, "eel": 1})
    for classes in ways_to_write(tmp_path):
        with pytest.raises(PackError, match=r"val/cta: 'cta' is not one of the 3 classes of .* Did you mean `cat`\?"):
            pack(val, tmp_path / "out", classes=classes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        ("missing", "there is no such file or folder"),
        ("val", "there is no classes.json in this folder"),
        (b"cat\ncat\n", "the class 'cat' appears twice"),
        (b"", "it holds no classes"),
        (b"cat\n\ndog\n", "a class without a name"),
        (b"\xff\xfec\0", "it is not UTF-8"),
        ([], "it holds no classes"),
        (["cat", 7], "a class without a name"),
        ({"cat": 1}, "the numbers of the 1 names are not 0 to 0"),
        ({"cat": 0, "dog": "1"}, "the numbers of the 2 names are not 0 to 1"),
        (3, "3 is neither a path nor a list of names"),
    ],
)
def test_classes_that_cannot_be_used_are_an_error(tmp_path, classes, problem):
    val = make_folder(tmp_path / "val", {"cat": 1})
    if isinstance(classes, bytes):
        (tmp_path / "names.txt").write_bytes(classes)
        classes = tmp_path / "names.txt"
    elif isinstance(classes, str):
        classes = tmp_path / classes
    with pytest.raises(PackError, match=problem):
        pack(val, tmp_path / "out", classes=classes)


def test_classes_belong_to_folders_of_classes(tmp_path):
    (tmp_path / "flat").mkdir()
    make_folder(tmp_path, {"flat": 1})
    with pytest.raises(PackError, match="there is no class folder here"):
        pack(tmp_path / "flat", tmp_path / "out", classes=["cat"])
    (tmp_path / "a.csv").write_text("image\nflat/0000.jpg\n")
    with pytest.raises(PackError, match=r"classes: no column becomes `cls`. Name the column: --field cls=COLUMN"):
        pack(tmp_path / "a.csv", tmp_path / "out", classes=["cat"])


@pytest.mark.parametrize("names", [("train", "val"), ("test", "train", "validation"), ("Train", "Test"), ("train",)])
def test_folders_of_splits_are_not_taken_for_classes(tmp_path, names):
    for name in names:
        make_folder(tmp_path / "data" / name, {"cat": 1, "dog": 1})
    with pytest.raises(PackError, match=r"it holds only .*rain.*\n  Pack each separately: `wdskit pack "):
        pack(tmp_path / "data", tmp_path / "out")
    pack(tmp_path / "data", tmp_path / "out", classes=sorted(names))  # the option says that they are classes
    assert read_classes(tmp_path / "out") == tuple(sorted(names))


def test_a_class_called_like_a_split_stands_among_others(tmp_path):
    pack(make_folder(tmp_path / "vehicles", {"bus": 1, "train": 1}), tmp_path / "out")
    assert read_classes(tmp_path / "out") == ("bus", "train")
    assert [entry.num_samples for entry in read_index(tmp_path / "out").entries] == [2]
