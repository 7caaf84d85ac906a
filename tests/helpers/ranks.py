"""Real ranks on gloo, forked from this process: they start in milliseconds, and only their results are pickled."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 60


def run_ranks(num: int, function: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return the results of `function(rank)` on each of `num` ranks of one process group.

    Raises:
        AssertionError: A rank fails, or hangs for TIMEOUT_S.
    """
    import torch._dynamo  # noqa: F401 (optimizers load it: once here, not in each rank)

    rendezvous = folder / f"rendezvous-{len(list(folder.iterdir()))}"
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num)]
    ranks = [
        context.Process(target=_run, args=(rank, num, function, rendezvous, pipes[rank][1])) for rank in range(num)
    ]
    for rank in ranks:
        rank.start()
    try:
        results = []
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(TIMEOUT_S), f"rank {rank} of {num} hangs"
            is_done, result = pickle.loads(receiver.recv_bytes())
            assert is_done, f"rank {rank} of {num}:\n{result}"
            results.append(result)
        return results
    finally:
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)  # at a normal exit, gloo sometimes aborts
            rank.join()


def _run(rank: int, num: int, function: Callable[[int], Any], rendezvous: Path, sender: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num)
        result = (True, function(rank))
    except BaseException:  # noqa: BLE001 (the parent reports it)
        result = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(result))
    signal.pause()  # a rank that ended would break the collective calls of others
