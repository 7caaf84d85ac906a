"""`cat`: fields printed by key are the bytes in the shard."""

from __future__ import annotations

import io
import sys

import pytest
from shards import write_shard

from wdskit import KeyRuleError, SelectionError, WdskitError, pack
from wdskit.shards.info import cat, info

SAMPLES = {
    "cat/1": {"jpg": b"\xff\xd8 image", "json": b"{}"},
    "cat/2": {"jpg": b"", "json": b"[1]", "left.png": b"p"},
    "dog": {"txt": b"two\nlines"},
}


@pytest.fixture
def shard(tmp_path) -> str:
    return str(write_shard(tmp_path / "a.tar", SAMPLES))


def test_every_field_is_read_by_its_name(shard):
    for key, fields in SAMPLES.items():
        assert {name: cat(shard, f"{key}.{name}") for name in fields} == fields


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cat/1", "is not KEY.FIELD"),
        (".jpg", "is not KEY.FIELD"),
        ("cat/3.jpg", "none of its 3 samples has the key 'cat/3'"),
        ("cat/2.txt", r"sample 'cat/2' has no field 'txt'\. It has: jpg, json, left.png"),
    ],
)
def test_what_is_not_there_is_named(shard, name, message, run):
    with pytest.raises(KeyRuleError, match=message):
        cat(shard, name)
    code, out, err = run("cat", shard, name)
    assert (code, out) == (1, "")
    assert err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_cat_writes_bytes_to_a_file_and_only_text_to_a_terminal(tmp_path, capfdbinary, monkeypatch):
    from wdskit.cli.cat import cat_command
    from wdskit.errors import DecodeError

    path = str(write_shard(tmp_path / "b.tar", {"a": {"txt": b"\x1b[31mred\nx\n", "jpg": b"\xff\xd8"}}))
    for name in ("a.txt", "a.jpg"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.FileIO(1, "w", closefd=False)))
        cat_command(path, name)
        sys.stdout.flush()
        assert capfdbinary.readouterr().out == cat(path, name)
    monkeypatch.setattr(sys, "stdout", Terminal())
    cat_command(path, "a.txt")
    assert sys.stdout.getvalue() == "\\x1b[31mred\nx\n\n"
    with pytest.raises(DecodeError, match=r"'a\.jpg' is not text but 2 bytes"):
        cat_command(path, "a.jpg")


def test_a_condition_counts_classes_and_values_of_the_samples_that_meet_it(tmp_path, run):
    rows = [{"__key__": str(at), "cls": at % 3, "json": {"a": at}} for at in range(100)]
    folder = str(tmp_path / "d")
    pack(rows, folder, columns="cls,json.a", max_samples=30)
    found = info(folder, where="json.a >= 40 and cls != 1")
    matching = [row for row in rows if row["json"]["a"] >= 40 and row["cls"] != 1]
    assert (found.num_samples, found.num_matching) == (100, len(matching))
    assert found.class_counts == {str(cls): sum(row["cls"] == cls for row in matching) for cls in (0, 2)}
    values = {column.name: column for column in found.columns}["json.a"]
    assert values.limits == (41, 99)
    assert sorted(map(int, values.values)) == [row["json"]["a"] for row in matching]
    none = info(folder, where="json.a > 1000")
    assert (none.num_matching, none.class_counts, [column.values for column in none.columns]) == (0, None, [None, None])
    assert info(folder).num_matching is None
    code, out, _ = run("info", folder, "--where", "cls == 1")
    assert (code, " matching  " in out, " 33: " in out) == (0, True, True)
    for path, condition, problem in (
        (folder, "b > 1", "no column 'b'"),
        (folder, "cls >", "cannot be read"),
        (f"{folder}/d-000000.tar", "cls > 1", "only a folder with an index has columns"),
    ):
        with pytest.raises(SelectionError, match=problem):
            info(path, where=condition)
    (tmp_path / "d" / "d-000000.tar").write_bytes(b"")
    with pytest.raises(WdskitError, match=r"d-000000.tar: it has 0 bytes, but the folder's index says \d+"):
        info(folder)
