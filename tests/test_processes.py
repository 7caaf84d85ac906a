"""Rules for all worker processes, and the CPU time that they use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from wdskit import processes
from wdskit.processes import block_sigint


def test_cpu_time_of_the_tree_counts_children_that_run() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def burn() -> None:
        while time.process_time() < 0.2:
            np.arange(1000).sum()
        there.send("done")
        there.recv()

    before = processes.cpu_s_of_tree()
    process = context.Process(target=burn)
    process.start()
    here.recv()
    after = processes.cpu_s_of_tree()
    here.send("end")
    process.join()
    assert before is not None
    assert after is not None
    assert after - before >= 0.15


@pytest.mark.parametrize("has_thread", [False, True])
def test_ctrl_c_waits_for_the_end_of_a_block(has_thread):
    """Another thread may receive the signal; Python runs the handler in the main thread at once."""
    stop = threading.Event()
    if has_thread:
        threading.Thread(target=stop.wait, daemon=True).start()
    handler = signal.getsignal(signal.SIGINT)
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with block_sigint():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(20):
                time.sleep(0.01)
            steps.append("end of the block")
        steps.append("after the block")
    assert steps == ["end of the block"]
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with block_sigint():
        pass
    stop.set()


def test_an_error_in_a_block_and_ctrl_c_are_both_seen():
    with pytest.raises(KeyboardInterrupt) as caught, block_sigint():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)
