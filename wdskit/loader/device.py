"""Move batches to page-locked memory or to a device, in a thread, before the consumer asks for them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from wdskit.engine.batch import Batch
from wdskit.errors import PipelineError
from wdskit.pipeline.settings import LoaderSpec
from wdskit.stages.collate import Ragged

_NUM_AHEAD = 2  # one batch is being moved, the other batch waits for the consumer


class Pin:
    """Moves batches to page-locked memory."""

    def send(self, value: Any) -> Any:
        """Start to move a batch, and return the argument for `receive`. Called in the thread of `move_ahead`.

        An object with the methods `to` and `pin_memory`, such as PackedSequence, becomes the result of its
        `pin_memory`. Tensors on a GPU stay there.
        """
        # torch's caching host allocator tracks the copies in flight.
        return map_tensors(value, pinned, own=lambda own: own.pin_memory() if hasattr(own, "pin_memory") else own)

    def receive(self, sent: Any) -> Any:
        """Return the moved batch. `sent` is the result of `send`. Called in the consumer's thread."""
        return sent


class ToDevice(Pin):
    """Moves batches to a CUDA device. It copies on its own CUDA stream while the consumer computes with the previous
    batch.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, value: Any) -> Any:
        """Start to copy a batch. Return (batch on the device, CUDA event at the end of this work).

        Objects other than tensors that have a method `to` are copied only by `receive`.
        """
        with torch.cuda.stream(self._stream):
            moved = map_tensors(value, lambda tensor: pinned(tensor).to(self._device, non_blocking=True))
            return moved, self._stream.record_event()

    def receive(self, sent: Any) -> Any:
        """Return the batch on the device. `sent` is the result of `send`.

        This call does not wait for the copy, but later work on the consumer's CUDA stream does. An object with a method
        `to`, such as torch's PackedSequence, is copied in this call, on the consumer's stream.
        """
        # An object with a method `to` is copied here because `record_stream` cannot reach its tensors.
        moved, event = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                tensor.record_stream(stream)  # its memory is reused only after this stream has used it
            return tensor

        return map_tensors(moved, note, own=lambda value: value.to(self._device))


def make_mover(spec: LoaderSpec) -> Pin | None:
    """Return what moves the batches of a loader with these settings: a `ToDevice` if `device` is set, a `Pin` if
    `pin_memory` is set and a GPU exists; else None.

    Raises:
        PipelineError: The device does not exist.
    """
    if spec.device is None:
        return Pin() if spec.pin_memory and torch.cuda.is_available() else None
    index = torch.device(spec.device).index or 0
    if index >= torch.cuda.device_count():
        msg = f"device: {spec.device}, but torch sees {torch.cuda.device_count()} CUDA devices here."
        raise PipelineError(f"{msg}\n  Leave `device` out where there is no GPU: --set loader.device=null.")
    return ToDevice(torch.device("cuda", index if ":" in spec.device else torch.cuda.current_device()))


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in page-locked memory; the tensor itself if it is page-locked or on a GPU."""
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def map_tensors(
    value: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    own: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return a copy of a batch with `function` applied to the tensors in its tuples, lists and mappings.

    These containers keep their type, transformers' BatchEncoding too; a mapping that cannot change becomes a dict.
    Other objects are not copied.

    Args:
        value: The batch, or a part of it.
        function: Takes a tensor and returns the new tensor.
        own: Takes an object with a method `to` that is neither a tensor nor a mapping, such as torch's PackedSequence,
            and returns the new object. Default: returns the object itself.
    """
    if isinstance(value, torch.Tensor):
        return function(value)

    def each(part: Any) -> Any:
        return map_tensors(part, function, own=own)

    if isinstance(value, Batch):
        return value._replace(value=each(value.value))
    if isinstance(value, Mapping):
        items = {name: each(part) for name, part in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        rebuilt = copy.copy(value)  # keeps the other attributes of a class
        rebuilt.update(items)
        return rebuilt
    if isinstance(value, Ragged):
        return Ragged(function(value.values), function(value.offsets))
    if callable(getattr(value, "to", None)):
        return value if isinstance(value, type) else own(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(each, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(each, value))
    return value


def move_ahead(source: Iterator[Any], mover: Pin, is_ready: Callable[[], bool]) -> Iterator[Any]:
    """Yield the values of `source` in order, each moved by `mover`. A thread moves the next values before the consumer
    asks for them.

    Args:
        source: Gives the values, in the consumer's thread. `source` is closed at the end, after an error, and when the
            returned iterator is closed.
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
            while error is None and len(sent) <= _NUM_AHEAD and (not sent or is_ready()):
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
        close = getattr(source, "close", None)
        if close is not None:
            close()
