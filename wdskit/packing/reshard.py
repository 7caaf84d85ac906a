"""`reshard`: pack the samples of finished shards again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from typing_extensions import Unpack

from wdskit.packing.change import Change, MapFunction
from wdskit.packing.pack import PackResult, RunOptions, fill_folder
from wdskit.packing.sources.records import parse_pairs
from wdskit.packing.sources.tars import Shards
from wdskit.shards.make_columns import parse_names


def reshard(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    *,
    where: str | None = None,
    keep: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    rename: str | Sequence[str] | Mapping[str, str] = (),
    map: MapFunction | None = None,  # noqa: A002 (the name of the option)
    **run: Unpack[RunOptions],
) -> PackResult:
    """Write new shards from finished shards: merge, split, select or shuffle them: `wdskit reshard`.

    The bytes of the fields are copied, not decoded; `wdskit verify` finds changed bytes in the sources. The new shards
    have the bytes that `pack` writes for the same samples, and the `classes.json` of the sources. Sources with an index
    are compared with it: size, samples and fields; of a store also the sha256. A key that some reader would refuse is
    cleaned, and kept in `json`.

    Args:
        source: Shards, local or in a store: a folder, glob or brace pattern, several joined by `::`, or a list.
        dest: The folder to write to, or a folder of a bucket.
        where: Keep the samples for which this condition on the columns of the sources is true: `width >= 256`.
        keep: Keep only these fields: `jpg,cls`.
        drop: Leave out these fields: `txt`.
        rename: New names of fields: `jpeg=jpg,class=cls`, or a mapping.
        map: As for `pack`.
        **run: As for `pack`: `max_samples`, `max_bytes`, `num_shards`, `shuffle`, `split`, `columns`, `append`, `part`,
            `on`, `workers`, `dry_run`, `progress` and `disk`.

    Raises:
        PackError: An option is invalid, no sample is left, the folder cannot be written, or it has another data set.
        RowError: Two samples have one key, or a renamed field does not fit its name.
        SelectionError: `where`, `split` or `columns` is invalid, or a folder lacks a column.
        ShardError: A source shard is damaged before its first sample, or has two samples of one key.
        FolderIndexError: A source does not match its index, two sources number their classes differently, or another
            process is writing in `dest`.
        StorageError: A source cannot be read, or a bucket cannot be written.
        WdskitError: A worker process was killed.
    """
    paths = [os.fspath(each) for each in ([source] if isinstance(source, str | os.PathLike) else source)]
    renames = parse_pairs(rename, "rename")
    shards = Shards(paths, where=where, keep=parse_names(keep), drop=parse_names(drop), rename=renames)
    change = Change(map=map, checks=None if map else frozenset(renames.values()))
    return fill_folder(shards, dest, change, run)
