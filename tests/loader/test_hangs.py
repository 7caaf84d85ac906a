"""Nothing waits for a sample that hangs: Ctrl-C, `break`, an error in the loop, `close`, with and without a mover."""

from __future__ import annotations

import copy
import itertools
import mmap
import multiprocessing
import operator
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from shards import index_numbers

import wdskit
from wdskit import Pipeline, PipelineError
from wdskit.loader import loader as planned_module

WAYS = {
    "here": {"workers": 0},
    "threads": {"workers": 0, "threads": 2},
    "process": {"workers": 1, "start_method": "fork"},
    "processes that end": {"workers": 2, "threads": 2, "start_method": "fork", "persistent_workers": False},
}
LIMIT_S = 1.0
"""Largest time from the end of the loop to the end of its threads and processes. A sample hangs for ever."""

TRIES = 3
"""Number of tries: a wait for a sample exceeds `LIMIT_S` in each try, busy processors do not."""

PATIENCE_S = {"pools._PATIENCE_S": 0.5, "worker.JOIN_S": 0.5}
"""Time for threads and processes to finish their sample: at most half of the limit, in most cases here shorter."""


class PassOn:
    """A mover that changes nothing."""

    def send(self, value: Any) -> Any:
        return value

    def receive(self, sent: Any) -> Any:
        return sent


SHARED = mmap.mmap(-1, 82)
"""Memory shared with forked processes: a byte for each of the 80 samples that is made, and two more."""

MAY_HANG, HANGS = 80, 81


@wdskit.thread_safe
def hang_at_16(sample: Any) -> int:
    number = int(sample["cls"])
    if number >= 16 and SHARED[MAY_HANG]:
        SHARED[HANGS] = 1
        threading.Event().wait()
    SHARED[number] = 1
    return number


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: Any) -> str:
    return index_numbers(tmp_path_factory.mktemp("numbers"), [40, 40])


def pipe_of(source: str, pattern: str) -> Pipeline:
    if source == "planned":
        return Pipeline().sequential(pattern, tail="drop").map(hang_at_16).batched(4)
    return Pipeline().stream(pattern, shuffle_shards=False).split_by_worker().map(hang_at_16).batched(4)


def interrupt(batches: Iterator[Any]) -> float:
    """Wait for the hanging batch until Ctrl-C. Return the time of Ctrl-C."""
    came: list[float] = []

    def hear(*_: object) -> None:
        came.append(time.monotonic())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, hear)
    limit = signal.setitimer(signal.ITIMER_REAL, 0.1, 10)  # again: Python may drop it, for example in a finalizer
    try:
        with pytest.raises(KeyboardInterrupt):
            list(batches)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *limit)
    return came[-1]


ENDED = "this iteration has ended: the loader was closed, or a new iteration began"


def leave(loader: Any, end: str) -> float:
    """Leave an epoch in the middle, at a sample that hangs. Return the seconds until its threads and processes end."""
    SHARED[:] = bytes(len(SHARED))
    loader.set_epoch(0)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    if loader.spec.workers == 0 and loader.spec.threads == 1:  # nothing is made ahead
        SHARED[MAY_HANG] = SHARED[HANGS] = 1
    for first in itertools.count(4, 4):
        while not SHARED[HANGS] and not all(SHARED[first : first + 4]):
            time.sleep(0.001)
        if SHARED[HANGS]:
            break
        SHARED[MAY_HANG] = 1  # not earlier: hanging samples would occupy the threads of the next samples
        next(batches)
    started_s = time.monotonic()
    if end == "ctrl-c":
        started_s = interrupt(batches)
    elif end == "error":
        with pytest.raises(ZeroDivisionError), loader:
            1 / 0  # noqa: B018
    elif end == "close":
        closing = threading.Thread(target=loader.close)
        closing.start()
        while loader.epoch == 0:
            time.sleep(0.001)
        with pytest.raises(PipelineError, match=ENDED):
            next(batches)  # the other thread may still end the workers
        closing.join()
    del batches
    loader.close()
    passed_s = time.monotonic() - started_s
    assert not multiprocessing.active_children()
    return passed_s


def test_patience_is_half_of_the_limit() -> None:
    for name, seconds in PATIENCE_S.items():
        assert operator.attrgetter(name)(wdskit.loader) == seconds <= LIMIT_S / 2


@pytest.mark.parametrize("end", ["break", "error", "close", "ctrl-c"])
@pytest.mark.parametrize(
    ("source", "way", "moves"),
    [
        *(("planned", way, moves) for way in WAYS for moves in (False, True)),
        *(("stream", way, False) for way in ("here", "process", "processes that end")),
    ],
)
def test_no_way_out_waits_for_a_sample(
    monkeypatch: Any, pattern: str, source: str, way: str, end: str, moves: bool
) -> None:
    """The real patience is used for Ctrl-C with a mover, which takes longest."""
    if moves:
        monkeypatch.setattr(planned_module, "make_mover", lambda _: PassOn())
    if not (moves and end == "ctrl-c"):
        for name in PATIENCE_S:
            monkeypatch.setattr(f"wdskit.{name}" if "engine" in name else f"wdskit.loader.{name}", 0.05)
    settings = dict(WAYS[way])
    if source == "stream":  # of two workers, the second has only samples that hang
        settings = {"workers": min(1, settings["workers"])} | {
            name: settings[name] for name in ("start_method", "persistent_workers") if name in settings
        }
    loader = pipe_of(source, pattern).loader(**settings)
    assert any(leave(loader, end) < LIMIT_S for _ in range(TRIES))


def hangs_once(sample: Any) -> Any:
    if int(sample["cls"]) == 8:
        time.sleep(1.5)
    return sample


@pytest.mark.parametrize("caller", ["thread", "signal handler"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loader_can_be_closed_while_it_waits(pattern: str, way: str, caller: str) -> None:
    """No batch comes after the call, and the epoch does not look finished."""
    loader = Pipeline().sequential(pattern).map(hangs_once).batched(2).loader(**WAYS[way])
    closed: list[float] = []

    def close(*_: object) -> None:
        loader.close()
        closed.append(time.monotonic())

    before = signal.signal(signal.SIGALRM, close)
    timer = threading.Timer(0.7, close)
    try:
        if caller == "thread":
            timer.start()
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.7)
        received = []
        with pytest.raises(PipelineError, match=ENDED):
            received += (time.monotonic() for _ in loader)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if caller == "thread":
            timer.join()
        signal.signal(signal.SIGALRM, before)
    assert all(moment < closed[0] for moment in received)
    loader.close()


def test_a_loader_is_not_copied(pattern: str) -> None:
    """Two loaders would share one position."""
    loader = Pipeline().sequential(pattern).batched(2).loader(workers=0)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PipelineError, match="a loader cannot be copied or pickled"):
            call(loader)
