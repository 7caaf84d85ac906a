"""Numbers that come twice, and those that are among others, as Python's own counters tell them."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.dataset import hashes
from wdskit.dataset.hashes import find_repeated, is_among

NUMBERS = st.lists(st.integers(-40, 40) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=50)


@pytest.fixture(autouse=True)
def _small_pieces(request, monkeypatch):
    if "memory" not in request.node.name:
        monkeypatch.setattr(hashes, "_PIECE", 7)


@given(NUMBERS)
def test_those_that_come_twice_are_found_once_each_in_order(numbers):
    expected = sorted(number for number, count in Counter(numbers).items() if count > 1)
    assert find_repeated(np.array(numbers, np.int64)).tolist() == expected
    unsigned = [number % (1 << 64) for number in numbers]
    expected = sorted(number for number, count in Counter(unsigned).items() if count > 1)
    assert find_repeated(np.array(unsigned, np.uint64)).tolist() == expected


@given(NUMBERS, NUMBERS)
def test_those_that_are_known_are_told(known, numbers):
    found = is_among(np.array(numbers, np.int64), np.array(sorted(known), np.int64))
    assert found.tolist() == [number in known for number in numbers]


def test_both_take_little_memory():
    numbers = np.random.default_rng(0).integers(0, 1 << 62, 1_000_000)
    numbers[-1] = numbers[0]
    tracemalloc.start()
    twice = find_repeated(numbers)
    found = is_among(numbers, twice)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.flatnonzero(found).tolist() == [0, 999_999]
    assert peak < numbers.nbytes * 3
