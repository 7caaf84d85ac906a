"""For users' tests: `assert_resumes_exactly` checks that a loader with the user's settings and functions resumes, and
`use_disk` lets `pack` and others write with a subclass of `Disk`, which can fail, stop or watch each operation.

from wdskit.testing import assert_resumes_exactly

def test_training_continues_where_it_stopped():
    assert_resumes_exactly(lambda: wdskit.make_loader("configs/train.yaml", pipeline="train", workers=2))
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from wdskit.files import Disk, use_disk
from wdskit.text import shorten

__all__ = ["Disk", "assert_resumes_exactly", "use_disk"]


class _Step(NamedTuple):
    """One item of a loader, and the number of its epoch."""

    epoch: int
    item: Any


def assert_resumes_exactly(
    make_loader: Callable[[], Any], *, num_epochs: int = 2, steps: Iterable[int] | None = None
) -> None:
    """Assert that a loader resumes exactly: after a stop at any step, it yields the same batches as without the stop.

    First, one loader runs without a stop. Then, for each step, a new loader loads the state of this step from JSON. Its
    batches must be equal to the batches of the first loader, up to one batch after the last epoch. Each step is tested
    with three states: of a loader that ran from the start, of a loader that was resumed at the previous tested step,
    and of a loader that was resumed at this step and has not yielded a batch.

    A test of n steps takes about n / 2 times as long as the epochs, and holds all batches of the epochs in memory. So
    use few samples, or few `steps`.

    Args:
        make_loader: Returns a new loader at each call, always with the same settings.
        num_epochs: Number of epochs to compare, from the first epoch of the loader.
        steps: Numbers of batches, counted over all epochs, after which to stop; 0 is before the first batch. Default:
            all.

    Raises:
        AssertionError: A resumed loader yields a different batch, or fewer batches; the message names the step, the
            place and the difference. Or the loader has no batches, its state is not plain JSON, or a number in `steps`
            is out of range.
    """
    whole = list(_take(make_loader(), num_epochs=num_epochs))
    if len(whole) < 2:
        raise AssertionError(f"there is nothing to resume: {num_epochs} epochs of this loader have no batches.")
    stops = sorted(range(len(whole)) if steps is None else set(steps))
    if stops and not 0 <= stops[0] <= stops[-1] < len(whole):
        raise AssertionError(f"steps={stops}: {num_epochs} epochs of this loader have {len(whole) - 1} steps.")
    loader = make_loader()
    saved = {0: _saved(loader)}
    way = "in a second run without a stop, whose states were saved during the run"
    for at in _follow(loader, whole, 0, max(stops, default=0), way):
        saved[at] = _saved(loader) if at in stops else ""
    chained, before = saved[0], 0
    for stop in stops:
        loader = _resumed(make_loader, chained)
        list(_follow(loader, whole, before, stop, f"resumed after step {before}"))
        chained, before = _saved(loader), stop
        ways = {saved[stop]: "saved during the run"}
        ways.setdefault(chained, "saved by a loader that was resumed before")
        ways.setdefault(_saved(_resumed(make_loader, saved[stop])), "saved again before the first batch")
        for state, how in ways.items():
            list(_follow(_resumed(make_loader, state), whole, stop, len(whole), f"resumed after step {stop}, {how}"))


def _take(loader: Any, *, num_epochs: int) -> Iterator[_Step]:
    """Yield the items of the next `num_epochs` epochs, and one item more if the loader has more."""
    end = loader.epoch + num_epochs
    for step in _epochs(loader):
        yield step
        if step.epoch >= end:
            return


def _epochs(loader: Any) -> Iterator[_Step]:
    """Yield the items of one epoch after another, until two epochs in a row are empty.

    Call `set_epoch` before each epoch, as a training loop does.
    """
    num_empty = 0
    for epoch in itertools.count(loader.epoch):
        loader.set_epoch(epoch)
        num_empty += 1
        for item in loader:
            num_empty = 0
            yield _Step(epoch, item)
        if num_empty > 1:
            return


def _follow(loader: Any, whole: list[_Step], at: int, stop: int, way: str) -> Iterator[int]:
    """Compare the next items of a loader with `whole[at:stop]`, and yield the number of compared items after each.

    `way` says how the loader came here, for messages. Raises AssertionError if an item differs or is missing.
    """
    for step in itertools.islice(_epochs(loader), stop - at):
        _compare(step, whole[at], at, way)
        at += 1
        yield at
    if at < stop:
        raise AssertionError(f"{way}: nothing comes after step {at}, but an uninterrupted run continues.")


def _saved(loader: Any) -> str:
    state = loader.state_dict()
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as err:
        raise AssertionError(f"this state is not plain JSON: {err}: {state!r}") from err


def _resumed(make_loader: Callable[[], Any], state: str) -> Any:
    loader = make_loader()
    loader.load_state_dict(json.loads(state))
    return loader


def _compare(found: _Step, expected: _Step, at: int, way: str) -> None:
    where = f"{way}: step {at + 1} differs"
    if found.epoch != expected.epoch:
        raise AssertionError(f"{where}: it is in epoch {found.epoch}, but without a stop in epoch {expected.epoch}.")
    what = _difference(found.item, expected.item, "batch")
    if what:
        raise AssertionError(f"{where} (epoch {found.epoch}).\n  {what}")


def _difference(found: Any, expected: Any, path: str) -> str:
    """Describe the first difference of two values; "" if the values and the types of all their parts are equal.

    `path` names the place of the values in the message. NaN is equal to NaN.
    """
    import numpy as np
    import torch

    if type(found) is not type(expected):
        return f"{path} is a {type(found).__name__}, but without a stop a {type(expected).__name__}."
    try:
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            return ""
        if isinstance(found, np.ndarray):
            np.testing.assert_array_equal(found, expected, strict=True)
            return ""
    except AssertionError as err:
        return f"{path}: {err}"
    mine, other = _parts_of(found), _parts_of(expected)
    if mine is None or other is None:
        is_same = bool(found == expected) or (found != found and expected != expected)  # noqa: PLR0124 (nan is nan here)
        return "" if is_same else f"{path} is {shorten(repr(found))}, but without a stop {shorten(repr(expected))}."
    if list(mine) != list(other):
        return f"{path} has the parts {list(mine)}, but without a stop {list(other)}."
    return next(filter(None, (_difference(mine[key], other[key], f"{path}[{key!r}]") for key in mine)), "")


def _parts_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a mapping, list, tuple or dataclass by key, position or name; None for another value."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else vars(value) if dataclasses.is_dataclass(value) else None
