"""Members into samples: the fields that share a key and stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wdskit.dataset.keys import split_name
from wdskit.errors import ShardError, StorageError
from wdskit.limits import MAX_READ_MEMBER_BYTES
from wdskit.storage.urls import LocalFile, RangeFile
from wdskit.tar.reader import TarReader, locate_members
from wdskit.tar.walk import Span, TarWalk
from wdskit.tar.window import Read, Spill

_CHECKED_BYTES = 1 << 20  # from here on a look at the file's size is nothing beside the read

OnSample = Callable[[int, int, int, Mapping[str, Any]], None]
"""Called with each sample before it is yielded: its number, the offset of its first header, that behind its last member
and all that is no sample's behind it, and the sample.
"""

OnMember = Callable[[str, tuple[str, str] | None, int, Any], object]
"""Called with each member: its name, its key and field (None where it is of no sample), the offset of its first header,
and its data (or `Passed`). What it returns stands in the sample in place of the data.
"""

OnFault = Callable[[int, str, str], None]
"""Called with the offset of a member, its key, and why it cannot be a field of that key's sample."""

_PACK_AGAIN = "Pack it again, with the fields of each sample side by side and unique keys."


class ShardReader:
    """The samples of one tar stream, in order; a fault raises after the last whole sample.

    A sample is whole when the next key or the end marker has been seen, so nothing that a cut or a damaged header could
    have shortened is ever yielded.

    Args:
        read: As `tar.reader.TarReader` takes it, and `hold_bytes` and `spill`.
        shard: Path or URL, for messages and `__url__`.
        on_member: Called with each member, those that belong to none included.
        on_sample: Called with each sample before it is yielded; what it raises goes on.
        on_fault: Called for a field that comes twice or has a reserved name, which is left out then; without it, such
            a field is an error. Who gives it looks for keys that come twice too: no key is kept here then.
        hold_bytes: As `TarReader` takes it.
        spill: As `TarReader` takes it.

    Attributes:
        num_samples: Samples yielded so far.
        starts: Byte offset of the first header of each sample yielded so far.
        num_ignored: Members so far that belong to no sample (no extension, dot files, `__meta__`).
        partial: Behind an error, the offset of the sample that it was met in, and what was read of it.
    """

    def __init__(
        self,
        read: Read,
        *,
        shard: str,
        on_member: OnMember | None = None,
        on_sample: OnSample | None = None,
        on_fault: OnFault | None = None,
        hold_bytes: int = MAX_READ_MEMBER_BYTES,
        spill: Spill | None = None,
    ) -> None:
        self.shard = shard
        self.num_samples = 0
        self.starts: list[int] = []
        self.num_ignored = 0
        self.partial: tuple[int, dict[str, Any]] | None = None
        self._on_member = on_member
        self._on_sample = on_sample
        self._on_fault = on_fault
        self._reader: TarReader | TarWalk = TarReader(read, shard=shard, hold_bytes=hold_bytes, spill=spill)

    @property
    def stop(self) -> int:
        """Byte offset behind the last member, once the stream is read."""
        return self._reader.stop

    @property
    def offset(self) -> int:
        """Byte offset behind the member that was read last, its padding included; not of a `HeaderReader`."""
        assert isinstance(self._reader, TarReader)
        return self._reader.offset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield `{"__key__": key, "__url__": shard, field: bytes, ...}`, fields in the order of their members.

        Raises:
            ShardError: The tar is invalid, a key comes twice, or a field comes twice in a sample.
        """
        keys: set[str] = set()
        key = None
        first = 0
        sample: dict[str, Any] = {}
        on_member, on_fault = self._on_member, self._on_fault
        try:
            for name, start, data in self._reader:
                split = split_name(name)
                value = data if on_member is None else on_member(name, split, start, data)
                if split is None:
                    self.num_ignored += 1
                    continue
                if split[0] != key:
                    if key is not None:
                        yield self._whole(first, start, sample)
                    key = split[0]
                    if on_fault is None:
                        if key in keys:
                            raise _fault(self.shard, start, _twice(key))
                        keys.add(key)
                    first = start
                    sample = {"__key__": key, "__url__": self.shard}
                field = split[1]
                if field in sample or field.startswith("__"):
                    problem = "a name that readers reserve" if field.startswith("__") else "twice"
                    if on_fault is None:
                        raise _fault(self.shard, start, f"key {key!r} has the field {field!r}: {problem}")
                    on_fault(start, key, f"it has the field {field!r}: {problem}")
                else:
                    sample[field] = value
        except ShardError as err:
            self.partial = None if key is None else (first, sample)
            raise err.after(self.num_samples) from err.__cause__
        if key is not None:
            yield self._whole(first, self.stop, sample)

    def _whole(self, start: int, stop: int, sample: dict[str, Any]) -> dict[str, Any]:
        """Count a sample that is complete, which is when the next key or the end marker has been seen."""
        if self._on_sample is not None:
            self._on_sample(self.num_samples, start, stop, sample)
        self.num_samples += 1
        self.starts.append(start)
        return sample


class HeaderReader(ShardReader):
    """The samples of a shard by their headers: as `ShardReader`, with a `Span` in the place of each field's data.

    Args:
        file: The shard, which stays open: a field's bytes are read with `read_span`.
        shard: Its path, for messages and `__url__`.
        start: Where the first sample to see starts.
    """

    def __init__(self, file: RangeFile, *, shard: str, start: int = 0) -> None:
        super().__init__(read_from(file, start), shard=shard)
        self._reader = TarWalk(file.read_at, file.num_bytes, shard=shard, start=start)


def _twice(key: str) -> str:
    return f"key {key!r} is in two places that are not side by side"


def _fault(shard: str, offset: int, problem: str) -> ShardError:
    return ShardError(shard=shard, offset=offset, problem=problem, remedy=_PACK_AGAIN)


def refuse_divided(file: LocalFile, *, shard: str) -> None:
    """Refuse a shard in which the members of a key do not stand side by side, as where they are grouped by extension:
    a reader would only know it at the second part, behind samples that lack a field. Only headers are read; whatever
    else is wrong is left to who reads the shard.

    Raises:
        ShardError: A key stands in two places.
    """
    keys: set[str] = set()
    key = None
    members = iter(TarWalk(file.read_at, file.num_bytes, shard=shard))
    while True:
        try:
            name, start, _ = next(members)
        except (StopIteration, ShardError):
            return
        split = split_name(name)
        if split is not None and split[0] != key:
            key = split[0]
            if key in keys:
                raise _fault(shard, start, _twice(key)).after(0)
            keys.add(key)


def read_span(file: RangeFile, span: Span) -> bytes:
    """The bytes of a field that `HeaderReader` found; `StorageError` where the file has become shorter."""
    is_long = span.size > _CHECKED_BYTES and span.offset + span.size > file.num_bytes  # before there is memory for it
    data = b"" if is_long else file.read_whole(*span)
    if len(data) < span.size:
        raise StorageError(f"{file.url}: it became shorter while it was read.", url=file.url)
    return data


def read_sample(file: RangeFile, start: int, stop: int | None = None) -> tuple[str, dict[str, memoryview]]:
    """Key and fields of the sample that starts at an offset.

    Args:
        file: The shard.
        start: Where its first member starts.
        stop: Where its last one ends, None where that is not known: then it ends before another key.

    Raises:
        ShardError: No whole sample stands there.
        StorageError: It cannot be read.
    """
    if stop is None:
        sample = next(iter(HeaderReader(file, shard=file.url, start=start)), {"__key__": ""})
        spans = ((name, span) for name, span in sample.items() if isinstance(span, Span))
        return sample["__key__"], {name: memoryview(read_span(file, span)) for name, span in spans}
    key, fields = "", dict[str, memoryview]()
    data = read_span(file, Span(start, stop - start))
    for name, first, last in locate_members(data, shard=file.url, offset=start, stop=len(data)):
        split = split_name(name)
        if split is None:
            continue
        if fields and split[0] != key:
            break
        key, fields[split[1]] = split[0], memoryview(data)[first:last]
    return key, fields


def read_from(file: RangeFile, start: int) -> Read:
    """What reads a file in order from `start` on, wherever it was read before."""
    at = start

    def read(size: int) -> bytes:
        nonlocal at
        part = file.read_at(at, size)
        at += len(part)
        return part

    return read
