"""Read the samples of a shard in bounded memory. The bytes of a field are read on request."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from wdskit.dataset.samples import HeaderReader, ShardReader, read_span
from wdskit.errors import StorageError
from wdskit.files import Buffer
from wdskit.limits import MAX_HELD_BYTES
from wdskit.storage.urls import LocalFile, open_stream
from wdskit.tar.walk import Span
from wdskit.tar.window import LargeData, size_of

LazyField: TypeAlias = Span | Buffer
"""A field as `LazyShard` yields it: a range of the file, or bytes (`LargeData` for a large field of a stream)."""


class LazyShard(contextlib.ExitStack):
    """An open shard. Use it as a context manager, and iterate once over its samples.

    Of a local file, only the headers and the requested fields are read. A remote shard or a named pipe is read as a
    stream.

    Args:
        url: Path or URL of the shard.

    Attributes:
        reader: The reader of the samples. It has the number and the offsets of the samples read so far.

    Raises:
        StorageError: The shard cannot be opened.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._stream = stream = open_stream(url)
        self.callback(stream.close)
        self._file = stream if isinstance(stream, LocalFile) and stream.is_regular else None
        self.reader = ShardReader(stream.read, shard=url, hold_bytes=MAX_HELD_BYTES, spill=tempfile.TemporaryFile)
        if self._file is not None:
            self.reader = HeaderReader(self._file, shard=url)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each sample, in order: `{"__key__": key, "__url__": url, field: data, ...}`. The data of a field are a
        `LazyField`, which `part` can read until the next sample is yielded.

        Raises:
            ShardError: The shard is invalid.
            StorageError: The shard cannot be read.
        """
        return close_files(self.reader)

    def part(self, field: LazyField, num_bytes: int, start: int = 0) -> bytes:
        """Return `num_bytes` bytes of a field from its byte `start`; fewer if the field ends before.

        Raises:
            StorageError: The file cannot be read, or has become shorter.
        """
        if not isinstance(field, Span):
            return read_part(field, num_bytes, start)
        assert self._file is not None
        return read_span(self._file, Span(field.offset + start, min(num_bytes, field.size - start)))

    @property
    def num_bytes(self) -> int:
        """Size of the shard in bytes; 0 for a named pipe."""
        return self._stream.num_bytes or 0


def close_files(samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the samples of a reader. Close the files of the `LargeData` of a sample before the next sample is read.
    StorageError: The folder for temporary files has no room for such a file.
    """
    try:
        for sample in samples:
            try:
                yield sample
            finally:
                for data in sample.values():
                    if isinstance(data, LargeData) and data.file is not None:
                        data.file.close()
    except OSError as err:
        raise StorageError(f"TMPDIR={tempfile.tempdir}: no place for a large field: {err.strerror or err}.") from err


def read_part(data: Buffer, num_bytes: int, start: int = 0) -> bytes:
    """Return `num_bytes` bytes of `data` from byte `start`; of `LargeData`, the bytes in its file."""
    if isinstance(data, LargeData) and data.file is not None:
        data.file.seek(start)
        return data.file.read(num_bytes)
    return bytes(data[start : start + num_bytes])


def fields_of(sample: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the data of each field of a sample, without `__key__` and `__url__`."""
    return ((name, data) for name, data in sample.items() if not name.startswith("__"))


def field_size(field: LazyField) -> int:
    """Return the number of bytes of a field."""
    return field.size if isinstance(field, Span) else size_of(field)
