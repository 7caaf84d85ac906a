"""The samples of a shard, with fields that are read in pieces when they are asked for: in bounded memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

from wdskit.dataset.samples import HeaderReader, ShardReader, read_span
from wdskit.limits import MAX_HELD_BYTES
from wdskit.storage.urls import LocalFile, RangeFile, open_ranges, open_stream
from wdskit.tar.walk import Span
from wdskit.tar.window import Passed, size_of

PIECE_BYTES = 1 << 20

Payload: TypeAlias = Span | bytes | memoryview
"""A field as `Payloads.reader` gives it, or in memory."""


class Payloads(contextlib.ExitStack):
    """A shard and its samples, as a context. Of a local file only headers and the fields that are asked for are read,
    and so of a remote one from `start` on: for few samples. Otherwise that is read as a stream.

    Args:
        url: Path or URL of the shard.
        start: Where the first sample to see starts; None for the first of the shard.
        spill_folder: Where the large fields of a shard that can be read once only stand while they are needed; None
            for the system's folder of temporary files.

    Attributes:
        reader: Counts its samples.

    Raises:
        StorageError: The shard cannot be opened.
    """

    def __init__(self, url: str, *, start: int | None = None, spill_folder: Path | None = None) -> None:
        super().__init__()
        self._num_read = 0
        self._spill_folder = spill_folder
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
        """Its samples as `ShardReader` gives them, fields for `payload_size` and, until the next sample, `pieces`."""
        for sample in self.reader:
            yield sample
            for data in sample.values():
                if isinstance(data, Passed) and data.file is not None:
                    data.file.close()

    def part(self, payload: Payload, start: int, num_bytes: int) -> bytes:
        """The bytes of a field from `start` on, fewer where it ends before; until the next sample."""
        if isinstance(payload, Span):
            assert self._file is not None
            return read_span(self._file, Span(payload.offset + start, min(num_bytes, payload.size - start)))
        if isinstance(payload, Passed) and payload.file is not None:
            payload.file.seek(start)
            return payload.file.read(num_bytes)
        return bytes(payload[start : start + num_bytes])

    @property
    def num_bytes(self) -> int:
        """Size of the shard, once its reader has come to the end."""
        return self._num_read if self._file is None else self._file.num_bytes

    def pieces(self, payload: Payload) -> Iterator[bytes]:
        """The bytes of a field, as `file_pieces` gives them."""
        if isinstance(payload, Span):
            assert self._file is not None
            yield from file_pieces(self._file, payload.offset, payload.offset + payload.size)
        elif not isinstance(payload, Passed):
            for start in range(0, len(payload), PIECE_BYTES):
                yield self.part(payload, start, PIECE_BYTES)
        elif payload.file is not None:
            payload.file.seek(0)
            while part := payload.file.read(PIECE_BYTES):
                yield part

    def _spill(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(dir=self._spill_folder)  # noqa: SIM115 (closed with its sample)
        self.callback(file.close)
        return file

    def _read(self, size: int) -> bytes:
        part = self._stream.read(size)
        self._num_read += len(part)
        return part


def file_pieces(file: RangeFile, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of a file from `start` to `stop`, in pieces of `PIECE_BYTES`, of which the last may be smaller.

    Raises:
        StorageError: The file cannot be read, or has become shorter.
    """
    for at in range(start, stop, PIECE_BYTES):
        yield read_span(file, Span(at, min(PIECE_BYTES, stop - at)))


def fields_of(sample: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and payload of each field of a sample."""
    return ((name, data) for name, data in sample.items() if not name.startswith("__"))


def payload_size(payload: Payload) -> int:
    """Bytes of a field."""
    if isinstance(payload, memoryview):
        return len(payload)
    return payload.size if isinstance(payload, Span) else size_of(payload)
