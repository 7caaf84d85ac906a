"""Long runs of loaders: random pipelines that are resumed many times, and thousands of breaks and Ctrl-C.

`make long WHAT=soak` runs all of it, CI a part.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import operator
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from digests import digest_of
from folders import ALL
from leaks import open_things, opened_since
from places import with_positions
from shards import index_numbers, png_of, write_shard

from wdskit import Pipeline
from wdskit.shards.index import index_folder

NUM_PIPELINES = 200 if ALL else 12
NUM_BREAKS = 9_000 if ALL else 250
NUM_INTERRUPTS = 1_000 if ALL else 40
GLOBAL = 12  # samples per step, on 1, 2, 3 or 4 ranks
EPOCHS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two folders of shards of uneven sizes; in the first, one image of 15 is damaged."""
    found = []
    for name, counts in (("one", (31, 7, 19, 1, 26, 12)), ("two", (9, 14))):
        folder = tmp_path_factory.mktemp(name)
        numbers = itertools.count()
        for shard, count in enumerate(counts):
            samples = {}
            for number in itertools.islice(numbers, count):
                rng = np.random.default_rng(number)
                image = png_of(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8))
                samples[f"{name}{number:03d}"] = {
                    "cls": b"%d" % number,
                    "json": b'{"n": %d}' % number,
                    "png": b"damaged" if name == "one" and number % 15 == 4 else image,
                    "txt": b"x" * (number % 5),
                }
            write_shard(folder / f"s-{shard}.tar", samples)
        index_folder(folder, workers=1)
        found.append(str(folder))
    return found[0], found[1]


# --- random pipelines


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a random number that depends on the sample's position, and one that does not."""
    return {**sample, "drawn": int(rng.integers(1 << 40)), "tokens": torch.arange(len(sample["txt"]) + 1)}


def random_pipeline(rng: np.random.Generator, folders: tuple[str, str]) -> Pipeline:
    """Return a random pipeline whose items are dicts."""
    kind = rng.choice(["exact", "resampled", "sequential"])
    settings: dict[str, Any] = {"seed": int(rng.integers(100))} if kind != "sequential" else {}
    if kind == "exact" and rng.random() < 0.3:
        settings |= {"lanes": int(rng.integers(1, 5)), "window": int(rng.integers(1, 30))}
    if kind != "resampled":
        settings["tail"] = str(rng.choice(["drop", "pad"]))
    weights = None
    if kind != "sequential" and rng.random() < 0.4:
        weights = [int(each) for each in rng.integers(1, 4, 2)]
        parts = [{"shards": folder, "weight": weight} for folder, weight in zip(folders, weights, strict=True)]
        pipe: Any = getattr(Pipeline(), kind)(mixture=parts, **settings)
    else:
        shards = folders[int(rng.integers(2))]
        pipe = getattr(Pipeline(), kind)(shards, **settings)
    images = bool(rng.random() < 0.6)
    pipe = pipe.decode(*(["rgb8"] if images else []))
    if images:
        pipe = pipe.random_resized_crop(int(rng.integers(6, 16))) if rng.random() < 0.6 else pipe.center_crop(8)
        pipe = pipe.random_flip() if rng.random() < 0.5 else pipe
        pipe = pipe.normalize("imagenet") if rng.random() < 0.3 else pipe
    is_drawn = rng.random() < 0.6
    pipe = pipe.map(drawn) if is_drawn else pipe
    fields = ["__key__", "json", *(["png"] if images else []), *(["drawn", "tokens"] if is_drawn else [])]
    pipe = pipe.to_dict(*fields)
    if rng.random() < 0.8:
        pipe = pipe.batched(global_size=GLOBAL, **({"ragged": "tokens"} if is_drawn else {}))
        num_items = int(rng.integers(2, 9))
    else:
        num_items = int(rng.integers(1, 9)) * GLOBAL
    if weights is not None or rng.random() < 0.3:
        pipe = pipe.with_epoch(num_items)
    return pipe


def rows(item: dict[str, Any]) -> list[bytes | None]:
    """Return a digest of each sample of an item; None for padding, and for a sample that replaces a bad one."""
    valid = item.pop("__valid__", None)
    if isinstance(item["__key__"], str):
        return [digest_of(item) if valid is None or valid else None]
    samples = [{name: value[row] for name, value in item.items()} for row in range(len(item["__key__"]))]
    return [digest_of(each) if valid is None or valid[row] else None for row, each in enumerate(samples)]


def run(loaders: list[Any], num_steps: int) -> list[list[bytes | None]]:
    """Return the samples of this number of steps of all ranks, across epochs, in the order of the sequence."""
    parts = []
    for loader in loaders:
        items = itertools.chain.from_iterable(with_positions(loader) for _ in itertools.repeat(None))
        parts.append(
            [list(zip(places, rows(item), strict=True)) for item, places in itertools.islice(items, num_steps)]
        )
    return [
        [row for _, row in sorted(itertools.chain(*ranks), key=operator.itemgetter(0))]
        for ranks in zip(*parts, strict=True)
    ]


def make_ranks(make: Callable[..., Any], world: int, state: dict[str, Any] | None) -> list[Any]:
    loaders = [make(rank=rank, world_size=world) for rank in range(world)]
    for loader in loaders if state is not None else []:
        loader.load_state_dict(state)
    return loaders


@pytest.mark.parametrize("number", range(NUM_PIPELINES))
def test_a_random_pipeline_goes_on_anywhere(folders: tuple[str, str], number: int) -> None:
    """It resumes from any step on other ranks, workers, threads; samples are those of one process that never stops."""
    rng = np.random.default_rng([7, number])
    pipe = random_pipeline(rng, folders)
    errors = {"errors": {"max_bad": 1000}}
    [whole_loader] = make_ranks(functools.partial(pipe.loader, workers=0, **errors), 1, None)
    is_batched = "batched" in repr(pipe)
    whole = run([whole_loader], EPOCHS * len(whole_loader))
    at, state = 0, None
    while at < len(whole):
        world = int(rng.choice([1, 2, 3, 4])) if is_batched else 1  # without batches, more ranks would change the step
        setting = {"workers": int(rng.integers(3)), "threads": int(rng.integers(1, 4))}
        if setting["workers"] or setting["threads"] > 1:
            setting["prefetch"] = int(rng.integers(1, 7))
        loaders = make_ranks(functools.partial(pipe.loader, **setting, **errors), world, state)
        num = min(int(rng.integers(1, len(whole) + 1)), len(whole) - at)
        assert run(loaders, num) == whole[at : at + num], (at, setting, world)
        states = [{**loader.state_dict(), "bad": 0, "bad_rank": None} for loader in loaders]  # of one rank each
        assert all(each == states[0] for each in states)
        state = json.loads(json.dumps(states[0]))
        at += num


# --- breaks and Ctrl-C


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return index_numbers(tmp_path_factory.mktemp("numbers"), [40, 50, 60])


KINDS: dict[str, Callable[[str], Any]] = {
    "inline": lambda path: Pipeline().exact(path).decode().batched(4).loader(workers=0, threads=1),
    "threads": lambda path: Pipeline().exact(path).decode().batched(4).loader(workers=0, threads=3),
    "processes": lambda path: Pipeline().exact(path).decode().batched(4).loader(workers=2),
    "both": lambda path: Pipeline().exact(path).decode().batched(4).loader(workers=2, threads=2),
    "stream": lambda path: Pipeline().stream(f"{path}/s-*.tar").split_by_worker().decode().batched(4).loader(workers=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_breaks_leave_nothing(numbers: str, kind: str) -> None:
    """The loader is used again after each break, sometimes after a pause in which its workers run ahead."""
    rng = np.random.default_rng(5)
    list(KINDS[kind](numbers))
    gc.collect()
    without = open_things()
    loader = KINDS[kind](numbers)
    list(loader)
    before = open_things()
    for number in range(NUM_BREAKS // len(KINDS)):
        deque(itertools.islice(loader, int(rng.integers(1, 8))), maxlen=0)  # keeps no batch
        if number % 50 == 0:
            time.sleep(0.01)
            gc.collect()
            held = 40 if kind == "stream" else 0  # the DataLoader keeps its prefetched batches, each with descriptors
            shared = before["shared memory"] + 40
            assert not opened_since({**before, "files": before["files"] + held, "shared memory": shared})
    assert len(list(loader)) == len(list(KINDS[kind](numbers)))
    del loader
    gc.collect()
    assert not opened_since(without, 20)


def interrupt(call: Callable[[], None], after_s: float) -> None:
    """Send Ctrl-C during a call, unless the call ends earlier. No code, such as the end of a context manager, runs
    between the call and the handler of Ctrl-C.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    limit = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *limit)


def iterate(make: Callable[[], Any]) -> None:
    loader = make()
    for _ in range(20):
        for _ in loader:
            pass


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_leaves_nothing(numbers: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while a loader is made, starts its workers, waits for them, or is dropped."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest keeps what it interrupts, such as workers
    make = functools.partial(KINDS[kind], numbers)
    list(make())
    gc.collect()
    before, num_left = open_things(), 0
    rng = np.random.default_rng(6)
    for _ in range(NUM_INTERRUPTS // len(KINDS)):
        interrupt(lambda: iterate(make), float(rng.choice([0.005, 0.05, 0.2]) * rng.random()) + 1e-4)
        gc.collect()
        if opened_since({**before, "files": 10**6}, 20):
            num_left += 1
            before = {**open_things(), "files": before["files"]}
    # Python may raise it in the first instructions of a finalizer, before that can block it, or between the return
    # of `os.open` and the assignment, after which no code can close the file.
    assert num_left <= 1
    assert open_things()["files"] <= before["files"] + max(1, NUM_INTERRUPTS // 50)
