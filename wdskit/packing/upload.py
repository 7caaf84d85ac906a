"""Pack into a folder of a bucket: upload each filled shard, remove its local file, and put `index.json` last.

The run works in a local folder of the user's cache. The entry of a shard gets the shard's name before the upload, and
the ETags after it. So a run that was killed knows which objects are its own. It replaces no other object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from wdskit.dataset.index import INDEX_NAME, index_json, join_url, read_index
from wdskit.dataset.patterns import split_url
from wdskit.dataset.remote import user_cache
from wdskit.errors import PackError
from wdskit.files import Disk, make_folders, publish_bytes
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.packing.fill import Entry, publish_note, read_entry, write_entry
from wdskit.packing.folder import ENDS, LISTS, RUN_NAME, Filled, Folder, open_folder
from wdskit.storage.urls import read_bytes

_INDEX_NAME = "upload.json"  # of the index in the work folder: another name than the one that a local commit completes


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
        self._list()
        self.entries = read_index(url).entries if INDEX_NAME in self._objects else ()

    def _list(self) -> None:
        from wdskit.storage.buckets import list_objects  # needs obstore

        self._objects = {unquote(each.url.rpartition("/")[2]): each for each in list_objects(self.shown)}

    def _url(self, name: str) -> str:
        return join_url(self.shown, quote(name))

    def _read(self, name: str) -> bytes | None:
        return read_bytes(self._url(name), limit=MAX_INDEX_BYTES) if name in self._objects else None

    def _sizes(self) -> Mapping[str, int]:
        return {name: found.num_bytes for name, found in self._objects.items()}

    def _others(self) -> set[str]:
        """Return the names of all objects but those that this run uploaded, or was about to upload."""
        entries = [read_entry(self.work, path.stem) for path in self.work.glob(f"{'[0-9a-f]' * 32}.json")]
        own = {name for entry in entries if entry is not None for name in self._own(entry)}
        has_begun = (self.work / _INDEX_NAME).exists()  # a commit, which puts these files before the index
        return self._objects.keys() - own - (LISTS if has_begun else set())

    def _own(self, entry: Entry) -> list[str]:
        """Return the names of the objects of a shard that are as this run uploaded them, or was about to."""
        names = [f"{entry.name}{last}" for _, last in ENDS if entry.name]
        found = [(name, self._objects[name].etag) for name in names if name in self._objects]
        return [name for name, etag in found if entry.etags.get(name) in {None, etag}]

    def known(self, name: str, digest: str) -> Entry | None:
        """Return the entry of a filled shard; None if it must be filled, also because its objects are gone or changed.

        FolderIndexError: The entry is damaged.
        """
        entry = read_entry(self.work, digest)
        if entry is None or not entry.etags or (entry.name == name and len(self._own(entry)) == len(ENDS)):
            return entry
        self.disk.remove(self.work / f"{digest}.json")
        return None

    def keep(self, filled: Filled) -> Filled:
        """Upload a filled shard, and remove its local files.

        StorageError: The store cannot be reached or refuses, or an object differs from its file.
        """
        name, digest, entry = filled
        if entry.etags:
            return filled
        entry = dataclasses.replace(entry, name=name)
        write_entry(self.work, digest, entry, disk=self.disk)
        files = {f"{name}{last}": self.work / f"{digest}{end}" for end, last in ENDS}
        entry = dataclasses.replace(entry, etags=self._upload(files))
        write_entry(self.work, digest, entry, disk=self.disk)
        for path in files.values():
            self.disk.remove(path)
        return Filled(name, digest, entry)

    def _upload(self, files: Mapping[str, Path]) -> dict[str, str | None]:
        """Put files under their names, one after the other. Return the ETag of each object."""
        from wdskit.storage.buckets import start_upload
        from wdskit.storage.requests import result

        return {name: result(start_upload(self._url(name), path), self._url(name)) for name, path in files.items()}

    def commit(
        self, shards: Sequence[Filled], lists: Mapping[str, bytes], columns: Mapping[str, Mapping[str, Any]], run: str
    ) -> None:
        """Put the lists and the columns of the folder, then `index.json`. The errors are those of `Folder.commit`, and
        StorageError: The store cannot be reached or refuses.

        Raises:
            PackError: Another writer has put an index, or has replaced or removed a shard.
        """
        self._list()
        lost = [each.name for each in shards if self.known(each.name, each.digest) is None]
        if lost or INDEX_NAME in self._objects:
            what = f"{lost[0]} was replaced or removed" if lost else f"an {INDEX_NAME} was put"
            raise PackError(f"{self.shown}: {what} by another writer during this run. Wait until it ends.")
        new = [each.index_entry for each in shards]
        data = index_json(new)
        names = self._write_columns(shards, new, columns) if columns else []
        files = {name: self.work / name for name in (*names, *lists)}
        files |= {RUN_NAME: self.work / "run", INDEX_NAME: self.work / _INDEX_NAME}
        for name, content in {**lists, INDEX_NAME: data}.items():
            publish_bytes(files[name], content, disk=self.disk)
        note = {"run": run, "index": hashlib.sha256(data).hexdigest(), "num_shards": len(new)}
        publish_note(files[RUN_NAME], note, disk=self.disk)
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
    from wdskit.storage.buckets import check_bucket

    url = url.rstrip("/")
    check_bucket(url)
    folder, name = split_url(f"{url}/")
    if folder.count("/") < 3 or name:
        raise PackError(f"{url}: the URL does not name a folder of a bucket. Write s3://BUCKET/FOLDER.")
    local = user_cache() / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:16]
    make_folders(local, disk=disk)
    with open_folder(Path(local), is_part=False, disk=disk) as work:
        yield Bucket(url, work)
