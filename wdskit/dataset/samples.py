"""Group members into samples: neighbouring members with the same key are one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wdskit.dataset.keys import field_problem
from wdskit.errors import MemberNameError, ShardError, StorageError, UnsupportedMember
from wdskit.limits import MAX_READ_MEMBER_BYTES
from wdskit.storage.urls import LocalFile, RangeFile
from wdskit.tar.names import split_name
from wdskit.tar.reader import TarReader
from wdskit.tar.walk import Span, TarWalk
from wdskit.tar.window import Read, Spill

OnSample = Callable[[int, int, int, Mapping[str, Any]], None]
"""Called with each sample before it is yielded: its number, its start and end offsets in the shard, and the sample.
Bytes between samples count to the sample before them.
"""

OnMember = Callable[[str, tuple[str, str] | None, int, Any], object]
"""Called with each member: its name, its key and field (None if it belongs to no sample), the offset of its first
header, and its data (or `LargeData`). Its result replaces the data in the sample.
"""

OnFault = Callable[[int, str, str], None]
"""Called with the offset of a member, its key, and why it cannot be a field of that key's sample."""

_PACK_AGAIN = "Pack it again, with the fields of each sample side by side and unique keys."


class ShardReader:
    """The samples of one tar stream, in order. A fault raises ShardError after the last whole sample.

    A sample is whole when the next key or the end marker has been read. A sample that may be cut or damaged is never
    yielded.

    Args:
        read: Called with a number of bytes. Returns at most this number of the next bytes; empty at the end. Or a
            `TarWalk`, which reads headers only.
        shard: Path or URL, for messages and `__url__`.
        on_member: Called with each member, also with members that belong to no sample. The result replaces the data.
        on_sample: Called with each sample before it is yielded; its exceptions are not caught.
        on_fault: Called for a repeated field, for a field with a reserved name, and for a member with a key that is not
            a plain file or whose name is not UTF-8; the field is left out. Repeated keys then raise no error. If
            `on_fault` is None, such fields and repeated keys raise ShardError.
        hold_bytes: Largest number of bytes of a member's data that are kept in memory. Larger data are replaced by
            `LargeData`, which has the number of bytes.
        spill: Opens a temporary file for the data of each member over `hold_bytes`; None discards the data.

    Attributes:
        num_samples: Samples yielded so far.
        starts: Byte offset of the first header of each sample yielded so far.
        num_ignored: Members so far, of any kind, that belong to no sample (no extension, dot files, `__meta__`).
    """

    def __init__(
        self,
        read: Read | TarWalk,
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
        self._on_member = on_member
        self._on_sample = on_sample
        self._on_fault = on_fault
        self._reader = (
            read if isinstance(read, TarWalk) else TarReader(read, shard=shard, hold_bytes=hold_bytes, spill=spill)
        )

    @property
    def stop(self) -> int:
        """Byte offset after the last member and its padding; 0 until the stream was read to its end."""
        return self._reader.stop

    @property
    def offset(self) -> int:
        """Byte offset after the last member that was read and its padding. AssertionError in a `HeaderReader`."""
        assert isinstance(self._reader, TarReader)
        return self._reader.offset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield `{"__key__": key, "__url__": shard, field: bytes, ...}`, fields in the order of their members.

        Raises:
            ShardError: The tar is invalid, a key or a field of a sample is repeated, a field has a reserved name, or a
                member with a key is not a plain file. Before the error for another archive after the end marker, all
                samples of the first archive were yielded.
        """
        keys: set[str] = set()
        key = None
        first = 0
        sample: dict[str, Any] = {}
        on_member, on_fault = self._on_member, self._on_fault
        while True:
            try:
                for name, start, data in self._reader:
                    split = split_name(name)
                    value = data if on_member is None else on_member(name, split, start, data)
                    if split is None:
                        self.num_ignored += 1
                        continue
                    if split[0] != key:
                        if key is not None:
                            yield self._finish(first, start, sample)
                        key = split[0]
                        if on_fault is None:
                            if key in keys:
                                raise _twice(self.shard, start, key)
                            keys.add(key)
                        first = start
                        sample = {"__key__": key, "__url__": self.shard}
                    field = split[1]
                    problem = field_problem(field, sample)
                    if problem:
                        if on_fault is None:
                            raise _misnamed(self.shard, start, f"key {key!r} has the field {field!r}: {problem}")
                        on_fault(start, key, f"it has the field {field!r}: {problem}")
                    else:
                        sample[field] = value
                break
            except ShardError as err:
                if on_fault is not None and isinstance(err, UnsupportedMember):
                    on_fault(err.offset, err.key, err.problem)
                    continue
                if key is not None and self.stop:  # another archive follows
                    yield self._finish(first, self.stop, sample)
                raise err.after(self.num_samples) from err.__cause__
        if key is not None:
            yield self._finish(first, self.stop, sample)

    def _finish(self, start: int, stop: int, sample: dict[str, Any]) -> dict[str, Any]:
        """Count a whole sample, pass it to `on_sample`, and return it."""
        if self._on_sample is not None:
            self._on_sample(self.num_samples, start, stop, sample)
        self.num_samples += 1
        self.starts.append(start)
        return sample


class HeaderReader(ShardReader):
    """A `ShardReader` that reads headers only. Each field of a sample is a `Span` in place of the data.

    Args:
        file: The open shard. It is not closed, so that `read_span` can read the bytes of a field.
        shard: Path or URL of the shard, for messages and `__url__`.
        start: Byte offset of the first sample to read.
        on_fault: As for `ShardReader`.

    Raises:
        StorageError: The size of the shard cannot be read.
    """

    def __init__(self, file: RangeFile, *, shard: str, start: int = 0, on_fault: OnFault | None = None) -> None:
        walk = TarWalk(file.read_at, file.num_bytes, shard=shard, start=start)
        super().__init__(walk, shard=shard, on_fault=on_fault)


def _twice(shard: str, offset: int, key: str) -> MemberNameError:
    return _misnamed(shard, offset, f"key {key!r} is in two places that are not side by side")


def _misnamed(shard: str, offset: int, problem: str) -> MemberNameError:
    return MemberNameError(shard=shard, offset=offset, problem=problem, remedy=_PACK_AGAIN)


def refuse_divided(file: LocalFile, *, shard: str) -> None:
    """Check the headers of a shard: raise ShardError if the members of a key are not neighbours, as in a tar grouped by
    extension. Damage raises no error here: only the headers before the damage are checked.

    Raises:
        ShardError: The members of a key are in two places, or a member is not a plain file.
        StorageError: The shard cannot be read.
    """
    keys: set[str] = set()
    key = None
    members = iter(TarWalk(file.read_at, file.num_bytes, shard=shard))
    while True:
        try:
            name, start, _ = next(members)
        except UnsupportedMember as err:
            raise err.after(0) from err.__cause__
        except (StopIteration, ShardError):
            return
        split = split_name(name)
        if split is not None and split[0] != key:
            key = split[0]
            if key in keys:
                raise _twice(shard, start, key).after(0)
            keys.add(key)


def read_span(file: RangeFile, span: Span) -> bytes:
    """Return the bytes of `span`, a field of a `HeaderReader`. Raises StorageError if the file cannot be read, or has
    become shorter.
    """
    data = file.read_at(*span)
    if len(data) < span.size:
        raise StorageError(f"{file.url}: it became shorter while it was read.", url=file.url)
    return data
