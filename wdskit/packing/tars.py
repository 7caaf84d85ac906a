"""Rows from tars: their samples, whose bytes are copied from where they stand."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from wdskit.dataset.classes import CLASSES_NAME, common_classes
from wdskit.dataset.identities import Verified
from wdskit.dataset.patterns import ShardList, list_shards
from wdskit.dataset.samples import HeaderReader
from wdskit.dataset.unfinished import refuse_part
from wdskit.errors import PackError, RowError
from wdskit.packing.members import row_or_error
from wdskit.packing.references import PartBytes
from wdskit.packing.rows import Row
from wdskit.storage.identity import FileIdentity
from wdskit.storage.urls import LocalFile, is_local, local_path

LEAVE_OUT = "leave the labels out: `wdskit reshard --drop cls`."
"""What to do where labels of several sources mean different classes."""
_log = logging.getLogger(__name__)


class Tars:
    """Local tars, as `dataset.patterns.list_shards` finds them.

    Attributes:
        num_other: Members read so far that belong to no sample.
        classes: Number of each class by name, where all folders of the tars that have labels have a `classes.json`.

    Raises:
        PackError: One is not on this machine.
        StorageError: There are none.
        FolderIndexError: They are what a run has come to that is not finished; or two `classes.json` disagree, or one
            does not read.
    """

    def __init__(self, shards: str) -> None:
        found = list_shards(shards)
        remote = next((url for url in found.urls if not is_local(url)), None)
        if remote is not None:
            raise PackError(f"{remote}: only local tars can be packed. Fetch it first.")
        refuse_part(shards, found)
        self._shards = [(local_path(url), entry) for url, entry in zip(found.urls, found.entries, strict=True)]
        self.num_other = 0
        self.classes = _classes_of(found)

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a sample, in their order: its members are its fields.

        Raises:
            ShardError: A tar is not right.
            StorageError: One cannot be read.
        """
        for path, entry in self._shards:
            file = LocalFile(path)
            try:
                if entry is not None:
                    Verified().check(file, entry.identity, entry.sha256)
                identity = FileIdentity.of(file.fd)
                samples = HeaderReader(file, shard=path)
                for sample in samples:
                    fields = (
                        (name, PartBytes(path, span.size, span.offset, *identity))
                        for name, span in sample.items()
                        if not name.startswith("__")
                    )
                    yield row_or_error(sample["__key__"], fields, path, keys)
                self.num_other += samples.num_ignored
            finally:
                file.close()


def _classes_of(found: ShardList) -> dict[str, int]:
    """The classes that the labels of all these shards stand for; none where that is not known of one.

    Raises:
        FolderIndexError: As `common_classes`.
    """
    folders = found.folders
    classes = common_classes(folders, folders.__getitem__, way_out=LEAVE_OUT)
    if classes.problem:
        _log.warning("%s, so no %s is written.", classes.problem, CLASSES_NAME)
    names = classes.names or ()
    if classes.problem or len({*names}) < len(names):
        return {}
    return {name: number for number, name in enumerate(names)}
