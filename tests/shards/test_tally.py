"""Counts of values in parts equal the counts of one pass, in bounded memory."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.shards import tally as counts
from wdskit.shards.tally import MAX_ITEMS, MAX_KEYS, FieldTally, NumberTally, count_values, round_number

SHARES = (Fraction(0), Fraction(1, 100), Fraction(1, 2), Fraction(99, 100), Fraction(1))


def numbers_of(values):
    numbers = NumberTally()
    for value in values:
        numbers.add(value)
    return numbers


def told(numbers):
    return numbers, [numbers.quantile(share) for share in SHARES]


@given(st.lists(st.integers(0, 10**12), max_size=60), st.integers(0, 60), st.integers(1, 30), st.integers(1, 50))
def test_parts_in_any_order_give_what_one_pass_gives(values, at, step, limit):
    """This holds for few different numbers, and for more than the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "MAX_DIFFERENT", limit)
        parts = [numbers_of(values[start : start + step]) for start in range(0, len(values), step)]
        parts = parts[at:] + parts[:at]
        merged = NumberTally()
        for part in parts:
            merged.merge(part)
        assert told(merged) == told(numbers_of(values))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=80))
def test_quantiles_are_numbers_that_came(values):
    numbers = numbers_of(values)
    ranked = sorted(values)
    for share, found in zip(SHARES[1:], map(numbers.quantile, SHARES[1:]), strict=True):
        assert found == ranked[ceil(share * len(values)) - 1]
    assert (numbers.least, numbers.most, numbers.total) == (ranked[0], ranked[-1], sum(values))


def test_of_too_many_numbers_quantiles_stay_within_a_twentieth_of_a_percent(monkeypatch):
    monkeypatch.setattr(counts, "MAX_DIFFERENT", 1000)
    values = np.random.default_rng(1).lognormal(11, 1, 30_000).astype(int).tolist()
    numbers = numbers_of(values)
    assert not numbers.is_exact
    assert len(numbers.counts) < 1024 * 12
    ranked = sorted(values)
    shares = [Fraction(at, 100) for at in range(1, 101)]
    for share, found in zip(shares, map(numbers.quantile, shares), strict=True):
        assert found == pytest.approx(ranked[ceil(share * len(values)) - 1], rel=0.0005)
    assert (numbers.least, numbers.most, numbers.total) == (ranked[0], ranked[-1], sum(values))


@given(st.integers(0, 2**50))
def test_rounding_is_near_and_rounding_again_changes_nothing(value):
    assert abs(round_number(value) - value) <= value * 0.0005
    assert round_number(round_number(value)) == round_number(value)


def test_values_that_cannot_be_rounded_are_not_counted_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(counts, "MAX_DIFFERENT", 3)
    few = count_values(Counter(), [5, 5, 6, 7])
    assert few == {5: 2, 6: 1, 7: 1}
    assert count_values(few, Counter([5, 5])) == {5: 4, 6: 1, 7: 1}
    assert count_values(few, Counter([8])) is None
    assert count_values(None, Counter([8])) is None
    assert count_values(Counter([8]), None) is None


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=50))
def test_bins_have_no_gap_and_hold_all(values):
    numbers = numbers_of(values)
    bins = numbers.bins()
    assert sum(count for _, _, count in bins) == len(values)
    assert all(sum(low <= value < high for value in values) == count for low, high, count in bins)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(bins))
    assert len(bins) <= 8 * 8


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=50))
def test_bins_begin_at_the_least_and_end_at_the_most(values):
    bins = numbers_of(values).bins()
    assert bins[0][2] > 0 or bins[1][2] > 0
    assert bins[-1][2] > 0


def keys_of(*documents):
    tally = FieldTally()
    for document in documents:
        tally.add_json(document)
    return tally


def test_json_keys_have_types_and_presence():
    tally = keys_of(
        {"a": 1, "b": {"c": [{"d": "x"}, {"d": 2.5}, None]}, "two words": True, "e.f": None},
        {"a": -3, "b": None, "big": 10**400, "odd": float("nan")},
        [1, 2],
    )
    found = {path: (one.num_samples, one.types, one.min, one.max) for path, one in tally.keys.items()}
    assert found == {
        "a": (2, {"integer": 2}, -3, 1),
        "b": (2, {"object": 1, "null": 1}, None, None),
        "b.c": (1, {"list": 1}, None, None),
        "b.c[]": (1, {"object": 2, "null": 1}, None, None),
        "b.c[].d": (1, {"text": 1, "number": 1}, 2.5, 2.5),
        '["two words"]': (1, {"boolean": 1}, None, None),
        '["e.f"]': (1, {"null": 1}, None, None),
        "big": (1, {"integer": 1}, 10**400, 10**400),
        "odd": (1, {"number": 1}, None, None),
        "": (1, {"list": 1}, None, None),
        "[]": (1, {"integer": 2}, 1, 2),
    }


def test_json_keys_of_parts_are_those_of_one_pass():
    documents = [{f"k{number % 5}": number, "same": "x"} for number in range(20)]
    one = keys_of(*documents)
    merged = keys_of(*documents[:7])
    merged.merge(keys_of(*documents[7:]))
    assert list(merged.keys) == list(one.keys)
    for path, tally in one.keys.items():
        other = merged.keys[path]
        assert (tally.num_samples, tally.types, tally.min, tally.max) == (
            other.num_samples,
            other.types,
            other.min,
            other.max,
        )


def test_json_of_ever_new_keys_long_lists_and_deep_nesting_takes_no_memory():
    tally = keys_of({f"k{number}": 0 for number in range(MAX_KEYS + 7)})
    assert (len(tally.keys), tally.num_more_keys) == (MAX_KEYS, 7)
    merged = keys_of({"other": 0})
    merged.merge(tally)
    assert (len(merged.keys), merged.num_more_keys) == (MAX_KEYS, 8)
    assert keys_of({"a": [0] * 10_000}).keys["a[]"].types == {"integer": MAX_ITEMS}
    deep = json.loads('{"a":' * 200 + "0" + "}" * 200)
    assert list(keys_of(deep).keys) == ["a", "a.a", "a.a.a", "a.a.a.a"]
    assert max(map(len, keys_of({"x" * 10_000: 0, "\ud800" * 10_000: 1}).keys)) < 2000
