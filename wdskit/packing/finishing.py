"""`finish_pack`: the index of a folder whose shards were filled in parts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from wdskit.dataset.index import INDEX_NAME, Exports, ShardEntry, read_index
from wdskit.dataset.lock import lock_folder, wait_for_workers
from wdskit.errors import PackError
from wdskit.files import DISK, Disk, remove_drafts
from wdskit.packing.api import PackResult
from wdskit.packing.destination import Destination
from wdskit.packing.finished import end, find_finished
from wdskit.packing.places import folder_of, told_as_pack_errors
from wdskit.packing.record import RunRecord, log_paths, read_logs, read_record
from wdskit.packing.running import publish_all

_SHOWN = 10


def finish_pack(dest: str | os.PathLike[str], *, disk: Disk = DISK) -> PackResult:
    """Write the index of a folder whose shards were filled in parts: `wdskit pack-finish`.

    It is the index, byte for byte, that one run would have written. The shards are not read: their digests stand in
    what each part has noted.

    Args:
        dest: The folder.
        disk: What writes.

    Raises:
        PackError: Nothing was begun there, or shards are missing; it names them and their parts.
        FolderIndexError: A part, or another process, is writing there.
    """
    start = time.perf_counter()
    with told_as_pack_errors(Path(dest)):
        folder = folder_of(os.fsdecode(dest))
        if not folder.is_dir():
            raise PackError(f"{folder}: there is no such folder.")
    with lock_folder(folder), told_as_pack_errors(folder):
        for path in (folder, *log_paths(folder)):
            wait_for_workers(path)
        record = read_record(folder)
        if record is None or record.shards is None or record.replaces:
            done = " It is packed and indexed already." if (folder / INDEX_NAME).exists() else ""
            raise PackError(f"{folder}: no part of a run has been packed here.{done}")
        finished = find_finished(folder)
        if finished is not None:  # it was killed behind the index
            remove_drafts(folder, disk=disk)
            finished.end(disk)
            return _result(folder, finished.entries, start, was_done=True)
        if not record.parts:
            msg = f"{folder}: a run that was stopped here is not divided into parts."
            raise PackError(f"{msg}\n  Do the same again to go on with it.")
        entries = _gather(folder, record)
        target = Destination(folder)
        if record.options["append"]:
            index = read_index(folder)
            target = Destination(folder, append=True, entries=index.entries, also=index.also)
        target.check_strays(entry.name for entry in entries)
        remove_drafts(folder, disk=disk)
        publish_all(target, entries, Exports(tuple(record.options["also"]), record.options["split_name"]), disk)
        end(folder, disk)
    return _result(folder, entries, start)


def _result(folder: Path, entries: Sequence[ShardEntry], start: float, *, was_done: bool = False) -> PackResult:
    num_samples, num_bytes = sum(entry.num_samples for entry in entries), sum(entry.num_bytes for entry in entries)
    seconds = time.perf_counter() - start
    return PackResult(folder, tuple(entries), num_samples, num_bytes, {}, (), 0, seconds, was_done=was_done)


def _gather(folder: Path, record: RunRecord) -> Sequence[ShardEntry]:
    """What the parts have published, in order."""
    assert record.shards is not None
    done = read_logs(folder, record)
    missing = [number for number, shard in enumerate(record.shards) if shard.name not in done]
    if missing:
        parts = ", ".join(f"{part}/{record.parts}" for part in sorted({number % record.parts for number in missing}))
        names = ", ".join(record.shards[number].name for number in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        msg = f"{folder}: {len(missing)} of {len(record.shards)} shards are missing: {names}{more}."
        raise PackError(f"{msg}\n  Run again the same with --part {parts}.")
    return [done[shard.name] for shard in record.shards]
