"""The state of a loader: its epoch, the samples that the consumer has received, and the fingerprint of their order.

Only batches that the consumer has received count. Batches that workers have ready do not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from wdskit.errors import StateError, check_whole
from wdskit.order.steps import AnySteps
from wdskit.stages.epoch import EpochLayout

logger = logging.getLogger(__name__)

STATE_VERSION = 1
_NUMBERS = ("epoch", "consumed", "start", "epoch_samples", "bad")
_CONTENT = "content"
_DIGEST = "digest"
_OTHER_DATA = "other shards, by name, size or bytes, or other samples of them, by `split`, `where`, `range` or a column"
_ADVICE = "Give the loader the same settings and data, or load with strict=False to continue from the same numbers."


class Pass(NamedTuple):
    """One iteration over an epoch, or over the rest of an epoch.

    Attributes:
        epoch: Number of the epoch.
        start: Position of the epoch's start in the endless sequence of samples.
        steps: The steps that remain of the epoch.
    """

    epoch: int
    start: int
    steps: AnySteps


class EpochCounter:
    """Counts the epochs and samples of a planned loader.

    A pass starts at the position of a loaded state of which no batch was received yet, otherwise at the start of the
    current epoch. The epoch advances before the last batch of a pass is yielded, and at the end of a pass that is left
    early. The state still has the consumer's position in the epoch that was left, until the next pass begins.

    Args:
        layout: Number of samples, batch size and fingerprint of the epochs.
        world_size: Number of ranks.

    Attributes:
        epoch: Number of the running epoch. Between two passes, and after the last step of a pass: number of the epoch
            that the next pass runs.
        consumed: Number of positions of this epoch that the consumer has received, on all ranks together.
    """

    def __init__(self, layout: EpochLayout, *, world_size: int) -> None:
        self._layout = layout
        self._world_size = world_size
        self._anchor = (0, 0, layout.num_samples)  # an epoch, its start and its samples: those of a loaded state
        self._is_loaded = False
        self._running: Pass | None = None
        self._left: tuple[int, int] | None = None  # number of an epoch that was left early, and its consumed samples
        self.epoch = 0
        self.consumed = 0

    def __len__(self) -> int:
        """Return the number of steps of the whole epoch `self.epoch`, which is the same on every rank."""
        return len(self._steps(self._start_of(self.epoch), self._samples_of(self.epoch), 0))

    @property
    def remaining(self) -> int:
        """Number of steps of the epoch `self.epoch` that the consumer has not received yet."""
        return len(self._steps(self._start_of(self.epoch), self._samples_of(self.epoch), self.consumed))

    def set_epoch(self, epoch: int, *, is_counted_elsewhere: bool = False) -> None:
        """Set the epoch of the next pass, which runs the whole epoch. If a loaded state has the same epoch, the next
        pass starts at the position of the state.

        Args:
            epoch: 0 or more.
            is_counted_elsewhere: Whether a framework counts the epochs. If True, `epoch` may differ by one from the
                epoch of a loaded state. If `epoch` is one less, and the state was saved at the start of its epoch, this
                call does nothing. If `epoch` is one more, and the state was saved later in its epoch, the next pass
                runs `epoch`.

        Raises:
            StateError: A state of another epoch was loaded, and no pass has used the state yet.
        """
        if self._is_loaded:
            step = epoch - self.epoch
            if step and (not is_counted_elsewhere or step != (1 if self.consumed else -1)):
                raise unused_state(epoch, self.epoch)
            if step <= 0:
                return  # -1: saved with the last batch of `epoch`, which the framework has not counted yet
            self._is_loaded = False  # the framework ended the epoch of the state early
            logger.warning("the rest of epoch %d is not read: the framework continues with the next epoch", self.epoch)
        self.epoch = epoch
        self.consumed = 0
        self._left = None

    def begin(self) -> Pass:
        """Start a pass and return it. If the current epoch has no steps left, the pass is empty, and the next epoch
        becomes the current epoch.
        """
        self._left = None
        start = self._start_of(self.epoch)
        steps = self._steps(start, self._samples_of(self.epoch), self.consumed)
        running = self._running = Pass(self.epoch, start, steps)
        if not len(steps):
            self._roll_over()
        return running

    def end(self, running: Pass) -> None:
        """End a pass. If the consumer received a batch of the pass, and left the pass early, the next epoch becomes the
        current epoch. Do nothing if a state was loaded, or another pass was started, since `running` started.
        """
        if running is self._running and not self._is_loaded and self.consumed:
            self._left = self.epoch, self.consumed
            self._roll_over()

    def following(self, running: Pass) -> Pass:
        """Return the pass over the whole epoch after `running`. The pass is not started. A later call of `set_epoch` or
        `load_state_dict` can still choose another pass.
        """
        start = running.start + self._samples_of(running.epoch)
        return Pass(running.epoch + 1, start, self._steps(start, self._layout.num_samples, 0))

    def received(self, running: Pass, step: int) -> None:
        """Count a step of a pass, before its batch is yielded. `step` is the number of the step in the pass, from 0.

        After the last step, the next epoch becomes the current epoch. Do nothing if a state was loaded, or another pass
        was started, since `running` started.
        """
        if running is not self._running:
            return
        self._is_loaded = False
        self.consumed = running.steps.consumed_after(step)
        if step + 1 == len(running.steps):
            self._roll_over()

    def _roll_over(self) -> None:
        """Make the next epoch the current epoch, with no positions consumed."""
        self.epoch += 1
        self.consumed = 0
        self._is_loaded, self._running = False, None

    def _samples_of(self, epoch: int) -> int:
        anchor, _, num_samples = self._anchor
        return num_samples if epoch == anchor else self._layout.num_samples

    def _start_of(self, epoch: int) -> int:
        anchor, start, num_samples = self._anchor
        if epoch <= anchor:
            return start if epoch == anchor else epoch * self._layout.num_samples
        return start + num_samples + (epoch - anchor - 1) * self._layout.num_samples

    def _steps(self, start: int, num_samples: int, consumed: int) -> AnySteps:
        return self._layout.steps(self._world_size, start=start, consumed=consumed, num_samples=num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the consumer's position as plain JSON (see `PlannedLoader.state_dict`). `bad` is always 0 here."""
        epoch, consumed = self._left or (self.epoch, self.consumed)
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "consumed": consumed,
            "start": self._start_of(epoch),
            "epoch_samples": self._samples_of(epoch),
            "bad": 0,
            "fingerprint": add_digest(self._layout.fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Start the next pass at the position of a state. Return the state as plain JSON.

        Args:
            state: From `state_dict`, of this pipeline on any number of ranks and workers.
            strict: If True, refuse a state of another sequence of samples. If False, log the difference, and continue
                in the same epoch after about the same number of samples.

        Raises:
            StateError: `state` is not a state of a planned loader, or `strict` is True and the state belongs to another
                sequence of samples. The message names the difference.
        """
        state = plain_state(state)
        epoch, consumed, start, samples, _ = _check_numbers(state)
        if differing := _differing(self._layout.fingerprint, state["fingerprint"]):
            refuse_state(differing, strict=strict)
            start, samples = epoch * self._layout.num_samples, self._layout.num_samples
            consumed = self._layout.resume_point(epoch, consumed)
        self.epoch, self.consumed = epoch, consumed
        self._anchor = (self.epoch, start, samples)
        self._is_loaded = True
        self._running = self._left = None
        return state


def plain_state(state: Any) -> dict[str, Any]:
    """Return a copy of a state as plain JSON. StateError: `state` is not plain JSON."""
    try:
        return dict(json.loads(json.dumps(_with_whole_numbers(state))))
    except (TypeError, ValueError, RecursionError) as err:
        raise StateError(f"this is not the state of a loader, a dict of plain JSON: {err}.") from err


def _check_numbers(state: Any) -> list[int]:
    """Return the numbers of a state, in the order of `_NUMBERS`.

    Raises:
        StateError: `state` is damaged or not from a planned loader.
    """
    if (version := state.get("version")) != STATE_VERSION:
        raise StateError(f"this is not the state of a planned loader of version {STATE_VERSION}, but {version!r}.")
    most = 2**62 - 1  # the sum of two such numbers is an int64
    numbers = [check_whole(f"state: {name}", state.get(name), StateError, most=most) for name in _NUMBERS]
    if state["consumed"] > state["epoch_samples"]:
        raise StateError(f"state: consumed is {state['consumed']}, more than epoch_samples, {state['epoch_samples']}.")
    if not isinstance(state.get("fingerprint"), Mapping):
        raise StateError("state: fingerprint is missing.")
    return numbers


def unused_state(epoch: int, loaded: int) -> StateError:
    """Return the StateError for `set_epoch(epoch)` while a loaded state of epoch `loaded` waits to be used."""
    msg = f"set_epoch({epoch}): a state in epoch {loaded} was loaded and has not been used."
    return StateError(f"{msg}\n  Begin with it: `for epoch in range(loader.epoch, ...)`.")


def add_digest(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a fingerprint with `digest`, a sha256 of all its fields except the digests of shards.

    torch.distributed.checkpoint loads only the fields that the loader's own state has. If the saved state has more
    fields, only the digest shows it.
    """
    return {**fingerprint, _DIGEST: _digest_of(fingerprint)}


def _digest_of(fingerprint: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(_with_whole_numbers(_bare(fingerprint)), sort_keys=True).encode()).hexdigest()


def _bare(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fingerprint without its digest, and without the digests of the shards of its data sets."""
    bare = {name: value for name, value in fingerprint.items() if name not in (_CONTENT, _DIGEST)}
    parts = bare.get("parts")
    if isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts):
        bare["parts"] = [{name: value for name, value in part.items() if name != _CONTENT} for part in parts]
    return bare


def _with_whole_numbers(value: Any) -> Any:
    """Return a copy of plain JSON in which each float without a fraction, such as 1.0, is an int. So equal numbers
    give the same text.
    """
    if isinstance(value, Mapping):
        return {str(name): _with_whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refuse_state(differing: Sequence[str], *, strict: bool) -> None:
    """Raise the StateError for a state that differs from its loader, or with `strict=False` log its message."""
    msg = f"this state belongs to a different sequence of samples: {'; '.join(differing)}."
    if strict:
        raise StateError(f"{msg}\n  {_ADVICE}")
    logger.warning("%s", msg)


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return a text for each item in which two mappings differ. Digests are shown as `…`."""
    texts = []
    for name in dict.fromkeys([*here, *there]):
        mine, other = (re.sub("[0-9a-f]{64}", "…", repr(each.get(name))) for each in (here, there))
        if here.get(name) != there.get(name):
            texts.append(f"{name} is {mine} here and {other} there" if mine != other else f"{name}: {_OTHER_DATA}")
    return texts


def _differing(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return a text for each field in which two fingerprints differ; an empty list if no field differs.

    Digests are compared only if all other fields are equal; a digest that one fingerprint lacks counts as equal.
    """
    differing = differences(_bare(own), _bare(saved))
    if not differing and saved.get(_DIGEST) not in (None, _digest_of(own)):
        differing = ["the state has a setting that this loader lacks, such as `where`, `repeat` or `weights`"]
    if not differing:
        pairs = zip(own.get("parts") or [own], saved.get("parts") or [saved], strict=True)
        contents = [(mine.get(_CONTENT), other.get(_CONTENT)) for mine, other in pairs]
        if any(None not in pair and pair[0] != pair[1] for pair in contents):
            differing = ["shards with these names and sample counts have other bytes now, by their sha256"]
    return differing
