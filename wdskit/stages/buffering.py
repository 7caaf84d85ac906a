"""The stages `batched` and `unbatched`: what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from wdskit.errors import PipelineError
from wdskit.stages.base import Origin, Run, note_place, stage_error
from wdskit.stages.collate import Collate
from wdskit.stages.memory import FRESH, Memory
from wdskit.stages.timing import Pace


class Batched:
    """Lists of `size` values, collated. A batch is given as soon as it is full."""

    def __init__(self, run: Run, collate: Callable[[list[Any]], Any], size: int, *, partial: bool) -> None:
        self.run = run
        self.collate = collate
        self.size = size
        self.partial = partial
        self._pace = Pace()

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield batches; the last may be shorter where `partial` allows it.

        Raises:
            SampleError, PipelineError: The values do not make a batch; it names the first and the last.
        """
        values: list[Any] = []
        origins: list[Origin] = []
        for value in source:
            values.append(value)
            origins.append(self.run.origin)
            if len(values) == self.size:
                yield self._timed(values, origins)
                values, origins = [], []
        if values and self.partial:
            yield self._timed(values, origins)

    def _timed(self, values: list[Any], origins: list[Origin]) -> Any:
        timings = self._pace.begin()
        batch, self.run.origin = self.collated(values, origins)
        if timings is not None:
            timings.lap("batched")
            self._pace.end(timings)
            self.run.keep_timings(timings)
        return batch

    def collated(
        self, values: list[Any], origins: list[Origin], memory: Memory = FRESH, ready: Mapping[Any, Any] | None = None
    ) -> tuple[Any, Origin]:
        """A batch of these values, and its origin.

        Args:
            values: At least one.
            origins: Of each.
            memory: Where a batch is written; a function of the user's uses its own.
            ready: Of the default collate: what stands already where the values are told to.

        Raises:
            SampleError, PipelineError: They do not make one; it names the first and the last.
        """
        origin = origins[-1]._replace(members=tuple(origins))
        try:
            if isinstance(self.collate, Collate):
                return self.collate(values, memory, ready or {}), origin
            return self.collate(values), origin
        except Exception as err:
            raise stage_error("batched", origin, err) from err
        except BaseException as err:
            note_place("batched", origin, err)
            raise


class Unbatched:
    """Batches into their samples again."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples of each batch in order, each with the origin it had before it was batched."""
        for batch in source:
            origin = self.run.origin
            try:
                samples = list(_samples(batch))
            except Exception as err:
                raise stage_error("unbatched", origin, err) from err
            if len(samples) == len(origin.members):
                origins = origin.members
            else:  # a function between has made other samples of them
                origins = tuple(Origin(origin.url, "", *origin[2:4], part=part + 1) for part in range(len(samples)))
            for self.run.origin, value in zip(origins, samples, strict=True):
                yield value


def _samples(batch: Any) -> Iterator[Any]:
    """The samples of a collated batch: a tuple or a dict of columns, or one column."""
    if isinstance(batch, Mapping):
        columns = dict(batch)
        _check_lengths(columns)
        return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    if isinstance(batch, tuple):
        _check_lengths(dict(enumerate(batch)))
        return zip(*batch, strict=True)
    return iter(batch)


def _check_lengths(columns: Mapping[Any, Any]) -> None:
    lengths = {name: _length(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        told = {name: "no column" if length is None else length for name, length in lengths.items()}
        raise PipelineError(f"unbatched: the columns of a batch differ in length: {told}. Put it right behind batched.")


def _length(column: Any) -> int | None:
    if isinstance(column, (str, bytes)):
        return None
    try:
        return len(column)
    except TypeError:  # a number, or a tensor without axes
        return None
