"""A run of `reshard`: begun, gone on with or over; its shards are filled and its index written."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.index import Exports, ShardEntry
from wdskit.errors import WdskitError
from wdskit.files import Disk
from wdskit.packing.destination import Destination, locked, look_at_destination, raised_as_pack_errors
from wdskit.packing.fill import Count
from wdskit.packing.journal import remove_finished
from wdskit.packing.planning import Chosen
from wdskit.packing.reshard_fill import ReshardJob, fill_in_worker, fill_shard
from wdskit.packing.reshard_plan import Jobs
from wdskit.packing.reshard_sources import Inputs
from wdskit.packing.run import fill_rest, publish_all, resolve_last_run
from wdskit.packing.sources import Tell
from wdskit.packing.staging import RunDescription, Staging, open_staging
from wdskit.shards.parallel import map_shards
from wdskit.tar.writer import END_BYTES


@dataclass(frozen=True)
class ReshardIntent:
    """What may become of what stands in the folder, as `destination.Intent` has it."""

    overwrite: bool = False
    restart: bool = False
    dry_run: bool = False
    append: bool = False
    only: int | None = None
    may_add: bool = False


@dataclass(frozen=True)
class ReshardRun:
    """Everything is planned.

    Attributes:
        folder: Where to write.
        intent: What may become of what stands there.
        inputs: The sources.
        described: All options that a shard, or what is beside it, could depend on, by name.
        planned: The shards to fill.
        lists: Files that are of all of them, by name.
        also: What is kept beside them for other readers.
        workers: Processes.
        tell: Told how far it is.
        disk: What writes.
    """

    folder: Path
    intent: ReshardIntent
    inputs: Inputs
    described: Mapping[str, Any]
    planned: Jobs
    lists: Mapping[str, bytes]
    also: Exports
    workers: int
    tell: Tell
    disk: Disk

    def look(self) -> None:
        """Refuse what is in the way, where nothing is written.

        Raises:
            PackError: Something is.
        """
        with raised_as_pack_errors(self.folder):
            self._look()

    def write(self) -> tuple[Sequence[ShardEntry], bool]:
        """Fill all shards, and publish them. Their lines of the index, and whether all was there.

        Raises:
            PackError: The folder cannot be written, holds something else, or a run that was stopped was another one.
            WdskitError: What `fill_shard` raises.
        """
        with locked(self.folder, None, self.disk):
            with raised_as_pack_errors(self.folder):
                target, run = self._look()
                if target.is_done:
                    assert target.last_run is not None
                    remove_finished(self.folder, self.disk)
                    return target.last_run.entries, True
                where_of = self.inputs.paths.__getitem__
                staging = open_staging(self.folder, run, where_of, restart=self.intent.restart, disk=self.disk)
            entries = self._fill(staging)
            with raised_as_pack_errors(self.folder):
                publish_all(target, staging, entries, self.lists, self.also)
        return entries, False

    def _look(self) -> tuple[Destination, RunDescription]:
        target = look_at_destination(self.folder, self.intent, {})
        options = {"command": "reshard", "append": False, **self.described}
        options |= {"also": list(self.also.kinds), "split_name": self.also.split_name}
        inputs = self.inputs
        shards = tuple(self.planned.shards)
        run = RunDescription(options, len(inputs.paths), inputs.block_shards, inputs.blocks, shards)
        target = resolve_last_run(target, run, inputs.paths.__getitem__, may_add=False)
        target.check_free(shards, self.also)
        target.check_lists(self.lists)
        return target, run

    def _fill(self, staging: Staging) -> list[ShardEntry]:
        shards = self.planned.shards
        total = sum(shard.num_samples for shard in shards), sum(shard.num_bytes - END_BYTES for shard in shards)
        count = Count(self.tell, total)

        def fill(chosen: Sequence[int]) -> Generator[ShardEntry, None, None]:
            return self._fill_jobs(Chosen(self.planned.into(staging.path), chosen), staging, count)

        return fill_rest([shard.name for shard in shards], staging, count, fill)

    def _fill_jobs(
        self, jobs: Sequence[ReshardJob], staging: Staging, count: Count
    ) -> Generator[ShardEntry, None, None]:
        if self.workers == 1 or len(jobs) < 2:
            for job in jobs:
                yield fill_shard(job, disk=self.disk, on_sample=count)
            return
        fill = functools.partial(fill_in_worker, held=staging.log, disk=self.disk)
        with contextlib.closing(map_shards(fill, jobs, workers=self.workers)) as filled:
            for entry in filled:
                if isinstance(entry, WdskitError):
                    raise entry
                count(entry.num_samples, entry.num_bytes - END_BYTES)
                yield entry
