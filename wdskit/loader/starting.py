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


def start_method_of(stages: Iterable[Any], said: str | None) -> str:
    """How worker processes with these stages are to start now. A loader asks when it is made, so that what could not
    start is refused there, and each time that workers start, when CUDA may be initialised.

    Args:
        stages: Of the pipeline that they get.
        said: As `choose_start_method` takes it.

    Raises:
        PipelineError: They are to be forked, and CUDA is initialised; or they are not forked, and a lambda, a closure,
            or an object that does not pickle cannot reach them. It is named.
    """
    method = choose_start_method(said)
    if method == "fork":
        return method
    from multiprocessing.reduction import ForkingPickler

    for stage in stages:
        try:
            ForkingPickler.dumps(stage)
        except Exception as err:
            is_cuda = said != method and torch.cuda.is_initialized()
            why = ", as CUDA is initialised" if is_cuda else ""
            way = "iterate the loader before CUDA is used" if is_cuda else "use start_method: fork"
            reason = str(err) if isinstance(err, (pickle.PicklingError, AttributeError, TypeError)) else repr(err)
            msg = f"a stage cannot reach workers under {method!r}{why}: {reason}."
            raise PipelineError(f"{msg}\n  Define the function at the top of a module, or {way}.") from err
    return method
