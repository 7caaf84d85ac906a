"""For users' tests: `assert_resumes_exactly` checks that a loader with the user's settings and functions resumes, and
`Disk` is what `pack(disk=...)` writes with: a subclass can fail, stop or watch each operation.

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

from wdskit.files import Disk

__all__ = ["Disk", "assert_resumes_exactly"]


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
    passing = _states_in_passing(make_loader, whole, set(stops))
    chained, before = passing[0], 0
    for stop in stops:
        loader = _resumed(make_loader, chained)
        for at, step in enumerate(itertools.islice(_epochs(loader), stop - before), before):
            _compare(step, whole[at], at, f"resumed after step {before}")
        chained, before = _saved(loader), stop
        ways = {passing[stop]: "saved during the run"}
        ways.setdefault(chained, "saved by a loader that was resumed before")
        ways.setdefault(_saved(_resumed(make_loader, passing[stop])), "saved again before the first batch")
        for state, way in ways.items():
            _check_rest(_resumed(make_loader, state), whole, stop, f"resumed after step {stop}, {way}")


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


def _states_in_passing(make_loader: Callable[[], Any], whole: list[_Step], stops: set[int]) -> dict[int, str]:
    """Run a new loader up to the last of `stops`, and return the saved states.

    Returns:
        Maps a number of yielded items to the loader's state after these items, as JSON. The numbers are 0 and `stops`.

    Raises:
        AssertionError: An item differs from the item of the first run, `whole`, the run ends before a stop, or a state
            is not plain JSON.
    """
    loader = make_loader()
    states = {0: _saved(loader)}
    for at, step in enumerate(itertools.islice(_epochs(loader), max(stops, default=0))):
        _compare(step, whole[at], at, "in a second run without a stop, whose states were saved during the run")
        if at + 1 in stops:
            states[at + 1] = _saved(loader)
    missing = sorted(stops - set(states))
    if missing:
        raise AssertionError(f"a second run without a stop has no step {missing[0]}, but the first run has it")
    return states


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


def _check_rest(loader: Any, whole: list[_Step], stop: int, way: str) -> None:
    """Compare the items of a resumed loader with `whole[stop:]`, the rest of the first run.

    `way` says how the loader was resumed, for messages. Raises AssertionError if an item differs or is missing.
    """
    num_steps = stop
    for at, step in enumerate(itertools.islice(_epochs(loader), len(whole) - stop), stop):
        _compare(step, whole[at], at, way)
        num_steps += 1
    if num_steps < len(whole):
        raise AssertionError(f"{way}: nothing comes after step {num_steps}, but an uninterrupted run continues.")


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
        return "" if is_same else f"{path} is {_short(found)}, but without a stop {_short(expected)}."
    if list(mine) != list(other):
        return f"{path} has the parts {list(mine)}, but without a stop {list(other)}."
    return next(filter(None, (_difference(mine[key], other[key], f"{path}[{key!r}]") for key in mine)), "")


def _parts_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a mapping, list, tuple or dataclass by key, position or name; None for another value."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else vars(value) if dataclasses.is_dataclass(value) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
