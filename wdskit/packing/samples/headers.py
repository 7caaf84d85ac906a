"""Many samples at once by their headers: keys, fields and sizes as columns, at a tenth of the time of one by one.

What is plain (`tar.columns`) is known here; whether it is also to the byte what our own writer makes decides whether a
sample is copied as it is. Whatever else stands there is for the exact reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.keys import check_field, check_key
from wdskit.errors import KeyRuleError
from wdskit.limits import BLOCK_BYTES
from wdskit.tar.columns import Headers, key_sizes, parse_headers, start_alike
from wdskit.tar.header import build_header

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

BlocksAt = Callable[[Ints], Bytes]
"""The 512 bytes that start at each of some places, uint8 (n, 512)."""

_FIRST_WORD = 12  # of a header's 64, the one in which its name ends
_IS_FIXED = np.array([at >= 100 and not 124 <= at < 136 and not 148 <= at < 156 for at in range(BLOCK_BYTES)])
_FIXED = (_IS_FIXED * np.uint8(255)).view(np.uint64)[_FIRST_WORD:]
_OURS = np.frombuffer(build_header(b"a", 0), dtype=np.uint64)[_FIRST_WORD:] & _FIXED
_SAFE = np.array([(chr(code).isalnum() and code < 128) or chr(code) in "-_/" for code in range(256)])
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Members(NamedTuple):
    """Members of plain samples by columns, those of a sample side by side and in their order.

    Attributes:
        rows: Which sample, rising.
        starts: Where its header starts.
        sizes: Bytes of its data.
        fields: Number of its field's name in `names`.
        names: The names, sorted.
    """

    rows: Ints
    starts: Ints
    sizes: Ints
    fields: Ints
    names: list[str]


class Look(NamedTuple):
    """Samples by columns, each (n,).

    Attributes:
        plain: Whether the others say anything of it.
        exact: Whether its headers and their order are those that our writer makes.
        hashes: 64 bits that depend on the key alone.
        keys: The keys, and what stands behind them, uint8 (n, bytes of the longest).
        key_sizes: Bytes of each.
        members: Of those that are plain.
    """

    plain: Bools
    exact: Bools
    hashes: Words
    keys: Bytes
    key_sizes: Ints
    members: Members

    def key(self, row: int) -> str:
        """The key of a plain sample."""
        return bytes(self.keys[row, : self.key_sizes[row]]).decode()


class _Round(NamedTuple):
    """The n-th member of each sample that has so many."""

    rows: Ints
    starts: Ints
    sizes: Ints
    fields: Bytes
    field_sizes: Ints


def look_at(starts: Ints, stops: Ints, blocks_at: BlocksAt) -> Look:
    """Look at the samples between `starts` and `stops`, at least one, each a rising multiple of 512."""
    plain, exact = np.ones(len(starts), np.bool_), np.ones(len(starts), np.bool_)
    at, rows = starts.copy(), np.arange(len(starts))
    rounds: list[_Round] = []
    keys, sizes_of_keys = np.zeros((0, 0), np.uint8), np.zeros(0, np.int64)
    while len(rows):
        blocks = blocks_at(at[rows])
        headers = parse_headers(blocks)
        sizes = key_sizes(headers)
        ends = at[rows] + BLOCK_BYTES + -(-headers.sizes // BLOCK_BYTES) * BLOCK_BYTES
        good = headers.plain & (sizes > 0) & (ends <= stops[rows])
        if not rounds:
            keys, sizes_of_keys = headers.names, sizes
        else:
            good &= (sizes == sizes_of_keys[rows]) & start_alike(headers.names, keys[rows], sizes)
        plain[rows[~good]] = False
        exact[rows[~_is_ours(blocks, headers)]] = False
        fields, field_sizes = _fields_of(headers, sizes)
        rounds.append(_Round(rows[good], at[rows[good]], headers.sizes[good], fields[good], field_sizes[good]))
        at[rows] = ends
        rows = rows[good & (ends < stops[rows])]
    _refuse_odd_keys(keys, sizes_of_keys, plain)
    members = _join(rounds, plain, exact)
    return Look(plain, plain & exact, hash_texts(keys, sizes_of_keys), keys, sizes_of_keys, members)


def _is_ours(blocks: Bytes, headers: Headers) -> Bools:
    """Whether each header is what `build_header` makes, where it is plain."""
    words = blocks.view(np.uint64)[:, _FIRST_WORD:] & _FIXED
    words ^= _OURS
    ours: Bools = ~words.any(axis=1)
    ours &= np.count_nonzero(headers.names, axis=1) == headers.name_sizes
    return ours


def _fields_of(headers: Headers, sizes: Ints) -> tuple[Bytes, Ints]:
    """What stands behind the key's dot in each name, zeros behind it, and its length."""
    field_sizes = np.maximum(headers.name_sizes - sizes - 1, 0)
    columns = np.arange(max(1, int(field_sizes.max())))
    places = np.minimum(sizes[:, None] + 1 + columns, headers.names.shape[1] - 1)
    fields = np.take_along_axis(headers.names, places, axis=1)
    fields[columns >= field_sizes[:, None]] = 0
    return fields, field_sizes


def _refuse_odd_keys(keys: Bytes, sizes: Ints, plain: Bools) -> None:
    """Take from the plain samples those whose keys would not do. Nearly all keys are seen to be fine at once."""
    inside = np.arange(keys.shape[1]) < sizes[:, None]
    fine = (_SAFE[keys] | ~inside).all(axis=1)
    slashes = (keys == ord("/")) & inside
    if slashes.any():
        parts = slashes[:, :-1] & np.isin(keys[:, 1:], (ord("/"), ord("_")))
        fine &= ~parts.any(axis=1) & (keys[:, 0] != ord("/"))
    for row in np.flatnonzero(plain & ~fine).tolist():
        try:
            check_key(bytes(keys[row, : sizes[row]]).decode())
        except KeyRuleError:
            plain[row] = False


def _join(rounds: list[_Round], plain: Bools, exact: Bools) -> Members:
    """The members of all rounds; samples with a field that is no name, or that comes twice, are not plain, and those
    whose members are not sorted are not exact.
    """
    width = max(each.fields.shape[1] for each in rounds)
    padded = [np.pad(each.fields, ((0, 0), (0, width - each.fields.shape[1]))) for each in rounds]
    texts, sizes = np.concatenate(padded), np.concatenate([each.field_sizes for each in rounds])
    rows = np.concatenate([each.rows for each in rounds])
    _, first, which = np.unique(hash_texts(texts, sizes), return_index=True, return_inverse=True)
    plain[rows[(texts != texts[first][which]).any(axis=1)]] = False  # two fields of one hash: somebody's trick
    raw = [bytes(texts[at, : sizes[at]]).decode() for at in first.tolist()]
    names = sorted({name.lower() for name in raw})
    for number, name in enumerate(raw):
        try:
            check_field(name.lower())
        except KeyRuleError:
            plain[rows[which == number]] = False
        if name != name.lower():
            exact[rows[which == number]] = False
    numbers = {name: number for number, name in enumerate(names)}
    fields = np.array([numbers[name.lower()] for name in raw], dtype=np.int64)[which]
    order = np.argsort(rows, kind="stable")
    rows, fields = rows[order], fields[order]
    after = rows[1:] == rows[:-1]
    exact[rows[1:][after & (fields[1:] <= fields[:-1])]] = False
    by_field = np.lexsort((fields, rows))
    twice = (rows[by_field][1:] == rows[by_field][:-1]) & (fields[by_field][1:] == fields[by_field][:-1])
    plain[rows[by_field][1:][twice]] = False
    starts = np.concatenate([each.starts for each in rounds])[order]
    sizes = np.concatenate([each.sizes for each in rounds])[order]
    whole = plain[rows]
    return Members(rows[whole], starts[whole], sizes[whole], fields[whole], names)


def hash_texts(texts: Bytes, sizes: Ints) -> Words:
    """64 bits for each text, uint64 (n,): the first `sizes` bytes of each row count, and how many there are.

    The same bytes give the same number whatever the width of the array; the mixer is splitmix64's.
    """
    width = -(-max(1, texts.shape[1]) // 8) * 8
    words = np.zeros((len(texts), width), dtype=np.uint8)
    words[:, : texts.shape[1]] = texts
    words[np.arange(width) >= sizes[:, None]] = 0
    hashes = sizes.astype(np.uint64)
    for number, column in enumerate(words.view("<u8").T):
        hashes = np.where(sizes > 8 * number, _mix(hashes * _GOLDEN ^ column), hashes)
    return hashes


def hash_keys(keys: list[bytes]) -> Words:
    """As `hash_texts`, of at least one key."""
    sizes = np.array([len(key) for key in keys])
    texts = np.frombuffer(b"".join(key.ljust(int(sizes.max()), b"\0") for key in keys), dtype=np.uint8)
    return hash_texts(texts.reshape(len(keys), -1), sizes)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
