"""Fill shards on a Ray cluster: `--on ray`. Each node sees source and DEST under the same paths."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Generator, Iterable
from pathlib import Path

from wdskit import __version__
from wdskit.errors import PackError, WdskitError
from wdskit.packing.fill import Filled, Filler, ShardJob
from wdskit.pipeline.ray_connection import connect, last_line

_MAX_TRIES = 4
_CANCEL_S = 10  # the wait for cancelled tasks


def fill_on_ray(jobs: Iterable[ShardJob], filler: Filler, on: str) -> Generator[Filled, None, None]:
    """Fill shards on a Ray cluster. Yield each filled shard, in order.

    If the worker of a shard dies, the shard is tried again, up to four tries in total. If the generator is closed, the
    tasks that still run are cancelled.

    Raises:
        PackError: Ray is not installed, the cluster cannot be reached, a node cannot run wdskit, or the worker of a
            shard died four times.
        WdskitError: A shard cannot be filled.
    """
    ray, is_new = connect(on, PackError, starts_cluster=True)
    task = ray.remote(max_retries=_MAX_TRIES - 1, num_cpus=1)(fill_on_node)
    running = deque((job.name, task.remote(job, filler, str(Path.cwd()), __version__)) for job in jobs)
    try:
        while running:
            name, result = running[0]
            try:
                filled = ray.get(result)
            except ray.exceptions.RayError as err:
                msg = f"{filler.work.parent}: {name}: a node of the cluster cannot fill it: {last_line(err)}."
                raise PackError(f"{msg}\n  Run the same command again to continue.") from err
            running.popleft()
            if isinstance(filled, WdskitError):
                raise filled
            yield filled
    finally:
        for _, result in running:
            ray.cancel(result, force=True)
        if running:
            ray.wait([result for _, result in running], num_returns=len(running), timeout=_CANCEL_S)
        if is_new:
            ray.shutdown()


def fill_on_node(job: ShardJob, filler: Filler, folder: str, version: str) -> Filled | WdskitError:
    """Fill a shard on a node of the cluster, in `folder`, the current folder of the run. Return it, or the error."""
    host = socket.gethostname()
    if version != __version__:
        return PackError(f"on: host {host} has wdskit {__version__}, but the run has {version}. Install that one.")
    try:
        os.chdir(folder)
        return filler.fill(job)
    except OSError as err:
        return PackError(f"on host {host}: {err.filename or filler.work}: {err.strerror}.")
    except WdskitError as err:
        return err
