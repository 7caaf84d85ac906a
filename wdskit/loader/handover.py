"""Batches on their way to who consumes them: into page-locked memory, and from there to a device, in a thread ahead."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from wdskit.engine.jobs import Made
from wdskit.engine.planned import PlannedPipeline
from wdskit.errors import PipelineError
from wdskit.pipeline.loader_specs import LoaderSpec
from wdskit.stages.collate import Ragged
from wdskit.stages.images.jpeg_crop import Ending, finish_batch

_NUM_AHEAD = 2  # one that is being moved while the other waits to be taken


class Mover(Protocol):
    """How a batch gets where it is wanted."""

    def send(self, value: Any) -> Any:
        """Set it on its way, in the thread ahead."""
        ...

    def receive(self, sent: Any) -> Any:
        """The batch that was sent, in the consumer's thread."""
        ...


class Pin:
    """Into page-locked memory of torch's caching host allocator, which knows of copies in flight."""

    def send(self, value: Any) -> Any:
        """See `Mover`."""
        return map_tensors(value, pinned)

    def receive(self, sent: Any) -> Any:
        """See `Mover`."""
        return sent


class ToDevice:
    """To a CUDA device, on a stream of its own: the copy of one batch runs while the one before is computed with.

    Args:
        device: Where to.
        finish: What is done to the batch there, on the same stream.
    """

    def __init__(self, device: torch.device, finish: Callable[[Any], Any]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._finish = finish

    def send(self, value: Any) -> Any:
        """See `Mover`."""
        with torch.cuda.stream(self._stream):
            moved = map_tensors(value, lambda tensor: pinned(tensor).to(self._device, non_blocking=True))
            moved = self._finish(moved)
            return moved, self._stream.record_event()

    def receive(self, sent: Any) -> Any:
        """See `Mover`: what the consumer does next on its stream waits for the copy."""
        moved, event = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                tensor.record_stream(stream)  # its memory is not used again before this stream is done with it
            return tensor

        return map_tensors(moved, note)


def make_mover(pipeline: PlannedPipeline, spec: LoaderSpec) -> Mover | None:
    """The one that a loader's settings ask for; None where batches stay as they are.

    Raises:
        PipelineError: There is no such device.
    """
    if spec.device is None:
        return Pin() if spec.pin_memory and torch.cuda.is_available() else None
    index = torch.device(spec.device).index or 0
    if index >= torch.cuda.device_count():
        msg = f"device: {spec.device}, but torch sees {torch.cuda.device_count()} CUDA devices here."
        raise PipelineError(f"{msg}\n  Leave `device` out where there is no GPU: --set loader.device=null.")
    device = torch.device("cuda", index if ":" in spec.device else torch.cuda.current_device())
    return ToDevice(device, functools.partial(finish_numbers, ending=pipeline.leave_numbers()))


def finish_numbers(made: Made, ending: Ending | None) -> Made:
    """A batch whose images were left as uint8, with their numbers."""
    if made.raw is None or ending is None:
        return made
    value, place = made.value, made.raw
    images = finish_batch(value[place], ending)
    if isinstance(value, tuple):
        assert isinstance(place, int)
        return made._replace(value=(*value[:place], images, *value[place + 1 :]), raw=None)
    return made._replace(value={**value, place: images}, raw=None)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The same in page-locked memory."""
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with a function done to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(each, function) for name, each in value.items()}
    if isinstance(value, Ragged):
        return Ragged(function(value.values), function(value.offsets))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, function) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(each, function) for each in value])
    return value


def hand_over(source: Iterator[Any], mover: Mover) -> Iterator[Any]:
    """The values of `source`, each moved, in their order. `source` runs in a thread that ends with this iteration."""
    way = _Way()
    thread = threading.Thread(target=_send_all, args=(source, mover, way), name="wdskit-handover", daemon=True)
    thread.start()
    try:
        while (sent := way.next()) is not _END:
            yield mover.receive(sent)
            del sent
    finally:
        way.stop()
        thread.join()
        way.clear()


_END = object()


class _Way:
    """Between the two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: deque[Any] = deque()
        self._error: BaseException | None = None
        self._is_over = False

    def put(self, sent: Any) -> bool:
        """Wait for room. False when nobody wants any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._sent) < _NUM_AHEAD)
            if not self._is_over:
                self._sent.append(sent)
                self._changed.notify_all()
            return not self._is_over

    def stop(self, error: BaseException | None = None) -> None:
        """There is no more, or no more is wanted."""
        with self._changed:
            self._is_over = True
            self._error = self._error or error
            self._changed.notify_all()

    def next(self) -> Any:
        """What was sent next; raises what went wrong behind it; `_END` where there is no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._sent)
            if self._sent:
                sent = self._sent.popleft()
                self._changed.notify_all()
                return sent
            error, self._error = self._error, None
        if error is None:
            return _END
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a cycle would keep the loader alive

    def clear(self) -> None:
        """Let go of what nobody took."""
        self._sent.clear()
        self._error = None


def _send_all(source: Iterator[Any], mover: Mover, way: _Way) -> None:
    try:
        for value in source:
            if not way.put(mover.send(value)):
                break
            del value
    except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
        way.stop(err)
    else:
        way.stop()
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
