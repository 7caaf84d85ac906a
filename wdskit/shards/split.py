"""Split a folder of shards: `wdskit split` writes the column `split`. `shards.shares` draws the split of a sample from
a hash of its key, or of the text of a column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wdskit.dataset.columns import SPLIT_COLUMN, Columns, NewColumn, Part, Texts, add_columns
from wdskit.dataset.index import read_index, refuse_commit
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.patterns import FolderShards, check_found
from wdskit.errors import FolderIndexError, SelectionError, StorageError
from wdskit.files import disk_in_use, remove_temp_files
from wdskit.shards.lazy_shard import LazyShard, field_size, fields_of
from wdskit.shards.make_columns import ColumnBuilder
from wdskit.shards.parallel import Progress, local_folder, read_shards
from wdskit.shards.shares import SPLIT_SEED, parse_shares, split_source


@dataclass(frozen=True)
class SplitPart:
    """One split. `wanted_ratio` is the share that the caller asked for."""

    name: str
    wanted_ratio: float
    num_samples: int


@dataclass(frozen=True)
class SplitReport:
    """Result of `split`.

    Attributes:
        folder: The folder that was split, as the caller wrote it.
        parts: The splits, in the order of their shares.
    """

    folder: str
    parts: tuple[SplitPart, ...]

    @property
    def num_samples(self) -> int:
        """Number of samples in all splits, which is the number of samples of the folder."""
        return sum(part.num_samples for part in self.parts)


def split(
    folder: str | Path,
    shares: str | Mapping[str, object],
    *,
    by: str = "key",
    seed: int = SPLIT_SEED,
    missing: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> SplitReport:
    """Assign each sample of an indexed folder to a split, and write the splits as the column `split`: `wdskit split`.

    A sample's split depends only on the seed, the shares, and its key or the value that `by` names. The split stays the
    same if shards are added, reordered or packed again with other sizes. For changed shards, `wdskit index` writes the
    column again. Only headers and the field that `by` names are read.

    Args:
        folder: A local folder with an index.
        shares: `train=0.8,val=0.1,test=0.1`, or a mapping of names to shares. The shares add up to 1.
        by: `key`, or a JSON field and the path of a value in it (`json:patient.id`). Samples with the same value get
            the same split.
        seed: 0 <= seed < 2**64; a different seed gives a different split.
        missing: The split for samples without the value that `by` names. Default: such a sample is an error.
        overwrite: Whether to replace splits with other shares, another seed or another `by`.
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data. The result does not
            depend on this number.
        progress: Called after each shard with the bytes read so far and the bytes of all shards.

    Raises:
        SelectionError: The shares, `by`, `seed` or `missing` are invalid, a sample lacks the value, a split would get
            no sample, the list of columns is damaged, or the folder has another split and `overwrite` is not set.
        FolderIndexError: The folder has no index, its index does not match its shards, a run of `pack` was stopped here
            while it moved its shards into place, or another process is writing.
        ShardError: Shards are invalid, or samples of several shards lack the value; the message lists the shards.
        StorageError: The folder does not exist, or cannot be read or written.
        WdskitError: A worker process was killed, or a number is out of range.
    """
    source = split_source(shares, by=by, seed=seed, missing=missing)
    path = local_folder(folder)
    with lock_folder(path):
        refuse_commit(path)
        index = read_index(path)
        check_found([FolderShards(index.folder, index, index.names)], with_sizes=True)
        known = Columns(index)
        if SPLIT_COLUMN in known and not overwrite and dict(known.column(SPLIT_COLUMN).source) != source:
            other = ", ".join(f"{name} {value}" for name, value in known.column(SPLIT_COLUMN).source.items())
            msg = f"{path}: another split is already here and would be replaced: {other}."
            raise SelectionError(f"{msg}\n  Replace it with --overwrite.", folder=str(path))
        names = [str(path / entry.name) for entry in index.entries]
        sizes = [entry.num_bytes for entry in index.entries]
        choose = partial(_split_shard, source=source)
        parts = [*read_shards(choose, names, sizes, workers=workers, progress=progress)]
        counts: Counter[str] = Counter()
        for entry, part in zip(index.entries, parts, strict=True):
            codes, values = part if isinstance(part, Texts) else (part, ())
            if len(codes) != entry.num_samples:
                msg = f"{path / entry.name}: it has {len(codes)} samples, but the folder's index says"
                msg += f" {entry.num_samples}.\n  If the shard is right, run `wdskit index {path}`."
                raise FolderIndexError(msg, folder=str(path))
            numbers = np.bincount(codes.astype(np.int64), minlength=len(values)).tolist()
            counts.update(dict(zip(values, numbers, strict=True)))
        report = SplitReport(
            folder=str(folder),
            parts=tuple(
                SplitPart(name=name, wanted_ratio=float(share), num_samples=counts[name])
                for name, share in parse_shares(source["split"]).items()
            ),
        )
        if empty := [part.name for part in report.parts if not part.num_samples]:
            msg = f"{path}: split {empty[0]!r} would be empty, so nothing was written."
            raise SelectionError(msg, folder=str(path))
        disk = disk_in_use()
        try:
            remove_temp_files(path, disk=disk)
            add_columns(index, {SPLIT_COLUMN: NewColumn(source, parts)}, disk=disk)
        except OSError as err:
            raise StorageError(f"{path}: the split cannot be written: {err.strerror}.", url=str(path)) from err
    return report


def _split_shard(path: str, *, source: Mapping[str, Any]) -> Part:
    """Return the split of each sample of a local shard. Errors: as for `split`."""
    builder = ColumnBuilder({SPLIT_COLUMN: source}, path)
    with LazyShard(path) as shard:
        for sample in shard:
            for name, data in fields_of(sample):
                builder.add(name, field_size(data), partial(shard.part, data))
            builder.end(sample["__key__"])
    return builder.parts()[SPLIT_COLUMN]
