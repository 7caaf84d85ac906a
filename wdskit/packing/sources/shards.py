"""Rows from finished shards: choose the samples to keep, and make the row of each kept sample."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from wdskit.dataset.classes import (
    CLASS_FIELD,
    CLASSES_NAME,
    MAX_CLASSES_BYTES,
    classes_json,
    common_classes,
    read_classes,
)
from wdskit.dataset.index import join_url
from wdskit.dataset.patterns import ShardList, split_url
from wdskit.errors import PackError, RowError
from wdskit.packing.changes import Changes
from wdskit.packing.row import Row
from wdskit.packing.sample_filter import Choice, LeftOutCounts
from wdskit.packing.sources.archives import DROP_LABELS
from wdskit.packing.sources.tar_samples import TarSamples
from wdskit.shards.export import split_of
from wdskit.storage.urls import is_local, read_bytes


class ShardSamples:
    """Reader of finished shards. The samples that are kept become rows.

    Args:
        shards: The shards.
        choice: Decides which samples are kept.
        changes: Changes the fields and keys of the samples that are kept.
        check: True compares each shard with the sha256 in its folder's index. False does so only for a local shard that
            seems changed and for a shard in a store.

    Attributes:
        num_samples: Number of samples in the shards that were read so far.
        num_other: Number of members of these shards that belong to no sample.
        left_out: Number of samples that are left out, for each reason.

    Raises:
        PackError: `check` is True, and the folder of a shard has no index.
    """

    def __init__(self, shards: ShardList, choice: Choice, changes: Changes, *, check: bool = False) -> None:
        self.num_samples = 0
        self.num_other = 0
        self.left_out = LeftOutCounts()
        self._fields: set[str] = set()
        self._shards = shards
        self._choice = choice
        self._changes = changes
        self._check = check
        if check:
            check_indexed(shards)

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield the row of each kept sample, in the order of the shards. Yield a `RowError` in place of a sample that
        cannot be changed, or in place of the rest of a damaged shard. `keys` must be equal to `changes.keys`.

        Raises:
            PackError: No sample is kept, or an option names a field that no sample has.
            SelectionError: The filter cannot be evaluated for a sample.
            ShardError: A shard has a link, a device or another kind of member that no sample has; or the shard was
                replaced after it was indexed.
            FolderIndexError: A shard differs from the index of its folder.
            StorageError: A shard cannot be read.
        """
        assert keys == self._changes.keys
        for url, entry in zip(self._shards.urls, self._shards.entries, strict=True):
            samples = TarSamples(url, entry, check=self._check)
            for sample in samples:
                if isinstance(sample, RowError):
                    yield sample
                    continue
                self._fields |= sample.fields.keys()
                if self._choice.keeps(sample, samples.place, self.left_out):
                    try:
                        yield self._changes.row(sample, f"{samples.place}: {sample.key}")
                    except RowError as err:
                        yield err
            self.num_samples += samples.num_samples
            self.num_other += samples.num_ignored
        unknown = sorted(self._changes.named - self._fields)
        if unknown:
            msg = f"{unknown[0]}: no sample has this field. The fields are {', '.join(sorted(self._fields))}."
            raise PackError(f"{msg} Correct --keep, --drop or --rename.")
        if self.left_out.total == self.num_samples:
            raise PackError(f"none of the {self.num_samples} samples is left to write. Correct --filter or --sample.")


def check_indexed(shards: ShardList) -> None:
    """Check that an index has the sha256 of each shard.

    Raises:
        PackError: The folder of a shard has no index.
    """
    unknown = next((url for url, entry in zip(shards.urls, shards.entries, strict=True) if entry is None), None)
    if unknown is not None:
        msg = f"{unknown}: its folder has no index, so its sha256 is unknown."
        raise PackError(f"{msg}\n  Run `wdskit index {os.path.dirname(unknown) or '.'}`, or leave --check out.")


def check_dest(folder: Path, shards: ShardList, *, overwrite: bool) -> None:
    """Check that writing to `folder` cannot replace a local source shard.

    Raises:
        PackError: A source shard is in the folder. With `overwrite`, also if a source shard is a link to a file in the
            folder.
    """
    here = os.path.realpath(folder)
    urls = [url for url in shards.urls if is_local(url)]
    for parent in dict.fromkeys(os.path.dirname(url) or "." for url in urls):
        if os.path.realpath(parent) == here:
            raise PackError(f"{folder}: the source's shards are in this folder. Write to another folder.")
    if overwrite and any(os.path.dirname(os.path.realpath(url)) == here for url in urls):
        raise PackError(f"{folder}: the source's shards are links to files in this folder. Write to another folder.")


def merged_splits(shards: ShardList) -> str:
    """Return a note for the user if the shards of one part have names of several splits, such as train and val;
    otherwise an empty text. A part is one of the texts that the user joined by `::`.
    """
    named: dict[int, dict[str, str]] = {}
    for url, part in zip(shards.urls, shards.parts, strict=True):
        named.setdefault(part, {}).setdefault(split_of(split_url(url)[1]), url)
    splits = next((splits for splits in named.values() if len(splits) > 1), None)
    if splits is None:
        return ""
    folder, name = split_url(next(iter(splits.values())))
    pattern = join_url(folder, re.sub(r"\d+(?=\D*$)", "*", name))
    msg = f"shards of {' and '.join(sorted(splits))} become one data set"
    return f"{msg}; name a pattern such as {pattern} to keep them apart."


def find_classes(shards: ShardList, changes: Changes) -> tuple[dict[str, bytes], str]:
    """Find the `classes.json` for a new folder, into which `shards` are packed with `changes`.

    Returns:
        (files, note). `files` maps the name `classes.json` to its bytes, or is empty if the new folder gets no such
        file. `note` tells the user why a `classes.json` of the sources is not used; it may be empty.

    Raises:
        FolderIndexError: Two folders number their classes differently, so one number would have two meanings; or a
            `classes.json` is invalid.
        StorageError: A `classes.json` cannot be read.
    """
    folders, made = shards.folders, changes.made
    if made is not None and made.classes is not None:
        return {CLASSES_NAME: classes_json(made.classes.numbers)}, ""
    other = None if made is None else made.fields.get(CLASS_FIELD)
    other = other or next((old for old, new in changes.rename.items() if new == CLASS_FIELD != old), None)
    if other is not None:
        named = next((folder for folder in folders if read_classes(folder) is not None), None)
        if named is None:
            return {}, ""
        problem = f"cls is made of {other!r}, and {join_url(named, CLASSES_NAME)} names the classes of another field"
        msg = f"{problem}, so no {CLASSES_NAME} was written"
        return {}, f"{msg}. To write it, use --field cls={other} --classes FILE."
    name = changes.new_name(CLASS_FIELD)
    if name is None:
        return {}, ""
    classes = common_classes(folders, folders.__getitem__, way_out=DROP_LABELS)
    if classes.names is None:
        return {}, ""
    if name != CLASS_FIELD:
        named = join_url(classes.folder, CLASSES_NAME)
        return {}, f"cls is renamed to {name}, but {named} names the classes of cls, so no {CLASSES_NAME} was written."
    if classes.problem:
        return {}, f"{classes.problem}, so no {CLASSES_NAME} was written."
    return {CLASSES_NAME: read_bytes(join_url(classes.folder, CLASSES_NAME), limit=MAX_CLASSES_BYTES)}, ""
