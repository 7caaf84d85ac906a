"""The base class of loaders: one iteration at a time, epochs, and the check of the rank."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wdskit.errors import PipelineError, RankError
from wdskit.loader.stats import LoaderStats, Meter
from wdskit.pipeline.ranks import group_rank, initialised_rank
from wdskit.pipeline.settings import LoaderSpec
from wdskit.stages.base import Run
from wdskit.text import as_int, plural

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_MAX_EPOCH = 10**9  # a stream's draws are numbers of 63 bits, 30 of which are the epoch's


class Loader(ABC):
    """What `make_loader` returns. Each iteration is one epoch and yields the items of the pipeline.

    The iteration after a whole epoch runs the next epoch; after a `break`, the same epoch starts again. The loader
    makes no collective call.

    Args:
        run: Rank and world size that the pipeline reads for, and its threads.
        spec: The settings: workers, prefetch and so on.
        name: Name of the pipeline, for reports.
        stages: The stages of the pipeline, its source first; for `repr`.
        process_group: The group from which rank and world size come. Each iteration compares them with it at its start.
        is_rank_given: True if they come from the caller's arguments alone, and are compared with no process group.
    """

    batch_sampler = None
    """Lightning reads this attribute of loaders that have a `sampler`."""

    dataset: Any = None
    """Trainers count its samples: `len(loader.dataset)` is the number of samples of an epoch, on all ranks together.
    None for a stream, whose samples are not counted before they are read.
    """

    def __init__(
        self,
        run: Run,
        spec: LoaderSpec,
        *,
        name: str = "pipeline",
        stages: Sequence[Any] = (),
        process_group: Any = None,
        is_rank_given: bool = False,
    ) -> None:
        self.spec = spec
        self._stages = stages
        self._rank_info = run.rank_info
        self._process_group = process_group
        self._is_rank_given = is_rank_given
        self._running: weakref.ref[Any] | None = None
        self._is_inside = False  # False once a state is loaded during the running iteration
        self._was_closed = False  # during the running iteration
        self._next_epoch: int | None = None  # from `set_epoch` during the running iteration
        self._meter = Meter(name=name, rank=run.rank_info.rank)

    def __repr__(self) -> str:
        """Return one line: name and stages of the pipeline, batch, rank, workers and threads."""
        rank, world_size, _ = self._rank_info
        names = [str(getattr(stage, "name", getattr(stage, "__name__", repr(stage)))) for stage in self._stages]
        parts = [f"{self._meter.name}: {' -> '.join(names)}" if names else self._meter.name]
        if self.batch_size is not None:
            parts.append(f"batch {self.batch_size}")
        parts.append(f"rank {rank} of {world_size}")
        parts.append(f"{plural(self.spec.workers, 'worker')} x {plural(self.spec.threads or 1, 'thread')}")
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a whole batch of this rank. None without `batched`."""
        for stage in self._stages:
            if getattr(stage, "name", "") == "batched":
                size: int = stage.size_on(self._rank_info.world_size)
                return size
        return None

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The running epoch, or the one that the next iteration runs."""

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Number of items of the epoch that the consumer has not received yet."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of items of a whole epoch on this rank."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position of the consumer, as plain JSON."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from a state with the next iteration.

        Args:
            state: From `state_dict`. A planned source accepts it on any number of ranks, workers and threads.
            strict: Whether a state of another order of samples is refused; otherwise it is logged and accepted.

        Raises:
            StateError: It is not a state, or one that does not fit; the message names what differs.
        """

    @abstractmethod
    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None: ...

    @abstractmethod
    def _close_pool(self) -> None:
        """End threads and worker processes."""

    @abstractmethod
    def _items(self) -> Any:
        """Return one iteration, as a generator that does nothing before its first `next()`."""

    def close(self) -> None:
        """End the running iteration, the threads and the worker processes, within a second even if a sample hangs.

        The epoch that was running starts again with the next iteration, which starts new workers. `with` closes too:
        `with wdskit.make_loader("train.yaml") as loader: ...`.
        """
        running = self._running() if self._running is not None else None
        if running is not None and running.gi_frame is not None:
            self._was_closed = True
            running.close()
            self._leave()
        self._close_pool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> LoaderStats:
        """Speed, waits and stages since the start of the running epoch, or of the last one.

        `print(loader.stats())` shows a table, and `.to_dict()` is for wandb or TensorBoard. At the end of each epoch
        the same is one line of the log, at level INFO.
        """
        return self._meter.stats()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (>= 0) that the next iteration runs. The epoch of a loaded state keeps its position.

        A running epoch does not change: `epoch`, `remaining` and `state_dict` describe it until it ends or the loop is
        left, and `epoch` follows it. The number of the running epoch itself has no effect.

        Raises:
            StateError: A state of another epoch was loaded and is not used yet.
        """
        self._set_next(_natural(epoch), is_counted_elsewhere=False)

    def _set_next(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        if self._is_inside:
            self._next_epoch = None if epoch == self.epoch else epoch
        else:
            self._set_epoch(epoch, is_counted_elsewhere=is_counted_elsewhere)

    def _leave(self) -> None:
        """End the running epoch. Go to the epoch that `set_epoch` set meanwhile."""
        if self._is_inside:
            self._is_inside = False
            if self._next_epoch is not None:
                self._set_epoch(self._next_epoch, is_counted_elsewhere=False)

    @property
    def sampler(self) -> _Sampler:
        """An object with the method `set_epoch`, which frameworks call."""
        return _Sampler(self)  # not kept: it would be a reference cycle

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration. It does nothing before the first `next()`.

        Raises:
            PipelineError: With the first item: another iteration of this loader is still running.
            RankError: With the first item: the process group says that this is another rank.
        """
        return self._run()

    def _run(self) -> Iterator[Any]:
        running = self._running() if self._running is not None else None
        if running is not None and running.gi_frame is not None:
            raise PipelineError(
                "this loader already has an iterator in use. Finish or delete that iterator, or make a second loader."
            )
        self._check_rank()
        items = self._items()
        self._running = weakref.ref(items)
        self._is_inside, self._next_epoch = True, None
        self._was_closed = False
        try:
            yield from items
            logger.info("%s", self._meter.stats().line())
        finally:
            self._leave()
        if self._was_closed:
            raise PipelineError("this loader was closed in the middle of an epoch. Start a new iteration.")

    def _check_rank(self) -> None:
        """Compare the rank of this loader with the process group that exists now.

        Raises:
            RankError: The ranks differ.
        """
        if self._is_rank_given:
            return
        now = group_rank(self._process_group) if self._process_group is not None else initialised_rank()
        own = self._rank_info
        if now is not None and now[:2] != own[:2]:
            msg = f"this loader reads for rank {own.rank} of {own.world_size}, but the process group has rank "
            raise RankError(f"{msg}{now.rank} of {now.world_size}.\n  Make the loader after init_process_group.")


class _Sampler:
    """Replaces a DistributedSampler for frameworks that call its `set_epoch`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Call `loader.set_epoch` for a framework that counts epochs itself, such as Lightning.

        The framework's number may be one less than the epoch of a loaded state, if the state was saved with the last
        batch of an epoch, before its validation: then the state is right. It may be one more if the epoch was ended
        early (`limit_train_batches`): then the framework is right.
        """
        self._loader._set_next(_natural(epoch), is_counted_elsewhere=True)  # noqa: SLF001 (the other half of it)


def _natural(epoch: object) -> int:
    epoch = as_int(epoch)
    if type(epoch) is not int or not 0 <= epoch <= _MAX_EPOCH:
        raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 to {_MAX_EPOCH}.")
    return epoch
