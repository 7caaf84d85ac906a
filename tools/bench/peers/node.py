"""Run a node of several ranks, as torchrun starts them. Each rank reads an epoch when it is asked for the next.

    python -m peers.node JOB NODE NODES RANKS PORT

A rank connects to PORT on loopback and sends a line when it has loaded its peer. Each line that it receives asks for an
epoch; the rank reads the epoch and answers with the result as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time

from peers.common import Job
from peers.harness import Epoch, cpu_s


def start_ranks(text: str, node: int, num_nodes: int, num_ranks: int, port: int) -> int:
    """Start the ranks of a node, and wait for them. Returns the first exit status that is not 0."""
    ranks = []
    for local in range(num_ranks):
        world = {"RANK": node * num_ranks + local, "WORLD_SIZE": num_nodes * num_ranks}
        world |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": node}
        world |= {"GLOBAL_RANK": world["RANK"], "NNODES": num_nodes, "NODE_RANK": node}  # litdata reads these
        environment = {**os.environ, **{name: str(value) for name, value in world.items()}}
        command = [sys.executable, "-m", "peers.node", text, str(port)]
        ranks.append(subprocess.Popen(command, env=environment))
    return next(filter(None, [rank.wait() for rank in ranks]), 0)


def run_rank(text: str, port: int) -> None:
    """Read epochs on request until the connection is closed."""
    os.dup2(2, 1)
    job = Job(**json.loads(text))
    peer = importlib.import_module(f"peers.{job.peer}")
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as lines:
        print("ready", file=lines, flush=True)
        epochs = None
        for _ in lines:
            start_s, cpu = time.monotonic(), cpu_s()
            epochs = epochs or peer.open_epochs(job)
            epoch = Epoch(job)
            epoch.run(epochs)
            result = {"start_s": start_s, "begin_s": epoch.begin_s, "end_s": epoch.end_s, "cpu_s": cpu_s() - cpu}
            result |= {"seen": epoch.seen.tolist(), "digest": epoch.digest, "num_bytes": epoch.num_bytes}
            print(json.dumps(result), file=lines, flush=True)
    os._exit(0)  # a peer's own shutdown is not measured, and some peers hang in it


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_rank(sys.argv[1], int(sys.argv[2]))
    sys.exit(start_ranks(sys.argv[1], *map(int, sys.argv[2:])))
