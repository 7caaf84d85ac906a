"""Move batches to page-locked memory in a thread, before the consumer asks for them, and from there to a device."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from wdskit.errors import PipelineError
from wdskit.pipeline.settings import LoaderSpec


class Mover:
    """Moves batches to page-locked memory, and from there to a CUDA device, unless `device` is None."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def send(self, value: Any) -> Any:
        """Return a batch in page-locked memory. Called in the thread of `move_ahead`.

        An object with the methods `to` and `pin_memory`, such as PackedSequence, becomes the result of its
        `pin_memory`. Tensors on a GPU stay there.
        """
        return map_tensors(value, _pinned)

    def receive(self, sent: Any) -> Any:
        """Return the moved batch. `sent` is the result of `send`. Called in the consumer's thread.

        This call does not wait for the copy to the device, which is the next work on the consumer's CUDA stream. torch
        keeps the page-locked memory until the copy has ended.
        """
        return map_tensors(sent, lambda part: part.to(self._device, non_blocking=True)) if self._device else sent


def make_mover(spec: LoaderSpec) -> Mover | None:
    """Return what moves the batches of a loader with these settings, or None if they stay where they are: neither
    `device` is set, nor `pin_memory` where a GPU exists.

    Raises:
        PipelineError: The device does not exist.
    """
    if spec.device is None:
        return Mover() if spec.pin_memory and torch.cuda.is_available() else None
    device = torch.device(spec.device)
    if (device.index or 0) >= torch.cuda.device_count():
        msg = f"device: {spec.device}, but torch sees {torch.cuda.device_count()} CUDA devices here."
        raise PipelineError(f"{msg}\n  Leave `device` out where there is no GPU: --set loader.device=null.")
    return Mover(device)


def _pinned(value: Any) -> Any:
    return value if getattr(value, "is_cuda", False) or not hasattr(value, "pin_memory") else value.pin_memory()


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a batch with `function` applied to the tensors in its tuples, lists and mappings, and to other
    objects with the method `to` of a tensor, such as `Ragged` and torch's PackedSequence.

    These containers keep their type, transformers' BatchEncoding too; a mapping that cannot change becomes a dict.
    Other objects are not copied.
    """

    def each(part: Any) -> Any:
        return map_tensors(part, function)

    if isinstance(value, Mapping):
        items = {name: each(part) for name, part in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        rebuilt = copy.copy(value)  # keeps the other attributes of a class
        rebuilt.update(items)
        return rebuilt
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return function(value)
    if isinstance(value, (tuple, list)):
        parts = map(each, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def move_ahead(source: Generator[Any, None, None], mover: Mover, is_ready: Callable[[], bool]) -> Iterator[Any]:
    """Yield the values of `source` in order, each moved by `mover`. A thread moves the next values before the consumer
    asks for them.

    Args:
        source: A generator of the values, which runs in the consumer's thread. It is closed at the end, after an error,
            and when the returned iterator is closed.
        mover: Moves each value.
        is_ready: Returns True if `next(source)` would not wait. Values are taken before the consumer asks only then.

    Raises:
        Exception: `source` raised this error. The values before the error are yielded first. An error of `is_ready`,
            and an error of `source` that is not an Exception, such as KeyboardInterrupt, are raised at once.
        BaseException: `mover` raised this error. The values before the error are yielded first.
    """
    # Its thread starts with the first batch: worker processes must be forked before.
    thread = ThreadPoolExecutor(1, thread_name_prefix="wdskit-device")
    sent: deque[Future[Any]] = deque()
    error: Exception | None = None
    try:
        while True:
            # Two batches ahead: one is being moved, the other waits for the consumer.
            while error is None and len(sent) <= 2 and (not sent or is_ready()):
                try:
                    sent.append(thread.submit(mover.send, next(source)))
                except Exception as err:  # noqa: BLE001 (raised after the values before the error)
                    error = err
            if not sent:
                break
            yield mover.receive(sent.popleft().result())
        if error is not None and not isinstance(error, StopIteration):
            raise error
    finally:
        del error
        thread.shutdown(cancel_futures=True)
        source.close()
