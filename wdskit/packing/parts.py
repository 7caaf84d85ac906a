"""The end of a run whose shards were filled in parts: `wdskit pack-finish`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wdskit.dataset.index import Exports, ShardEntry, read_index
from wdskit.dataset.lock import wait_for_workers
from wdskit.dataset.unfinished import run_folders
from wdskit.errors import PackError
from wdskit.files import Disk, remove_temp_files
from wdskit.packing.destination import Destination
from wdskit.packing.journal import (
    LIST_NAMES,
    find_last_run,
    finish_publishing,
    is_publishing,
    remove_finished,
    remove_locks,
)
from wdskit.packing.run import publish_all
from wdskit.packing.staging import Staging, read_description, read_filled

_SHOWN = 10


def finish_parts(folder: Path, disk: Disk) -> tuple[Sequence[ShardEntry], bool]:
    """Publish a run whose shards were filled in parts. The folder's lock is held.

    Returns:
        The shards, and whether they had been published already.

    Raises:
        PackError: Nothing was begun here, or shards are missing; it names them and their parts.
    """
    if is_publishing(folder):
        finish_publishing(folder, disk)
        last = find_last_run(folder)
        return (last.entries if last is not None else ()), True
    remove_finished(folder, disk)
    runs = [(path, run) for path in run_folders(folder) if (run := read_description(path)) is not None]
    if not runs:
        last = find_last_run(folder)
        if last is not None:
            remove_locks(folder, disk)
            return last.entries, True
        raise PackError(f"{folder}: no part of a run has been packed here.")
    [(path, run), *others] = runs
    if others or not run.parts or run.shards is None:
        msg = f"{folder}: a run that was stopped here is not divided into parts."
        raise PackError(f"{msg}\n  Do the same again to go on with it.")
    for log in path.glob("*.log"):
        wait_for_workers(log)
    filled = read_filled(path)
    missing = [number for number, shard in enumerate(run.shards) if shard.name not in filled]
    if missing:
        parts = ", ".join(f"{part}/{run.parts}" for part in sorted({number % run.parts for number in missing}))
        names = ", ".join(run.shards[number].name for number in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        msg = f"{folder}: {len(missing)} of {len(run.shards)} shards are missing: {names}{more}."
        raise PackError(f"{msg}\n  Run again the same with --part {parts}.")
    entries = [filled[shard.name] for shard in run.shards]
    staging = Staging(folder, path, run, path / "shards.log", disk)
    remove_temp_files(path, disk=disk)
    append = run.options["append"]
    target = Destination(folder, append=append, index=read_index(folder) if append else None)
    lists = {name: (path / name).read_bytes() for name in LIST_NAMES if (path / name).exists()}
    publish_all(target, staging, entries, lists, Exports(tuple(run.options["export"]), run.options["split_name"]))
    return entries, False
