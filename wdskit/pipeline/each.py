"""One value in, one value out: consecutive one-to-one stages run as one, in this thread or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdskit.errors import PipelineError, SampleError, WdskitError
from wdskit.pipeline.run import Origin, Run

if TYPE_CHECKING:
    import torch

    from wdskit.pipeline.fused import FusedStep

Function = Callable[[Any, Origin], Any]


@dataclass(frozen=True)
class Step:
    """A one-to-one stage: its name as the user wrote it, and what it does to a value of known origin."""

    name: str
    function: Function


class StepFailed(Exception):
    """Tells which of several stages that run as one step failed, and what it raised."""

    def __init__(self, stage: str, err: Exception) -> None:
        super().__init__(stage, err)
        self.stage = stage
        self.err = err


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
    """

    def __init__(self, run: Run, name: str, steps: tuple[Step, ...], parts: tuple[tuple[Step, ...], ...] = ()) -> None:
        self.run = run
        self.name = name
        self.steps = steps
        self.parts = parts
        self.writer: FusedStep | None = None
        self.kept: list[tuple[Origin, Any]] = []
        self.count = 0
        self.capacity = 2 * run.num_threads

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value after all steps."""
        if self.run.num_threads > 1:
            yield from self._threaded(source)
            return
        for value in self._with_kept(source):
            origin = self.run.origin
            done = self.apply(value, origin)
            self.run.origin = origin
            yield done

    def apply(self, value: Any, origin: Origin, out: torch.Tensor | None = None) -> Any:
        """One value after all steps.

        Args:
            value: Before them.
            origin: Where it comes from.
            out: Where `writer` puts its image.

        Raises:
            SampleError, PipelineError: A step failed; it names stage, shard and key.
        """
        for step in (*self.parts[origin.part], *self.steps) if self.parts else self.steps:
            try:
                if out is not None and step.function is self.writer:
                    value = self.writer(value, origin, out)
                else:
                    value = step.function(value, origin)
            except StepFailed as failed:
                raise stage_error(failed.stage, origin, failed.err) from failed.err
            except Exception as err:
                raise stage_error(step.name, origin, err) from err
        return value

    def _with_kept(self, source: Iterable[Any]) -> Iterator[Any]:
        while self.kept:
            self.run.origin, value = self.kept.pop(0)
            yield value
        yield from source

    def _threaded(self, source: Iterable[Any]) -> Iterator[Any]:
        run = self.run
        ahead = 2 * run.num_threads
        waiting: list[Future[Any]] = []
        with ThreadPoolExecutor(run.num_threads, thread_name_prefix=f"wdskit-{self.name}") as pool:
            try:
                for value in self._with_kept_ahead(source):
                    self.kept.append((run.origin, value))
                    waiting.append(pool.submit(self.apply, value, run.origin))
                    if len(waiting) > ahead:
                        yield self._oldest(waiting)
                while waiting:
                    yield self._oldest(waiting)
            finally:
                for future in waiting:
                    future.cancel()

    def _with_kept_ahead(self, source: Iterable[Any]) -> Iterator[Any]:
        """As `_with_kept`, before this call keeps anything itself."""
        kept = self.kept[:]
        self.kept.clear()
        for self.run.origin, value in kept:
            yield value
        yield from source

    def _oldest(self, waiting: list[Future[Any]]) -> Any:
        done = waiting.pop(0).result()
        self.run.origin, _ = self.kept.pop(0)
        return done


def stage_error(stage: str, origin: Origin, err: Exception) -> WdskitError:
    """The error of a stage that failed on one value, with shard and key; a PipelineError stays one."""
    if isinstance(err, PipelineError):
        return PipelineError(f"{origin}: {err}")
    told = str(err) if isinstance(err, WdskitError) else f"{type(err).__name__}: {err}"
    return SampleError(f"{origin}: {stage} failed: {told}", stage=stage, shard=origin.url, key=origin.key)
