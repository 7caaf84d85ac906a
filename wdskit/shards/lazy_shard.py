"""Read the samples of a shard in bounded memory. The bytes of a field are read on request and in pieces."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any, TypeAlias

from wdskit.dataset.samples import HeaderReader, ShardReader, read_span
from wdskit.limits import MAX_HELD_BYTES
from wdskit.storage.urls import LocalFile, RangeFile, open_ranges, open_stream
from wdskit.tar.walk import Span
from wdskit.tar.window import LargeData, size_of

PIECE_BYTES = 1 << 20

LazyField: TypeAlias = Span | bytes | memoryview
"""A field as `LazyShard` yields it: a range of the file, or bytes (`LargeData` for a large field of a stream)."""


class LazyShard(contextlib.ExitStack):
    """An open shard. Use it as a context manager, and iterate once over its samples.

    Of a local file, only the headers and the requested fields are read. A remote shard is read in the same way if
    `start` is set; otherwise the whole shard is read as a stream. A named pipe is read as a stream too.

    Args:
        url: Path or URL of the shard.
        start: Byte offset of the first sample to read; None for the first sample of the shard.

    Attributes:
        reader: The reader of the samples. It has the number and the offsets of the samples read so far.

    Raises:
        StorageError: The shard cannot be opened.
    """

    def __init__(self, url: str, *, start: int | None = None) -> None:
        super().__init__()
        self._num_read = 0
        self._file: RangeFile | None = None
        self.reader: ShardReader
        if start is not None:
            self._file = open_ranges(url)
            self.callback(self._file.close)
        else:
            self._stream = stream = open_stream(url)
            self.callback(stream.close)
            if isinstance(stream, LocalFile) and stream.is_regular:
                self._file = stream
        if self._file is not None:
            self.reader = HeaderReader(self._file, shard=url, start=start or 0)
        else:
            self.reader = ShardReader(self._read, shard=url, hold_bytes=MAX_HELD_BYTES, spill=self._spill)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each sample, in order: `{"__key__": key, "__url__": url, field: data, ...}`. The data of a field are a
        `LazyField`. `part` and `pieces` can read the field until the next sample is yielded.

        Raises:
            ShardError: The shard is invalid.
            StorageError: The shard cannot be read.
        """
        for sample in self.reader:
            yield sample
            for data in sample.values():
                if isinstance(data, LargeData) and data.file is not None:
                    data.file.close()

    def part(self, field: LazyField, start: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes of a field from its byte `start`; fewer if the field ends before.

        Raises:
            StorageError: The file cannot be read, or has become shorter.
        """
        if isinstance(field, Span):
            assert self._file is not None
            return read_span(self._file, Span(field.offset + start, min(num_bytes, field.size - start)))
        if isinstance(field, LargeData) and field.file is not None:
            field.file.seek(start)
            return field.file.read(num_bytes)
        return bytes(field[start : start + num_bytes])

    def pieces(self, field: LazyField) -> Iterator[bytes]:
        """Yield the bytes of a field in pieces of `PIECE_BYTES`; the last piece may be smaller.

        Raises:
            StorageError: The file cannot be read, or has become shorter.
        """
        for start in range(0, field_size(field), PIECE_BYTES):
            yield self.part(field, start, PIECE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Size of the shard in bytes; for a stream, the bytes read so far."""
        return self._num_read if self._file is None else self._file.num_bytes

    def _spill(self) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with its sample)
        self.callback(file.close)
        return file

    def _read(self, size: int) -> bytes:
        part = self._stream.read(size)
        self._num_read += len(part)
        return part


def fields_of(sample: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the data of each field of a sample, without `__key__` and `__url__`."""
    return ((name, data) for name, data in sample.items() if not name.startswith("__"))


def field_size(field: LazyField) -> int:
    """Return the number of bytes of a field."""
    if isinstance(field, memoryview):
        return len(field)
    return field.size if isinstance(field, Span) else size_of(field)
