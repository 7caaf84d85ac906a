"""Key rules: accepted keys come back unchanged from every reader, and each refusal gives its reason."""

from __future__ import annotations

import io
import itertools
import re
import string
import tarfile
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import webdataset.tariterators
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from wdskit.dataset.keys import check_field, check_key, check_member_name, find_repeated, hashed_key
from wdskit.dataset.samples import ShardReader
from wdskit.errors import KeyRuleError
from wdskit.limits import MAX_NAME_BYTES
from wdskit.tar.names import split_name
from wdskit.tar.writer import TarWriter


def tar_of(names: list[str]) -> bytes:
    """Return a shard whose members contain their own numbers."""
    parts: list[bytes] = []
    writer = TarWriter(lambda data: parts.append(bytes(data)))
    for number, name in enumerate(names):
        writer.add(name, b"%d" % number)
    writer.finish()
    return b"".join(parts)


def by_tarfile(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return tar.getnames()


def by_webdataset(data: bytes) -> list[dict[str, Any]]:
    files = webdataset.tariterators.tar_file_expander([{"url": "s.tar", "stream": io.BytesIO(data)}])
    return [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.tariterators.group_by_keys(files)
    ]


def by_wdskit(data: bytes) -> list[dict[str, Any]]:
    samples = ShardReader(io.BytesIO(data).read, shard="s.tar")
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


def check_round_trip(samples: dict[str, list[str]]) -> None:
    """Check that every reader returns these keys with these fields, in this order."""
    names = [f"{key}.{field}" for key, fields in samples.items() for field in fields]
    expected: list[dict[str, Any]] = []
    numbers = iter(range(len(names)))
    for key, fields in samples.items():
        expected.append({"__key__": key, **{field: b"%d" % next(numbers) for field in fields}})
    data = tar_of(names)
    assert by_tarfile(data) == names
    assert by_webdataset(data) == expected
    assert by_wdskit(data) == expected
    for key, fields in samples.items():
        assert [split_name(f"{key}.{field}") for field in fields] == [(key, field) for field in fields]


def is_accepted(check: Any, *names: str) -> bool:
    try:
        check(*names)
    except KeyRuleError as err:
        error = err
    else:
        return True
    assert repr(error.name) in str(error)
    assert error.name in names
    return False


# Accepted keys.

nasty = st.sampled_from(
    [*"abAB01_-+./\\ :*?\"<>|~$%#&'`;,=@!()[]{}^", "__", "..", "./", "//", "\t", "\n", "\0", "\x7f"]
)
keys = (
    st.lists(nasty | st.characters(), max_size=8).map("".join)
    | st.text("ab._/", max_size=8)
    | st.text(st.characters(exclude_categories=["Cc", "Cs", "Zs"], exclude_characters="./\\"), max_size=40)
)
fields = st.text("abAB01_-+.", max_size=6) | st.text(max_size=4) | st.sampled_from(["cls", "jpg", "seg.png", "__x"])


@settings(max_examples=400)
@given(key=keys, field=fields)
@example("a" * 96, "cls")
@example("ä" * 48, "cls")
@example("-rf", "cls")
@example("a/-", "x-y+z.0_1")
@example("CON", "txt")
@example('a:b*?"<>|', "txt")
@example("\ufeffkey", "cls")
@example("e\u0301", "cls")
def test_what_is_accepted_comes_back_from_every_reader(key: str, field: str) -> None:
    if is_accepted(check_member_name, key, field):
        check_round_trip({key: [field]})


accepted_keys = keys.filter(lambda key: is_accepted(check_key, key) and len(key.encode()) < 90)
accepted_fields = st.lists(
    fields.filter(lambda field: is_accepted(check_field, field)), min_size=1, max_size=3, unique=True
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.dictionaries(accepted_keys, accepted_fields, min_size=1, max_size=6))
def test_samples_that_are_accepted_stay_apart(samples: dict[str, list[str]]) -> None:
    """Exception: if one changed byte without a checksum could have split a sample into two, that is an error."""
    assume(all(is_accepted(check_member_name, key, field) for key, names in samples.items() for field in names))
    for first, second in itertools.pairwise(samples):
        is_short = 1 in {len(samples[first]), len(samples[second])}
        assume(not is_short or first.encode("ascii", "replace") != second.encode("ascii", "replace"))
    check_round_trip(samples)


def test_every_ascii_character_is_refused_or_comes_back_wherever_it_stands() -> None:
    refused = {}
    for char in map(chr, range(128)):
        for where, key in (("first", f"{char}a"), ("inside", f"a{char}a"), ("last", f"a{char}")):
            if is_accepted(check_key, key):
                check_round_trip({key: ["cls", "txt"]})
            else:
                refused.setdefault(char, []).append(where)
    everywhere = ["first", "inside", "last"]
    controls = {chr(code): everywhere for code in [*range(33), 127]}
    assert refused == controls | {".": everywhere, "\\": everywhere, "/": ["first", "last"]}


def test_every_ascii_character_of_a_field_is_refused_or_comes_back() -> None:
    accepted = {char for char in map(chr, range(128)) if is_accepted(check_field, f"a{char}a")}
    assert accepted == {*string.ascii_lowercase, *string.digits, *"_+-."}
    for char in accepted:
        check_round_trip({"k": [f"a{char}a"]})


@pytest.mark.parametrize(("char", "width"), [("a", 1), ("ä", 2), ("猫", 3), ("🐈", 4)])
def test_a_name_of_100_bytes_fits_and_one_of_101_does_not(char: str, width: int) -> None:
    for field in ("c", "cls", "seg.png"):
        room = MAX_NAME_BYTES - 1 - len(field)
        key = char * (room // width) + "x" * (room % width)
        check_member_name(key, field)
        check_round_trip({key: [field]})
        with pytest.raises(KeyRuleError, match=f"with its field '{field}' it takes 101 bytes"):
            check_member_name(f"{key}x", field)


# Refused keys.

KEYS_REFUSED = {
    "": "it is empty",
    "dir.d/a": "it holds a dot, where every reader would cut it off",
    "a/.b": "a part of it starts with a dot",
    "../a": "it is not a plain relative path",
    "a//b": "it is not a plain relative path",
    "/a": "it is an absolute path",
    "C:\\a": "it holds a backslash, which is a separator on other systems",
    "a/__b": "a part of it starts with `__`",
    "a\u00a0b": "it holds white space",
    "a\x1b[2J": "it holds a control character",
    "a\u2028b": "it holds a control character",
    "a\ud800": "it cannot be written as UTF-8",
}


@pytest.mark.parametrize(("key", "rule"), KEYS_REFUSED.items())
def test_a_key_that_some_reader_would_change_is_refused_by_rule(key: str, rule: str) -> None:
    with pytest.raises(KeyRuleError, match=re.escape(f"key {key!r}: {rule}")) as caught:
        check_key(key)
    assert caught.value.name == key
    with pytest.raises(KeyRuleError):
        check_member_name(key, "cls")


# Splitting of names in shards of other writers.

SPLITS = {
    "a.JPG": ("a", "jpg"),
    "a.b.c": ("a", "b.c"),
    "x.y/a.jpg": ("x.y/a", "jpg"),
    "x.y/a": None,
    "./a.jpg": ("a", "jpg"),
    "../a.jpg": ("../a", "jpg"),
    "/abs/a.jpg": ("/abs/a", "jpg"),
    "": None,
    "a.": None,
    "x/.hidden.jpg": None,
    "x/": None,
    "a..jpg": ("a", ".jpg"),
    "__a__.jpg": ("__a__", "jpg"),
    "__a__/b.jpg": None,
    "__a/b.jpg": ("__a/b", "jpg"),
    "a b.jpg": ("a b", "jpg"),
}


@pytest.mark.parametrize(("name", "split"), SPLITS.items())
def test_a_name_splits_at_the_first_dot_of_its_basename(name: str, split: tuple[str, str] | None) -> None:
    assert split_name(name) == split


@settings(max_examples=500)
@given(st.text("aB._/", min_size=1, max_size=12) | st.lists(st.sampled_from(["__", "a", ".", "/", "B"])).map("".join))
def test_names_split_as_webdataset_splits_them(name: str) -> None:
    """Exceptions are hidden files and names without a field, `x/.jpg` and `a.`: webdataset makes samples of them, and
    keeps a leading `./` in the key.
    """
    name = re.sub(r"^(\./)+", "", name)
    assume(name and not name.endswith("/"))
    key, field = webdataset.tariterators.base_plus_ext(name)
    split = split_name(name)
    if split is None:
        assert key is None or key.endswith("/") or not field or re.match(r"__[^/]*__($|/)", name)
    else:
        assert split == (key, field.lower())


def test_a_hashed_key_is_safe_and_the_same_everywhere() -> None:
    """The values are committed: packing with `--keys hashed` again gives the same keys."""
    assert hashed_key("train/a b.jpg") == "e00d717ee2cfb202156d"  # b2sum -l 80
    assert hashed_key("") == "6fa1d8fcfd719046d762"
    assert hashed_key("\udcff") == "bc05b8d149955d3836b9"  # a path that is the byte FF
    for path in ("a", "a b/ü.jpg", "\udcff", "x" * 5000):
        check_member_name(hashed_key(path), "seg.png")
        assert re.fullmatch("[0-9a-f]{20}", hashed_key(path))
    assert len({hashed_key(f"{number}") for number in range(10_000)}) == 10_000


# --- 64-bit hashes, as Python's own counters find them

NUMBERS = st.lists(st.integers(-40, 40) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=50)


@given(NUMBERS)
def test_those_that_come_twice_are_found_once_each_in_order(numbers):
    for dtype, values in ((np.int64, numbers), (np.uint64, [number % (1 << 64) for number in numbers])):
        expected = sorted(number for number, count in Counter(values).items() if count > 1)
        assert find_repeated(np.array(values, dtype)).tolist() == expected


def test_repeated_hashes_are_found_in_little_memory():
    numbers = np.random.default_rng(0).integers(0, 1 << 62, 1_000_000)
    numbers[-1] = numbers[0]
    tracemalloc.start()
    twice = find_repeated(numbers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert twice.tolist() == [numbers[0]]
    assert peak < numbers.nbytes * 1.5
