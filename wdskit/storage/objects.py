"""Read ranges of objects in a store: S3, Google Cloud Storage, Azure, Hugging Face, AIStore and http(s) servers.

All reads of a process go through one event loop in one thread, which limits the requests in flight and repeats failed
requests. Each reply must have the requested range and the known version of the object. Otherwise an error is raised: a
server may ignore a range or If-Match, and an object may be replaced while it is read.

A process that was forked after the first use of obstore gets an error, because obstore would hang forever.
"""

from __future__ import annotations

import asyncio
import bisect
import re
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from wdskit.errors import StorageError
from wdskit.storage.requests import (
    LARGE_UNITS,
    STORE_ERRORS,
    BrokenReplyError,
    RetryState,
    follow_redirects,
    loop_of_this_process,
    wait_for_result,
)
from wdskit.storage.stores import locate
from wdskit.storage.traffic import Traffic

REQUEST_BYTES = 16 << 20
"""Most bytes of one request."""
GAP_BYTES = 64 << 10
"""Ranges with fewer bytes between them become one request: a request costs more than these bytes."""
CHUNK_BYTES = 1 << 20
"""Size of the pieces of a reply. Complete pieces are kept if the connection breaks."""
PIECE_BYTES = 64 << 10
"""Size of the pieces of the body of a stream. Complete pieces are kept if the connection breaks."""
PROBE_BYTES = 2
"""Bytes of a request that needs the size only. Some servers send the whole object for `bytes=0-0`."""
PART_S = 720.0
"""Longest time for one part, including all tries."""

_PAGE = re.compile(rb"\s*<(!doctype|html)\b", re.IGNORECASE)
_PAST_END = ("status code: 416", "RangeNotSupported", "StartTooLarge")
"""Text in obstore's errors if a range starts after the end: the server sends 416, the whole object, or no range."""

Range: TypeAlias = tuple[int, int]


class ObjectFile:
    """One object of a store, read by ranges. The first read sends the first request.

    Unknown size, ETag and time of change are taken from the first reply. A reply with other values raises StorageError,
    so bytes of two versions are never mixed. Threads may share the object.

    Args:
        url: s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY, hf://datasets/OWNER/NAME[@REVISION]/PATH,
            ais://BUCKET/KEY or http(s)://...
        num_bytes: Size of the object in bytes; None if unknown.
        etag: ETag of the object; None if unknown.

    Attributes:
        url: The URL for messages, without the query, which may have a signature.
        fd: -1: an object has no descriptor.

    Raises:
        StorageError: The URL names no object.
    """

    def __init__(self, url: str, *, num_bytes: int | None = None, etag: str | None = None) -> None:
        self._location = locate(url)
        self.url = self._location.url
        if not self._location.key and self._location.scheme not in ("http", "https"):
            raise self._error("the URL has no key. Add the key of an object")
        self._full_url = url
        self._num_bytes = num_bytes
        self._etag = quote_etag(etag)
        self._modified: datetime | None = None  # compared if the store has no strong ETag
        self._is_closed = False
        self._has_replied = False
        self._is_resolved = self._location.scheme not in ("http", "https") or self._full_url == self.url

    @property
    def num_bytes(self) -> int:
        """Size of the object in bytes. If the size is unknown, it is requested. StorageError: The request failed."""
        if self._num_bytes is None:
            self.read_at(0, PROBE_BYTES)
        assert self._num_bytes is not None
        return self._num_bytes

    @property
    def etag(self) -> str | None:
        """ETag of the object; None if the store has no ETags. An unknown ETag is requested. StorageError: The request
        failed.
        """
        if self._etag is None and not self._has_replied:
            self.read_at(0, PROBE_BYTES)
        return self._etag

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer bytes only at the end of the object.

        Raises:
            StorageError: The store cannot be reached, refuses the request, or sends other bytes than requested. Or the
                object was replaced or closed, or this process is ending or was forked after its parent had used a
                store.
        """
        chunks = wait_for_result(self.start_reading([(offset, offset + size)]), self.url)
        return _join(chunks, offset, offset + size)

    fd = -1

    @property
    def version(self) -> str | None:
        """Text that identifies the version of the object: its size, and its strong ETag, or its URL and time of change.

        None if the store gives neither a strong ETag nor a time of change. Unknown values are requested. StorageError:
        The request failed.
        """
        # A weak ETag may stay while the bytes change.
        if is_strong_etag(self.etag):
            return f"{self._etag} {self.num_bytes}"
        return f"{self.url} {self._etag} {self._modified} {self.num_bytes}" if self._modified else None

    def close(self) -> None:
        """Close the object: later reads raise StorageError. A second call does nothing."""
        self._is_closed = True

    def ahead(self, ranges: Sequence[Range]) -> ReadAhead:
        """Start to read ranges in the background. Return a `ReadAhead`, whose `read_at` returns the bytes.

        `ranges` has (start, stop) of each range, sorted. Raises StorageError if the object was closed, or this process
        is ending or was forked after its parent had used a store. `ReadAhead.read_at` raises the errors of the read.
        """
        return ReadAhead(self, ranges)

    def start_reading(self, ranges: Sequence[Range]) -> Future[list[Chunk]]:
        """Start to read ranges, each (start, stop), in the background.

        Returns:
            A future of chunks, sorted by offset. They have all bytes of the ranges up to the end of the object, and may
            have bytes between the ranges. The future raises StorageError if the store cannot be reached, refuses the
            request or sends other bytes, or if the object was replaced.

        Raises:
            StorageError: The object was closed, or this process is ending or was forked after its parent had used a
                store.
        """
        return self.submit(self._read_parts(plan_parts(ranges)))

    def submit(self, read: Coroutine[Any, Any, list[Chunk]]) -> Future[list[Chunk]]:
        """Start to read chunks of this object in the background. The errors are those of `start_reading`."""
        try:
            if self._is_closed:
                raise self._error("it has been closed")
            return loop_of_this_process(self.url).submit(read)
        except StorageError:
            read.close()
            raise

    async def start_tries(self) -> RetryState:
        """Return a new `RetryState` of this object. If the URL has a query, its redirects are followed first.

        Raises StorageError if the server did not answer, or stayed busy, in all tries.
        """
        if not self._is_resolved:
            url = quote(self._full_url, safe=bytes(range(33, 127)))
            last = await follow_redirects(self._location, url)
            if last != url:
                self._location = replace(self._location, root=last, key="")
            self._is_resolved = True
        return RetryState(self._location)

    async def _read_parts(self, parts: list[Range]) -> list[Chunk]:
        """Read several parts, each (start, stop), at the same time; if the size is unknown, the first part before the
        others. Return their chunks in the order of the parts.

        Raises StorageError if a part cannot be read.
        """
        chunks: list[Chunk] = []
        if parts and (self._num_bytes is None or len(parts) == 1):
            chunks = await self._read_part(*parts[0])
            parts = parts[1:]
        tasks = [asyncio.ensure_future(self._read_part(*part)) for part in parts]
        try:
            for found in await asyncio.gather(*tasks):
                chunks += found
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        return chunks

    async def _read_part(self, start: int, stop: int) -> list[Chunk]:
        """Return the chunks of the bytes `start` to `stop`; fewer bytes only at the end of the object.

        Raises StorageError if the bytes cannot be read, or do not arrive within `PART_S` seconds.
        """
        stop = self._end(stop)
        if start >= stop:
            return []
        loop = loop_of_this_process(self.url)
        async with loop.slot(LARGE_UNITS if stop - start >= CHUNK_BYTES else 1):
            try:
                return await asyncio.wait_for(self._request_part(start, stop), PART_S)
            except asyncio.TimeoutError as err:
                raise self._error(f"bytes {start} to {stop} did not arrive within {PART_S:.0f} s") from err

    async def _request_part(self, start: int, stop: int) -> list[Chunk]:
        """Request bytes `start` to `stop` and return their chunks; fewer bytes only at the end of the object.

        Retries request only the missing bytes. Raises StorageError if no try is left or would help, or if a reply is
        wrong.
        """
        chunks: list[Chunk] = []
        tries = await self.start_tries()
        asks_size = False  # after a request from `start` on was refused, perhaps because the object ends there
        while (at := chunks[-1].stop if chunks else start) < self._end(stop):
            try:
                if asks_size:
                    await self.request(tries.store(), 0, 0, by_range=False)
                else:
                    await self._try_part(tries.store(), at, self._end(stop), chunks)
            except STORE_ERRORS as err:
                if asks_size or self._num_bytes is not None or not any(sign in str(err) for sign in _PAST_END):
                    await tries.failed(err)
                else:
                    asks_size = True
            else:
                asks_size = False
                tries.succeeded()
        return chunks

    def _end(self, stop: int) -> int:
        """Return `stop`, or the size of the object if that is known and less."""
        return stop if self._num_bytes is None else min(stop, self._num_bytes)

    async def _try_part(self, store: Any, start: int, stop: int, chunks: list[Chunk]) -> None:
        """Send one request for bytes `start` to `stop`, and append the received bytes to `chunks`.

        Raises one of `STORE_ERRORS` if this try failed, and StorageError if the reply is wrong (see `_check`).
        """
        reply, stop = await self.request(store, start, stop)
        at = start
        async for data in reply.stream(min_chunk_size=CHUNK_BYTES):
            chunks.append(Chunk(at, memoryview(data)))
            loop_of_this_process(self.url).count(Traffic(fetched=len(data)))
            at += len(data)
            if at > stop:
                raise self._error(f"the server sent more than bytes {start} to {stop}, which were requested")
        if at < stop:
            raise BrokenReplyError(f"the server sent {at - start} of {stop - start} bytes")

    async def request(self, store: Any, start: int, stop: int | None, *, by_range: bool = True) -> tuple[Any, int]:
        """Request bytes `start` to `stop`, or to the end if `stop` is None; without `by_range`, the whole object.

        Return the reply, and the offset at which it must end. The errors are those of `_try_part`.
        """
        options: Any = {"range": {"offset": start} if stop is None else (start, stop)} if by_range else {}
        if is_strong_etag(self._etag):
            options["if_match"] = self._etag
        reply = await store.get_async(self._location.key, options=options)
        return reply, self._check(reply, start, reply.meta["size"] if stop is None else stop)

    def _check(self, reply: Any, start: int, stop: int) -> int:
        """Check a reply to a request for bytes `start` to `stop`. Store the size and version of the object if they were
        unknown.

        Return the offset at which the reply must end: `stop`, or the object's size if this is less. Raises StorageError
        if the object was replaced, or if the reply is compressed or has another range.
        """
        meta = reply.meta
        etag, modified, num_bytes = quote_etag(meta["e_tag"]), meta["last_modified"], meta["size"]
        if not modified.timestamp():  # obstore's value if the store sends no time
            modified = None
        if self._num_bytes not in (None, num_bytes):
            raise self._replaced(f"it has {num_bytes} bytes now, but had {self._num_bytes}")
        if self._etag is not None and etag != self._etag:
            raise self._replaced(f"its ETag is {etag} now, but was {self._etag}")
        if self._modified is not None and not is_strong_etag(etag) and modified != self._modified:
            raise self._replaced(f"its last change is {modified} now, but was {self._modified}")
        encoding = str(reply.attributes.get("Content-Encoding", "identity")).lower()
        if encoding not in ("", "identity", "aws-chunked"):
            raise self._error(f"the server sends it compressed ({encoding}), so ranges do not match the file")
        self._num_bytes, self._etag, self._modified, self._has_replied = num_bytes, etag, modified, True
        stop = min(stop, num_bytes)
        if stop > start and tuple(reply.range) != (start, stop):
            raise self._error(f"the server sent bytes {reply.range}, but {(start, stop)} were requested")
        return stop

    def _replaced(self, what: str) -> StorageError:
        return self._error(f"the object was replaced while it was read: {what}")

    def _error(self, problem: str) -> StorageError:
        return StorageError(f"{self.url}: {problem}.", url=self.url)


class Chunk(NamedTuple):
    """Bytes of an object, and their offset in the object."""

    offset: int
    data: memoryview

    @property
    def stop(self) -> int:
        """The offset after the last byte."""
        return self.offset + len(self.data)


class ReadAhead:
    """An object of which some ranges are read in the background. Other bytes are requested when they are read.

    Args:
        file: The object. Closing the ReadAhead does not close the object.
        ranges: (start, stop) of each range, sorted. Ranges may overlap.
    """

    fd = -1

    def __init__(self, file: ObjectFile, ranges: Sequence[Range]) -> None:
        self._file = file
        self._ranges = ranges
        self.url = file.url
        if ranges:
            self._chunks = file.start_reading(ranges)

    @property
    def num_bytes(self) -> int:
        """Size of the object in bytes. Raises StorageError if the size is unknown and cannot be read."""
        return self._file.num_bytes

    def covers(self, offset: int, size: int) -> bool:
        """Return True if `read_at` sends no further request: the last range that starts at or before `offset` has all
        `size` bytes from `offset`.
        """
        at = bisect.bisect_right(self._ranges, (offset, 1 << 63)) - 1
        return at >= 0 and offset + size <= self._ranges[at][1]

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer bytes only at the end of the object.

        Bytes that `covers` accepts are returned when all ranges have arrived. Other bytes are requested. Raises
        StorageError if the bytes cannot be read, or if the object was replaced.
        """
        if not self.covers(offset, size):
            return self._file.read_at(offset, size)
        return _join(wait_for_result(self._chunks, self._file.url), offset, offset + size)

    def close(self) -> None:
        """Do nothing: other code may still read the object."""


class ObjectStream:
    """An object that is read in order, as the body of one request. The next bytes are read ahead. Close the stream when
    done.

    If the body breaks, the missing bytes are requested; the ETag or the time of change must show that the object is the
    same.

    Args:
        url: s3://, gs://, az://, hf://, ais:// or http(s):// URL of the object, as for `ObjectFile`.

    Attributes:
        file: The object, whose first bytes have been read.

    Raises:
        StorageError: The URL names no object, or the object cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.file = ObjectFile(url)
        self.url = self.file.url
        self._at = 0  # offset of the next byte to receive
        self._stop = -1  # size of the object; unknown before the first reply
        self._has_ranges = True  # a server without ranges, or with an empty object, refuses the first request
        self._pieces: Any = None
        self._chunks: deque[memoryview] = deque()
        self._ahead: Future[list[Chunk]] | None = self.file.submit(self._receive())
        self._take()  # errors are raised when the stream is opened, as for a file

    @property
    def num_bytes(self) -> int:
        """Size of the object in bytes."""
        return self.file.num_bytes

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes from where the last call stopped; empty only at the end, and after `close`.

        Raises StorageError if the object cannot be read or was replaced, also in each later call.
        """
        if not self._chunks and not self._take():
            return b""
        chunk = self._chunks[0]
        if size < len(chunk):
            self._chunks[0] = chunk[size:]
        else:
            self._chunks.popleft()
        return bytes(chunk[:size])

    def close(self) -> None:
        """Cancel the read ahead, and close the object."""
        self.file.close()
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        self._chunks.clear()

    def _take(self) -> bool:
        """Wait for the bytes that are read ahead, append them to `_chunks`, and start to read the next bytes.

        Return True if `_chunks` has bytes. Return False at the end, and after `close`. StorageError: The bytes cannot
        be read.
        """
        if self._ahead is None:
            return False
        loop_of_this_process(self.url)
        received = wait_for_result(self._ahead, self.url)
        self._ahead = self.file.submit(self._receive()) if self._at < self._stop else None
        self._chunks.extend(chunk.data for chunk in received)
        return bool(self._chunks)

    async def _receive(self) -> list[Chunk]:
        """Return the chunks of the next bytes: `CHUNK_BYTES`, except at the end.

        Raises StorageError if the bytes cannot be read, or do not arrive within `PART_S` seconds.
        """
        try:
            return await asyncio.wait_for(self._read_body(), PART_S)
        except asyncio.TimeoutError as err:
            msg = f"{self.url}: the bytes from {self._at} on did not arrive within {PART_S:.0f} s."
            raise StorageError(msg, url=self.url) from err

    async def _read_body(self) -> list[Chunk]:
        file, chunks, first = self.file, list[Chunk](), self._at
        tries = await file.start_tries()
        while self._at != self._stop and self._at - first < CHUNK_BYTES:
            try:
                if self._pieces is None:
                    stop = self._stop if self._at else None
                    reply, self._stop = await file.request(tries.store(), self._at, stop, by_range=self._has_ranges)
                    self._pieces = aiter(reply.stream(min_chunk_size=PIECE_BYTES))
                    continue
                data = await anext(self._pieces, b"")
                if not self._at and _PAGE.match(data):
                    way = "Name the shards, or a folder with an index and a slash at the end of its URL"
                    raise StorageError(f"{self.url}: this is a web page, not a tar.\n  {way}.", url=self.url)
                if not data:
                    raise BrokenReplyError(f"the server sent {self._at} of {self._stop} bytes")
                if self._at + len(data) > self._stop:
                    raise StorageError(f"{self.url}: the server sent more than {self._stop} bytes.", url=self.url)
            except STORE_ERRORS as err:
                self._pieces = None
                if not self._at and self._has_ranges and any(sign in str(err) for sign in _PAST_END):
                    self._has_ranges = False
                    continue
                if self._at and file.version is None:
                    msg = f"{self.url}: the connection broke after {self._at} of {self._stop} bytes, and without an "
                    msg += "ETag or a time of change the rest may be of another file."
                    raise StorageError(msg, url=self.url) from None
                await tries.failed(err)
            else:
                chunks.append(Chunk(self._at, memoryview(data)))
                loop_of_this_process(self.url).count(Traffic(fetched=len(data)))
                self._at += len(data)
        tries.succeeded()
        return chunks


def plan_parts(ranges: Iterable[Range]) -> list[Range]:
    """Return the requests, each (start, stop), that read all ranges. The requests are sorted by offset.

    `ranges` has (start, stop) in any order; empty ranges are ignored. Ranges with fewer than `GAP_BYTES` between them
    are joined. A request has at most `REQUEST_BYTES`.
    """
    runs: list[list[int]] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if runs and start - runs[-1][1] < GAP_BYTES:
            runs[-1][1] = max(runs[-1][1], stop)
        else:
            runs.append([start, stop])
    return [(at, min(at + REQUEST_BYTES, stop)) for start, stop in runs for at in range(start, stop, REQUEST_BYTES)]


def _join(chunks: list[Chunk], start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` from chunks that are sorted by offset; fewer bytes only at the object's end."""
    pieces: list[memoryview] = []
    for offset, data in chunks[max(0, bisect.bisect_right(chunks, start, key=lambda chunk: chunk.offset) - 1) :]:
        if offset >= stop:
            break
        pieces.append(data[max(0, start - offset) : stop - offset])
    return b"".join(pieces)


def quote_etag(etag: str | None) -> str | None:
    """Return an ETag with quotes, also if a store lists it without quotes; None for no ETag."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or None


def is_strong_etag(etag: str | None) -> bool:
    """Return True if an ETag is strong; False for None and for a weak ETag, which starts with `W/`.

    Two versions of an object never have the same strong ETag.
    """
    return etag is not None and not etag.startswith("W/")
