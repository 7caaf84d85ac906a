"""The text of a sample's own JSON does not change when wdskit adds members to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import image_bytes
from shards import samples_in, write_shard

from wdskit import pack, reshard
from wdskit.dataset.keys import hashed_key
from wdskit.packing.json_merge import add_metadata

TEXTS = {
    "numbers": rb'{"a": 1.10, "b": 1E5, "c": -0.0, "d": 1e999, "e": 0.1000000000000000055511151231257827}',
    "large integers": b'{"n": 123456789012345678901234567890, "m": 1' + b"0" * 4000 + b"}",
    "members of one name": b'{"b": 1, "a": {"x": 1, "x": 2}, "b": 2, "b": 3}',
    "no numbers": b'{"a": NaN, "b": [Infinity, -Infinity]}',
    "escapes": rb'{"a": "\u00e9\/\ud800", "\u0062": "\u0041"}',
    "white space": b' \n{\n\t"a" :\r\n 1 ,\n "b":[ ]\n}\n',
    "byte order mark": b'\xef\xbb\xbf{"a": 1.0}',
    "empty": b"{ \n }",
    "large": b'{"a": 1.0, "b": "' + b"x" * (1 << 18) + b'"}',
}


def in_folder(path: Path, text: bytes, out: Path) -> None:
    (path / "c").mkdir(parents=True)
    (path / "c" / "a b.jpg").write_bytes(image_bytes())
    (path / "c" / "a b.json").write_bytes(text)
    pack(path, out, sidecars=["json"], keys="hashed")


def in_tar(path: Path, text: bytes, out: Path) -> None:
    path.mkdir()
    pack(write_shard(path / "s.tar", {"c/a b": {"jpg": image_bytes(), "json": text}}), out, keys="hashed")


def in_rows(path: Path, text: bytes, out: Path) -> None:
    pack([{"__key__": "c/a b", "jpg": image_bytes(), "json": text}], out, keys="hashed")


def in_a_file_of_rows(path: Path, text: bytes, out: Path) -> None:
    path.mkdir()
    (path / "own.json").write_bytes(text)
    pack([{"__key__": "c/a b", "jpg": image_bytes(), "json": path / "own.json"}], out, keys="hashed")


def in_shards(path: Path, text: bytes, out: Path) -> None:
    path.mkdir()
    reshard(str(write_shard(path / "s.tar", {"c/a b": {"jpg": image_bytes(), "json": text}})), out, keys="hashed")


def in_a_table(path: Path, text: bytes, out: Path) -> None:
    """A line of JSONL is the sample's JSON, unchanged."""
    path.mkdir()
    (path / "a.jpg").write_bytes(image_bytes())
    (path / "rows.jsonl").write_bytes(b'{"image":"a.jpg",' + text.removeprefix(b"{") + b"\n")
    pack(path / "rows.jsonl", out)


def derived(path: Path, text: bytes, out: Path) -> None:
    pack([{"__key__": "ab", "jpg": image_bytes(), "json": text}], out, derive="width,height,bytes,sha256")


WAYS = [in_folder, in_tar, in_rows, in_a_file_of_rows, in_shards, derived]


@pytest.mark.parametrize(
    "text", [TEXTS["large integers"], b'{"a": 1.10, "b": 1E5, "c": -0.0, "d":\t0.10000000000000000555, "e": [ ]}']
)
def test_a_line_of_a_table_is_the_json_of_its_sample_as_it_stands(tmp_path, text):
    in_a_table(tmp_path / "source", text, tmp_path / "out")
    ((_, sample),) = samples_in(tmp_path / "out").items()
    assert sample["json"] == b'{"image":"a.jpg",' + text.removeprefix(b"{")


def same_start(one: bytes, other: bytes) -> int:
    """Return the number of equal bytes at the start of both."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_of_the_own_json_stays_where_facts_are_added(tmp_path, way, name):
    text = TEXTS[name]
    way(tmp_path / "source", text, tmp_path / "out")
    ((_, sample),) = samples_in(tmp_path / "out").items()
    made = sample["json"]
    head = same_start(text, made)
    tail = same_start(text[::-1], made[::-1])
    assert head + tail >= len(text), "something was taken out, or written otherwise"
    assert len(made) > len(text), "nothing was added"
    if name != "large integers":
        added = json.loads(made[text.index(b"{") :] if made.startswith(b"\xef") else made)
        assert added.keys() > json.loads(text.removeprefix(b"\xef\xbb\xbf")).keys()


def test_reshard_writes_the_json_that_pack_writes(tmp_path):
    samples = {f"a b/{number}": {"json": text} for number, text in enumerate(TEXTS.values())} | {"c": {"cls": b"1"}}
    source = str(write_shard(tmp_path / "s.tar", samples))
    pack(source, tmp_path / "packed", keys="hashed", pattern="p-%d.tar")
    reshard(source, tmp_path / "resharded", keys="hashed", pattern="p-%d.tar")
    assert samples_in(tmp_path / "packed") == samples_in(tmp_path / "resharded")
    assert samples_in(tmp_path / "packed")[hashed_key("c")]["json"] == b'{"key":"c"}'


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.lists(st.tuples(st.text(max_size=3), values), max_size=4), st.sampled_from(["", " ", "\n\t"]), st.booleans())
def test_facts_stand_beside_any_members(members, space, at_end):
    inner = f"{space},{space}".join(f"{json.dumps(name)}:{space}{json.dumps(value)}" for name, value in members)
    text = f"{space}{{{space}{inner}{space}}}{space}".encode()
    made = add_metadata(text, {"longer": 1, "second": "ä"}, at_end=at_end)
    added = '"longer":1,"second":"ä"'.encode()
    assert made.replace(b"," + added if at_end and members else added + (b"," if members else b""), b"", 1) == text
    names = [name for name, _ in json.loads(made, object_pairs_hook=list)]
    facts = ["longer", "second"]
    own = [name for name, _ in members]
    assert names == (own + facts if at_end else facts + own)
