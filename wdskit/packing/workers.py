"""Filling shards in worker processes, which hold the folder, or the log of a part, for as long as they live."""

from __future__ import annotations

from pathlib import Path

from wdskit.dataset.index import ShardEntry
from wdskit.dataset.lock import hold
from wdskit.files import Disk
from wdskit.packing.fill import ShardJob, fill_shard


def fill_in_worker(job: ShardJob, *, held: Path, disk: Disk) -> ShardEntry:
    """`fill_shard` in a worker process, and there only: a folder or a file is held until the process ends."""
    hold(held)
    return fill_shard(job, disk=disk)
