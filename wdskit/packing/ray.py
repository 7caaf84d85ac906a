"""Fill shards on a Ray cluster: `--on ray`.

Each node needs this version of wdskit, and must see the folder and the source under the same paths. The shards have the
same bytes as shards that this machine fills.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit import __version__
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.lock import share_lock
from wdskit.errors import PackError, RowError, WdskitError
from wdskit.files import Disk
from wdskit.packing.fill import ProgressCounter, fill_shard
from wdskit.packing.plan import FileRows, ShardJob
from wdskit.packing.row import row_error
from wdskit.packing.run_journal import DESCRIPTION_NAME
from wdskit.pipeline.ray_connection import ADDRESS, connect, last_line

_MAX_TRIES = 4
_MIN_SUBMITTED = 64  # tasks that wait or run: an autoscaling cluster adds nodes for waiting tasks
_CANCEL_S = 10  # the wait for cancelled tasks


@dataclass(frozen=True)
class RunContext:
    """Values of the run that each node of the cluster needs.

    Attributes:
        description: Path of the run's `run.json`. A node that does not see this file refuses to work.
        log: The log of the run. The node holds a shared lock on this file while it fills a shard.
        cwd: Working directory of the run, for relative paths.
        host: Name of the machine that started the run.
        disk: Performs the file operations.
        version: Version of wdskit on `host`.
    """

    description: Path
    log: Path
    cwd: str
    host: str
    disk: Disk
    version: str = __version__


def check_address(on: str) -> None:
    """Check the form of the address of a Ray cluster.

    Raises:
        PackError: `on` is neither `ray` nor `ray://HOST:PORT`.
    """
    if not ADDRESS.fullmatch(on):
        shown = "an address with a user or password" if "@" in on else repr(on)
        raise PackError(f"on: {shown} is neither ray nor the address of a cluster, such as ray://head:10001.")


def fill_on_ray(
    jobs: Iterable[ShardJob], on: str, *, log: Path, disk: Disk, count: ProgressCounter
) -> Generator[ShardEntry, None, None]:
    """Fill shards on a Ray cluster. If the worker of a shard dies, the shard is tried again, up to four tries in total.

    Args:
        jobs: The shards to fill.
        on: Address of the cluster: `ray`, or `ray://HOST:PORT`.
        log: The log of the run, in its staging folder.
        disk: Performs the file operations; tests replace it.
        count: Counts the samples and bytes of the filled shards: `count.add` gets the index entry of each.

    Yields:
        The index entries of the shards, in order. If the caller stops early or a shard fails, the tasks that still run
        are cancelled.

    Raises:
        PackError: Ray is not installed, the cluster cannot be reached, a node cannot run wdskit or sees other files, or
            the worker of a shard died four times.
        WdskitError: A shard cannot be filled. If several shards fail, the error is that of the first one in order.
    """
    run = RunContext(log.with_name(DESCRIPTION_NAME), log, os.getcwd(), socket.gethostname(), disk)
    pending: deque[tuple[Path, Any]] = deque()
    ray, disconnect = connect(on, PackError, starts_cluster=True)
    with contextlib.ExitStack() as stack:
        stack.callback(disconnect)
        fill = ray.remote(max_retries=_MAX_TRIES - 1, num_cpus=1)(fill_on_node)
        submitted = ((job.path, fill.remote(job, run)) for job in jobs)  # when they are taken
        try:
            while True:
                ahead = max(_MIN_SUBMITTED, 2 * int(ray.cluster_resources().get("CPU", 0)))
                pending.extend(itertools.islice(submitted, max(0, ahead - len(pending))))
                if not pending:
                    return
                path, task = pending[0]
                try:
                    filled = ray.get(task)
                except ray.exceptions.RayTaskError as err:
                    msg = f"{path}: a node of the cluster cannot write it: {last_line(err)}."
                    raise PackError(f"{msg}\n  Install wdskit {__version__} on all of them.") from err
                except ray.exceptions.RayError as err:
                    msg = f"{path}: its worker on the cluster died {_MAX_TRIES} times: {last_line(err)}."
                    raise PackError(f"{msg}\n  Check its memory; run the same command again to continue.") from err
                pending.popleft()
                if isinstance(filled, WdskitError):
                    raise filled
                count.add(filled)
                yield filled
        finally:
            for _, task in pending:
                ray.cancel(task, force=True)
            if pending:
                ray.wait([task for _, task in pending], num_returns=len(pending), timeout=_CANCEL_S)


def fill_on_node(job: ShardJob, run: RunContext) -> ShardEntry | WdskitError:
    """Fill a shard on a node of the cluster. Return its index entry, or the WdskitError that prevented the shard.

    The process of the node gets the working directory of the run, if the directory exists.
    """
    host = socket.gethostname()
    with contextlib.suppress(OSError):  # only relative paths need the folder; missing paths are found below
        os.chdir(run.cwd)
    try:
        if run.version != __version__:
            msg = f"on: host {host} has wdskit {__version__}, but {run.host} has {run.version}."
            raise PackError(f"{msg}\n  Install the same version on all nodes.")
        plan = [Path(job.rows.path)] if isinstance(job.rows, FileRows) else []
        for path in (run.description, *plan):  # a digest names their folder: no other run has these paths
            if not path.exists():
                msg = f"{path}: host {host} does not see the same file as {run.host}."
                remedy = "Pack into a folder on a disk that all nodes of the cluster have under this path."
                raise PackError(f"{msg}\n  {remedy}")
        with share_lock(run.log):
            return fill_shard(job, disk=run.disk)
    except RowError as err:
        if host == run.host:
            return err
        return row_error(
            err.where, f"on host {host}: {err.problem}", "All nodes must see the same source as this machine."
        )
    except WdskitError as err:
        return err
