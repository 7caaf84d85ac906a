"""What every worker process does. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process


def end_with_parent() -> None:
    """Let this worker process not outlive the main process, which may be killed: call it once, at its start. Under
    forkserver the parent that the kernel knows is the server, which lives on.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that start inside hear Ctrl-C only once they call `hear_ctrl_c`: in the middle of their imports they
    would print a traceback. This process hears it when the block is left.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_ctrl_c() -> None:
    """Let Ctrl-C end this worker process at once and without a word, from now on."""
    with contextlib.suppress(ValueError):  # not in a main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
