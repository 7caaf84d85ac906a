"""Rows whose images are byte for byte those of an earlier row."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.packing import duplicates
from wdskit.packing.duplicates import Digests, find_duplicates, image_digest
from wdskit.packing.row import Row


def rows_of(images):
    return [Row(f"k{n}", (("cls", b"%d" % n), ("jpg", image)), f"row {n}") for n, image in enumerate(images)]


def found_in(rows, image_fields=()):
    digests = Digests()
    for number, row in enumerate(rows):
        digests.add(number, image_digest(row.read_fields(), image_fields))
    return find_duplicates(digests, rows.__getitem__, image_fields)


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=12))
def test_each_row_that_repeats_an_image_names_the_first_one(images):
    found = found_in(rows_of(images))
    expected = [(n, f"k{images.index(image)}") for n, image in enumerate(images) if images.index(image) < n]
    assert [(one.number, one.first_key) for one in found] == expected
    assert all(one.sha256 == hashlib.sha256(images[one.number]).hexdigest() for one in found)


def test_rows_that_share_8_bytes_of_their_digests_are_compared_whole(monkeypatch):
    """A mutant of the hash: none of them."""
    monkeypatch.setattr(duplicates, "HASH_BYTES", 0)
    rows = rows_of([b"a", b"b", b"c", b"a"])
    assert [(one.key, one.first_key) for one in found_in(rows)] == [("k3", "k0")]


def test_a_line_says_which_rows_and_what():
    (one,) = found_in(rows_of([b"x", b"x"]))
    assert one.to_dict() == {
        "key": "k1",
        "where": "row 1",
        "first_key": "k0",
        "first_where": "row 0",
        "sha256": hashlib.sha256(b"x").hexdigest(),
    }


def test_rows_without_an_image_repeat_nothing_and_other_fields_do_not_count():
    assert found_in([Row("a", (("txt", b"x"),), "0"), Row("b", (("txt", b"x"),), "1")]) == []
    assert len(found_in([Row("a", (("jpg", b"x"),), "0"), Row("b", (("jpg", b"x"), ("txt", b"y")), "1")])) == 1


def test_of_several_images_all_count_or_those_that_are_named():
    one = Row("a", (("jpg", b"x"), ("seg.png", b"1")), "0")
    other = Row("b", (("jpg", b"x"), ("seg.png", b"2")), "1")
    assert found_in([one, other]) == []
    assert len(found_in([one, other], ("jpg",))) == 1


def test_a_row_takes_8_bytes_and_is_looked_at_in_little_more():
    digests = Digests()
    for number in range(200_000):
        digests.add(number, (number % 150_000).to_bytes(4, "big") + bytes(28))
    tracemalloc.start()
    assert len(digests.suspects()) == 100_000
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 200_000 * 32
    assert duplicates.HASH_BYTES == 8


@pytest.mark.parametrize("number", [0, 1, 2])
def test_few_rows_are_no_special_case(number):
    assert found_in(rows_of([b"x"] * number)) == [] if number < 2 else found_in(rows_of([b"x"] * number))
