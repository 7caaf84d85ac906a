"""Group members into samples: members of one sample, members of no sample, and members that are errors."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_shard
from tar_corpus import END, member, padded

from wdskit import Pipeline
from wdskit.dataset.samples import HeaderReader, ShardReader
from wdskit.dataset.shard import IndexedShard
from wdskit.errors import ShardError, UnsupportedMember
from wdskit.storage.urls import LocalFile

# Names of members; the number of samples before the fault, the number of the wrong member, and the message.
FAULTS: dict[str, tuple[list[str], int, int, str]] = {
    "a key at both ends": (["a.jpg", "b.jpg", "c.jpg", "d.jpg", "a.jpg"], 4, 4, "key 'a' is in two places"),
    "a key twice": (["a.jpg", "a.json", "b.jpg", "a.jpg", "a.json"], 2, 3, "key 'a' is in two places"),
    "two keys in turns": (["a.jpg", "b.jpg", "a.json", "b.json"], 2, 2, "key 'a' is in two places"),
    "a field twice": (["a.jpg", "b.jpg", "b.jpg"], 1, 2, "key 'b' has the field 'jpg': twice"),
    "a field twice in capitals": (["a.jpg", "a.JPG"], 0, 1, "key 'a' has the field 'jpg': twice"),
    "a field twice with a stranger between": (["a.jpg", "README", "a.jpg"], 0, 2, "'jpg': twice"),
    "the key as a field": (["a.jpg", "b.__key__"], 1, 1, "'__key__': a name that readers reserve"),
    "the url as a field in capitals": (["a.__URL__"], 0, 0, "'__url__': a name that readers reserve"),
}


def content(number: int) -> bytes:
    """Return the content of the member with this number: many sizes, one empty."""
    return bytes([number % 256]) * (number * 300)


def shard_of(names: list[str]) -> bytes:
    """Return a shard of members with these names; names that end in a slash are directories."""
    members = [
        member(name, b"", kind=b"5") if name.endswith("/") else member(name, content(number))
        for number, name in enumerate(names)
    ]
    return b"".join(members) + END


def offset_of(names: list[str], number: int) -> int:
    """Return the offset of the member with this number."""
    return len(shard_of(names[:number])) - len(END)


def split(name: str) -> tuple[str, str]:
    """Return key and field by WebDataset's rule, written in another way."""
    folder, slash, base = re.sub(r"^(\./)+", "", name).rpartition("/")
    stem, _, field = base.partition(".")
    return folder + slash + stem, field.lower()


@pytest.mark.parametrize("case", FAULTS)
def test_what_would_mix_samples_is_an_error_at_its_second_place(case):
    names, num_samples, number, problem = FAULTS[case]
    reader = ShardReader(io.BytesIO(shard_of(names)).read, shard="a.tar")
    samples = []
    with pytest.raises(ShardError) as caught:
        for sample in reader:
            samples.append(sample["__key__"])  # noqa: PERF401 (what came before the error)
    err = caught.value
    assert problem in err.problem
    assert (err.shard, err.offset, err.samples_read) == ("a.tar", offset_of(names, number), num_samples)
    assert f"a.tar, byte {err.offset}: {err.problem} ({num_samples} samples read).\n  Pack it again" in str(err)
    assert len(samples) == reader.num_samples == num_samples


def model(names: list[str]) -> tuple[list[tuple[str, list[str]]], bool]:
    """Return the samples before the first fault, and whether there is a fault."""
    groups: list[tuple[str, list[str]]] = []
    for name in names:
        key, field = split(name)
        if not field or not key or key.endswith("/"):
            continue
        if groups and groups[-1][0] == key:
            if field in groups[-1][1]:
                return groups[:-1], True
            groups[-1][1].append(field)
        elif key in [other for other, _ in groups]:
            return groups, True
        else:
            groups.append((key, [field]))
    return groups, False


NAMES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "", "./", "d/", "d.e/", "ä b/"]),
    st.sampled_from(["a", "b", "c", "", "A"]),
    st.sampled_from([".jpg", ".json", ".JPG", ".a.b", "", ".", "/"]),
).filter(lambda name: name not in ("", "/", "./", ".//"))


@given(st.lists(NAMES, max_size=7))
@settings(max_examples=300)
def test_any_names_group_as_the_rule_says(names):
    """Keys, fields, contents and places are those of a model; names that end in a slash are directories."""
    wanted, has_fault = model(names)
    reader = ShardReader(io.BytesIO(shard_of(names)).read, shard="x")
    found = []
    try:
        for sample in reader:
            assert list(sample)[:2] == ["__key__", "__url__"]
            found.append((sample["__key__"], list(sample)[2:]))
            for field, data in list(sample.items())[2:]:
                assert data == content([split(name) for name in names].index((sample["__key__"], field)))
    except ShardError:
        assert has_fault
    else:
        assert not has_fault
        keys = [split(name)[0] if split(name)[1] else "" for name in names]
        assert reader.starts == [offset_of(names, keys.index(key)) for key, _ in wanted]
        num_files = sum(not name.endswith("/") for name in names)
        assert reader.num_ignored == num_files - sum(len(fields) for _, fields in wanted)
    assert found == wanted
    assert reader.num_samples == len(wanted)


def test_a_sample_comes_before_the_rest_of_the_shard_is_there(monkeypatch):
    """A slow stream yields each sample once it has the next sample's first member and the header after that."""
    monkeypatch.setattr("wdskit.tar.window.CHUNK_BYTES", 512)
    stream = io.BytesIO(b"".join(member(f"{n}.cls", padded(b"%d" % n)) for n in range(9)) + END)
    for number, sample in enumerate(ShardReader(stream.read, shard="x")):
        assert sample["__key__"] == str(number)
        assert stream.tell() <= (number + 2) * 1024 + 1024


# From one shard to the next.


def two_shards(folder: Path) -> list[str]:
    """The key `k` ends the first shard and begins the second, with other fields."""
    first = write_shard(folder / "1.tar", {"a": {"cls": b"1"}, "k": {"jpg": b"first's image"}})
    second = write_shard(folder / "2.tar", {"k": {"json": b'"second"'}, "b": {"cls": b"2"}})
    return [str(first), str(second)]


def test_grouping_begins_anew_in_each_shard(tmp_path):
    first, second = two_shards(tmp_path)
    samples = list(Pipeline().stream([first, second]).loader(workers=0))
    found = {(s["__url__"], s["__key__"]): [name for name in s if not name.startswith("__")] for s in samples}
    assert len(samples) == 4
    assert found == {(first, "a"): ["cls"], (first, "k"): ["jpg"], (second, "k"): ["json"], (second, "b"): ["cls"]}


def test_a_cut_sample_is_not_completed_with_the_next_shards_fields(tmp_path):
    """In both orders of the two shards."""
    first, second = two_shards(tmp_path)
    Path(first).write_bytes(
        Path(first).read_bytes()[:-1024]
    )  # cut at the end of a member: all members of `k` before that are whole
    for seed in range(4):
        samples = []
        with pytest.raises(ShardError, match=r"1\.tar, byte 2048: the shard stops before its end marker"):
            for sample in Pipeline().stream([first, second], seed=seed).loader(workers=0):
                samples.append(sample)  # noqa: PERF402 (what came before the error)
        assert (first, "k") not in [(sample["__url__"], sample["__key__"]) for sample in samples]
        assert all("jpg" not in sample for sample in samples)


UNFIT = {
    "a field twice": (["a.jpg", "a.jpg"], "key 'a' has the field 'jpg': twice"),
    "a field twice in other letters": (["a.jpg", "a.JPG"], "key 'a' has the field 'jpg': twice"),
    "a reserved field": (["a.jpg", "a.__key__"], "key 'a' has the field '__key__': a name that readers reserve"),
    "no member with a key": (["README"], "sample 0 has no member"),
    "members of two keys": (["a.jpg", "b.jpg"], "sample 0 holds 'b.jpg' beside the key 'a'"),
}


@pytest.mark.parametrize("is_trusted", [True, False])
@pytest.mark.parametrize("case", UNFIT)
def test_a_sample_that_is_read_by_its_place_is_whole_or_an_error(case, is_trusted, tmp_path):
    names, problem = UNFIT[case]
    members = b"".join(member(name, b"x") for name in names)
    path = tmp_path / "s.tar"
    path.write_bytes(members + END)
    offsets = np.array([0, len(members)])
    shard = IndexedShard(str(path), LocalFile(str(path)), offsets, is_trusted=is_trusted)
    with shard, pytest.raises(ShardError) as caught:
        shard.read(0)
    assert caught.value.problem == problem


LINK = member("b.png", b"", kind=b"1", link=b"a.jpg")


@pytest.mark.parametrize("by_headers", [False, True])
def test_a_member_with_a_key_that_cannot_be_a_field_is_an_error_of_its_sample(by_headers, tmp_path):
    """Who takes faults gets all samples, without the field; otherwise the samples before it."""
    names = {"a.jpg": b"", "b.jpg": b"", "b.png": LINK, b"\xe9.txt": b"", "c.jpg": b"", "c.JPG": b"", "c.__url__": b""}
    data = b"".join(header or member(name, b"x") for name, header in names.items()) + END
    (tmp_path / "s.tar").write_bytes(data)
    faults = []

    def reader(on_fault):
        if by_headers:
            return HeaderReader(LocalFile(str(tmp_path / "s.tar")), shard="s.tar", on_fault=on_fault)
        return ShardReader(io.BytesIO(data).read, shard="s.tar", on_fault=on_fault)

    found = [(s["__key__"], [*s][2:]) for s in reader(lambda *fault: faults.append(fault))]
    assert found == [("a", ["jpg"]), ("b", ["jpg"]), ("c", ["jpg"])]
    assert faults == [
        (2048, "b", "a member is a hard link: 'b.png'"),
        (2560, r"\xe9", r"a member is a file whose name is not UTF-8: '\\xe9.txt'"),
        (4608, "c", "it has the field 'jpg': twice"),
        (5632, "c", "it has the field '__url__': a name that readers reserve"),
    ]
    found = []
    with pytest.raises(UnsupportedMember, match=r"byte 2048: a member is a hard link: 'b.png' \(1 samples read\)"):
        found.extend(s["__key__"] for s in reader(None))
    assert found == ["a"]
