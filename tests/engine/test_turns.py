"""User functions run in one thread at a time for any `threads`, unless they are declared thread-safe."""

from __future__ import annotations

import functools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from disks import run_child
from shards import index_numbers

import wdskit
from wdskit import Pipeline
from wdskit.engine import reader
from wdskit.stages.run import is_thread_safe


class Meeting:
    """Counts the threads that are inside at the same time; `together` waits for two."""

    def __init__(self, *, together: bool = False) -> None:
        self._inside = 0
        self.most = 0
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(2, timeout=20) if together else None

    def __call__(self, value: Any) -> Any:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        if self._barrier is not None:
            self._barrier.wait()
        else:
            threading.Event().wait(0.001)  # lets another thread in, if that is allowed
        with self._lock:
            self._inside -= 1
        return value


@pytest.fixture
def pattern(tmp_path: Any) -> str:
    return index_numbers(tmp_path / "numbers", [16, 16])


def even(value: Any) -> bool:
    return True


STAGES = {
    "map": lambda pipe, function: pipe.map(function).batched(4),
    "two maps": lambda pipe, function: pipe.map(function).map(function).batched(4),
    "map_dict": lambda pipe, function: pipe.map_dict(cls=function).batched(4),
    "map_tuple": lambda pipe, function: pipe.to_tuple("cls").map_tuple(function).batched(4),
    "map of batches": lambda pipe, function: pipe.batched(4).map(function),
    "collate": lambda pipe, function: pipe.map(function).batched(4, collate=function),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_function_runs_in_one_thread_at_a_time(pattern: str, stage: str) -> None:
    meeting = Meeting()
    pipe = STAGES[stage](Pipeline().exact(pattern), meeting)
    assert len(list(pipe.loader(workers=0, threads=4))) == 8
    assert meeting.most == 1


def test_a_function_that_is_declared_safe_runs_in_all_threads(pattern: str) -> None:
    meeting = wdskit.thread_safe(Meeting(together=True))
    pipe = Pipeline().exact(pattern).map(meeting).batched(4)
    assert len(list(pipe.loader(workers=0, threads=2))) == 8
    assert meeting.most == 2


def test_what_is_declared_safe_stays_so_with_settings_and_as_a_class() -> None:
    @wdskit.thread_safe
    class Safe:
        def __call__(self, value: Any) -> Any: ...

    assert is_thread_safe(Safe())
    assert is_thread_safe(Safe)
    assert is_thread_safe(functools.partial(wdskit.thread_safe(even), rng=None))
    assert is_thread_safe(wdskit.thread_safe(len))
    assert wdskit.thread_safe(len)("four") == 4
    assert is_thread_safe(wdskit.thread_safe("a".join))
    assert not is_thread_safe(len)
    assert not is_thread_safe(Meeting())


def draw_globally(sample: Any) -> Any:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 (tested here)


@pytest.mark.parametrize("source", ["exact", "stream"])
def test_global_rng_leaves_the_generators_of_the_training_loop_alone(pattern: str, source: str) -> None:
    pipe = getattr(Pipeline(), source)(pattern).map(draw_globally, global_rng=True).batched(4)

    def drawn(*, with_loader: bool) -> list[Any]:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 (the global one is meant)
        torch.manual_seed(1)
        batches = iter(pipe.loader(workers=0, timeout=60))
        found = []
        for _ in range(3):
            if with_loader:
                next(batches)
            found.append(draw_globally(None))
        return found

    assert drawn(with_loader=True) == drawn(with_loader=False)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_loaders_of_a_process_take_turns_to_call_a_function(pattern: str, threads: int) -> None:
    """Such as one tokenizer in the pipelines of training and validation."""
    function = Meeting()
    pipe = Pipeline().exact(pattern).map(function).batched(4)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: [*pipe.loader(workers=0, threads=threads)], range(3)))
    assert function.most == 1


def drawn_twice(sample: dict[str, Any]) -> dict[str, Any]:
    first = float(torch.rand(()))
    threading.Event().wait(0.001)
    return {"draws": np.array([first, float(torch.rand(()))])}


def test_loaders_in_two_threads_draw_from_the_generators_of_the_process_in_turn(pattern: str) -> None:
    pipe = Pipeline().exact(pattern).map(wdskit.thread_safe(drawn_twice), global_rng=True).to_tuple("draws").batched(4)
    run = lambda _: [column.tolist() for (column,) in pipe.loader(workers=0)]  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [run(2), run(3)]


def test_a_process_that_is_forked_while_a_thread_opens_a_shard_reads(pattern: str) -> None:
    with reader._lock:
        assert run_child(lambda: [*Pipeline().exact(pattern).batched(4).loader(workers=0)]) == 0
