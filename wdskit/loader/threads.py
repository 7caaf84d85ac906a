"""The threads of one process that make batches: each takes a few samples at a time, of the oldest batch first."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from wdskit.engine.by_columns import Work
from wdskit.engine.jobs import Made

_JOIN_S = 5.0  # a thread is in the midst of a sample, unless a function of the user's hangs


class Task:
    """A batch in the making.

    Args:
        making: What is done.
        done: Called by the last thread when the batch, or the error in its place, is there.

    Attributes:
        is_done: Set after that.
    """

    def __init__(self, making: Work, done: Callable[[Task], None] | None = None) -> None:
        self.making = making
        self.is_done = threading.Event()
        self.made: Made | None = None
        self.error: BaseException | None = None
        self.num_chunks: int | None = None  # None before it is prepared
        self.is_begun = False
        self.next_chunk = 0
        self.failed: BaseException | None = None
        self.num_left = 0
        self._done = done

    def result(self) -> Made:
        """What was made, once; raises what went wrong."""
        made, error = self.made, self.error
        self.made = self.error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle would keep the batch alive
        assert made is not None
        return made

    def end(self, error: BaseException | None = None) -> None:
        """Finish the batch, if nothing went wrong before."""
        if error is None:
            try:
                self.made = self.making.finish()
            except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
                error = err
        self.error, self.failed = error, None
        del error  # its traceback refers to this frame: a cycle would keep the batch alive
        if self._done is not None:
            self._done(self)
        self.is_done.set()


def run_here(making: Work) -> Made:
    """Make a batch in this thread, with one thread of torch's: in images of this size more only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for chunk in range(making.prepare()):
            making.run(chunk)
        return making.finish()
    finally:
        torch.set_num_threads(before)


class Threads:
    """Threads that work on tasks in the order in which these come.

    Args:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        self._shared = _Shared()
        before = torch.get_num_threads()
        ready = threading.Barrier(number + 1)
        threads = [
            threading.Thread(target=_work, args=(self._shared, ready), name=f"wdskit-{at}", daemon=True)
            for at in range(number)
        ]
        for thread in threads:
            thread.start()
        ready.wait()
        torch.set_num_threads(before)  # those that were just started keep theirs
        self._closing = weakref.finalize(self, _close, self._shared, threads, os.getpid())

    def submit(self, task: Task) -> None:
        """Add a task behind the others."""
        with self._shared.changed:
            self._shared.tasks.append(task)
            self._shared.changed.notify_all()

    def forget(self, tasks: Sequence[Task]) -> None:
        """Leave tasks, those that are at work within the present sample. Who forgets one does not wait for it."""
        with self._shared.changed:
            for task in tasks:
                self._shared.drop(task)

    def close(self) -> None:
        """End the threads, each after the sample that it is at."""
        self._closing()


class _Shared:
    """What the threads know. They do not know `Threads`, so that it can go when nobody else knows it."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()  # those with something left to begin
        self.begun: set[Task] = set()
        self.changed = threading.Condition()
        self.is_closed = False

    def next(self) -> tuple[Task, int | None] | None:
        """A task to prepare (None), or a chunk of one; waits for it. None when it is time to go."""
        with self.changed:
            while not self.is_closed:
                for task in self.tasks:
                    if not task.is_begun:
                        task.is_begun = True
                        self.begun.add(task)
                        return task, None
                    if task.num_chunks is not None:
                        chunk = task.next_chunk
                        task.next_chunk += 1
                        if task.next_chunk == task.num_chunks:
                            self.tasks.remove(task)
                        return task, chunk
                self.changed.wait()
        return None

    def drop(self, task: Task) -> None:
        """Let no thread begin anything of a task any more. `changed` is held."""
        task.making.drop()
        self.begun.discard(task)
        if task in self.tasks:
            self.tasks.remove(task)


def _work(shared: _Shared, ready: threading.Barrier) -> None:
    torch.set_num_threads(1)  # of this thread: several images at a time instead of several threads an image
    torch.get_num_threads()  # torch looks at the number again where a thread first asks, which may be later
    ready.wait()
    while (found := shared.next()) is not None:
        task, chunk = found
        if chunk is None:
            _prepare(shared, task)
        else:
            failed = None
            try:
                task.making.run(chunk)
            except BaseException as err:  # noqa: BLE001 (not a sample's: memory ran out, for example)
                failed = err
            with shared.changed:
                task.failed = task.failed or failed
                task.num_left -= 1
                is_last = not task.num_left and task in shared.begun
                if is_last:
                    shared.begun.discard(task)
            del failed
            if is_last:
                task.end(task.failed)
        del task, found  # while this thread waits, it holds no batch


def _prepare(shared: _Shared, task: Task) -> None:
    try:
        num_chunks = task.making.prepare()
    except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
        with shared.changed:
            is_wanted = task in shared.begun
            shared.drop(task)
        if is_wanted:
            task.end(err)
        return
    with shared.changed:
        task.num_chunks = task.num_left = num_chunks
        shared.changed.notify_all()


def _close(shared: _Shared, threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy, and no threads
        return
    with shared.changed:
        shared.is_closed = True
        for task in [*shared.begun, *shared.tasks]:
            shared.drop(task)
        shared.changed.notify_all()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)
