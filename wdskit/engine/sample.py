"""One value in, one value out: consecutive one-to-one stages, for a sample by itself and in a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdskit.engine.threads import Threads
from wdskit.stages.base import Origin, Run, Step, StepFailed, cause_of, note_place, stage_error
from wdskit.stages.timing import Pace, Timings

if TYPE_CHECKING:
    import torch

    from wdskit.stages.images.fused import FusedStep


@dataclass(frozen=True)
class SampleStages:
    """One-to-one stages that stand side by side.

    Attributes:
        steps: In their order.
        parts: Of a mixture: the steps that come before for samples of each part, by `origin.part`.
    """

    steps: tuple[Step, ...]
    parts: tuple[tuple[Step, ...], ...] = ()

    def apply(
        self,
        value: Any,
        origin: Origin,
        out: tuple[FusedStep, torch.Tensor] | None = None,
        timings: Timings | None = None,
        start: int = 0,
    ) -> Any:
        """One value behind all of them.

        Args:
            value: Before them.
            origin: Where it comes from.
            out: The stage that writes its image somewhere, and where.
            timings: Takes a lap for each stage, under its label. A lap has begun.
            start: 1 where the first stage is done already.

        Raises:
            SampleError: A stage failed; it names stage, shard and key.
            BaseException: What is no Exception stays as it is.
        """
        steps = (*self.parts[origin.part], *self.steps) if self.parts else self.steps
        for step in steps[start:] if start else steps:
            try:
                if out is not None and step.function is out[0]:
                    value = out[0](value, origin, out[1])
                else:
                    value = step.function(value, origin)
            except StepFailed as failed:
                raise stage_error(failed.stage, origin, failed.err) from cause_of(failed.err)
            except Exception as err:  # noqa: BLE001 (it is the cause of what is raised)
                raise stage_error(step.name, origin, err) from cause_of(err)
            except BaseException as err:
                note_place(step.name, origin, err)
                raise
            if timings is not None:
                timings.lap(step.label)
        return value


class Each:
    """One-to-one stages in a stream.

    With several threads values are worked on ahead, at most twice as many as threads, and given in order, so that the
    result is the same as with one.

    Args:
        run: Of the pipeline.
        steps: The stages, in their order.

    Attributes:
        kept: Values that were taken and not given yet; what is put there before a call is what the call starts with.
        capacity: How many these are at most.
    """

    def __init__(self, run: Run, steps: Iterable[Step]) -> None:
        self.run = run
        self.stages = SampleStages(tuple(steps))
        self.name = "-".join(step.name for step in self.stages.steps)
        self._pace = Pace()
        self.kept: list[tuple[Origin, Any]] = []
        self.count = 0
        self.capacity = 2 * run.num_threads

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value behind all stages."""
        if self.run.num_threads > 1:
            yield from self._threaded(source)
            return
        left = weight = 1  # values up to the next that is timed, which counts for all of them
        for value in self._with_kept(source):
            origin = self.run.origin
            self.run.note(self.run.board.main, origin)
            left -= 1
            if left:
                done = self.stages.apply(value, origin)
            else:
                timings = Timings(weight=weight)
                done = self._started(value, origin, timings)
                self._keep(timings)
                left = weight = self._pace.gap()
            self.run.origin = origin
            yield done

    def _keep(self, timings: Timings | None) -> None:
        if timings is not None:
            self._pace.end(timings)
            self.run.keep_timings(timings)

    def _with_kept(self, source: Iterable[Any]) -> Iterator[Any]:
        """The values that were kept before this call, then those of the source."""
        kept, self.kept = self.kept, []
        for self.run.origin, value in kept:
            yield value
        yield from source

    def _threaded(self, source: Iterable[Any]) -> Iterator[Any]:
        run = self.run
        ahead = 2 * run.num_threads
        waiting: list[tuple[Future[Any], Timings | None]] = []
        threads = Threads(run.num_threads, self.name)
        try:
            for value in self._with_kept(source):
                self.kept.append((run.origin, value))
                timings = self._pace.begin()
                waiting.append((Future(), timings))
                threads.submit(self._fulfil, waiting[-1][0], value, run.origin, timings)
                if len(waiting) > ahead:
                    yield self._oldest(waiting)
            while waiting:
                yield self._oldest(waiting)
        finally:
            for future, _ in waiting:
                future.cancel()
            threads.close()

    def _fulfil(self, future: Future[Any], value: Any, origin: Origin, timings: Timings | None) -> None:
        if not future.set_running_or_notify_cancel():
            return
        slot = self.run.board.claim()
        self.run.note(slot, origin)
        try:
            done = self._started(value, origin, timings)
        except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
            future.set_exception(err)
        else:
            future.set_result(done)
        finally:
            self.run.board.release(slot)
            del future  # the traceback of its error refers to this frame: a cycle would keep the value alive

    def _started(self, value: Any, origin: Origin, timings: Timings | None) -> Any:
        if timings is not None:
            timings.start()
        return self.stages.apply(value, origin, timings=timings)

    def _oldest(self, waiting: list[tuple[Future[Any], Timings | None]]) -> Any:
        timings = waiting[0][1]
        done = waiting.pop(0)[0].result()  # no name for the future: its error would refer to this frame, a cycle
        self._keep(timings)
        self.run.origin, _ = self.kept.pop(0)
        return done
