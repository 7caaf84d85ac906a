"""Pack into a folder of a bucket: upload each filled shard, remove its local file, and put `index.json` last.

The run works in a local folder of the user's cache. The entry of a shard gets the shard's name before the upload, and
the ETags after it. So a run that was killed knows which objects are its own. It replaces no other object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from wdskit.dataset.index import INDEX_NAME, ShardEntry, index_json, join_url, read_index
from wdskit.dataset.patterns import split_url
from wdskit.dataset.remote import user_cache
from wdskit.errors import FolderIndexError, PackError
from wdskit.files import Disk, make_folders, publish_bytes
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.packing.fill import Entry, publish_note, read_entry, write_entry
from wdskit.packing.folder import ENDS, RUN_NAME, Filled, Folder, open_folder
from wdskit.storage.urls import read_bytes

if TYPE_CHECKING:
    from wdskit.storage.buckets import ObjectInfo

_MAX_PENDING = 2
"""Shards that are uploaded while the next one is filled. A larger number only takes more local disk."""

Uploads = dict[str, "Future[str | None]"]
"""The futures of the ETags of a shard's objects, by name; empty for a shard that is uploaded already."""


class Bucket(Folder):
    """A folder of a bucket, and the run that writes into it.

    Args:
        url: URL of the folder, without a slash at the end.
        local: The local folder in which the run works.

    Raises:
        StorageError: The bucket cannot be read.
        FolderIndexError: The index in the bucket is damaged.
    """

    def __init__(self, url: str, local: Folder) -> None:
        super().__init__(local.path, local.work, local.disk)
        self.shown = url
        self._pending: deque[tuple[Filled, Uploads]] = deque()
        self._objects = self._list()
        self.entries = read_index(url).entries if INDEX_NAME in self._objects else ()

    def _list(self) -> dict[str, ObjectInfo]:
        from wdskit.storage.buckets import list_objects

        return {unquote(each.url.rpartition("/")[2]): each for each in list_objects(self.shown)}

    def _url(self, name: str) -> str:
        return join_url(self.shown, quote(name))

    def done(self, run: str) -> tuple[ShardEntry, ...]:
        """Return the shards of the run with the digest `run` if it wrote the index in the bucket; empty otherwise."""
        for name in {RUN_NAME, INDEX_NAME} & self._objects.keys():
            publish_bytes(self.path / name, read_bytes(self._url(name), limit=MAX_INDEX_BYTES), disk=self.disk)
        try:
            return super().done(run)
        finally:
            for name in (RUN_NAME, INDEX_NAME):
                self.disk.remove(self.path / name)

    def _refuse_lost(self, entries: Iterable[ShardEntry]) -> None:
        """Raise FolderIndexError if an object of a shard is gone, or has another size than the index says."""
        for entry in entries:
            if entry.name not in self._objects or self._objects[entry.name].num_bytes != entry.num_bytes:
                msg = f"{self._url(entry.name)}: the index lists this shard, but it is gone or has another size."
                raise FolderIndexError(msg, folder=self.shown)

    def _others(self) -> set[str]:
        """Return the names of all objects but those that this run uploaded, or was about to upload."""
        own: dict[str, set[str | None]] = {}
        for path in self.work.glob(f"{'[0-9a-f]' * 32}.json"):
            entry = read_entry(self.work, path.stem)
            if entry is not None and entry.name:
                for name in (f"{entry.name}{last}" for _, last in ENDS):
                    own.setdefault(name, set()).add(entry.etags.get(name))
        is_own = {name for name, etags in own.items() if etags & {None, self._etag(name)}}
        return self._objects.keys() - is_own

    def _etag(self, name: str) -> str | None:
        found = self._objects.get(name)
        return None if found is None else found.etag

    def known(self, name: str, digest: str) -> Entry | None:
        """Return the entry of a filled shard; None if it must be filled, also because its objects are gone or changed.

        FolderIndexError: The entry is damaged.
        """
        entry = read_entry(self.work, digest)
        if entry is None or not entry.etags:
            return entry
        names = [f"{name}{last}" for _, last in ENDS]
        is_same = all(each in self._objects and entry.etags.get(each) in {None, self._etag(each)} for each in names)
        if entry.name == name and is_same and self._objects[name].num_bytes == entry.num_bytes:
            return entry
        self.disk.remove(self.work / f"{digest}.json")
        return None

    def keep(self, filled: Filled) -> Iterator[Filled]:
        """Upload a filled shard in the background. Yield the shards whose uploads are complete.

        StorageError: The store cannot be reached or refuses, or an object differs from its file.
        """
        from wdskit.storage.buckets import start_upload

        uploads: Uploads = {}
        if not filled.entry.etags:
            entry = dataclasses.replace(filled.entry, name=filled.name)
            write_entry(self.work, filled.digest, entry, disk=self.disk)
            filled = filled._replace(entry=entry)
            for end, last in ENDS:
                name = f"{filled.name}{last}"
                uploads[name] = start_upload(self._url(name), self.work / f"{filled.digest}{end}")
        self._pending.append((filled, uploads))
        while len(self._pending) > _MAX_PENDING:
            yield self._complete()

    def finish(self) -> Iterator[Filled]:
        """Wait for the last uploads, and yield their shards. StorageError: As for `keep`."""
        while self._pending:
            yield self._complete()

    def _complete(self) -> Filled:
        from wdskit.storage.requests import result

        filled, uploads = self._pending[0]
        etags = {name: result(future, self._url(name)) for name, future in uploads.items()}
        self._pending.popleft()
        if etags:
            filled = filled._replace(entry=dataclasses.replace(filled.entry, etags=etags))
            write_entry(self.work, filled.digest, filled.entry, disk=self.disk)
            for end, _ in ENDS:
                self.disk.remove(self.work / f"{filled.digest}{end}")
        return filled

    def cancel(self) -> None:
        """Cancel the uploads that still run."""
        for _, uploads in self._pending:
            for future in uploads.values():
                future.cancel()

    def commit(
        self, shards: Sequence[Filled], lists: Mapping[str, bytes], columns: Mapping[str, Mapping[str, Any]], run: str
    ) -> None:
        """Put the lists and the columns of the folder, then `index.json`. The errors are those of `Folder.commit`, and
        StorageError: The store cannot be reached or refuses.

        Raises:
            PackError: Another writer has put an index, or has replaced or removed a shard.
        """
        from wdskit.storage.buckets import start_upload
        from wdskit.storage.requests import result

        self._objects = self._list()
        lost = [each.name for each in shards if self.known(each.name, each.digest) is None]
        if lost or INDEX_NAME in self._objects:
            what = f"{lost[0]} was replaced or removed" if lost else f"an {INDEX_NAME} was put"
            raise PackError(f"{self.shown}: {what} by another writer during this run. Wait until it ends.")
        new = [each.index_entry for each in shards]
        data = index_json(new)
        names = self._write_columns(shards, new, columns) if columns else []
        files = {name: self.work / name for name in (*names, *lists)}
        files |= {RUN_NAME: self.work / "run", INDEX_NAME: self.work / "upload.json"}
        for name, content in {**lists, INDEX_NAME: data}.items():
            publish_bytes(files[name], content, disk=self.disk)
        note = {"run": run, "index": hashlib.sha256(data).hexdigest(), "num_shards": len(new)}
        publish_note(files[RUN_NAME], note, disk=self.disk)
        for name, path in files.items():
            result(start_upload(self._url(name), path), self._url(name))
        self.clean()


@contextlib.contextmanager
def open_bucket(url: str, *, disk: Disk) -> Iterator[Bucket]:
    """Lock the local folder of a run that writes into a folder of a bucket, and yield the folder of the bucket.

    Raises:
        PackError: The URL does not name a folder of a bucket.
        StorageError: The bucket cannot be read, or the local folder cannot be locked.
        OSError: The local folder cannot be written.
    """
    from wdskit.storage.buckets import check_bucket

    url = url.rstrip("/")
    check_bucket(url)
    folder, name = split_url(f"{url}/")
    if folder.count("/") < 3 or name:
        raise PackError(f"{url}: the URL does not name a folder of a bucket. Write s3://BUCKET/FOLDER.")
    local = user_cache() / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:16]
    make_folders(local, disk=disk)
    with open_folder(Path(local), is_part=False, disk=disk) as work:
        bucket = Bucket(url, work)
        try:
            yield bucket
        finally:
            bucket.cancel()
