"""Shares of a split: read exactly, refused if the sum is not 1, and mapped exactly to the range of draws."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.errors import SelectionError
from wdskit.shards.shares import bounds_of, choose_splits, format_share, format_shares, parse_shares


@pytest.mark.parametrize(
    "shares",
    [
        "train=0.8,val=0.1,test=0.1",
        "train=80%,val=10%,test=10%",
        "train=4/5,val=1/10,test=1/10",
        " train=0.80 , val= 0.1,test =10.0%",
        {"train": 0.8, "val": 0.1, "test": 0.1},
        {"train": "80%", "val": Fraction(1, 10), "test": "0.10"},
        {"train": np.float64(0.8), "val": np.float64(0.1), "test": 0.1},
    ],
    ids=str,
)
def test_every_way_to_write_shares_is_one_split(shares) -> None:
    """As floats, 0.8 + 0.1 + 0.1 is not 1; shares are exact decimals."""
    parsed = parse_shares(shares)
    assert list(parsed.items()) == [("train", Fraction(4, 5)), ("val", Fraction(1, 10)), ("test", Fraction(1, 10))]
    assert format_shares(parsed) == "train=0.8,val=0.1,test=0.1"


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ("train=0.8,val=0.1", "add up to 0.9, not to 1.\n  Name the rest too: add unused=0.1"),
        ("train=0.8,val=0.3", "the shares train=0.8,val=0.3 add up to 1.1, not to 1."),
        ("train=0.8,train=0.2", "name 'train' twice"),
        ("train", "'train' is not NAME=SHARE. Write train=0.8"),
        ({}, "the shares  add up to 0, not to 1."),
        ("Train=1", "'Train' is not a valid name for a split"),
        ("../x=1", "is not a valid name for a split"),
        ("a=0,b=1", "a=0 is not a share: a share is more than 0 and at most 1"),
        ("a=2", "a=2 is not a share"),
        ("a=1e-9999999999", "is not a share"),
        ("a=\u0660.\u0665,b=0.5", "is not a share"),
        ({"a": float("nan")}, "a=nan is not a share"),
        ({"a": True}, "a=True is not a share"),
    ],
)
def test_what_is_no_whole_is_refused(shares, told: str) -> None:
    with pytest.raises(SelectionError) as caught:
        parse_shares(shares)
    assert told in str(caught.value)


fractions = st.lists(st.integers(1, 10**6), min_size=1, max_size=20).map(
    lambda parts: {f"s{at}": Fraction(part, sum(parts)) for at, part in enumerate(parts)}
)


@given(fractions, st.decimals(0, 1, places=6).filter(bool))
def test_what_is_written_is_read_back_and_a_decimal_stays_a_decimal(shares, share) -> None:
    assert parse_shares(format_shares(parse_shares(shares))) == shares
    text = format_share(Fraction(share))
    assert (Fraction(text), "/" in text) == (Fraction(share), False)


@given(fractions, st.lists(st.integers(0, (1 << 64) - 1), max_size=50))
def test_a_draw_belongs_to_the_split_whose_part_of_the_range_it_is_in(shares, draws) -> None:
    """Draws, and the neighbours of each bound, are compared with fractions."""
    bounds = bounds_of(shares)
    assert bounds.dtype == np.uint64
    draws += [int(bound) + step for bound in bounds for step in (-1, 0, 1) if 0 <= int(bound) + step < 1 << 64]
    chosen = choose_splits(np.array(draws, dtype=np.uint64), shares)
    sums = np.cumsum([Fraction(0), *shares.values()])
    for draw, at in zip(draws, chosen, strict=True):
        assert int(sums[at] * 2**64) <= draw < int(sums[at + 1] * 2**64)
