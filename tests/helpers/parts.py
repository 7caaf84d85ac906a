"""A part of a shard for tests of the cache, without a store."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

from wdskit.storage.cache import PartCache, PartName
from wdskit.storage.objects import Chunk

SHA = "ab" * 32
STARTS = [512, 2048, 5120, 6144]
DATA = os.urandom(8192)
NAME = PartName(SHA, STARTS[0], STARTS[-1])


class Object:
    """A stand-in for `ObjectFile` with fixed bytes, which counts its reads; with `error`, each read fails."""

    url = "s3://bucket/a.tar"

    def __init__(self, data: bytes = DATA, error: Exception | None = None) -> None:
        self.data, self.error, self.num_reads = data, error, 0

    def start_reading(self, ranges: Any) -> Future[list[Chunk]]:
        self.num_reads += 1
        [(start, stop)] = ranges
        future: Future[list[Chunk]] = Future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            data = memoryview(self.data)[:stop]
            future.set_result([Chunk(at, data[at : at + 700]) for at in range(start, len(data), 700)])
        return future


def keep(cache: PartCache, name: PartName = NAME, starts: Any = STARTS, file: Any = None) -> Any:
    """Keep a part and wait until it is stored; return the file that it was read from."""
    file = file or Object()
    cache.keep(name, file, starts)
    wait(cache)
    return file


def wait(cache: PartCache) -> None:
    deadline = time.monotonic() + 10
    while cache._fetches and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not cache._fetches
