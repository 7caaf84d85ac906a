"""Four ranks under torchrun: no hang with uneven shards, and after a SIGKILL of all, three ranks resume exactly."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from shards import index_numbers, number_of

from wdskit import Pipeline

COUNTS = [7, 0, 1, 12, 5, 20, 3, 0, 13]  # 61 samples
EPOCHS = 3
BATCH = 3
LAST_STEP = 7  # last saved step of the killed run, counted over epochs: the second step of the second epoch
SCRIPT = '''
"""Trains on the numbers of a folder: notes those of a step, all-reduces, and rank 0 saves. Behind its step `last`, rank
0 waits to be killed, and the others for it, in the next all-reduce.
"""
import datetime, json, os, signal, sys
import torch, torch.distributed as dist
import wdskit

def number_of(sample):
    return int(sample["cls"])

def train(pattern, out, tail, workers, last):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipe = wdskit.Pipeline().exact(pattern, seed=5, window=16, tail=tail).map(number_of).batched(3)
    loader = pipe.loader(workers=workers, prefetch=2)
    step = 0
    if os.path.exists(f"{out}/checkpoint.json"):
        with open(f"{out}/checkpoint.json") as file:
            checkpoint = json.load(file)
        loader.load_state_dict(checkpoint["data"])
        step = checkpoint["step"]
    with open(f"{out}/{world_size}-{rank}.jsonl", "a", buffering=1) as notes:
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                numbers = batch if tail == "drop" else batch[0][batch[1]]
                step += 1
                notes.write(json.dumps({"step": step, "epoch": epoch, "numbers": numbers.tolist()}) + "\\n")
                total = torch.tensor([step])
                dist.all_reduce(total)
                assert int(total) == step * world_size
                if rank == 0:
                    with open(f"{out}/checkpoint.tmp", "w") as file:
                        json.dump({"step": step, "data": loader.state_dict()}, file)
                    os.replace(f"{out}/checkpoint.tmp", f"{out}/checkpoint.json")
                    if step == last:
                        os.write(1, f"saved {step}\\n".encode())
                        signal.pause()

if __name__ == "__main__":
    pattern, *runs = sys.argv[1:]
    os.write(1, f"pid {os.getpid()}\\n".encode())  # at once: four ranks share the pipe
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))  # a hang is an error
    for run in runs:
        train(pattern, *json.loads(run))
    dist.barrier()
    os._exit(0)  # at the usual end of a process, gloo aborts now and then
'''


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return index_numbers(tmp_path_factory.mktemp("numbers"), COUNTS)


@pytest.fixture
def start(tmp_path, shards, script_environment):
    """Start ranks under torchrun; each run is (folder, tail, workers, last step)."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(num_ranks, *runs):
        command = ["torchrun", "--standalone", "--nproc-per-node", str(num_ranks), "script.py", shards]
        with (tmp_path / "stderr").open("w") as stderr:
            return subprocess.Popen(
                [*command, *map(json.dumps, runs)],
                cwd=tmp_path,
                env=script_environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    return start


def read_notes(folder: Path, world_size: int, last: int | None = None) -> list[list[dict]]:
    """Return each rank's log, only whole lines, up to the step of the checkpoint."""
    ranks = []
    for rank in range(world_size):
        lines = (folder / f"{world_size}-{rank}.jsonl").read_text().splitlines(keepends=True)
        steps = [json.loads(line) for line in lines if line.endswith("\n")]
        ranks.append([step for step in steps if last is None or step["step"] <= last])
    return ranks


def true_epochs(shards) -> list[list[int]]:
    """Return the numbers of each epoch in order, read by one rank, one by one."""
    loader = Pipeline().exact(shards, seed=5, window=16).map(number_of).loader(workers=0, rank=0, world_size=1)
    return [list(loader) for _ in range(EPOCHS)]


def faults_of(runs, epochs, *, dropped) -> set[str]:
    """Return the faults of runs that follow each other. A run has the steps of each of its ranks; the last `dropped`
    samples of an epoch must not come.
    """
    faults = set()
    consumed = [Counter() for _ in epochs]
    for ranks in runs:
        if len({len(steps) for steps in ranks}) > 1:
            faults.add("ranks have unequal steps")
        for step in itertools.chain(*ranks):
            consumed[step["epoch"]].update(step["numbers"])
    for found, numbers, num_dropped in zip(consumed, epochs, dropped, strict=True):
        due = Counter(numbers[: len(numbers) - num_dropped])
        if found - due:
            faults.add("a number comes twice, or is not due")
        if due - found:
            faults.add("a number is lost")
    return faults


def three_here(shards, state, consumed) -> list[list[dict]]:
    """Return, from this process, the logs of three ranks that resume after this number of consumed samples."""
    pipe = Pipeline().exact(shards, seed=5, window=16).map(number_of).batched(BATCH)
    ranks = []
    for rank in range(3):
        loader = pipe.loader(workers=0, rank=rank, world_size=3, ranks_per_node=3)
        loader.load_state_dict({**state, "consumed": consumed})
        epochs = range(loader.epoch, EPOCHS)
        ranks.append([{"epoch": epoch, "numbers": batch.tolist()} for epoch in epochs for batch in loader])
    return ranks


def finish(process) -> None:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out


@pytest.fixture
def killed(tmp_path, start):
    """The logs, by folder, of whole runs and of a run whose ranks are killed during a step."""
    runs = [("drop", "drop", 0, None), ("pad", "pad", 0, None), ("killed", "drop", 1, LAST_STEP)]
    for folder, *_ in runs:
        (tmp_path / folder).mkdir()
    process = start(4, *runs)
    lines = [line.split() for line in itertools.islice(process.stdout, 5)]
    for pid in [int(number) for what, number in lines if what == "pid"]:
        with contextlib.suppress(ProcessLookupError):  # torchrun ends the other ranks when one has ended
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.stdout.close()
    process.wait(60)
    assert lines[4:] == [["saved", str(LAST_STEP)]], (tmp_path / "stderr").read_text()
    return tmp_path


def test_ranks_neither_hang_nor_lose_a_sample_and_three_go_on_where_four_were_killed(killed, start, shards):
    """Of 61 samples, four ranks with batches of 3 take 60, or all with padding: 12 per step, and 9 after the kill."""
    epochs = true_epochs(shards)
    for tail, num_steps, dropped in (("drop", 15, 1), ("pad", 18, 0)):
        ranks = read_notes(killed / tail, 4)
        assert [len(steps) for steps in ranks] == [num_steps] * 4
        assert faults_of([ranks], epochs, dropped=[dropped] * 3) == set()

    checkpoint = json.loads((killed / "killed" / "checkpoint.json").read_text())
    consumed = checkpoint["data"]["consumed"]
    assert (checkpoint["step"], checkpoint["data"]["epoch"], consumed) == (LAST_STEP, 1, 24)
    finish(start(3, ("killed", "drop", 1, None)))
    four, three = read_notes(killed / "killed", 4, last=checkpoint["step"]), read_notes(killed / "killed", 3)
    dropped = [1, (61 - consumed) % 9, 61 % 9]
    assert faults_of([four, three], epochs, dropped=dropped) == set()

    # The result of the check for other checkpoints, and for wrong logs.
    go_on = functools.partial(three_here, shards, checkpoint["data"])
    assert [[{**step, "step": at} for at, step in enumerate(steps, 8)] for steps in go_on(consumed)] == three
    lost, twice = {"a number is lost"}, {"a number comes twice, or is not due"}
    assert faults_of([four, go_on(consumed + 12)], epochs, dropped=dropped) == lost  # batches that workers had ready
    assert twice <= faults_of([four, go_on(consumed - 12)], epochs, dropped=dropped)
    assert twice <= faults_of([four, go_on(0)], epochs, dropped=dropped)
    shorter = [three[0][:-1], *three[1:]]
    assert faults_of([four, shorter], epochs, dropped=dropped) == {"ranks have unequal steps", *lost}
