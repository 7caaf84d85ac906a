"""Members into samples: the fields that share a key and stand side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wdskit.dataset.keys import split_name
from wdskit.errors import ShardError
from wdskit.tar.reader import Read, TarReader


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
        try:
            for start, sample in self._group():
                self.num_samples += 1
                self.starts.append(start)
                yield sample
        except ShardError as err:
            raise err.after(self.num_samples) from err.__cause__

    def _group(self) -> Iterator[tuple[int, dict[str, Any]]]:
        keys: set[str] = set()
        key = None
        first = 0
        sample: dict[str, Any] = {}
        for name, start, data in self._members:
            split = split_name(name)
            if split is None:
                self.num_ignored += 1
                continue
            if split[0] != key:
                if key is not None:
                    yield first, sample
                key = split[0]
                if key in keys:
                    raise self._fault(start, f"key {key!r} stands in two places that are not side by side")
                keys.add(key)
                first = start
                sample = {"__key__": key, "__url__": self.shard}
            if split[1] in sample or split[1].startswith("__"):
                problem = "a name that readers keep for themselves" if split[1].startswith("__") else "twice"
                raise self._fault(start, f"key {key!r} has the field {split[1]!r}: {problem}")
            sample[split[1]] = data
        if key is not None:
            yield first, sample

    def _fault(self, offset: int, problem: str) -> ShardError:
        return ShardError(
            shard=self.shard,
            offset=offset,
            problem=problem,
            remedy="Pack it again, with the fields of a sample side by side and keys that differ.",
        )
