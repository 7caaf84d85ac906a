"""Two sets of shards, sample by sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_shard

from wdskit import ShardError, StorageError
from wdskit.dataset.keys import hash_key
from wdskit.shards import diff as comparing
from wdskit.shards.diff import Difference, diff

Samples = dict[str, dict[str, bytes]]


def folder(path: Path, *parts: Samples) -> str:
    path.mkdir()
    for number, samples in enumerate(parts):
        write_shard(path / f"{number}.tar", samples)
    return str(path)


def expected(a: Samples, b: Samples) -> tuple[set[str], set[str], dict[str, set[str]]]:
    """Return the differences of two dictionaries, for the comparison."""
    fields = {
        key: {
            name if name in a[key] and name in b[key] else f"-{name}" if name in a[key] else f"+{name}"
            for name in a[key].keys() | b[key].keys()
            if a[key].get(name) != b[key].get(name)
        }
        for key in a.keys() & b.keys()
        if a[key] != b[key]
    }
    return a.keys() - b.keys(), b.keys() - a.keys(), fields


def found(result) -> tuple[set[str], set[str], dict[str, set[str]]]:
    both = {one.key: set(one.fields) for one in result.differences if one.in_a and one.in_b}
    only_a = {one.key for one in result.differences if one.in_b is None}
    return only_a, {one.key for one in result.differences if one.in_a is None}, both


SIDES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from([b"", b"1", b"2"]), min_size=1),
)


@settings(max_examples=60)
@given(a=SIDES, b=SIDES, cut=st.integers(0, 8))
def test_any_two_sides_differ_as_dictionaries_do(a, b, cut, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("diff")
    items = list(b.items())[::-1]
    sides = folder(tmp / "a", a), folder(tmp / "b", dict(items[:cut]), dict(items[cut:]))
    result = diff(*sides, workers=1)
    only_a, only_b, both = expected(a, b)
    assert found(result) == (only_a, only_b, both)
    assert (result.num_only_a, result.num_only_b, result.num_differ) == (len(only_a), len(only_b), len(both))
    assert result.num_equal == len(a.keys() & b.keys()) - len(both)
    assert result.is_same is (a == b)


def test_order_and_place_of_samples_and_fields_are_no_difference(tmp_path):
    a = {"k1": {"x": b"1", "y": b"2"}, "k2": {"x": b"3"}}
    b = {"k2": {"x": b"3"}, "k1": {"y": b"2", "x": b"1"}}
    assert diff(folder(tmp_path / "a", a), folder(tmp_path / "b", {}, b)).is_same


def test_names_and_bytes_of_fields_do_not_run_into_each_other(tmp_path):
    a, b = {"k": {"x": b"1y", "z": b""}}, {"k": {"x": b"1", "yz": b""}}
    assert not diff(folder(tmp_path / "a", a), folder(tmp_path / "b", b)).is_same


def test_two_workers_find_what_one_does(tmp_path):
    parts = [{f"{shard}k{n}": {"x": b"%d" % n} for n in range(20)} for shard in range(3)]
    a = folder(tmp_path / "a", *parts)
    parts[1]["1k3"]["x"] = b"other"
    b = folder(tmp_path / "b", *parts[1:])
    assert diff(a, b, workers=2) == diff(a, b, workers=1)


def test_all_are_counted_and_the_first_listed(tmp_path):
    a = folder(tmp_path / "a", {f"k{n:02d}": {"x": b""} for n in range(30)})
    b = folder(tmp_path / "b", {"other": {"x": b""}})
    result = diff(a, b, limit=3)
    assert (result.num_only_a, result.num_only_b) == (30, 1)
    assert [one.key for one in result.differences] == ["k00", "k01", "k02", "other"]


def test_keys_that_come_twice_on_one_side_are_told(tmp_path):
    a = folder(tmp_path / "a", {"k": {"x": b"1"}}, {"k": {"x": b"2"}})
    b = folder(tmp_path / "b", {"k": {"x": b"1"}})
    result = diff(a, b)
    assert (result.num_equal, result.num_repeated, result.is_same) == (1, (1, 0), False)


def test_keys_whose_hashes_collide_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "hash_key", lambda key: bytes(8))
    a, b = folder(tmp_path / "a", {"k": {"x": b"1"}}), folder(tmp_path / "b", {"m": {"x": b"2"}})
    result = diff(a, b, workers=1)
    assert result.differences == (Difference("k", f"{a}/0.tar", None), Difference("m", None, f"{b}/0.tar"))
    assert hash_key("k") != hash_key("m")


def test_a_damaged_shard_and_a_missing_one_cannot_be_compared(tmp_path, run):
    a = folder(tmp_path / "a", {"k": {"x": b"1"}})
    (tmp_path / "bad.tar").write_bytes((Path(a) / "0.tar").read_bytes()[:-1000])
    for other, error in [("bad.tar", ShardError), ("none.tar", StorageError)]:
        with pytest.raises(error):
            diff(a, str(tmp_path / other))
        code, out, err = run("diff", a, str(tmp_path / other))
        assert (code, out) == (2, "")
        assert err


def test_the_command_tells_each_key_and_its_fields(tmp_path, run, monkeypatch):
    folder(tmp_path / "a", {"k1": {"x": b"1", "txt": b""}, "k2": {"x": b""}, "k3\x1b": {"x": b""}})
    folder(tmp_path / "b", {"k1": {"x": b"2", "cls": b""}, "k2": {"x": b""}, "k4": {"x": b""}})
    monkeypatch.chdir(tmp_path)
    code, out, err = run("diff", "a", "b")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "only in A: k3\\x1b (a/0.tar)",
        "differs: k1: +cls, -txt, x (a/0.tar, b/0.tar)",
        "only in B: k4 (b/0.tar)",
        "A has 3 samples, B 3: 1 equal, 1 only in A, 1 only in B, 1 differ.",
    ]
    code, out, _ = run("diff", "a", "b", "--json", "--limit", "0")
    document = json.loads(out)
    assert (code, document["is_same"], document["num_differ"], document["differences"]) == (1, False, 1, [])
    code, out, _ = run("diff", "a", "a")
    assert (code, out) == (0, "A has 3 samples, B 3: 3 equal, 0 only in A, 0 only in B, 0 differ.")
