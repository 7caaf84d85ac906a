"""The state of a stream: where each worker of one rank stands, as plain JSON."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdskit.errors import StateError
from wdskit.loader.passes import compare_fingerprints
from wdskit.pipeline.board import Standing
from wdskit.pipeline.marks import How, Mark

STATE_VERSION = 1
_MAX_NUMBERS = 1 << 26


@dataclass(frozen=True)
class StreamState:
    """Where the consumer of one rank stands.

    Attributes:
        epoch: The epoch that is to go on.
        how: Whether it goes on behind what was received, begins where the one before was left, or begins a stream.
        received: Items of it (or of the one that was left) that each worker has given to the consumer.
        next_worker: The worker whose turn it is.
        starts: Where each worker stood when the epoch began; None at the beginning of a stream.
        marks: The last place of each that the consumer has passed; None where that is the epoch's beginning.
    """

    epoch: int
    how: How
    received: tuple[int, ...]
    next_worker: int
    starts: tuple[Standing | None, ...]
    marks: tuple[Mark | None, ...]

    def to_json(self, setting: Mapping[str, int], fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """As plain JSON; `setting` are rank, world size and what else must be the same to go on."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "how": self.how.name.lower(),
            "received": list(self.received),
            "next_worker": self.next_worker,
            "starts": [start and _packed(start) for start in self.starts],
            "marks": [mark and [mark.num_items, _packed(mark.standing)] for mark in self.marks],
            "setting": dict(setting),
            "fingerprint": dict(fingerprint),
        }


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
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION or "received" not in state:
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
            epoch=_natural(state["epoch"]),
            how=How[state["how"].upper()],
            received=tuple(map(_natural, state["received"])),
            next_worker=_natural(state["next_worker"]),
            starts=tuple(start and _unpacked(start) for start in state["starts"]),
            marks=tuple(mark and Mark(_natural(mark[0]), _unpacked(mark[1])) for mark in state["marks"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, zlib.error, binascii.Error) as err:
        raise StateError(f"state: it is damaged: {type(err).__name__}: {err}.") from err


def _packed(standing: Standing) -> str:
    """The numbers of a standing: those it holds are near each other, so that differences are small."""
    numbers = np.array(standing.numbers(), dtype="<i8")
    return base64.b64encode(zlib.compress(np.diff(numbers, prepend=0).tobytes(), 9)).decode()


def _unpacked(text: str) -> Standing:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), 8 * _MAX_NUMBERS)
    return Standing.of_numbers(np.cumsum(np.frombuffer(data, dtype="<i8")).tolist())


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        msg = f"{value!r} is no whole number of 0 or more"
        raise ValueError(msg)
    return value
