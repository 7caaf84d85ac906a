"""What states of planned sources and of streams have in common: epochs that fit, and data that are the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from wdskit.errors import StateError

logger = logging.getLogger(__name__)

_CONTENT = "content"
_ORDER = "order_version"
_ADVICE = "Give the loader the same settings, or load with strict=False to continue from the same numbers."


def unused_state(epoch: int, loaded: int) -> StateError:
    """The error of `set_epoch(epoch)` where a state in epoch `loaded` has not been used."""
    msg = f"set_epoch({epoch}): a state in epoch {loaded} was loaded and has not been used."
    return StateError(f"{msg}\n  Begin with it: `for epoch in range(loader.epoch, ...)`.")


def beside(epoch: int, loaded: int, *, has_begun: bool) -> Literal["same", "behind", "ahead"]:
    """Where the epoch that a framework counts stands to that of a loaded state.

    Args:
        epoch: The framework's.
        loaded: The state's.
        has_begun: Whether the state is behind the first batch of its epoch.

    Returns:
        "behind": the epoch before has its last batch out, and the framework has not counted it yet.
        "ahead": the framework has ended the loaded epoch before its end.

    Raises:
        StateError: It is neither.
    """
    if epoch == loaded:
        return "same"
    if epoch == loaded - 1 and not has_begun:
        return "behind"
    if epoch == loaded + 1 and has_begun:
        logger.warning("epoch %d continues with the next one: the rest of it is not read", loaded)
        return "ahead"
    raise unused_state(epoch, loaded)


def compare_fingerprints(here: Mapping[str, Any], there: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse a state of another sequence of samples, or log that it is one.

    Raises:
        StateError: It is, and `strict`.
    """
    differing = _differences(here, there)
    if differing and strict:
        raise StateError(f"this state belongs to a different sequence of samples: {'; '.join(differing)}.\n  {_ADVICE}")
    if differing:
        logger.warning("the loaded state belongs to a different sequence of samples: %s", "; ".join(differing))


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Each field in which two fingerprints differ, with both values; what the shards hold, where both note it."""
    (here, own), (there, others) = _divided(here), _divided(there)
    if here.get("source") == there.get("source") and there.get(_ORDER) != here.get(_ORDER):
        source = f"`{here.get('source')}` has order version {here.get(_ORDER)!r} in this wdskit"
        return [f"{source} and {there.get(_ORDER)!r} in the state; the same settings give a different sequence"]
    names = dict.fromkeys([*here, *there])
    differing = [
        f"{name} is {here.get(name)!r} here and {there.get(name)!r} in the state"
        for name in names
        if here.get(name) != there.get(name)
    ]
    if not differing and any(None not in pair and pair[0] != pair[1] for pair in zip(own, others, strict=True)):
        differing.append("shards with these names and sample counts have other bytes now, by their sha256")
    return differing


def _divided(fingerprint: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """A fingerprint without what its shards hold, and that of each part; None where it is not noted."""
    parts = fingerprint.get("parts")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        rest = {name: value for name, value in fingerprint.items() if name != _CONTENT}
        return rest, [fingerprint.get(_CONTENT)]
    bare = [{name: value for name, value in part.items() if name != _CONTENT} for part in parts]
    return {**fingerprint, "parts": bare}, [part.get(_CONTENT) for part in parts]
