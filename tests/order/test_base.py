"""Keyed randomness: committed numbers, keys that never collide, positions that do not depend on earlier draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wdskit.order.base import PositionRng, _entropy, permutation, philox

WORDS_64 = st.integers(0, 2**64 - 1)

# Committed numbers: numpy guarantees these streams, and a run must resume exactly under the next numpy.

GOLDEN_WORDS = {
    ("draw",): [0x998E066AEB337900, 0x0A19A6AB5F2648DB, 0x09E37DD8DFEBFA9F],
    ("draw", 1, 2): [0x1FF712950FEA57B3, 0x71F855ED03ECF59E, 0xAE2D4E5515BF8447],
    ("shard-order", 7, 3): [0x513BEB9D8917816B, 0x4EB9D93DF01F4844, 0x4C5F0FCA59D5BB6],
    ("stage:0:map", 2**64 - 1): [0x84D5E8F41395438D, 0xAF90D48948825977, 0x6D1837FFF85DCC0D],
    ("a", 1, 2, 3, 4, 5): [0xD3ED2FD66D1503AC, 0xA0AA2A35653D7786, 0x700CFBACEC2440C9],
}


@pytest.mark.parametrize(("key", "words"), GOLDEN_WORDS.items())
def test_words_of_a_key_are_those_that_were_committed(key: tuple[Any, ...], words: list[int]) -> None:
    assert philox(*key).random_raw(3).tolist() == words


@pytest.mark.parametrize("n", [0, 1, 2, 511, 512, 513, 1000, 4095, 4096, 4097, 70_000])
def test_a_permutation_is_a_stable_argsort_of_raw_words(n: int) -> None:
    words = philox("test", 1, n).random_raw(n)
    found = permutation(n, "test", 1, n)
    assert found.dtype == np.int64
    assert np.array_equal(found, np.argsort(words, kind="stable"))


@pytest.mark.parametrize("spread", [0, 1, 3, 8, 9, 10, 20])
def test_words_that_are_nearly_equal_keep_their_order_too(spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `spread` bits of the words differ: the packed sort cannot distinguish them, and must notice that."""
    words = philox("test", spread).random_raw(600) >> np.uint64(64 - spread) if spread else np.zeros(600, np.uint64)

    class Same:
        def random_raw(self, n: int) -> Any:
            return words[:n].copy()

    monkeypatch.setattr("wdskit.order.base.philox", lambda *_: Same())
    assert np.array_equal(permutation(600, "test"), np.argsort(words, kind="stable"))


def philox_block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 from its paper (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(a * 0xD2E7470EE14C6C93, 1 << 64)
        high1, low1 = divmod(c * 0xCA5A826395121157, 1 << 64)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % (1 << 64), (k1 + 0xBB67AE8584CAA73B) % (1 << 64)
    return [a, b, c, d]


@settings(max_examples=100)
@given(WORDS_64, st.text(max_size=10), st.tuples(WORDS_64, WORDS_64, WORDS_64))
def test_a_positions_words_are_philox_of_its_counter(seed: int, stage: str, position: tuple[int, int, int]) -> None:
    """Block n of a position is Philox of the counter (n, major, minor, part), n from 1, and the stage's key."""
    key = tuple(philox(f"stage:{stage}", seed).state["state"]["key"].tolist())
    found = PositionRng(seed, stage).at(*position).bit_generator.random_raw(9).tolist()
    assert found == [word for n in (1, 2, 3) for word in philox_block((n, *position), key)][:9]


# Keys.


@settings(max_examples=300)
@given(st.lists(st.tuples(st.text(max_size=4), st.lists(WORDS_64 | st.integers(0, 3), max_size=5)), min_size=2))
def test_different_keys_have_different_entropy(keys: list[tuple[str, list[int]]]) -> None:
    """All keys have one length, so that no key is the beginning of another; missing words are zeros."""
    whole = {(purpose, *words, *[0] * (5 - len(words))) for purpose, words in keys}
    found = {tuple(_entropy(purpose, tuple(words))) for purpose, words in keys}
    assert len(found) == len(whole)
    assert {len(entropy) for entropy in found} == {12}
    assert all(0 <= word < 1 << 32 for entropy in found for word in entropy)


@pytest.mark.parametrize("word", [-1, -(2**63), 2**64, 2**100])
def test_a_word_that_does_not_fit_is_refused(word: int) -> None:
    for place in range(5):
        with pytest.raises(ValueError, match=f"{word} does not fit an unsigned 64-bit word of a key"):
            philox("draw", *[0] * place, word)
    with pytest.raises(ValueError, match="does not fit"):
        permutation(3, "draw", word)
    with pytest.raises(ValueError, match="does not fit"):
        PositionRng(word, "stage")
    for position in [(word,), (0, word), (0, 0, word)]:
        with pytest.raises(ValueError, match="are not unsigned 64-bit integers"):
            PositionRng(0, "stage").at(*position)
    with pytest.raises(ValueError, match="negative"):
        permutation(-1, "test")


# Positions.

USES = {
    "random": lambda rng: rng.random(),
    "32 bits": lambda rng: rng.integers(1 << 32, dtype=np.uint32),  # leaves half a word unused
    "8 bits": lambda rng: rng.integers(256, size=3, dtype=np.uint8),
    "bool": lambda rng: rng.integers(2, size=5, dtype=bool),
    "float32": lambda rng: rng.random(3, dtype=np.float32),
    "normal": lambda rng: rng.standard_normal(5),
    "gamma": lambda rng: rng.gamma(0.5, size=3),
    "permutation": lambda rng: rng.permutation(9),
    "choice": lambda rng: rng.choice(100, 5, replace=False),
    "bytes": lambda rng: rng.bytes(5),
    "many": lambda rng: rng.integers(1 << 60, size=1000),
    "nothing": lambda rng: None,
}
positions = st.tuples(WORDS_64, WORDS_64, WORDS_64) | st.tuples(*[st.integers(0, 2)] * 3)


def used(rng: np.random.Generator) -> list[Any]:
    return [np.asarray(use(rng)).tolist() for use in USES.values()]


@settings(max_examples=100)
@given(
    seed=WORDS_64,
    visits=st.lists(st.tuples(positions, st.lists(st.sampled_from(sorted(USES)), max_size=4)), max_size=8),
    position=positions,
)
def test_a_position_remembers_nothing_of_others(
    seed: int, visits: list[tuple[tuple[int, int, int], list[str]]], position: tuple[int, int, int]
) -> None:
    rng = PositionRng(seed, "stage")
    for other, names in visits:
        generator = rng.at(*other)
        for name in names:
            USES[name](generator)
    assert used(rng.at(*position)) == used(PositionRng(seed, "stage").at(*position))


def test_without_the_reset_a_position_would_remember() -> None:
    """The mutant sets only the counter, and keeps the rest of the last word."""

    class Forgetful(PositionRng):
        def at(self, major, minor=0, part=0):
            state = self._bits.state
            state["state"]["counter"][:] = (0, major, minor, part)
            state["buffer_pos"] = 4
            self._bits.state = state
            return self._generator

    def second(kind: type[PositionRng], first: str) -> list[int]:
        rng = kind(0, "stage")
        USES[first](rng.at(1))
        return [int(number) for number in rng.at(2).integers(1 << 32, size=3, dtype=np.uint32)]

    assert len({tuple(second(PositionRng, name)) for name in USES}) == 1
    assert len({tuple(second(Forgetful, name)) for name in USES}) > 1
