"""Find resources that a loader leaves open, and start a script that loads without end: for tests of faults."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forking import Interpreter, Script

from wdskit import SampleError


def open_things() -> dict[str, int]:
    """Count files, threads, children and shared memory of this process, after waiting for the threads of queues."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(0.5)  # the thread of a closed queue ends by itself
    maps = Path("/proc/self/maps").read_text()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "children": len(multiprocessing.active_children()),
        "shared memory": maps.count("/dev/shm/") + maps.count("/torch_"),
    }


def open_descriptors() -> set[str]:
    """Return the numbers of the open files of this process."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def opened_since(before: dict[str, int], limit_s: float = 10.0) -> dict[str, int]:
    """Return the increase of each kind of resource since `before`, as soon as it is empty or after `limit_s`.

    Threads that were asked to end take a moment. Fewer resources are not a fault, because the garbage collector may
    free those of earlier tests at any time.
    """
    until = time.monotonic() + limit_s
    while True:
        now = open_things()
        more = {name: now[name] - before[name] for name in before if now[name] > before[name]}
        if not more or time.monotonic() > until:
            return more
        select.select([], [], [], 0.01)


def leftovers(make: Callable[[], Any], limit_s: float = 10.0) -> dict[str, int]:
    """Return the resources that a loader leaves open when it is dropped after a whole and a broken epoch, or an error.

    The garbage collector is off: reference counts must suffice.
    """
    gc.collect()
    gc.disable()
    try:
        before = open_things()
        loader = make()
        for stop_at in (10**9, 3):
            with contextlib.suppress(SampleError):
                collections.deque(itertools.islice(loader, stop_at), maxlen=0)
        alive = weakref.ref(loader)
        del loader
        left = opened_since(before, limit_s)
        return left | ({"loader": 1} if alive() is not None else {})
    finally:
        gc.enable()
        gc.collect()


def start_endless(python: Interpreter, source: str, folder: Path, settings: dict[str, Any]) -> tuple[Script, list[int]]:
    """Start a script, in a process group of its own, that reads without end; return it and its running workers.

    `source` is the text of a source stage, such as `.exact('data')`.
    """
    method = "fork" if settings["workers"] else None
    script = f"""
import json, multiprocessing, torch
from shards import number_of
from wdskit import Pipeline
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2
pipe = Pipeline(){source}.map(number_of).with_epoch(10**9)
if __name__ == "__main__":
    for number, _ in enumerate(pipe.loader(**{ {"start_method": method, **settings}!r})):
        if number == 20:
            print(json.dumps([worker.pid for worker in multiprocessing.active_children()]), flush=True)
"""
    (folder / "endless.py").write_text(script)
    os.mkfifo(folder / "endless.py.out")
    pipe = os.open(folder / "endless.py.out", os.O_RDONLY | os.O_NONBLOCK)
    running = python.start(folder / "endless.py")
    os.set_blocking(pipe, True)
    with os.fdopen(pipe) as out:
        workers = json.loads(out.readline())
    assert len(workers) == settings["workers"]
    return running, workers
