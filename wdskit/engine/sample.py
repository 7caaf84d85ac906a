"""Consecutive one-to-one stages, for a single sample and in a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdskit.engine.threads import Threads
from wdskit.errors import PROCESS_ERRORS, SampleError
from wdskit.stages.base import Origin, Run, Step, StepFailed, add_origin_note, cause_of, stage_error
from wdskit.stages.timing import Timings, TimingSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wdskit.stages.images.fused import FusedStep


_SKIP = "Pack it again without this sample (`--skip-bad`), or allow some: `errors: {max_bad: 10}`."


def add_advice(err: SampleError) -> None:
    """Add a second line to the error of a sample that cannot be decoded, before the error ends a run."""
    if err.stage == "decode" and not isinstance(err.__cause__, PROCESS_ERRORS):
        err.args = (f"{err}\n  {_SKIP}",)


@dataclass(frozen=True)
class SampleStages:
    """Consecutive one-to-one stages, in their order."""

    steps: tuple[Step, ...]

    def apply(
        self,
        value: Any,
        origin: Origin,
        out: tuple[FusedStep, NDArray[Any]] | None = None,
        timings: Timings | None = None,
        start: int = 0,
        num: int = 1,
    ) -> Any:
        """Return the value after all stages.

        Args:
            value: The value before the stage `start`.
            origin: Origin of the value.
            out: The stage that writes its image into given memory, and this memory; None without such a stage.
            timings: Receives the time of each stage, if not None. The time of the first stage is already running.
            start: Index of the first stage to run: 1 if the first stage has run already, else 0.
            num: Number of samples in the value, for `timings`.

        Raises:
            SampleError: A stage failed. The error names stage, shard and key.
            BaseException: A stage raised this error, which is not an Exception, such as SystemExit. `add_origin_note`
                adds a note about stage and sample.
        """
        for step in self.steps[start:] if start else self.steps:
            try:
                if out is not None and step.function is out[0]:
                    value = out[0](value, origin, out[1])
                else:
                    value = step.function(value, origin)
            except StepFailed as failed:
                raise stage_error(failed.stage, origin, failed.err) from cause_of(failed.err)
            except Exception as err:  # noqa: BLE001 (the SampleError has it as its cause)
                raise stage_error(step.name, origin, err) from cause_of(err)
            except BaseException as err:
                add_origin_note(step.name, origin, err)
                raise
            if timings is not None:
                timings.lap(step.label, num)
        return value


class StreamStages:
    """One-to-one stages in a stream.

    With several threads, up to two values per thread are made in advance. The values are yielded in their order, so the
    result is the same as with one thread.

    Args:
        run: The state that all stages of the stream share.
        steps: The stages, in their order.
    """

    def __init__(self, run: Run, steps: Iterable[Step]) -> None:
        self.run = run
        self.stages = SampleStages(tuple(steps))
        self.name = "-".join(step.name for step in self.stages.steps)
        self._pace = TimingSampler(every=8)

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value of `source` after all stages. Bad samples are skipped, up to `run.max_bad` in an epoch.

        Raises:
            SampleError: A stage failed on a sample that `Run.skips` does not skip.
            BaseException: `source` raised this error, or a stage raised this error, which is not an Exception.
        """
        run = self.run
        if run.num_threads > 1:
            yield from self._threaded(source)
            return
        for value in source:
            origin = run.origin
            run.mark_busy(run.board.main, origin)
            timings = self._pace.begin()
            try:
                done = self._apply(value, origin, timings)
            except SampleError as err:
                if not run.skips(err, origin):
                    raise
                continue
            if timings is not None:
                run.keep_timings(timings)
            run.origin = origin
            yield done

    def _threaded(self, source: Iterable[Any]) -> Iterator[Any]:
        run = self.run
        ahead = 2 * run.num_threads
        waiting: list[tuple[Origin, Future[Any], Timings | None]] = []
        threads = Threads(run.num_threads, self.name)
        try:
            for value in source:
                timings = self._pace.begin()
                waiting.append((run.origin, Future(), timings))
                threads.submit(self._fulfil, waiting[-1][1], value, run.origin, timings)
                if len(waiting) > ahead:
                    yield from self._oldest(waiting)
            while waiting:
                yield from self._oldest(waiting)
        finally:
            for _, future, _ in waiting:
                future.cancel()
            threads.close()

    def _fulfil(self, future: Future[Any], value: Any, origin: Origin, timings: Timings | None) -> None:
        if not future.set_running_or_notify_cancel():
            return
        slot = self.run.board.claim()
        self.run.mark_busy(slot, origin)
        try:
            done = self._apply(value, origin, timings)
        except BaseException as err:  # noqa: BLE001 (the consumer receives every error)
            future.set_exception(err)
        else:
            future.set_result(done)
        finally:
            self.run.board.release(slot)
            del future  # the traceback of its error refers to this frame: a cycle would keep the value alive

    def _apply(self, value: Any, origin: Origin, timings: Timings | None) -> Any:
        if timings is not None:
            timings.start()
        return self.stages.apply(value, origin, timings=timings, num=len(origin.members) or 1)

    def _oldest(self, waiting: list[tuple[Origin, Future[Any], Timings | None]]) -> Iterator[Any]:
        """Take the oldest entry out of `waiting`, wait for its value, and yield the value.

        Yield nothing if the sample is bad and `Run.skips` allows to skip it. Raise all other errors of the stages.
        """
        origin, timings = waiting[0][0], waiting[0][2]
        try:
            done = waiting.pop(0)[1].result()  # the future has no name: its error would refer to this frame, a cycle
        except SampleError as err:
            if not self.run.skips(err, origin):
                raise
            return
        if timings is not None:
            self.run.keep_timings(timings)
        self.run.origin = origin
        yield done
