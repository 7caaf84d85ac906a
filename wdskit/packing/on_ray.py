"""Filling shards on a Ray cluster: `--on ray`.

A node needs this version of wdskit, and the disk with the folder and the source under the same paths. It reads the rows
of its shards from the plan there, and publishes them there. So what it fills is what this machine would have filled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from wdskit import __version__
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.lock import held_meanwhile
from wdskit.dataset.unfinished import RECORD_NAME
from wdskit.errors import PackError, RowError, WdskitError
from wdskit.files import DRAFT_PREFIX, DRAFT_SUFFIX, Buffer, Disk
from wdskit.packing.fill import ShardJob, fill_shard
from wdskit.packing.recorded import RecordedRows
from wdskit.packing.rows import row_error

_MOST_TRIES = 4
_LEAST_AHEAD = 64  # shards that wait at least, so that a cluster that grows with its work has some to grow for
_END_S = 10


@dataclass(frozen=True)
class Site:
    """Where a run works, for a node to compare with what it sees.

    Attributes:
        folder: The folder that is packed into.
        cwd: What relative paths begin at.
        host: The machine that the run was started on.
        version: Its wdskit.
        record: Digest of the run's record in the folder.
        held: What is held while a shard is filled.
        disk: What writes.
    """

    folder: Path
    cwd: str
    host: str
    version: str
    record: str
    held: Path
    disk: Disk


def check_address(on: str) -> None:
    """Refuse what is neither `ray` nor the address of a cluster.

    Raises:
        PackError: It is neither.
    """
    if not re.fullmatch(r"ray(://[^\s/:]+:[0-9]{1,5})?", on):
        raise PackError(f"on: {on!r} is neither ray nor the address of a cluster, as ray://head:10001.")


def fill_on_ray(
    jobs: Sequence[ShardJob], on: str, *, folder: Path, held: Path, disk: Disk
) -> Generator[ShardEntry, None, None]:
    """The lines of the index of these shards, in order, each once it is published.

    A shard whose worker died is filled again. When it ends early, what is not done is cancelled.

    Raises:
        PackError: Ray is not installed, the cluster cannot be reached, a node cannot work, or workers die again and
            again.
        WdskitError: What `fill_shard` raises.
    """
    record = hashlib.sha256((folder / RECORD_NAME).read_bytes()).hexdigest()
    site = Site(folder, os.getcwd(), socket.gethostname(), __version__, record, held, disk)
    with _connected(on) as ray:
        # A worker that died is dealt with here, where a try beside one that only seemed dead has drafts of its own.
        yield from _fill_all(ray, ray.remote(max_retries=0, num_cpus=1)(fill_on_node), jobs, site)


def _fill_all(ray: ModuleType, fill: Any, jobs: Sequence[ShardJob], site: Site) -> Iterator[ShardEntry]:
    pending: deque[Any] = deque()
    try:
        for number in range(len(jobs)):
            ahead = max(_LEAST_AHEAD, 2 * int(ray.cluster_resources().get("CPU", 0)))
            start = number + len(pending)
            pending.extend(fill.remote(job, site) for job in jobs[start : number + ahead])
            for left in reversed(range(_MOST_TRIES)):
                found = _result(ray, pending[0], jobs, number, is_last=not left)
                if found is not None:
                    break
                pending[0] = fill.remote(jobs[number], site)
            pending.popleft()
            if isinstance(found, WdskitError):
                raise found
            assert found is not None
            if left < _MOST_TRIES - 1:
                _remove_drafts_of(jobs[number].path, site.disk)
            yield found
    finally:
        if pending:
            for each in pending:
                ray.cancel(each, force=True)
            ray.wait([*pending], num_returns=len(pending), timeout=_END_S)


def _result(
    ray: ModuleType, ref: Any, jobs: Sequence[ShardJob], number: int, *, is_last: bool
) -> ShardEntry | WdskitError | None:
    """What became of a shard; None where its worker died."""
    try:
        found: ShardEntry | WdskitError = ray.get(ref)
    except ray.exceptions.RayTaskError as err:
        msg = f"{jobs[number].path}: a node of the cluster cannot fill it: {_last_line(err)}."
        raise PackError(f"{msg}\n  Install wdskit {__version__} on all of them.") from err
    except ray.exceptions.RayError as err:
        if not is_last:
            return None
        msg = f"{jobs[number].path}: its worker on the cluster died {_MOST_TRIES} times: {_last_line(err)}."
        raise PackError(f"{msg}\n  Look at its memory; do the same again to go on.") from err
    return found


def _last_line(err: Exception) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return (lines[-1] if lines else type(err).__name__).rstrip(".")


def import_ray() -> ModuleType:
    """Ray.

    Raises:
        PackError: It is not installed.
    """
    try:
        import ray
    except ImportError as err:
        raise PackError("on: Ray is not installed. Run `pip install wdskit[ray]`.") from err
    found: ModuleType = ray
    return found


@contextlib.contextmanager
def _connected(on: str) -> Iterator[ModuleType]:
    """Ray, connected to the cluster; where this process was not connected before, only while the block runs."""
    check_address(on)
    ray = import_ray()
    if ray.is_initialized():
        if on != "ray":
            raise PackError(f"on: this process is connected to Ray already, not to {on}. Give on='ray' to use that.")
        yield ray
        return
    address = None if on == "ray" else on
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, ValueError) as err:
        raise PackError(f"on: the cluster {on} cannot be reached: {_last_line(err)}.") from err
    try:
        yield ray
    finally:
        ray.shutdown()


def fill_on_node(job: ShardJob, site: Site) -> ShardEntry | WdskitError:
    """`fill_shard` on a node of the cluster; faults as values."""
    host = socket.gethostname()
    with contextlib.suppress(OSError):  # only relative paths need it, and are looked for below
        os.chdir(site.cwd)
    try:
        _check_node(job, site, host)
        with held_meanwhile(site.held):
            return fill_shard(job, disk=_OwnDrafts(site.disk, secrets.token_hex(4)))
    except RowError as err:
        if host == site.host:
            return err
        return row_error(err.where, f"on host {host}: {err.problem}", "All nodes must see the source as it is here.")
    except WdskitError as err:
        return err


def _check_node(job: ShardJob, site: Site, host: str) -> None:
    """Refuse to work where other bytes could come out, or would go elsewhere."""
    if site.version != __version__:
        msg = f"on: host {host} has wdskit {__version__}, and {site.host} has {site.version}."
        raise PackError(f"{msg}\n  Install the same on all nodes.")
    record = site.folder / RECORD_NAME
    plan = Path(job.rows.path) if isinstance(job.rows, RecordedRows) else record
    try:
        is_same = hashlib.sha256(record.read_bytes()).hexdigest() == site.record
    except OSError:
        is_same = False
    if not is_same or not plan.exists():
        msg = f"{plan if is_same else record}: host {host} does not see this file as {site.host} does."
        raise PackError(f"{msg}\n  Pack into a folder on a disk that all nodes of the cluster have under this path.")


def _remove_drafts_of(path: Path, disk: Disk) -> None:
    """Remove what tries to fill a shard have left whose worker died."""
    for draft in sorted(path.parent.glob(f"{DRAFT_PREFIX}{path.name}.*{DRAFT_SUFFIX}")):
        disk.remove(draft)


class _OwnDrafts(Disk):
    """A disk on which drafts have other names than on another node that fills the same shard: one that seems to be
    dead and is not must not write into them.
    """

    def __init__(self, disk: Disk, word: str) -> None:
        self._disk = disk
        self._word = word

    def _own(self, path: Path) -> Path:
        if not path.name.endswith(DRAFT_SUFFIX):
            return path
        return path.with_name(f"{path.name.removesuffix(DRAFT_SUFFIX)}.{self._word}{DRAFT_SUFFIX}")

    def open(self, path: Path) -> int:
        return self._disk.open(self._own(path))

    def open_log(self, path: Path) -> int:
        return self._disk.open_log(path)

    def write(self, fd: int, data: Buffer) -> int:
        return self._disk.write(fd, data)

    def begin_flush(self, fd: int, start: int, num_bytes: int) -> None:
        self._disk.begin_flush(fd, start, num_bytes)

    def fsync(self, fd: int) -> None:
        self._disk.fsync(fd)

    def close(self, fd: int) -> None:
        self._disk.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._disk.rename(self._own(source), target)

    def fsync_folder(self, folder: Path) -> None:
        self._disk.fsync_folder(folder)

    def remove(self, path: Path) -> None:
        self._disk.remove(self._own(path))

    def make_folder(self, path: Path) -> None:
        self._disk.make_folder(path)
