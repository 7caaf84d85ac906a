"""The first stages of a stream: draws of shards, their split over ranks and workers, and their samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from wdskit.dataset.grouping import ShardReader
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.patterns import ShardList
from wdskit.errors import PipelineError, ShardError
from wdskit.order.draws import Draws
from wdskit.pipeline.run import Origin, Run
from wdskit.storage.urls import LocalFile, Stream, is_local, open_stream

DRAW = "__draw__"
ORDINAL = "__ordinal__"


class StreamSource:
    """Yields draws, `{"url", "__draw__", "__ordinal__"}`, from where the run stands.

    The ordinal starts as the draw's number; each splitter divides it, so that the next one splits what is left.
    """

    def __init__(self, run: Run, shards: ShardList, draws: Draws) -> None:
        self.run = run
        self.shards = shards
        self.draws = draws

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield draws until the run's stop, or for ever."""
        draw = self.run.next_draw
        while self.run.stop_draw is None or draw < self.run.stop_draw:
            yield {"url": self.shards.urls[self.draws.shard(draw)], DRAW: draw, ORDINAL: draw}
            draw += 1


class SplitByNode:
    """Keeps the draws of this rank: every R-th."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the draws of this rank."""
        return _deal(source, *self.run.place)


class SplitByWorker:
    """Keeps, of what reaches it, the draws of this worker process: every W-th."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the draws of this worker."""
        return _deal(source, self.run.worker, self.run.num_workers)


def _deal(source: Iterable[dict[str, Any]], part: int, num_parts: int) -> Iterator[dict[str, Any]]:
    for item in source:
        ordinal, rest = divmod(item[ORDINAL], num_parts)
        if rest == part:
            yield {**item, ORDINAL: ordinal}


class OpenTars:
    """Draws into samples: opens each shard and yields what it holds.

    Args:
        run: Says how many samples of the first draw to pass over, and is told where the reading stands.
        entries: The index's line of each shard by URL, where there is one.
        num_shards: How many there are in all.
        check: `size` compares a shard with its line when it is opened, `sha256` reads it once more before, `none` does
            not.
        patience: Samples that may be read without one coming out, before a whole pass without output is an error.
    """

    def __init__(self, run: Run, entries: dict[str, ShardEntry], num_shards: int, *, check: str, patience: int) -> None:
        self.run = run
        self._entries = entries
        self._num_shards = num_shards
        self._check = check
        self._patience = patience
        self._digested: set[str] = set()

    def __call__(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the samples of each draw in order."""
        run = self.run
        seen: set[str] = set()
        for number, item in enumerate(source):
            draw = item.get(DRAW, number)  # another library's shard list has no draws
            first = run.next_sample if draw == run.next_draw else 0
            run.next_draw, run.next_sample = draw, first
            for index, sample in enumerate(self.read(item["url"])):
                if index < first:
                    continue
                run.next_sample = index + 1
                run.silent_samples += 1
                run.origin = Origin(item["url"], sample["__key__"], draw, index, 0)
                yield sample
            run.next_draw, run.next_sample = draw + 1, 0
            run.silent_draws += 1
            seen.add(item["url"])
            self._check_output(seen)

    def read(self, url: str) -> Iterator[dict[str, Any]]:
        """The samples of one shard, the shard checked against the index first."""
        entry = self._entries.get(url)
        stream = open_stream(url)
        try:
            if entry is not None and self._check != "none" and isinstance(stream, LocalFile):
                _check_size(url, stream.num_bytes, entry)
            if self._check == "sha256" and entry is not None:
                if not is_local(url):
                    stream = _Digesting(stream, url, entry)
                elif url not in self._digested:
                    _check_digest(url, entry)
                    self._digested.add(url)
            yield from ShardReader(stream.read, shard=url)
        finally:
            stream.close()

    def _check_output(self, seen: set[str]) -> None:
        """Raise where all shards have been read and nothing came out, as behind a filter that drops everything."""
        run = self.run
        if run.stop_draw is not None or run.silent_draws <= self._num_shards:
            return
        if run.silent_samples == 0:
            raise PipelineError(f"{_some(seen)}: {run.silent_draws} shards in a row hold no sample. Pack them again.")
        if run.silent_samples > self._patience:
            msg = (
                f"{_some(seen)}: the pipeline dropped all of the last {run.silent_samples} samples "
                f"from {run.silent_draws} shards.\n  Look at its select stages."
            )
            raise PipelineError(msg)


def _some(urls: set[str]) -> str:
    return f"{min(urls)} and {len(urls) - 1} more" if len(urls) > 1 else min(urls)


def _check_size(url: str, num_bytes: int, entry: ShardEntry) -> None:
    if num_bytes != entry.num_bytes:
        problem = f"the shard has {num_bytes} bytes, its folder's index says {entry.num_bytes}"
        raise _changed(url, min(num_bytes, entry.num_bytes), problem)


def _check_digest(url: str, entry: ShardEntry) -> None:
    stream = _Digesting(open_stream(url), url, entry)
    try:
        while stream.read(1 << 20):
            pass
    finally:
        stream.close()


class _Digesting:
    """A stream that is compared with its digest at its end."""

    def __init__(self, stream: Stream, url: str, entry: ShardEntry) -> None:
        self._stream = stream
        self._url = url
        self._entry = entry
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def read(self, size: int) -> bytes:
        part = self._stream.read(size)
        self._digest.update(part)
        self._num_bytes += len(part)
        if not part and self._digest.hexdigest() != self._entry.sha256:
            problem = f"its sha256 {self._digest.hexdigest()[:12]}... is not {self._entry.sha256[:12]}... of the index"
            raise _changed(self._url, self._num_bytes, problem)
        return part

    def close(self) -> None:
        self._stream.close()


def _changed(url: str, offset: int, problem: str) -> ShardError:
    remedy = "It was damaged or replaced. Fetch it again, or run `wdskit index` if it is right."
    return ShardError(shard=url, offset=offset, problem=problem, remedy=remedy)
