"""The loop of a worker sends one answer for each job, in the order of the jobs, for any error of a job."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from wdskit.engine.batch import Batch, Maker
from wdskit.engine.outcome import Outcome
from wdskit.loader.memory import Arena, Arenas
from wdskit.loader.worker import ReceivedJob, work


class Value:
    """A value that a weak reference can watch."""


class Factory(Maker):
    """Makes one batch for each job. A job that is an exception fails after its batch; a job may be a function."""

    def open(self, job: Any) -> Any:
        return job

    def __call__(self, job: Any, memory: Any, is_cancelled: Callable[[], bool], /) -> Outcome[list[Batch]]:
        if callable(job):
            job()
        error = job if isinstance(job, BaseException) else None
        return Outcome([Batch(Value(), 1)], error)


class Freeing(Arenas):
    """Counts how often it frees its pages."""

    num_freed = 0

    def free_pages(self) -> None:
        self.num_freed += 1
        super().free_pages()


def answers_of(jobs: list[ReceivedJob], memory: Arenas | None = None) -> list[tuple[int, Outcome[list[Batch]]]]:
    answers: list[tuple[int, Outcome[list[Batch]]]] = []
    waiting = [None, *reversed(jobs)]

    def answer(received: ReceivedJob, outcome: Outcome[list[Batch]], _: Arena) -> None:
        answers.append((received.ticket, outcome))

    work(waiting.pop, Factory(), memory or Arenas(), answer)
    assert not waiting
    return answers


def test_each_job_gets_one_answer_in_the_order_of_the_jobs() -> None:
    answers = answers_of([ReceivedJob(ticket, "job") for ticket in (3, 1, 2)])
    assert [ticket for ticket, _ in answers] == [3, 1, 2]
    assert all(outcome.error is None and len(outcome.value or ()) == 1 for _, outcome in answers)


@pytest.mark.parametrize("error", [ValueError("planned"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_failed_job_is_an_answer_and_the_next_jobs_run(error: BaseException) -> None:
    answers = answers_of([ReceivedJob(0, error), ReceivedJob(1, "job")])
    assert [(ticket, outcome.error) for ticket, outcome in answers] == [(0, error), (1, None)]
    assert len(answers[0][1].value or ()) == 1


def test_a_cancelled_job_does_not_run_and_its_answer_is_empty() -> None:
    ran: list[int] = []
    jobs = [ReceivedJob(number, lambda number=number: ran.append(number)) for number in range(3)]
    jobs[1].cancel()
    answers = answers_of(jobs)
    assert ran == [0, 2]
    assert [len(outcome.value or ()) for _, outcome in answers] == [1, 0, 1]


def test_a_job_that_is_cancelled_while_it_runs_gives_no_batch_and_frees_its_pages() -> None:
    memory = Freeing()
    received = ReceivedJob(0, None)
    received.job = received.cancel
    [(_, outcome)] = answers_of([received], memory)
    assert (outcome.value, outcome.error) == (None, None)
    assert memory.num_freed == 1


def test_a_worker_that_waits_holds_no_batch_and_no_job() -> None:
    gc.disable()
    try:
        jobs: list[Any] = [ReceivedJob(0, "job")]
        watched: list[weakref.ref[Any]] = [weakref.ref(jobs[0])]

        def next_job() -> ReceivedJob | None:
            if jobs:
                return jobs.pop()
            assert [each() for each in watched] == [None, None]
            return None

        def answer(_: ReceivedJob, outcome: Outcome[list[Batch]], __: Arena) -> None:
            assert outcome.value
            watched.append(weakref.ref(outcome.value[0].value))

        work(next_job, Factory(), Arenas(), answer)
        assert len(watched) == 2
    finally:
        gc.enable()


def test_an_outcome_is_kept_once_and_not_at_all_for_a_cancelled_task() -> None:
    received = ReceivedJob(0, "job")
    received.finish(Outcome([]))
    assert received.done.is_set()
    assert received.take().value == []
    assert received.take().value is None
    other = ReceivedJob(1, "job")
    other.cancel()
    other.finish(Outcome([]))
    assert other.take().value is None
