"""Rules for all worker processes, and the CPU time that they use."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np

from wdskit import processes


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
