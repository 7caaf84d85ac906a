"""Where shards are filled: in this process, in several, or on a Ray cluster. The bytes do not depend on it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from wdskit.dataset.index import ShardEntry
from wdskit.errors import WdskitError
from wdskit.files import Disk
from wdskit.packing.fill import ShardJob, fill_shard
from wdskit.packing.on_ray import fill_on_ray
from wdskit.packing.workers import fill_in_worker
from wdskit.shards.parallel import map_shards
from wdskit.tar.writer import END_BYTES


def fill_jobs(
    jobs: Sequence[ShardJob],
    *,
    on: str | None,
    workers: int,
    folder: Path,
    held: Path,
    disk: Disk,
    count: Callable[[int, int], None],
) -> Generator[ShardEntry, None, None]:
    """The lines of the index of these shards, in order, each once it is published.

    Args:
        jobs: The shards.
        on: A Ray cluster; None for this machine.
        workers: Processes of this machine.
        folder: The folder that is packed into.
        held: What is held while others fill a shard.
        disk: What writes.
        count: Told how many samples, and bytes of them, are packed.

    Raises:
        WdskitError: What the first shard raised that could not be filled.
    """
    if not jobs:
        return
    if on is None and (workers == 1 or len(jobs) == 1):
        for job in jobs:
            yield fill_shard(job, disk=disk, on_sample=count)
        return
    if on is None:
        fill = functools.partial(fill_in_worker, held=held, disk=disk)
        filled: Generator[ShardEntry | WdskitError, None, None] = map_shards(fill, jobs, workers=workers)
    else:
        filled = fill_on_ray(jobs, on, folder=folder, held=held, disk=disk)
    with contextlib.closing(filled):  # after an error nothing is written any more when it is raised
        for entry in filled:
            if isinstance(entry, WdskitError):
                raise entry
            count(entry.num_samples, entry.num_bytes - END_BYTES)
            yield entry
