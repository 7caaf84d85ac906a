"""One value in, one value out: consecutive one-to-one stages run as one, in this thread or in several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from wdskit.stages.base import Origin, Run, Step, StepFailed, note_place, stage_error
from wdskit.stages.timing import Pace, Timings

if TYPE_CHECKING:
    import torch

    from wdskit.stages.images.fused import FusedStep


class Each:
    """Runs one-to-one stages that stand side by side.

    With several threads values are worked on ahead, at most twice as many as threads, and given in order, so that the
    result is the same as with one.

    Args:
        run: Of the pipeline.
        name: For threads.
        steps: In their order.
        parts: Of a mixture: the steps that come before for samples of each part, by `origin.part`.

    Attributes:
        writer: The one of `steps` that writes its image where `apply` is told to.
        first: The first of `steps`, if it has two halves and nothing comes before it.
    """

    def __init__(self, run: Run, name: str, steps: tuple[Step, ...], parts: tuple[tuple[Step, ...], ...] = ()) -> None:
        self.run = run
        self.name = name
        self.steps = steps
        self.parts = parts
        self.writer: FusedStep | None = None
        self.first: FusedStep | None = None
        self._pace = Pace()
        self.kept: list[tuple[Origin, Any]] = []
        self.count = 0
        self.capacity = 2 * run.num_threads

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value after all steps."""
        if self.run.num_threads > 1:
            yield from self._threaded(source)
            return
        left = weight = 1  # values up to the next that is timed, which counts for all of them
        for value in self._with_kept(source):
            origin = self.run.origin
            left -= 1
            if left:
                done = self.apply(value, origin)
            else:
                timings = Timings(weight=weight)
                done = self._started(value, origin, timings)
                self._keep(timings)
                left = weight = self._pace.gap()
            self.run.origin = origin
            yield done

    def apply(
        self,
        value: Any,
        origin: Origin,
        out: torch.Tensor | None = None,
        timings: Timings | None = None,
        start: int = 0,
    ) -> Any:
        """One value after all steps.

        Args:
            value: Before them.
            origin: Where it comes from.
            out: Where `writer` puts its image.
            timings: Takes a lap for each step, under its label. A lap has begun.
            start: 1 where `first` is done already.

        Raises:
            SampleError, PipelineError: A step failed; it names stage, shard and key.
            BaseException: What is no Exception stays as it is.
        """
        steps = (*self.parts[origin.part], *self.steps) if self.parts else self.steps
        for step in steps[start:] if start else steps:
            try:
                if out is not None and step.function is self.writer:
                    value = self.writer(value, origin, out)
                else:
                    value = step.function(value, origin)
            except StepFailed as failed:
                raise stage_error(failed.stage, origin, failed.err) from failed.err
            except Exception as err:
                raise stage_error(step.name, origin, err) from err
            except BaseException as err:
                note_place(step.name, origin, err)
                raise
            if timings is not None:
                timings.lap(step.label)
        return value

    def _keep(self, timings: Timings | None) -> None:
        if timings is not None:
            self._pace.end(timings)
            self.run.keep_timings(timings)

    def _with_kept(self, source: Iterable[Any]) -> Iterator[Any]:
        while self.kept:
            self.run.origin, value = self.kept.pop(0)
            yield value
        yield from source

    def _threaded(self, source: Iterable[Any]) -> Iterator[Any]:
        run = self.run
        ahead = 2 * run.num_threads
        waiting: list[tuple[Future[Any], Timings | None]] = []
        with ThreadPoolExecutor(run.num_threads, thread_name_prefix=f"wdskit-{self.name}") as pool:
            try:
                for value in self._with_kept_ahead(source):
                    self.kept.append((run.origin, value))
                    timings = self._pace.begin()
                    waiting.append((pool.submit(self._started, value, run.origin, timings), timings))
                    if len(waiting) > ahead:
                        yield self._oldest(waiting)
                while waiting:
                    yield self._oldest(waiting)
            finally:
                for future, _ in waiting:
                    future.cancel()

    def _with_kept_ahead(self, source: Iterable[Any]) -> Iterator[Any]:
        """As `_with_kept`, before this call keeps anything itself."""
        kept = self.kept[:]
        self.kept.clear()
        for self.run.origin, value in kept:
            yield value
        yield from source

    def _started(self, value: Any, origin: Origin, timings: Timings | None) -> Any:
        if timings is not None:
            timings.start()
        return self.apply(value, origin, timings=timings)

    def _oldest(self, waiting: list[tuple[Future[Any], Timings | None]]) -> Any:
        timings = waiting[0][1]
        done = waiting.pop(0)[0].result()  # no name for the future: its error would refer to this frame, a cycle
        self._keep(timings)
        self.run.origin, _ = self.kept.pop(0)
        return done


def together(run: Run, steps: list[Step]) -> Each:
    """Stages that stand side by side, as one."""
    return Each(run, "-".join(step.name for step in steps), tuple(steps))
