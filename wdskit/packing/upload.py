"""Pack into a folder of a bucket: upload each filled shard, remove its local file, and put `index.json` last.

The run works in a local folder of the user's cache. A note there, `SHARD.put`, has the digest of the job of a shard
before its upload, and the ETags of its objects after it. So a run that was killed knows which objects are its own, also
if its shards get other names. It replaces no other object that it finds when it begins, except one under the name of a
shard whose upload was noted and then killed. The lock of the local folder keeps away runs of this user on this machine;
another writer is noticed at the commit (`Bucket._finish`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from wdskit.dataset.index import INDEX_NAME, join_url, read_index
from wdskit.dataset.remote import user_cache
from wdskit.errors import PackError
from wdskit.files import Disk, publish_bytes, read_own
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.packing.fill import Filled, parse_note, publish_note, read_filled
from wdskit.packing.folder import ENDS, LISTS, RUN_NAME, Folder, open_folder
from wdskit.storage.buckets import check_bucket, list_objects, upload
from wdskit.storage.urls import read_bytes

_PUT = ".put"


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
        self._puts = {path.stem: parse_note(read_own(path), path) for path in self.work.glob(f"*{_PUT}")}
        self._list()
        self.entries = read_index(url).entries if INDEX_NAME in self._objects else ()

    def _list(self) -> None:
        self._objects = {unquote(each.url.rpartition("/")[2]): each for each in list_objects(self.shown)}

    def _url(self, name: str) -> str:
        return join_url(self.shown, quote(name))

    def _read(self, name: str) -> bytes | None:
        return read_bytes(self._url(name), limit=MAX_INDEX_BYTES) if name in self._objects else None

    def _sizes(self) -> Mapping[str, int]:
        return {name: found.num_bytes for name, found in self._objects.items()}

    def _others(self) -> set[str]:
        """Return the names of all objects but those that this run uploaded, or was about to upload."""
        has_begun = (self.work / INDEX_NAME).exists()  # a commit, which puts these files before the index
        return {name for name in self._objects if not self._is_own(name)} - (LISTS if has_begun else set())

    def _is_own(self, name: str) -> bool:
        """Return whether an object is as this run uploaded it, or was about to."""
        put = self._puts.get(name.removesuffix(".idx"))
        return put is not None and name in self._objects and put["etags"].get(name) in {None, self._objects[name].etag}

    def _is_put(self, name: str, digest: str) -> bool:
        """Return whether the shard of a job is in the bucket as this run uploaded it."""
        put = self._puts.get(name) or {"digest": None}
        return put["digest"] == digest and bool(put["etags"]) and all(map(self._is_own, put["etags"]))

    def _note(self, name: str, digest: str, etags: Mapping[str, str | None]) -> None:
        self._puts[name] = note = {"digest": digest, "etags": etags}
        publish_note(self.work / f"{name}{_PUT}", note, disk=self.disk)

    def known(self, name: str, digest: str) -> Filled | None:
        """Return the filled shard of a job; None if it must be filled, also because its objects are gone or changed.

        FolderIndexError: The entry is damaged.
        """
        return read_filled(self.work, name, digest, has_files=not self._is_put(name, digest))

    def keep(self, filled: Filled) -> Filled:
        """Upload a filled shard, and remove its local files.

        StorageError: The store cannot be reached or refuses, or an object differs from its file.
        """
        name, digest = filled.entry.name, filled.digest
        if not self._is_put(name, digest):
            files = {f"{name}{last}": self.work / f"{digest}{end}" for end, last in ENDS}
            self._note(name, digest, {})
            self._note(name, digest, self._upload(files))
            for path in files.values():
                self.disk.remove(path)
        return filled

    def _upload(self, files: Mapping[str, Path]) -> dict[str, str | None]:
        """Put files under their names, one after the other. Return the ETag of each object."""
        return {name: upload(self._url(name), path) for name, path in files.items()}

    def _finish(self, shards: Sequence[Filled], names: Sequence[str], index: bytes, done: Mapping[str, object]) -> None:
        """Put the files `names` of the work folder, then `index.json`.

        Raises:
            PackError: Another writer has put an index, or has replaced or removed a shard.
            StorageError: The store cannot be reached or refuses.
        """
        self._list()
        lost = [each.entry.name for each in shards if not self._is_put(each.entry.name, each.digest)]
        if lost or INDEX_NAME in self._objects:
            raise PackError(f"{self.shown}: another writer has changed {(*lost, INDEX_NAME)[0]} during this run.")
        files = {name: self.work / name for name in names}
        files |= {RUN_NAME: self.work / "run", INDEX_NAME: self.work / INDEX_NAME}
        publish_bytes(files[INDEX_NAME], index, disk=self.disk)
        publish_note(files[RUN_NAME], done, disk=self.disk)
        self._upload(files)
        self.clean()


@contextlib.contextmanager
def open_bucket(url: str, *, disk: Disk) -> Iterator[Bucket]:
    """Lock the local folder of a run that writes into a folder of a bucket, and yield the folder of the bucket.

    Raises:
        PackError: The URL does not name a folder of a bucket.
        StorageError: The bucket cannot be read, or the local folder cannot be locked.
        OSError: The local folder cannot be written.
    """
    url = url.rstrip("/")
    if not check_bucket(url).key:
        raise PackError(f"{url}: the URL does not name a folder of a bucket. Write s3://BUCKET/FOLDER.")
    local = user_cache() / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:16]
    with open_folder(local, is_part=False, disk=disk) as work:
        yield Bucket(url, work)
