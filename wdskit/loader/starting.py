"""How worker processes start, and what cannot reach them."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from wdskit.errors import PipelineError

logger = logging.getLogger(__name__)


def choose_start_method(said: str | None, *, reads_store: bool = False) -> str:
    """How worker processes are to start now.

    Args:
        said: What the user said; None for torch's default, but never fork once CUDA is initialised, nor where shards
            stand in a store, whose client hangs in a forked process.
        reads_store: Whether they do.

    Raises:
        PipelineError: They are to be forked, and cannot be.
    """
    # Asking for the default would settle it, and a later set_start_method of the user's would fail.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    reason = why_not_fork(reads_store=reads_store)
    if (said or default) != "fork" or not reason:
        return said or default
    if said is None:
        logger.info("%s, so workers are not forked: start_method is forkserver", reason)
        return "forkserver"
    msg = f"{reason}, so workers cannot be forked."
    raise PipelineError(f"{msg}\n  Use start_method: forkserver, or leave it out.")


def why_not_fork(*, reads_store: bool) -> str:
    """Why workers cannot be forked now, "" where they can."""
    if reads_store:
        return "the shards stand in a store"
    return "CUDA is initialised" if torch.cuda.is_initialized() else ""


def start_method_of(stages: Iterable[Any], said: str | None, *, reads_store: bool = False) -> str:
    """How worker processes with these stages are to start now. A loader asks when it is made, so that what could not
    start is refused there, and each time that workers start, when CUDA may be initialised.

    Args:
        stages: Of the pipeline that they get.
        said: As `choose_start_method` takes it.
        reads_store: As `choose_start_method` takes it.

    Raises:
        PipelineError: They are to be forked, and cannot be; or they are not forked, and a lambda, a closure, or an
            object that does not pickle cannot reach them. It is named.
    """
    method = choose_start_method(said, reads_store=reads_store)
    if method == "fork":
        return method
    from multiprocessing.reduction import ForkingPickler

    for stage in stages:
        try:
            ForkingPickler.dumps(stage)
        except Exception as err:
            reason = why_not_fork(reads_store=reads_store) if said != method else ""
            why = f", as {reason}" if reason else ""
            way = {"": "use start_method: fork", "CUDA is initialised": "iterate the loader before CUDA is used"}.get(
                reason, "use workers: 0"
            )
            what = str(err) if isinstance(err, (pickle.PicklingError, AttributeError, TypeError)) else repr(err)
            msg = f"a stage cannot reach workers under {method!r}{why}: {what}."
            raise PipelineError(f"{msg}\n  Define the function at the top of a module, or {way}.") from err
    return method
