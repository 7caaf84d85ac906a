"""`wdskit diff A B`: compare the samples of two sets of shards by key, not by position.

Memory: 28 bytes per sample (64-bit hashes of the key and of the fields, offset and shard): 280 MB for 10**7 samples.
Samples are compared by hash. Listed differences are read again and compared byte by byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.keys import hash_key
from wdskit.shards.lazy_shard import LazyShard, field_size, fields_of
from wdskit.shards.listing import find_target
from wdskit.shards.parallel import Progress, file_sizes, read_shards
from wdskit.storage.urls import shown_url
from wdskit.text import shorten


@dataclass(frozen=True)
class Difference:
    """One key whose samples in A and B differ.

    Attributes:
        key: The key; only its beginning if the key is long.
        in_a: Shard of A that has the key; None if A does not have the key.
        in_b: Shard of B that has the key; None if B does not have the key.
        fields: If both have the key, the fields that differ: `json` (bytes), `-txt` (only in A), `+cls` (only in B).
            Otherwise empty.
    """

    key: str
    in_a: str | None
    in_b: str | None
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiffResult:
    """Result of `diff`.

    Attributes:
        num_samples: Number of samples in A, and in B.
        num_equal: Number of keys whose samples are equal in A and B.
        num_only_a: Number of keys that only A has.
        num_only_b: Number of keys that only B has.
        num_differ: Number of keys that both have, with different fields or bytes.
        num_repeated: Number of samples of A, and of B, whose key an earlier sample of the same side has. These samples
            are not compared.
        differences: The first keys that only A has, then keys that differ, then keys that only B has. Each kind is in
            the order of the shards, and has at most `limit` keys.
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
        """True if A and B have the same samples, in any order, and no key is repeated in A or in B."""
        return not (self.num_only_a or self.num_only_b or self.num_differ or any(self.num_repeated))


class _SampleHashes(NamedTuple):
    """For each sample of a shard: hash of the key, hash of the fields, byte offset. Arrays uint64 (num_samples,)."""

    keys: NDArray[np.uint64]
    fields: NDArray[np.uint64]
    starts: NDArray[np.uint64]


class _Side:
    """The samples of A or of B, sorted by the hash of the key. Of samples with the same hash, only the first is kept.
    `urls` are the shards, and `parts` has the hashes of each shard's samples.
    """

    def __init__(self, urls: tuple[str, ...], parts: list[_SampleHashes]) -> None:
        keys, fields, starts = map(np.concatenate, zip(*parts, strict=True))
        shards = np.repeat(np.arange(len(urls), dtype=np.int32), [len(part.keys) for part in parts])
        self.urls = urls
        self.num_samples = len(keys)
        self.keys, first = np.unique(keys, return_index=True)
        self.fields, self.starts, self.shards = fields[first], starts[first], shards[first]

    def first(self, numbers: NDArray[np.intp], limit: int) -> list[int]:
        """Sort the samples `numbers` by shard and offset, and return the numbers of the first `limit` samples."""
        order = np.lexsort((self.starts[numbers], self.shards[numbers]))
        found: list[int] = numbers[order[:limit]].tolist()
        return found

    def url(self, number: int) -> str:
        return self.urls[int(self.shards[number])]

    def shown(self, number: int) -> str:
        """Return the path or URL of the shard of sample `number` for messages, without secrets."""
        return shown_url(self.url(number))

    def key(self, number: int) -> str:
        with self.sample(number) as (_, sample):
            return shorten(sample["__key__"])

    @contextlib.contextmanager
    def sample(self, number: int) -> Iterator[tuple[LazyShard, dict[str, Any]]]:
        """Read a sample again: yield (shard, sample). `shard` reads the bytes of the sample's fields, and is closed
        after the `with` block.
        """
        with LazyShard(self.url(number), start=int(self.starts[number])) as shard:
            yield shard, next(iter(shard))


def diff(
    a: str, b: str, *, limit: int = 100, workers: int | None = None, progress: Progress | None = None
) -> DiffResult:
    """Compare the samples of two sets of shards by key: `wdskit diff`.

    Args:
        a: A shard, folder or pattern, local or remote.
        b: The shard, folder or pattern to compare `a` with.
        limit: List at most this number of differences of each kind. All differences are counted.
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data.
        progress: Called after each shard with the bytes read so far and the bytes of all shards (None if unknown).

    Raises:
        ShardError: Shards are invalid; the message lists them.
        StorageError: No shard was found, or a shard cannot be read.
        FolderIndexError: The index of a folder does not match its files.
        WdskitError: A worker process was killed.
    """
    urls_a, urls_b = find_target(a).urls, find_target(b).urls
    urls = [*urls_a, *urls_b]
    path = f"{a} and {b}"
    parts = list(read_shards(hash_samples, urls, file_sizes(urls), path=path, workers=workers, progress=progress))
    side_a, side_b = _Side(urls_a, parts[: len(urls_a)]), _Side(urls_b, parts[len(urls_a) :])
    del parts
    both, in_a, in_b = np.intersect1d(side_a.keys, side_b.keys, assume_unique=True, return_indices=True)
    is_other = side_a.fields[in_a] != side_b.fields[in_b]
    other, partner = in_a[is_other], in_b[is_other]  # rising, as the keys are
    only_a = np.delete(np.arange(len(side_a.keys)), in_a)
    only_b = np.delete(np.arange(len(side_b.keys)), in_b)
    listed = [Difference(side_a.key(n), side_a.shown(n), None) for n in side_a.first(only_a, limit)]
    for number in side_a.first(other, limit):
        listed += _compare(side_a, number, side_b, int(partner[np.searchsorted(other, number)]))
    listed += [Difference(side_b.key(n), None, side_b.shown(n)) for n in side_b.first(only_b, limit)]
    return DiffResult(
        num_samples=(side_a.num_samples, side_b.num_samples),
        num_equal=len(both) - len(other),
        num_only_a=len(only_a),
        num_only_b=len(only_b),
        num_differ=len(other),
        num_repeated=(side_a.num_samples - len(side_a.keys), side_b.num_samples - len(side_b.keys)),
        differences=tuple(listed),
    )


def hash_samples(url: str) -> _SampleHashes:
    """Return the hashes and offsets of a shard's samples. The hash of the fields does not depend on their order.
    ShardError: The shard is invalid. StorageError: The shard cannot be read.
    """
    keys, fields = bytearray(), bytearray()
    with LazyShard(url) as shard:
        for sample in shard:
            keys += hash_key(sample["__key__"])
            digest = hashlib.blake2b(digest_size=8)
            for name, data in sorted(fields_of(sample)):
                encoded = name.encode()
                digest.update(b"%d %d " % (len(encoded), field_size(data)))
                digest.update(encoded)
                for piece in shard.pieces(data):
                    digest.update(piece)
            fields += digest.digest()
    starts = np.array(shard.reader.starts, dtype=np.uint64)
    return _SampleHashes(np.frombuffer(keys, np.uint64), np.frombuffer(fields, np.uint64), starts)


def _compare(a: _Side, number: int, b: _Side, other: int) -> list[Difference]:
    """Compare two samples whose keys have the same hash: `number` of `a` with `other` of `b`. If the keys are equal,
    return one `Difference` with the fields that differ. If the keys differ, return one `Difference` for the key that
    only `a` has, and one for the key that only `b` has.
    """
    with a.sample(number) as (shard_a, sample_a), b.sample(other) as (shard_b, sample_b):
        key_a, key_b = sample_a["__key__"], sample_b["__key__"]
        if key_a != key_b:
            return [Difference(shorten(key_a), a.shown(number), None), Difference(shorten(key_b), None, b.shown(other))]
        fields_a, fields_b = dict(fields_of(sample_a)), dict(fields_of(sample_b))
        differing = [f"-{name}" for name in fields_a.keys() - fields_b.keys()]
        differing += [f"+{name}" for name in fields_b.keys() - fields_a.keys()]
        for name in fields_a.keys() & fields_b.keys():
            data_a, data_b = fields_a[name], fields_b[name]
            is_same_size = field_size(data_a) == field_size(data_b)
            if not is_same_size or any(map(operator.ne, shard_a.pieces(data_a), shard_b.pieces(data_b))):
                differing.append(name)
        fields = tuple(map(shorten, sorted(differing, key=lambda name: name.lstrip("+-"))))
    return [Difference(shorten(key_a), a.shown(number), b.shown(other), fields)]
