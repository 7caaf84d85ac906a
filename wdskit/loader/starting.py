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


def choose_start_method(said: str | None) -> str:
    """How worker processes are to start now.

    Args:
        said: What the user said; None for torch's default, but never fork once CUDA is initialised.

    Raises:
        PipelineError: They are to be forked, and CUDA is initialised.
    """
    # Asking for the default would settle it, and a later set_start_method of the user's would fail.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if (said or default) != "fork" or not torch.cuda.is_initialized():
        return said or default
    if said is None:
        logger.info("CUDA is initialised, so workers are not forked: start_method is forkserver")
        return "forkserver"
    msg = "CUDA is initialised, so workers cannot be forked."
    raise PipelineError(f"{msg}\n  Use start_method: forkserver, or leave it out.")


def check_sendable(stages: Iterable[Any], method: str) -> None:
    """Name the function or stage that cannot reach workers that are not forked.

    Raises:
        PipelineError: A lambda, a closure, or an object that does not pickle.
    """
    if method == "fork":
        return
    from multiprocessing.reduction import ForkingPickler

    for stage in stages:
        try:
            ForkingPickler.dumps(stage)
        except (pickle.PicklingError, AttributeError, TypeError) as err:
            msg = f"a stage cannot reach workers under {method!r}: {err}."
            raise PipelineError(
                f"{msg}\n  Define the function at the top of a module, or use start_method: fork."
            ) from err
