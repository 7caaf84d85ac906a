"""Threads that make jobs: one answer for each job that is not cancelled, in the order of the jobs, for any error."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from wdskit.engine.batch import Batch
from wdskit.engine.outcome import Outcome
from wdskit.loader.memory import Arenas
from wdskit.loader.worker import JobThreads


class Value:
    """A value that a weak reference can watch."""


class Maker:
    """Makes one batch for each job. A job that is an exception fails after its batch; a job may be a function."""

    def open(self, job: Any) -> Any:
        return job

    def __call__(self, job: Any, memory: Any, is_cancelled: Callable[[], bool], /) -> Outcome[list[Batch]]:
        if callable(job):
            job()
        error = job if isinstance(job, BaseException) else None
        return Outcome([] if is_cancelled() else [Batch(Value(), 1)], error)


def jobs_of(answer: Callable[..., None]) -> JobThreads:
    maker: Any = Maker()
    return JobThreads(maker, Arenas(), answer)


def answers_of(jobs: dict[int, Any], cancelled: tuple[int, ...] = ()) -> list[tuple[int, Outcome[list[Batch]]]]:
    answers: list[tuple[int, Outcome[list[Batch]]]] = []
    threads = jobs_of(lambda ticket, outcome, _: answers.append((ticket, outcome)))
    for ticket, job in jobs.items():
        threads.submit(ticket, job)
    threads.cancel(cancelled)
    for _ in jobs:
        assert threads.make_next()
    threads.end()
    assert not threads.make_next()
    return answers


def test_each_job_gets_one_answer_in_the_order_of_the_jobs() -> None:
    answers = answers_of({3: "job", 1: "job", 2: "job"})
    assert [ticket for ticket, _ in answers] == [3, 1, 2]
    assert all(outcome.error is None and len(outcome.value or ()) == 1 for _, outcome in answers)


@pytest.mark.parametrize("error", [ValueError("planned"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_failed_job_is_an_answer_and_the_next_jobs_run(error: BaseException) -> None:
    answers = answers_of({0: error, 1: "job"})
    assert [(ticket, outcome.error) for ticket, outcome in answers] == [(0, error), (1, None)]
    assert len(answers[0][1].value or ()) == 1


def test_a_cancelled_job_does_not_run_and_has_no_answer() -> None:
    ran: list[int] = []
    answers = answers_of({number: lambda number=number: ran.append(number) for number in range(3)}, cancelled=(1,))
    assert ran == [0, 2]
    assert [ticket for ticket, _ in answers] == [0, 2]


def test_a_job_that_is_cancelled_while_it_runs_has_no_answer() -> None:
    answers: list[int] = []
    threads = jobs_of(lambda ticket, *_: answers.append(ticket))
    threads.submit(0, lambda: threads.cancel([0]))
    assert threads.make_next()
    assert not answers


def test_threads_that_wait_hold_no_batch_and_no_job() -> None:
    answered, watched = threading.Event(), list[weakref.ref[Any]]()

    def answer(_: int, outcome: Outcome[list[Batch]], __: Any) -> None:
        assert outcome.value
        watched.append(weakref.ref(outcome.value[0].value))
        answered.set()

    threads = jobs_of(answer)
    threads.start(2)
    gc.disable()
    try:
        job = Value()
        watched.append(weakref.ref(job))
        threads.submit(0, job)
        del job
        assert answered.wait(30)
        assert threads.end()
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()
