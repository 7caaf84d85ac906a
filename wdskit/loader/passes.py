"""Passes over a planned pipeline: which epoch, from which position on, and what a state says of it. Pure arithmetic.

A state says what the *consumer* has received: what workers have ready does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from wdskit.errors import StateError
from wdskit.loader.states import beside, compare_fingerprints, unused_state
from wdskit.order.steps import Steps, Tail

STATE_VERSION = 1
_NUMBERS = ("epoch", "consumed", "start", "epoch_samples", "bad")
_MAX_NUMBER = 1 << 62  # two of them together are still an int64


class Pass(NamedTuple):
    """One pass: its epoch, where that starts in the endless sequence of samples, and the steps that are left."""

    epoch: int
    start: int
    steps: Steps


class Passes:
    """Counts epochs and samples.

    A pass starts at the loaded position if one is unused, else at 0 of the current epoch. Finishing it, which is noted
    before its last batch is handed out, advances the epoch.

    Args:
        epoch_samples: Positions of an epoch.
        batch: Samples of a rank's batch.
        world_size: Ranks.
        tail: What becomes of the positions behind the last full global batch.
        fingerprint: What the sequence of samples follows from, as plain JSON.

    Attributes:
        epoch: The epoch that the next pass runs, or the one that runs now.
        consumed: Positions of it that the consumer has received, on all ranks together.
    """

    def __init__(
        self, *, epoch_samples: int, batch: int, world_size: int, tail: Tail, fingerprint: Mapping[str, Any]
    ) -> None:
        self._own_samples = epoch_samples
        self._batch = batch
        self._world_size = world_size
        self._tail: Tail = tail
        self._fingerprint = dict(fingerprint)
        self._anchor = (0, 0)  # an epoch, and where it starts; later ones follow it
        self._loaded_samples: tuple[int, int] | None = None  # an epoch that was begun elsewhere, and its positions
        self._is_loaded = False
        self._running: Pass | None = None
        self.epoch = 0
        self.consumed = 0

    def __len__(self) -> int:
        """Steps of a whole epoch, on every rank alike."""
        return len(self._steps(self._own_samples, 0))

    @property
    def remaining(self) -> int:
        """Steps between what the consumer has received and the end of the epoch."""
        return len(self._steps(self._samples_of(self.epoch), self.consumed))

    def set_epoch(self, epoch: int, *, is_counted_elsewhere: bool = False) -> None:
        """Make `epoch` the one that the next pass runs; the loaded one keeps its position.

        Args:
            epoch: 0 or more.
            is_counted_elsewhere: Whether it may be one behind or ahead of the loaded one, see `beside`.

        Raises:
            StateError: A state of another epoch has been loaded and not used.
        """
        if self._is_loaded and is_counted_elsewhere:
            if beside(epoch, self.epoch, has_begun=self.consumed > 0) == "behind":
                return
            self._is_loaded = epoch == self.epoch
        if self._is_loaded and epoch != self.epoch:
            raise unused_state(epoch, self.epoch)
        if not self._is_loaded:
            self.epoch = epoch
            self.consumed = 0

    def begin(self) -> Pass:
        """Start a pass."""
        if not self._is_loaded:
            self.consumed = 0
        self._is_loaded = False
        steps = self._steps(self._samples_of(self.epoch), self.consumed)
        self._running = Pass(self.epoch, self._start_of(self.epoch), steps)
        if not len(steps):
            self._roll_over()
        return self._running

    def following(self, running: Pass) -> Pass:
        """The pass behind one, if nothing is set or loaded before it begins."""
        start = running.start + self._samples_of(running.epoch)
        return Pass(running.epoch + 1, start, self._steps(self._own_samples, 0))

    def received(self, running: Pass, step: int) -> None:
        """Note that the consumer is about to get the batch of `step`, unless a state was loaded meanwhile."""
        if running is not self._running:
            return
        self.consumed = running.steps.consumed_after(step)
        if step + 1 == len(running.steps):
            self._roll_over()

    def _roll_over(self) -> None:
        """Stand at the beginning of the next epoch, which starts where the last one ended."""
        stop = self._start_of(self.epoch) + self._samples_of(self.epoch)
        self.epoch += 1
        self.consumed = 0
        self._anchor = (self.epoch, stop)

    def _samples_of(self, epoch: int) -> int:
        if self._loaded_samples is not None and self._loaded_samples[0] == epoch:
            return self._loaded_samples[1]
        return self._own_samples

    def _start_of(self, epoch: int) -> int:
        anchor, start = self._anchor
        if epoch < anchor:
            return epoch * self._own_samples
        loaded, num_loaded = self._loaded_samples or (epoch, 0)
        further = num_loaded - self._own_samples if anchor <= loaded < epoch else 0
        return start + (epoch - anchor) * self._own_samples + further

    def _steps(self, num_samples: int, consumed: int) -> Steps:
        return Steps(num_samples, self._batch, self._world_size, self._tail, consumed)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands, as plain JSON, the same on every rank."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "start": self._start_of(self.epoch),
            "epoch_samples": self._samples_of(self.epoch),
            "bad": 0,
            "fingerprint": dict(self._fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Stand where a state says.

        Args:
            state: From `state_dict`, of this pipeline on any number of ranks and workers.
            strict: Whether a state of another sequence is refused, or logged and taken.

        Raises:
            StateError: It is no state, or one of another sequence of samples; the field is named.
        """
        numbers = _check(state)
        compare_fingerprints(self._fingerprint, state["fingerprint"], strict=strict)
        self.epoch, self.consumed, start, samples, _ = numbers
        self._anchor = (self.epoch, start)
        self._loaded_samples = (self.epoch, samples)
        self._is_loaded = True
        self._running = None


def _check(state: Any) -> list[int]:
    """The numbers of a state."""
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
        version = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"this is not the state of a planned loader of version {STATE_VERSION}, but {version!r}.")
    numbers = [state.get(name) for name in _NUMBERS]
    for name, number in zip(_NUMBERS, numbers, strict=True):
        if type(number) is not int or not 0 <= number < _MAX_NUMBER:
            raise StateError(f"state: {name} is {number!r}, not a whole number from 0 to 2**62 - 1.")
    if state["consumed"] > state["epoch_samples"]:
        msg = f"state: consumed is {state['consumed']}, more than the {state['epoch_samples']} samples of its epoch."
        raise StateError(f"{msg}\n  It is damaged.")
    if not isinstance(state.get("fingerprint"), Mapping):
        raise StateError("state: fingerprint is missing.")
    return [number for number in numbers if number is not None]
