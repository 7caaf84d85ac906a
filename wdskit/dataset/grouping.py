"""Members into samples: the fields that share a key and stand side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wdskit.dataset.keys import split_name
from wdskit.errors import ShardError
from wdskit.tar.reader import TarReader
from wdskit.tar.window import Read


class ShardReader:
    """The samples of one tar stream, in order; a fault raises after the last whole sample.

    A sample is whole when the next key or the end marker has been seen, so nothing that a cut or a damaged header could
    have shortened is ever yielded.

    Args:
        read: As `tar.reader.TarReader` takes it.
        shard: Path or URL, for messages and `__url__`.

    Attributes:
        num_samples: Samples yielded so far.
        starts: Byte offset of the first header of each sample yielded so far.
        num_ignored: Members so far that belong to no sample (no extension, dot files, `__meta__`).
    """

    def __init__(self, read: Read, *, shard: str) -> None:
        self.shard = shard
        self.num_samples = 0
        self.starts: list[int] = []
        self.num_ignored = 0
        self._members = TarReader(read, shard=shard)

    @property
    def stop(self) -> int:
        """Byte offset behind the last member, once the stream is read."""
        return self._members.stop

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield `{"__key__": key, "__url__": shard, field: bytes, ...}`, fields in the order of their members.

        Raises:
            ShardError: The tar is not right, a key comes twice, or a field comes twice in a sample.
        """
        keys: set[str] = set()
        key = None
        first = 0
        sample: dict[str, Any] = {}
        try:
            for name, start, data in self._members:
                split = split_name(name)
                if split is None:
                    self.num_ignored += 1
                    continue
                if split[0] != key:
                    if key is not None:
                        yield self._whole(first, sample)
                    key = split[0]
                    if key in keys:
                        raise self._fault(start, f"key {key!r} stands in two places that are not side by side")
                    keys.add(key)
                    first = start
                    sample = {"__key__": key, "__url__": self.shard}
                field = split[1]
                if field in sample or field.startswith("__"):
                    problem = "a name that readers keep for themselves" if field.startswith("__") else "twice"
                    raise self._fault(start, f"key {key!r} has the field {field!r}: {problem}")
                sample[field] = data
        except ShardError as err:
            raise err.after(self.num_samples) from err.__cause__
        if key is not None:
            yield self._whole(first, sample)

    def _whole(self, start: int, sample: dict[str, Any]) -> dict[str, Any]:
        """Count a sample that is complete, which is when the next key or the end marker has been seen."""
        self.num_samples += 1
        self.starts.append(start)
        return sample

    def _fault(self, offset: int, problem: str) -> ShardError:
        return ShardError(
            shard=self.shard,
            offset=offset,
            problem=problem,
            remedy="Pack it again, with the fields of a sample side by side and keys that differ.",
        )
