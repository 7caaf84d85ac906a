"""Batches on their way to who consumes them: into page-locked memory, and from there to a device, in a thread ahead."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from wdskit.engine.batch import Batch
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Program
from wdskit.errors import PipelineError
from wdskit.pipeline.settings import LoaderSpec
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


def make_mover(program: Program, spec: LoaderSpec) -> tuple[Mover | None, Program]:
    """The one that a loader's settings ask for, None where batches stay as they are; and what makes batches for it.

    Raises:
        PipelineError: There is no such device.
    """
    if spec.device is None:
        return pin_mover(spec), program
    index = torch.device(spec.device).index or 0
    if index >= torch.cuda.device_count():
        msg = f"device: {spec.device}, but torch sees {torch.cuda.device_count()} CUDA devices here."
        raise PipelineError(f"{msg}\n  Leave `device` out where there is no GPU: --set loader.device=null.")
    device = torch.device("cuda", index if ":" in spec.device else torch.cuda.current_device())
    program, ending = program.without_numbers()
    return ToDevice(device, functools.partial(finish_numbers, ending=ending)), program


def pin_mover(spec: LoaderSpec) -> Mover | None:
    """Into page-locked memory, where that is asked for and there is a GPU."""
    return Pin() if spec.pin_memory and torch.cuda.is_available() else None


def finish_numbers(batch: Batch, ending: Ending | None) -> Batch:
    """A batch whose images were left as uint8, with their numbers."""
    if batch.raw is None or ending is None:
        return batch
    value, place = batch.value, batch.raw
    images = finish_batch(value[place], ending)
    if isinstance(value, tuple):
        assert isinstance(place, int)
        return batch._replace(value=(*value[:place], images, *value[place + 1 :]), raw=None)
    return batch._replace(value={**value, place: images}, raw=None)


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
    queue = _Queue()
    thread = threading.Thread(target=_send_all, args=(source, mover, queue), name="wdskit-device", daemon=True)
    thread.start()
    try:
        while (outcome := queue.get()) is not None:
            yield mover.receive(outcome.result())
            del outcome
    finally:
        queue.end()
        thread.join()
        queue.clear()


class _Queue:
    """Between the two threads: outcomes, and None behind the last."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Outcome[Any]] = deque()
        self._is_over = False

    def put(self, outcome: Outcome[Any]) -> bool:
        """Wait for room. False when nobody wants any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._waiting) < _NUM_AHEAD)
            if not self._is_over:
                self._waiting.append(outcome)
                self._changed.notify_all()
            return not self._is_over

    def end(self) -> None:
        """There is no more, or no more is wanted."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def get(self) -> Outcome[Any] | None:
        """The next one; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._waiting)
            self._changed.notify_all()
            return self._waiting.popleft() if self._waiting else None

    def clear(self) -> None:
        """Let go of what nobody took."""
        self._waiting.clear()


def _send_all(source: Iterator[Any], mover: Mover, queue: _Queue) -> None:
    try:
        for value in source:
            if not queue.put(Outcome(mover.send(value))):
                break
            del value
    except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
        queue.put(Outcome(error=err))
    finally:
        queue.end()
        close = getattr(source, "close", None)
        if close is not None:
            close()
