"""Random numbers from keys: equal keys give equal bits, on every machine and with every version of numpy.

numpy promises stable bit streams of `SeedSequence` and `Philox` across versions, but not a stable `permutation`, so
permutations are a stable argsort of random words. Keys have a fixed length, and their parts are never added: `(worker
0, epoch 31)` and `(worker 1, epoch 0)` are different keys.
"""

from __future__ import annotations

import operator
import zlib
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_NUM_WORDS = 5
_MIN_PACKED = 512  # `_argsort_packed` is faster from this number of words on
_WORD_MASK = 0xFFFFFFFF


def _entropy(purpose: str, words: tuple[int, ...]) -> list[int]:
    """Return a key as uint32 numbers for `np.random.SeedSequence`: a list of fixed length.

    Raises:
        ValueError: The key has more than `_NUM_WORDS` words, or a word is below 0 or above 2**64 - 1.
        TypeError: A word is not an integer.
    """
    if len(words) > _NUM_WORDS:
        msg = f"a key has at most {_NUM_WORDS} words, not {len(words)}"
        raise ValueError(msg)
    tag = purpose.encode()
    entropy = [zlib.crc32(tag), zlib.adler32(tag)]
    for word in map(operator.index, words + (0,) * (_NUM_WORDS - len(words))):
        if not 0 <= word < 1 << 64:
            msg = f"{word} does not fit an unsigned 64-bit word of a key"
            raise ValueError(msg)
        entropy += (word & _WORD_MASK, word >> 32)
    return entropy


def philox(purpose: str, *words: int) -> np.random.Philox:
    """Return a Philox bit generator for a key: a purpose and up to five uint64 words.

    Different keys give different streams. Missing words count as 0, so a purpose must always use the same number of
    words.

    Raises:
        ValueError: There are more than five words, or a word is below 0 or above 2**64 - 1.
        TypeError: A word is not an integer.
    """
    entropy = np.array(_entropy(purpose, words), dtype=np.uint32)  # SeedSequence takes six times as long for a list
    return np.random.Philox(np.random.SeedSequence(entropy))


def permutation(n: int, purpose: str, *words: int) -> NDArray[np.int64]:
    """Return a random permutation of 0..n-1, int64 (n,). Equal keys give equal permutations.

    `purpose` and `words` are the key, as for `philox`.

    Raises:
        ValueError: `n` is negative, or `philox` refuses the key.
        TypeError: A word is not an integer.
    """
    order = _argsort_packed(philox(purpose, *words).random_raw(n)) if n >= _MIN_PACKED else None
    if order is None:
        order = np.argsort(philox(purpose, *words).random_raw(n), kind="stable").astype(np.int64, copy=False)
    return order


def _argsort_packed(words: NDArray[np.uint64]) -> NDArray[np.int64] | None:
    """Return the indices that sort `words`: int64 (n,), in the memory of `words`.

    Return None if two words differ at most in the k lowest bits, which is very rare; k is the number of bits of n - 1.
    `words` is overwritten in both cases.
    """
    # Four times as fast as `np.argsort`: the index of each word replaces its lowest bits, and the words are sorted.
    num_bits = np.uint64((len(words) - 1).bit_length())
    words >>= num_bits
    words <<= num_bits
    words |= np.arange(len(words), dtype=np.uint64)
    words.sort()
    high = words >> num_bits
    if (high[1:] == high[:-1]).any():
        return None
    words &= (np.uint64(1) << num_bits) - np.uint64(1)
    order: NDArray[np.int64] = words.view(np.int64)
    return order


class PositionRng:
    """Random generators by position: a position always gives the same random numbers.

    `at` returns the same object each time, set to the position. So the result is valid only until the next call, and
    only one thread may use a `PositionRng`.

    Args:
        seed: Seed of the pipeline, 0 <= seed < 2**64.
        stage: Name and ordinal of the stage, so that two stages never get the same numbers.

    Raises:
        ValueError: `seed` is below 0 or above 2**64 - 1.
    """

    def __init__(self, seed: int, stage: str) -> None:
        self._bits = philox(f"stage:{stage}", seed)
        self._generator = np.random.Generator(self._bits)
        self._state = cast(Any, self._bits.state)
        self._words = self._state["state"]
        self._words["key"] = self._words["key"].tolist()  # the setter takes plain integers in half the time
        self._state["buffer"] = self._state["buffer"].tolist()
        self._state["buffer_pos"] = 4
        self._state["has_uint32"] = 0
        self._state["uinteger"] = 0

    def at(self, major: int, minor: int = 0, part: int = 0) -> np.random.Generator:
        """Return the generator of the position (major, minor, part), each an unsigned 64-bit integer.

        The generator is valid only until the next call.

        Raises:
            ValueError: An argument is negative or too large.
        """
        if (major | minor | part) >> 64:
            msg = f"{(major, minor, part)} are not unsigned 64-bit integers"
            raise ValueError(msg)
        # The lowest word counts 2**64 numbers per position. A new generator would take 14 us in place of 1.2.
        self._words["counter"] = (0, major, minor, part)
        self._bits.state = self._state
        return self._generator
