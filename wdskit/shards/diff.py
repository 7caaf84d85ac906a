"""`wdskit diff A B`: the samples of two sets of shards, compared by key and not by where they stand.

Each sample is held as 64 bits of its key, 64 of its fields and its place: 28 bytes, so 280 MB a side for 10**7 samples.
Whatever differs is read again and compared in full, so that two keys with one hash are told apart.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.keys import hash_key
from wdskit.dataset.patterns import find_shards
from wdskit.errors import StorageError, WdskitError
from wdskit.shards.parallel import Progress, file_sizes, read_shards
from wdskit.shards.payloads import Payload, Payloads, payload_size
from wdskit.storage.urls import is_local
from wdskit.text import shorten


@dataclass(frozen=True)
class Difference:
    """One key whose samples are not the same.

    Attributes:
        key: The key.
        in_a: Shard of A that has it, None where none has.
        in_b: The same of B.
        fields: Where both have it, the fields that differ: `json` in its bytes, `-txt` only A has, `+cls` only B has.
    """

    key: str
    in_a: str | None
    in_b: str | None
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiffResult:
    """What `diff` found.

    Attributes:
        num_samples: Samples in A and in B.
        num_equal: Keys whose samples are the same.
        num_only_a: Keys that only A has.
        num_only_b: Keys that only B has.
        num_differ: Keys that both have, with other fields.
        num_repeated: Samples of A and of B whose key came before on their side; they are not compared.
        differences: The first of each of the three, in the order of A, those that only B has last.
    """

    num_samples: tuple[int, int]
    num_equal: int
    num_only_a: int
    num_only_b: int
    num_differ: int
    num_repeated: tuple[int, int]
    differences: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """Both have the same samples, each once."""
        return not (self.num_only_a or self.num_only_b or self.num_differ or any(self.num_repeated))


@dataclass(frozen=True)
class _Side:
    """The samples of one side; the first of each key, and in the order of the keys' hashes.

    Arrays of one length: hashes of keys and of fields, number of the shard, offset in it.
    """

    urls: tuple[str, ...]
    num_samples: int
    num_repeated: int
    keys: NDArray[np.uint64]
    fields: NDArray[np.uint64]
    shards: NDArray[np.int32]
    starts: NDArray[np.uint64]


def diff(
    a: str, b: str, *, limit: int = 100, workers: int | None = None, progress: Progress | None = None
) -> DiffResult:
    """Compare the samples of two local sets of shards by key: `wdskit diff`.

    Args:
        a: A shard, folder or pattern.
        b: Another.
        limit: Most differences of each kind that are listed; all are counted.
        workers: Processes that read; default: the CPUs, fewer for little data.
        progress: Called after each shard.

    Raises:
        ShardError: A shard is invalid.
        StorageError: There is nothing, it is not local, or it cannot be read.
    """
    urls = [_local_shards(path) for path in (a, b)]
    every = [url for side in urls for url in side]
    read = read_shards(hash_samples, every, file_sizes(every), workers=workers, progress=progress)
    side_a, side_b = (_gather(side, read) for side in urls)
    at = np.searchsorted(side_b.keys, side_a.keys)
    at_safe = np.minimum(at, max(0, len(side_b.keys) - 1))
    is_both = side_b.keys[at_safe] == side_a.keys if len(side_b.keys) else np.zeros(len(side_a.keys), dtype=np.bool_)
    partner = np.where(is_both, at_safe, -1)
    is_other = np.zeros(len(side_a.keys), dtype=np.bool_)
    is_other[is_both] = side_a.fields[is_both] != side_b.fields[partner[is_both]]
    is_only_b = np.ones(len(side_b.keys), dtype=np.bool_)
    is_only_b[partner[is_both]] = False
    only_a, other, only_b = (np.flatnonzero(found) for found in (~is_both, is_other, is_only_b))
    listed = [Difference(_key(side_a, n), _url(side_a, n), None) for n in _first(side_a, only_a, limit)]
    for number in _first(side_a, other, limit):
        listed += _compare(side_a, number, side_b, int(partner[number]))
    listed += [Difference(_key(side_b, n), None, _url(side_b, n)) for n in _first(side_b, only_b, limit)]
    return DiffResult(
        num_samples=(side_a.num_samples, side_b.num_samples),
        num_equal=int(is_both.sum() - is_other.sum()),
        num_only_a=len(only_a),
        num_only_b=len(only_b),
        num_differ=len(other),
        num_repeated=(side_a.num_repeated, side_b.num_repeated),
        differences=tuple(listed),
    )


def _local_shards(path: str) -> tuple[str, ...]:
    urls = find_shards(path).urls
    remote = [url for url in urls if not is_local(url)]
    if remote:
        raise StorageError(f"{remote[0]}: only local shards can be compared. Fetch it first.", url=remote[0])
    return urls


_Read = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def hash_samples(url: str) -> _Read:
    """Hashes of the keys and of the fields of a shard's samples, and where they start."""
    keys, fields = bytearray(), bytearray()
    with Payloads(url) as shard:
        for sample in shard:
            keys += hash_key(sample["__key__"])
            fields += _hash_fields(shard, sample)
        starts = array("Q", shard.reader.starts)
    return np.frombuffer(keys, np.uint64), np.frombuffer(fields, np.uint64), np.array(starts, dtype=np.uint64)


def _hash_fields(shard: Payloads, sample: dict[str, Any]) -> bytes:
    """64 bits of all fields, whatever their order."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(name for name in sample if not name.startswith("__")):
        encoded = name.encode()
        digest.update(b"%d %d " % (len(encoded), payload_size(sample[name])))
        digest.update(encoded)
        for piece in shard.pieces(sample[name]):
            digest.update(piece)
    return digest.digest()


def _gather(urls: tuple[str, ...], read: Iterator[_Read | WdskitError]) -> _Side:
    """Join what was read of a side's shards."""
    parts = []
    for part in islice(read, len(urls)):
        if isinstance(part, WdskitError):
            raise part
        parts.append(part)
    keys, fields, starts = (np.concatenate([part[at] for part in parts]) for at in range(3))
    shards = np.repeat(np.arange(len(urls), dtype=np.int32), [len(part[0]) for part in parts])
    order = np.argsort(keys, kind="stable")
    is_first = np.ones(len(keys), dtype=np.bool_)
    is_first[1:] = keys[order][1:] != keys[order][:-1]
    kept = order[is_first]
    num_repeated = len(keys) - len(kept)
    return _Side(urls, len(keys), num_repeated, keys[kept], fields[kept], shards[kept], starts[kept])


def _first(side: _Side, numbers: NDArray[np.intp], limit: int) -> list[int]:
    """The first of these samples in the order of the shards."""
    order = np.lexsort((side.starts[numbers], side.shards[numbers]))
    return [int(number) for number in numbers[order[:limit]]]


def _compare(a: _Side, number: int, b: _Side, other: int) -> list[Difference]:
    """In what two samples with one hash differ; two differences where their keys do."""
    with _sample(a, number) as (shard_a, sample_a), _sample(b, other) as (shard_b, sample_b):
        key_a, key_b = shorten(sample_a["__key__"]), shorten(sample_b["__key__"])
        if sample_a["__key__"] != sample_b["__key__"]:
            return [Difference(key_a, _url(a, number), None), Difference(key_b, None, _url(b, other))]
        names = sorted(name for name in {*sample_a, *sample_b} if not name.startswith("__"))
        fields = []
        for name in names:
            if name not in sample_b or name not in sample_a:
                fields.append(shorten(f"-{name}" if name in sample_a else f"+{name}"))
            elif not _are_equal(shard_a, sample_a[name], shard_b, sample_b[name]):
                fields.append(shorten(name))
    return [Difference(key_a, _url(a, number), _url(b, other), tuple(fields))]


def _are_equal(shard_a: Payloads, a: Payload, shard_b: Payloads, b: Payload) -> bool:
    if payload_size(a) != payload_size(b):
        return False
    return all(one == other for one, other in zip(shard_a.pieces(a), shard_b.pieces(b), strict=True))


def _url(side: _Side, number: int) -> str:
    return side.urls[int(side.shards[number])]


def _key(side: _Side, number: int) -> str:
    with _sample(side, number) as (_, sample):
        return shorten(str(sample["__key__"]))


@contextlib.contextmanager
def _sample(side: _Side, number: int) -> Iterator[tuple[Payloads, dict[str, Any]]]:
    """A sample again, and what reads its fields."""
    with Payloads(_url(side, number), start=int(side.starts[number])) as shard:
        yield shard, next(iter(shard))
