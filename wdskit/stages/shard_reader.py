"""The stage `tarfile_to_samples`: opens each shard, compares it with its folder's index, and yields its samples."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from wdskit.config.types import Kind
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.samples import ShardReader, refuse_divided
from wdskit.dataset.shard import changed_bytes, check_digest, offsets_path, read_offsets
from wdskit.errors import PipelineError, ShardError
from wdskit.stages.base import Origin, Run
from wdskit.stages.progress import SilenceTimer
from wdskit.stages.stream_source import DRAW
from wdskit.stages.streaming import StreamContext, StreamStage
from wdskit.stages.timing import time_iteration
from wdskit.storage.urls import ByteStream, LocalFile, is_local, local_path, open_stream, shown_url

logger = logging.getLogger(__name__)

_MOST_EMPTY = 1000
"""A worker fails after this many empty shards in a row, times the number of all shards: it will never get a sample."""


class TarfileToSamples(StreamStage):
    """Open the shards here. Without this stage, they are opened before the first stage that is not a splitter."""

    name: ClassVar[str] = "tarfile_to_samples"
    kind: ClassVar[Kind] = "open"

    def bind(self, context: StreamContext) -> ShardOpener:
        """Return the `ShardOpener` for the shards of `context`."""
        shards = context.shards
        pairs = zip(shards.urls, shards.entries, strict=True) if shards else ()
        entries = {url: entry for url, entry in pairs if entry is not None}
        return ShardOpener(context.run, entries, frozenset(shards.urls if shards else ()), check=context.check)


class ShardOpener:
    """Opens the shard of each draw and yields its samples.

    Args:
        run: The running pipeline.
        entries: Maps the URL of each indexed shard to its index entry.
        urls: The URLs of all shards; empty if they are unknown.
        check: What is compared with the index entry. `none`: nothing. `size`: the size of the shard, and the number and
            the fields of its samples. If a local shard has an `.idx` file, the offsets of its samples are compared too.
            `sha256`: as `size`, and the sha256 of each shard is compared; of a local shard once, before its first
            sample, of another shard after its last sample. With `size` and `sha256`, a local shard without an entry is
            scanned once before its first sample, to find samples that are split over non-adjacent members.
    """

    def __init__(self, run: Run, entries: dict[str, ShardEntry], urls: frozenset[str], *, check: str) -> None:
        self.run = run
        self._entries = entries
        self._urls = urls
        self._silence = SilenceTimer(0)
        self._check = check
        self._hashed: set[str] = set()
        self._scanned: set[str] = set()

    def __call__(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the samples of the shard of each draw in `source`, in order. Set `run.origin` before each sample. A
        shard without samples yields nothing.

        A draw is a dict with the `url` of the shard, and with the number of the draw under `__draw__`. Draws of a
        foreign source have no `__draw__`; they are numbered from 0.

        Raises:
            PipelineError: The stream is endless, and all shards are empty, or all that this worker gets.
            ShardError: A shard is damaged, has a sample in two places, or differs from its index entry.
            FolderIndexError: The `.idx` file next to a shard belongs to another shard.
            StorageError: A shard cannot be opened or read.
        """
        return time_iteration(self._samples(source), "read", self.run.keep_timings)

    def _samples(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        run, slot = self.run, self.run.board.main
        self._silence.restart(run.num_yielded)
        empty: set[str] = set()
        num_empty = 0
        for number, item in enumerate(source):
            draw = item.get(DRAW, number)  # a foreign source does not number its draws
            shown = shown_url(item["url"])
            slot[0], slot[1] = draw, 0
            index = -1
            for index, sample in enumerate(self.read(item["url"])):
                run.origin = Origin(shown, sample["__key__"], draw, index, 0, epoch=run.epoch)
                slot[2] += 1
                self._report(1)
                yield sample
                slot[0], slot[1] = draw, index + 1
            if index >= 0:
                empty.clear()
                num_empty = 0
                continue
            empty.add(item["url"])
            num_empty += 1
            self._report(0)
            if run.stop_draw is None and empty == self._urls:
                raise PipelineError(f"{shown}: all {len(empty)} shards hold no samples. Pack them again.")
            if run.stop_draw is None and num_empty >= _MOST_EMPTY * len(self._urls) > 0:
                msg = f"{shown}: this worker gets only shards that hold no samples, {num_empty:,} times until now."
                raise PipelineError(f"{msg} Pack them again, or use fewer workers or ranks.")

    def _report(self, num_samples: int) -> None:
        """Add `num_samples` to the samples that were read, and log a warning if the stream has yielded no value for
        `REPORT_S` seconds. Do nothing if a loader watches the stream.
        """
        if not self.run.is_watched and (line := self._silence.update(self.run.num_yielded, num_samples)):
            logger.warning("%s", line)

    def read(self, url: str) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard, and compare them with the index as `check` says. The shard is closed at its
        end, after an error, and when the iterator is closed.

        Raises:
            ShardError: The shard is damaged, has a sample in two places, or differs from its index entry.
            FolderIndexError: The `.idx` file next to the shard belongs to another shard.
            StorageError: The shard cannot be opened or read.
        """
        entry = self._entries.get(url) if self._check != "none" else None
        stream = open_stream(url)
        comparison, hashed = None, None
        try:
            if entry is not None:
                comparison = IndexComparison(url, entry, stream)
            elif self._check != "none" and url not in self._scanned:
                if isinstance(stream, LocalFile) and stream.is_regular:
                    refuse_divided(stream, shard=url)
                self._scanned.add(url)
            if self._check == "sha256" and entry is not None:
                if not is_local(url):
                    hashed = entry
                elif url not in self._hashed:
                    assert isinstance(stream, LocalFile)
                    check_digest(stream, entry.sha256)
                    self._hashed.add(url)
            yield from ShardReader(self._counted(stream, url, hashed), shard=shown_url(url), on_sample=comparison)
            if comparison is not None:
                comparison.end()
        finally:
            stream.close()

    def _counted(self, stream: ByteStream, url: str, entry: ShardEntry | None) -> Callable[[int], bytes]:
        """Return a function that reads up to `size` bytes from `stream`, and counts them in the timings of the run.

        If `entry` is given, the function raises ShardError at the end of the stream if the sha256 of all bytes differs
        from `entry`.
        """
        digest, num_bytes = hashlib.sha256(), 0

        def read(size: int) -> bytes:
            nonlocal num_bytes
            part = stream.read(size)
            self.run.timings.bytes_read += len(part)
            if entry is not None:
                digest.update(part)
                num_bytes += len(part)
                if not part and digest.hexdigest() != entry.sha256:
                    raise changed_bytes(url, num_bytes, digest.hexdigest(), entry.sha256)
            return part

        return read


class IndexComparison:
    """Compares the samples of a shard with the folder's index while the samples are read.

    The size of the shard is compared, unless its server does not send it. The number of samples and their fields are
    compared, and for a local shard with an `.idx` file the offsets of its samples.

    Args:
        url: URL of the shard.
        entry: The index entry of the shard.
        stream: The open shard.

    Raises:
        ShardError: The size of the shard differs from the index.
        FolderIndexError: The `.idx` file next to the shard belongs to another shard.
    """

    def __init__(self, url: str, entry: ShardEntry, stream: ByteStream) -> None:
        self._url = url
        self._entry = entry
        self._offsets: list[int] | None = None
        self._fields = frozenset((*entry.fields, "__key__", "__url__"))
        self._unseen = set(entry.fields)
        self._num_samples = 0
        num_bytes = stream.num_bytes
        if num_bytes not in (None, entry.num_bytes):
            problem = f"the shard has {num_bytes} bytes, but its folder's index says {entry.num_bytes}"
            raise _changed(url, min(num_bytes, entry.num_bytes), problem)
        path = local_path(url) if is_local(url) else ""
        if path and offsets_path(path).is_file():
            self._offsets = read_offsets(path, num_bytes=entry.num_bytes, sha256=entry.idx_sha256).tolist()

    def __call__(self, number: int, start: int, stop: int, sample: Mapping[str, Any]) -> None:
        """Compare a sample with the index before it is yielded.

        Args:
            number: Number of the sample in the shard, from 0.
            start: Byte offset of the sample's first header.
            stop: Byte offset of the sample's end.
            sample: The fields of the sample.

        Raises:
            ShardError: The index has fewer samples, or other offsets for this sample; or the sample has a field that
                the index of the shard does not list. A field that is listed may be missing.
        """
        if number >= self._entry.num_samples:
            raise self._error(start, f"it holds more samples than the {self._entry.num_samples} in the index")
        if self._offsets is not None and self._offsets[number : number + 2] != [start, stop]:
            first, last = (*self._offsets[number : number + 2], -1, -1)[:2]
            problem = f"sample {number} is at bytes {start} to {stop}, but its .idx says {first} to {last}"
            raise self._error(start, problem)
        fields = sample.keys()
        if not fields <= self._fields:
            others = ", ".join(sorted(fields - self._fields))
            raise self._error(start, f"sample {number} has fields that are not in the index: {others}")
        if self._unseen:
            self._unseen -= fields
        self._num_samples = number + 1

    def end(self) -> None:
        """Compare the number of samples and the fields of all samples with the index. Call it after the last sample.

        Raises:
            ShardError: Samples are missing, or no sample has a field that the index lists.
        """
        if self._num_samples != self._entry.num_samples:
            problem = f"it holds {self._num_samples} samples, but the index says {self._entry.num_samples}"
        elif self._unseen:
            problem = f"no sample has {', '.join(sorted(self._unseen))}, which the index lists"
        else:
            return
        raise self._error(self._entry.num_bytes, problem)

    def _error(self, offset: int, problem: str) -> ShardError:
        return _changed(self._url, offset, problem).after(self._num_samples)


def _changed(url: str, offset: int, problem: str) -> ShardError:
    remedy = "It was damaged or replaced. Fetch it again, or run `wdskit index` if the shard is right."
    return ShardError(shard=url, offset=offset, problem=problem, remedy=remedy)
