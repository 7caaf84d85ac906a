"""Filling shards in worker processes, which hold the folder for as long as they live."""

from __future__ import annotations

from wdskit.dataset.index import ShardEntry
from wdskit.files import Disk
from wdskit.packing.fill import ShardJob, fill_shard
from wdskit.shards.locking import hold_folder


def fill_in_worker(job: ShardJob, *, disk: Disk) -> ShardEntry:
    """`fill_shard` in a worker process, and there only: the folder is held until the process ends."""
    hold_folder(job.path.parent)
    return fill_shard(job, disk=disk)
