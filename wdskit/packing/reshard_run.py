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
from wdskit.packing.destination import Destination, look_at_destination
from wdskit.packing.finished import indexed_already
from wdskit.packing.places import opened, told_as_pack_errors
from wdskit.packing.planning import Chosen
from wdskit.packing.record import RunRecord
from wdskit.packing.reshard_fill import ReshardJob, fill_in_worker, fill_shard
from wdskit.packing.reshard_plan import Jobs
from wdskit.packing.reshard_sources import Inputs
from wdskit.packing.running import Count, complete, fill_rest
from wdskit.packing.sources import Tell
from wdskit.packing.started import Run, begin, compare
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
        told: All options that a shard, or what is beside it, could depend on, by name.
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
    told: Mapping[str, Any]
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
        with told_as_pack_errors(self.folder):
            self._check_free(self._look())

    def write(self) -> tuple[Sequence[ShardEntry], bool]:
        """Fill all shards, and write the index when they are there. Their lines of it, and whether all was there.

        Raises:
            PackError: The folder cannot be written, holds something else, or a run that was stopped was another one.
            WdskitError: What `fill_shard` raises.
        """
        with opened(self.folder, None, self.disk):
            with told_as_pack_errors(self.folder):
                target = self._settle()
                if target.finished is not None:
                    target.check_lists(self.lists)
                    target.finished.end(self.disk)
                    return target.finished.entries, True
                run = self._begin(target)
            entries = self._fill(run)
            complete(target, self.lists, entries, self.also, run)
        return entries, False

    def _look(self) -> Destination:
        return look_at_destination(self.folder, self.intent, {})

    def _check_free(self, target: Destination) -> None:
        target.check_free(self.planned.shards)
        target.check_lists(self.lists)

    def _record(self) -> RunRecord:
        told = {"command": "reshard", "append": False, "first": 0, **self.told}
        told |= {"also": list(self.also.kinds), "split_name": self.also.split_name}
        inputs = self.inputs
        return RunRecord(told, len(inputs.paths), inputs.block_shards, inputs.blocks, tuple(self.planned.shards))

    def _settle(self) -> Destination:
        """The folder. Where a run of the same was killed behind its index, it is `finished`."""
        target = self._look()
        if target.finished is None:
            return target
        others = target.finished.others(self._record(), self.inputs.paths.__getitem__)
        if not others:
            return target
        if not self.intent.overwrite:
            raise indexed_already(self.folder, others, may_add=False)
        target.finished.end(self.disk)
        return self._look()

    def _begin(self, target: Destination) -> Run:
        """Write the record, or go on with that of a run that was stopped."""
        overwrite = self.intent.overwrite
        record = compare(
            self.folder,
            self._record(),
            self.inputs.paths.__getitem__,
            restart=self.intent.restart,
            overwrite=overwrite,
            disk=self.disk,
        )
        self._check_free(target)
        return begin(self.folder, record, overwrite=overwrite, disk=self.disk)

    def _fill(self, run: Run) -> list[ShardEntry]:
        shards = self.planned.shards
        total = sum(shard.num_samples for shard in shards), sum(shard.num_bytes - END_BYTES for shard in shards)
        count = Count(self.tell, total)

        def fill(chosen: Sequence[int]) -> Generator[ShardEntry, None, None]:
            return self._fill_jobs(Chosen(self.planned, chosen), count)

        return fill_rest([shard.name for shard in shards], run, count, fill)

    def _fill_jobs(self, jobs: Sequence[ReshardJob], count: Count) -> Generator[ShardEntry, None, None]:
        if self.workers == 1 or len(jobs) < 2:
            for job in jobs:
                yield fill_shard(job, disk=self.disk, on_sample=count)
            return
        fill = functools.partial(fill_in_worker, disk=self.disk)
        with contextlib.closing(map_shards(fill, jobs, workers=self.workers)) as filled:
            for entry in filled:
                if isinstance(entry, WdskitError):
                    raise entry
                count(entry.num_samples, entry.num_bytes - END_BYTES)
                yield entry
