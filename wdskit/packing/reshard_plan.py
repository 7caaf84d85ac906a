"""What is written where, decided before anything is: a row of numbers a sample, 10 million in 300 MB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from wdskit.dataset.index import NO_EXPORTS, Exports
from wdskit.dataset.keys import hashed_key
from wdskit.dataset.samples import read_span
from wdskit.errors import PackError
from wdskit.limits import BLOCK_BYTES
from wdskit.order.keys import permutation
from wdskit.packing.plan import Limits, Names, RowTooLarge, Span, divide
from wdskit.packing.planning import PlannedShard
from wdskit.packing.reshard_fields import Changes, find_fields
from wdskit.packing.reshard_fill import ReshardJob
from wdskit.packing.reshard_look import Words
from wdskit.packing.reshard_read import SourcePath, open_path
from wdskit.packing.reshard_samples import Columns, Samples
from wdskit.packing.reshard_scan import Scanned
from wdskit.packing.rows import row_error
from wdskit.tar import walk


def join_sources(scans: Iterable[Scanned], *, hashed: bool, first_of_key: bool) -> tuple[Samples, int]:
    """The samples of all sources in their order, and how many were left out because their key came before.

    Args:
        scans: What was seen of each source.
        hashed: Whether keys are hashed.
        first_of_key: Leave out the later ones of a key, instead of refusing them.

    Raises:
        PackError: Two have one key.
    """
    paths: list[SourcePath] = []
    columns = Columns({"hashes": "u8", "source": "u4", "starts": "u4", "spans": "u4", "sizes": "u4", "copied": "?"})
    for number, scan in enumerate(scans):
        paths.append(scan.path)
        columns.append({**vars(scan), "source": number}, len(scan.starts))
    hashes = columns.take("hashes")
    suspects = _of_one_hash(hashes)
    check = hashes.view("<u4")[::2].copy()
    del hashes
    names = ("source", "starts", "spans", "sizes")
    source, start, span, size = map(columns.take, names)
    samples = Samples(paths, source, start, span, size, check, columns.take("copied"))
    later = _find_later(samples, suspects, hashed=hashed, first_of_key=first_of_key)
    if later:
        keep = np.ones(len(samples), dtype=np.bool_)
        keep[later] = False
        samples.take(keep)
    return samples, len(later)


def _of_one_hash(hashes: Words) -> list[int]:
    """Samples whose hash another one has too, rising."""
    ordered = np.sort(hashes)
    if not (ordered[1:] == ordered[:-1]).any():
        return []
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(np.diff(hashes[order]) == 0)
    rows: list[int] = np.unique(np.concatenate([order[same], order[same + 1]])).tolist()
    return rows


def _find_later(samples: Samples, suspects: Iterable[int], *, hashed: bool, first_of_key: bool) -> list[int]:
    """Of samples with equal hashes, which are only a hint, those whose key an earlier one has: their keys are read."""
    known: dict[str, int] = {}
    later = []
    for row in suspects:
        key = _read_key(samples, row)
        key = hashed_key(key) if hashed else key
        if key not in known:
            known[key] = row
        elif first_of_key:
            later.append(row)
        else:
            raise _twice(key, _place(samples, known[key]), _place(samples, row))
    return later


def _read_key(samples: Samples, row: int) -> str:
    path = samples.sources[samples.source[row]]
    start, span = (int(column[row]) * BLOCK_BYTES for column in (samples.start, samples.span))
    file = open_path(path)
    try:
        return find_fields(read_span(file, walk.Span(start, span)), shard=path, offset=start).key
    except ValueError as err:
        raise PackError(f"{path}, byte {start}: {err}. It changed while it was read; start again.") from err
    finally:
        file.close()


def _place(samples: Samples, row: int) -> str:
    return f"{samples.sources[samples.source[row]]} (byte {int(samples.start[row]) * BLOCK_BYTES})"


def _twice(key: str, first: str, second: str) -> PackError:
    remedy = "Take the first one of each key with --duplicate-keys first, or name fewer shards."
    return PackError(f"key {key!r} stands in {first} and in {second}; keys must be unique.\n  {remedy}")


def shuffle_samples(samples: Samples, seed: int) -> None:
    """Put the samples into the order that `pack --shuffle` gives as many rows."""
    samples.take(permutation(len(samples), "pack-shuffle", seed))


class Jobs(Sequence[ReshardJob]):
    """The shards to fill, in order; each is made when it is asked for, as its rows take memory.

    Args:
        folder: Where they are written.
        samples: All samples, in the order in which they are written.
        spans: The samples of each shard.
        names: File names of the shards.
        changes: What happens to samples that are not copied.
        also: What is kept beside the shards for other readers.
    """

    def __init__(
        self,
        folder: Path,
        samples: Samples,
        spans: Sequence[Span],
        names: Names,
        changes: Changes,
        also: Exports = NO_EXPORTS,
    ) -> None:
        self._folder = folder
        self._samples = samples
        self._spans = spans
        self._changes = changes
        self._also = also
        self.shards = [
            PlannedShard(names[number], span.stop - span.start, span.num_bytes) for number, span in enumerate(spans)
        ]

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._spans)

    @overload
    def __getitem__(self, number: int) -> ReshardJob: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[ReshardJob]: ...

    def __getitem__(self, number: int | slice) -> ReshardJob | Sequence[ReshardJob]:
        """One job, or several."""
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        span, shard = self._spans[number], self.shards[number]
        samples = self._samples.part(slice(span.start, span.stop))
        return ReshardJob(self._folder / shard.name, samples, shard.num_bytes, self._changes, self._also)


def divide_samples(samples: Samples, limits: Limits) -> list[Span]:
    """Where shards begin and end.

    Raises:
        RowError: A sample alone is over the limit.
        PackError: So many shards cannot be made of them.
    """
    try:
        return divide(samples.size, limits, name=lambda place: _place(samples, place))
    except RowTooLarge as err:
        problem = f"its shard would have {err.num_bytes} bytes, over max_bytes {limits.max_bytes}, with it alone"
        raise row_error(_place(samples, err.place), problem, "Raise --max-bytes.") from None
