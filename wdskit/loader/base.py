"""The base class of loaders: it allows one iteration at a time, sets epochs and checks the rank."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from wdskit.engine.program import Program
from wdskit.errors import PipelineError, RankError
from wdskit.loader.stats import LoaderStats, Meter
from wdskit.pipeline.ranks import group_rank, initialised_rank
from wdskit.pipeline.settings import LoaderSpec
from wdskit.stages.base import RankInfo
from wdskit.text import as_int, plural

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_NEW_ITERATION = "a new iteration of this loader began, which ended this one. Two at a time need two loaders."
_MAX_EPOCH = 10**9  # a stream numbers its draws with 63 bits, of which 30 hold the epoch


class Loader(ABC):
    """The loader that `make_loader` returns. Each iteration is one epoch and yields the items of the pipeline.

    An item is a batch, or a sample if the pipeline has no stage `batched`. Each iteration that yielded an item is an
    epoch, as with a DataLoader: the next iteration runs the next epoch, also after a `break`. The loader makes no
    collective call.

    Args:
        rank_info: The rank and world size for which the pipeline reads.
        spec: The settings: workers, prefetch and so on.
        name: Name of the pipeline, for reports.
        stages: The stages of the pipeline, its source first; for `repr` and `batch_size`.
        process_group: The group with which each iteration compares rank and world size; None for the default group.
        is_rank_given: True if rank and world size come only from the caller's arguments. They are then not compared.
    """

    batch_sampler = None
    """Always None. Lightning reads this attribute of each loader that has a `sampler`."""

    dataset: Any = None
    """An object whose length is the number of samples of an epoch, on all ranks together; trainers read this length.
    None for a stream, whose samples are not counted before they are read.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        spec: LoaderSpec,
        *,
        name: str = "pipeline",
        stages: Sequence[Any] = (),
        process_group: Any = None,
        is_rank_given: bool = False,
    ) -> None:
        self.spec = spec
        self._stages = stages
        self._rank_info = rank_info
        self._process_group = process_group
        self._is_rank_given = is_rank_given
        self._running: weakref.ref[Any] | None = None  # the items of the running iteration
        self._is_in_epoch = False  # False once a state is loaded during the running iteration
        self._ends: list[str] = []  # why something else has ended the running iteration
        self._next_epoch: int | None = None  # from `set_epoch` during the running iteration
        self._meter = Meter(name=name, rank=rank_info.rank)

    def __repr__(self) -> str:
        """Return one line: name and stages of the pipeline, batch size, rank, workers and threads."""
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
        """Number of samples in a whole batch of this rank; None if the pipeline has no stage `batched`."""
        for stage in self._stages:
            if getattr(stage, "name", "") == "batched":
                size: int = stage.size_on(self._rank_info.world_size)
                return size
        return None

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of the running epoch. Between two iterations: number of the epoch that the next iteration runs.

        The number of the next epoch is set just before the last item is yielded, or when an iteration is left early. If
        a stream has no known length, the number is set after the last item.
        """

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Number of items of the running or next epoch (see `epoch`) that the consumer has not received yet.

        Raises:
            TypeError: The stages of a stream do not define the length of an epoch.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items of a whole epoch on this rank.

        Raises:
            TypeError: The stages of a stream do not define the length of an epoch.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer for `load_state_dict`, as a dict of plain JSON values. After an iteration
        that was left early, until the next one begins, it is the position in the epoch that was left.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Let the next iteration start at the position of a saved state.

        Args:
            state: Result of `state_dict`. The numbers of ranks, workers and threads may differ from those of the saved
                run.
            strict: If True, refuse a state that belongs to another order of samples. If False, load this state too and
                log the difference.

        Raises:
            StateError: `state` is not a state of this kind of loader, or `strict` is True and the state belongs to
                another order of samples. The message names the difference.
        """

    @abstractmethod
    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None: ...

    @abstractmethod
    def _close_pool(self) -> None:
        """End the threads and worker processes. The next iteration starts new threads and processes."""

    @abstractmethod
    def _items(self) -> Any:
        """Return a generator of the items of one epoch. The generator does nothing before its first `next()`."""

    def close(self) -> None:
        """End the running iteration, the threads and the worker processes, within a second even if a worker hangs.

        The next `next()` of the ended iteration raises PipelineError. A new iteration starts new workers. A `with`
        statement closes the loader at its end: `with wdskit.make_loader("train.yaml") as loader: ...`.
        """
        self._end_running("this loader was closed in the middle of an epoch. Start a new iteration.")
        self._close_pool()

    def _end_running(self, why: str) -> bool:
        """End the running iteration, whose next `next()` then raises a PipelineError with the text `why`. Return False
        if it ends only later, because a signal handler or another thread calls this method while it waits for an item.
        """
        running = self._running() if self._running is not None else None
        if running is None or running.gi_frame is None:
            return True
        self._ends.append(why)
        if running.gi_running:
            return False
        running.close()
        self._end_epoch()
        return True

    def __reduce_ex__(self, _: object) -> Any:
        """Raise PipelineError: a copy would share the position of this loader, and its workers cannot be pickled."""
        raise PipelineError("a loader cannot be copied or pickled.\n  Copy its Pipeline, and make another loader.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> LoaderStats:
        """Return speed, waits and times of the stages in the running epoch; between two epochs, in the last epoch.

        `print(loader.stats())` shows a table, and `.to_dict()` is for wandb or TensorBoard. At the end of each whole
        epoch, the loader logs a summary in one line, at level INFO.
        """
        return self._meter.stats()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (>= 0) that the next iteration runs. A loaded state of the same epoch keeps its position.

        A call during an iteration takes effect when the running epoch ends; until then `epoch`, `remaining` and
        `state_dict` describe the running epoch. A call with the number of the running epoch cancels earlier calls in
        this iteration, and has no other effect.

        Raises:
            PipelineError: `epoch` is not a whole number from 0 to 10**9.
            StateError: A state of another epoch was loaded, and no iteration has started from it yet.
        """
        self._set_next(_check_epoch(epoch), is_counted_elsewhere=False)

    def _set_next(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        if self._is_in_epoch:
            self._next_epoch = None if epoch == self.epoch else epoch
        else:
            self._set_epoch(epoch, is_counted_elsewhere=is_counted_elsewhere)

    def _end_epoch(self) -> None:
        """Mark the running epoch as ended. If `set_epoch` was called during the epoch, apply its last call now."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            if self._next_epoch is not None:
                self._set_epoch(self._next_epoch, is_counted_elsewhere=False)

    @property
    def sampler(self) -> _Sampler:
        """A stand-in for a DistributedSampler: frameworks call its method `set_epoch` before each epoch."""
        return _Sampler(self)  # not stored, because that would be a reference cycle

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the items of one epoch. The iterator does nothing before its first `next()`.

        Raises:
            PipelineError: At the first `next()`: a worker of torch's DataLoader runs the loader, or another thread
                waits for an item of it. At any `next()`: the loader was closed or a new iteration began during this
                iteration, a worker died, or a wait lasted for the `timeout`.
            RankError: At the first `next()`: the process group has another rank or world size than this loader, or the
                loaders of other ranks read another sequence of samples.
            SampleError, ShardError, StorageError: An item cannot be made. All items before this item were yielded.
        """
        return self._run()

    def _run(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and not isinstance(info.dataset, Program):  # not a worker of wdskit
            raise PipelineError(
                "a loader in a worker of torch's DataLoader: each of these workers would yield every sample.\n"
                "  Use the loader in place of the DataLoader, with `workers`."
            )
        if not self._end_running(_NEW_ITERATION):
            raise PipelineError("another thread waits for an item of this loader. Make a second loader.")
        self._check_rank()
        items = self._items()
        own = self._running = weakref.ref(items)
        self._is_in_epoch, self._next_epoch = True, None
        ends = self._ends = []
        error: Exception | None = None
        try:
            for item in items:
                if ends:  # by a signal handler or another thread
                    break
                yield item
                del item
        except Exception as err:
            if not ends:
                raise
            error = err
        finally:
            items.close()
            if self._running is own:
                self._end_epoch()
        if ends:
            raise PipelineError(ends[0]) from error
        logger.info("%s", self._meter.stats().line())

    def _check_rank(self) -> None:
        """Raise RankError if the process group that exists now has another rank or world size than this loader.

        Nothing is checked if no process group exists, or if the caller passed rank and world size as arguments.
        """
        if self._is_rank_given:
            return
        now = group_rank(self._process_group) if self._process_group is not None else initialised_rank()
        own = self._rank_info
        if now is not None and now[:2] != own[:2]:
            msg = f"this loader reads for rank {own.rank} of {own.world_size}, but the process group has rank "
            raise RankError(f"{msg}{now.rank} of {now.world_size}.\n  Make the loader after init_process_group.")


class _Sampler:
    """A stand-in for a DistributedSampler, on which frameworks call `set_epoch`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch as `Loader.set_epoch` does, for a framework that counts epochs itself, such as Lightning.

        After a state was loaded, `epoch` may differ by one from the epoch of the state:
        - `epoch` is one less if the framework saved the state before it counted the finished epoch. The loader keeps
          the epoch of the state.
        - `epoch` is one more if the framework ended the epoch early (`limit_train_batches`). The loader takes `epoch`.

        Raises:
            PipelineError: `epoch` is not a whole number from 0 to 10**9.
            StateError: `epoch` differs from the epoch of the state in another way.
        """
        self._loader._set_next(_check_epoch(epoch), is_counted_elsewhere=True)  # noqa: SLF001 (a part of the loader)


def _check_epoch(epoch: object) -> int:
    epoch = as_int(epoch)
    if type(epoch) is not int or not 0 <= epoch <= _MAX_EPOCH:
        raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 to {_MAX_EPOCH}.")
    return epoch
