"""The state of a stream: where each worker of one rank stands, as plain JSON."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdskit.engine.board import Standing
from wdskit.engine.marks import How, Mark, Start
from wdskit.errors import StateError
from wdskit.loader.passes import compare_fingerprints

STATE_VERSION = 1
_MAX_NUMBERS = 1 << 26
_MAX_EPOCH = 1 << 30  # its draws are numbers of 63 bits


@dataclass(frozen=True)
class StreamState:
    """Where the consumer of one rank stands.

    Attributes:
        epoch: The epoch that is to go on.
        next_worker: The worker whose turn it is.
        workers: How each goes on.
    """

    epoch: int
    next_worker: int
    workers: tuple[Start, ...]

    @property
    def received(self) -> list[int]:
        """Items of `epoch` that each worker has given to the consumer."""
        return [worker.num_items if worker.how is How.RESUME else 0 for worker in self.workers]

    def to_json(self, setting: Mapping[str, int], fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """As plain JSON; `setting` are rank, world size and what else must be the same to go on."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "next_worker": self.next_worker,
            "workers": [_worker_to_json(worker) for worker in self.workers],
            "setting": dict(setting),
            "fingerprint": dict(fingerprint),
        }


def _worker_to_json(start: Start) -> dict[str, Any]:
    return {
        "how": start.how.name.lower(),
        "epoch": start.epoch,
        "received": start.num_items,
        "begun": start.begun and _packed(start.begun),
        "mark": start.mark and [start.mark.num_items, _packed(start.mark.standing)],
    }


def _worker_of_json(worker: Mapping[str, Any]) -> Start:
    begun, mark = worker["begun"], worker["mark"]
    return Start(
        how=How[worker["how"].upper()],
        epoch=_natural("a worker's epoch", worker["epoch"], _MAX_EPOCH),
        num_items=_natural("received", worker["received"]),
        mark=mark and Mark(_natural("mark", mark[0]), _unpacked("mark", mark[1])),
        begun=begun and _unpacked("begun", begun),
    )


def read_state(state: Any, setting: Mapping[str, int], fingerprint: Mapping[str, Any], *, strict: bool) -> StreamState:
    """A state that was JSON.

    Args:
        state: From `StreamState.to_json`.
        setting: This loader's.
        fingerprint: This loader's.
        strict: Whether a state of another order of samples is refused, or logged and taken.

    Raises:
        StateError: It is no state of a stream, or one of other ranks, workers or data; what differs is named.
    """
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION or "workers" not in state:
        raise StateError(f"this is no state of a stream of version {STATE_VERSION}.")
    there = state.get("setting")
    if there != dict(setting):
        msg = f"a stream goes on with the ranks, workers and threads that it was stopped with: {there} in the state"
        raise StateError(f"{msg}, {dict(setting)} here.\n  Use the same, or a planned source, which takes any.")
    if not isinstance(state.get("fingerprint"), Mapping):
        raise StateError("state: fingerprint is missing.")
    compare_fingerprints(fingerprint, state["fingerprint"], strict=strict)
    try:
        return StreamState(
            epoch=_natural("epoch", state["epoch"], _MAX_EPOCH),
            next_worker=_natural("next_worker", state["next_worker"], len(state["workers"])),
            workers=tuple(map(_worker_of_json, state["workers"])),
        )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, zlib.error, binascii.Error) as err:
        raise StateError(f"state: it is damaged: {type(err).__name__}: {err}.") from err


def _packed(standing: Standing) -> str:
    """The numbers of a standing: those it holds are near each other, so that differences are small."""
    numbers = np.array(standing.numbers(), dtype="<i8")
    return base64.b64encode(zlib.compress(np.diff(numbers, prepend=0).tobytes(), 9)).decode()


def _unpacked(name: str, text: str) -> Standing:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), 8 * _MAX_NUMBERS)
    numbers = np.cumsum(np.frombuffer(data, dtype="<i8"))
    if len(numbers) and numbers.min() < 0:
        msg = f"{name} holds {numbers.min()}, where a whole number of 0 or more belongs"
        raise ValueError(msg)
    standing = Standing.of_numbers(numbers.tolist())
    _natural(f"{name}: first epoch", standing.first_epoch, _MAX_EPOCH)
    return standing


def _natural(name: str, value: object, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value < most:
        msg = f"{name} is {value!r}, where a whole number from 0 to {most - 1} belongs"
        raise ValueError(msg)
    return value
