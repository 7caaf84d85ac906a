"""The protocol of orders, and what several orders use: random numbers from keys, the numbers of the samples of all
shards, and lanes.

Equal keys give equal bits, on every machine and with every version of numpy. numpy promises stable bit streams of
`SeedSequence` and `Philox` across versions, but not a stable `permutation`, so permutations are a stable argsort of
random words. Keys have a fixed length, and their parts are never added: `(worker 0, epoch 31)` and `(worker 1, epoch
0)` are different keys.

Lanes shuffle a long sequence without holding it in memory. A sequence of n places is cut into L consecutive pieces, the
cuts, and each of L lanes reads one cut. Position p is in lane p mod L, so neighbouring positions read different cuts.
Each lane is shuffled in windows of w places.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
import zlib
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Tail = Literal["drop", "pad"]
"""Whether the samples of an epoch that do not fill a global batch are dropped, or padded to a whole batch."""

DEPTHS = 1 << 20
"""Number of different depths. `Order.locate` returns 0 <= depth < DEPTHS."""

DEFAULT_LANES = 240
DEFAULT_WINDOW = 4096

_MIN_PER_LANE = 64  # samples, for the default number of lanes
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_NUM_WORDS = 5
_MIN_PACKED = 512  # `_argsort_packed` is faster from this number of words on
_WORD_MASK = 0xFFFFFFFF


class Order(Protocol):
    """An order of samples: maps each position 0, 1, 2, ... of an endless sequence to a sample.

    Every order except a mixture has `num_samples`, the number of positions of a pass. Position `q` is position
    `q % num_samples` of pass `q // num_samples`.
    """

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return the samples at `positions`.

        Args:
            positions: int64 (n,), each at least 0, in any order.

        Returns:
            (shard, sample), int64 (n,) each: the number of the shard among all shards, and the number of the
            sample among those samples of the shard that the pipeline uses. `ShardTable.numbers` returns the number
            among all samples.
        """
        ...

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part of the mixture and the depth of each position.

        The depth is about the place of the sample in the part's data: positions of one part with close depths mostly
        read the same shards. In a `ResampledOrder`, the depth does not depend on the shard.

        Args:
            positions: int64 (n,), each at least 0.

        Returns:
            (part, depth), int64 (n,) each; 0 <= depth < DEPTHS = 2**20. The part is 0 if the order is not a mixture.
        """
        ...


def take_one(order: Order, position: int) -> tuple[int, int]:
    """Return (shard, sample) of one position of an order, as `Order.take` does for an array of positions."""
    shards, samples = order.take([position])
    return int(shards[0]), int(samples[0])


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


class ShardOffsets:
    """Numbers the samples of all shards consecutively, and maps a sample's number to (shard, sample).

    Args:
        counts: Number of samples of each shard, (num_shards,), each at least 0.

    Attributes:
        num_samples: The sum of `counts`.
        stops: Cumulative sum of `counts`, int64 (num_shards,).

    Raises:
        ValueError: All counts are 0.
    """

    def __init__(self, counts: ArrayLike) -> None:
        self.stops: Ints = np.cumsum(np.asarray(counts, dtype=np.int64))
        self.num_samples = int(self.stops[-1])
        if self.num_samples < 1:
            raise ValueError("all shards are empty")

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of each sample, int64 (n,) each.

        `numbers` are the numbers of the samples over all shards: 0 <= number < num_samples.
        """
        shards = np.searchsorted(self.stops, numbers, side="right")
        return shards, numbers - self.starts(shards)

    def starts(self, shards: Ints) -> Ints:
        """Return the number, over all shards, of the first sample of each shard in `shards`: int64 (n,).

        For an empty shard, return the number of the first sample after the shard.
        """
        before = self.stops[shards - 1]
        before[shards == 0] = 0
        return before

    def counts(self, shards: Ints) -> Ints:
        """Return the number of samples in each of `shards`: int64 (n,)."""
        return self.stops[shards] - self.starts(shards)


def group_indices(keys: Ints) -> list[tuple[int, Ints]]:
    """Return [(key, indices of `keys` with this key), ...], sorted by key. The indices are ascending, int64."""
    if len(keys) and keys[0] == keys[-1] and (keys == keys[0]).all():  # most often, as with the pass of a batch
        return [(int(keys[0]), np.arange(len(keys)))]
    by_key = np.argsort(keys, kind="stable")
    in_order = keys[by_key]
    firsts = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))
    return list(zip(in_order[firsts].tolist(), np.split(by_key, firsts)[1:], strict=True))


class Lanes:
    """Shuffles each lane in windows. Threads may share a `Lanes`.

    Args:
        num_lanes: Number of lanes, at least 1.
        window: Number of consecutive places of a lane that are shuffled with each other, at least 1.
        num_positions: Number of positions of all lanes together. None: the lanes are endless.
        purpose: Part of the random key: orders with different purposes get different shuffles.
        seed: Seed of the order.
    """

    def __init__(self, num_lanes: int, window: int, num_positions: int | None, *, purpose: str, seed: int) -> None:
        self.num_lanes = num_lanes
        self.window = window
        self.num_positions = num_positions
        self._purpose = purpose
        self._seed = seed
        self._copy = functools.partial(Lanes, num_lanes, window, num_positions, purpose=purpose, seed=seed)
        # Row 2 * lane + number % 2 has the last even or the last odd window of each lane, because a batch may extend
        # over the end of a window. Unused rows take no memory; used rows take 2 bytes per place with windows of 4096.
        num_rows = 2 * self.num_lanes
        self._shuffles = np.empty((num_rows, self.window), dtype=np.min_scalar_type(self.window - 1))
        self._passes = np.full(num_rows, -1, dtype=np.int64)
        self._windows = np.full(num_rows, -1, dtype=np.int64)
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return self._copy, ()  # without the buffers

    @staticmethod
    def default_number(num_samples: int) -> int:
        """Return the default number of lanes: 240, or one per 64 samples if that is less, but at least 1."""
        return min(DEFAULT_LANES, max(1, num_samples // _MIN_PER_LANE))

    @staticmethod
    def cuts(num_lanes: int, offset: int = 0) -> Ints:
        """Return the number of the cut that each lane reads: int64 (num_lanes,), a permutation.

        Neighbouring lanes read cuts that are far apart. Lane 0 reads cut `offset` mod `num_lanes`.
        """
        middle = round(_GOLDEN_RATIO * num_lanes)
        near = (middle + sign * distance for distance in range(num_lanes) for sign in (-1, 1))
        stride = next(each for each in near if each > 0 and math.gcd(each, num_lanes) == 1)
        found: Ints = (np.arange(num_lanes, dtype=np.int64) * stride + offset) % num_lanes
        return found

    def shuffle(self, pass_number: int, lanes: Ints, places: Ints) -> Ints:
        """Return the new place of each place after the shuffle. A place stays in its window and its lane.

        Args:
            pass_number: Number of the pass; each pass has a different shuffle.
            lanes: Lane of each place, (n,).
            places: Places before the shuffle, counted in their lanes, (n,).

        Returns:
            New places, counted in their lanes, int64 (n,).
        """
        numbers, within = np.divmod(places, self.window)
        rows = 2 * lanes + (numbers & 1)
        with self._lock:
            if (self._passes.take(rows) == pass_number).all() and (self._windows.take(rows) == numbers).all():
                shuffled = self._shuffles.reshape(-1).take(rows * self.window + within)
            else:
                shuffled = np.empty_like(places)
                for window, at in group_indices(numbers * self.num_lanes + lanes):
                    shuffled[at] = self._window(pass_number, *divmod(window, self.num_lanes))[within[at]]
        return numbers * self.window + shuffled

    def _window(self, pass_number: int, number: int, lane: int) -> NDArray[Any]:
        """Return the permutation of a lane's window with this number. The caller holds the lock."""
        row = 2 * lane + (number & 1)
        if (self._passes[row], self._windows[row]) != (pass_number, number):
            size = self._window_size(number, lane)
            self._windows[row] = -1  # until the row is whole: Ctrl-C may come in between
            self._shuffles[row, :size] = permutation(size, self._purpose, self._seed, pass_number, lane, number)
            self._passes[row] = pass_number
            self._windows[row] = number
        shuffle: NDArray[Any] = self._shuffles[row]
        return shuffle

    def _window_size(self, number: int, lane: int) -> int:
        """Return the number of places in a lane's window with this number."""
        if self.num_positions is None:
            return self.window
        lane_size = (self.num_positions - lane + self.num_lanes - 1) // self.num_lanes
        return min(self.window, lane_size - number * self.window)
