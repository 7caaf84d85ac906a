"""Load the optional extension `wdskit._native`: functions in C that setup.py builds from native/."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

from wdskit.errors import WdskitError

INTERFACE = 4
"""Version of the interface that this version of wdskit calls."""

_VARIABLE = "WDSKIT_NATIVE"
_INSTALL = "Install a C compiler and the headers of libjpeg-turbo, and then wdskit again."

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def native() -> Any:
    """Return the module `wdskit._native`; None if the module cannot be used, or if `WDSKIT_NATIVE=0` is set.

    The module cannot be used if it was not built, cannot be loaded, or does not have the interface `INTERFACE`. A
    warning is logged if it was built but cannot be used.

    Raises:
        WdskitError: `WDSKIT_NATIVE=require` is set and the module cannot be used, or the value of the variable is not
            0, `require` or empty.
    """
    setting = os.environ.get(_VARIABLE, "")
    if setting not in {"", "0", "require"}:
        raise WdskitError(f"{_VARIABLE}={setting}: unknown. Write `0` to do without it, or `require`.")
    if setting == "0":
        return None
    try:
        module = importlib.import_module("wdskit._native")
        if module.INTERFACE == INTERFACE:
            return module
        problem = f"wdskit._native has interface {module.INTERFACE}, this version of wdskit needs {INTERFACE}"
    except ImportError as err:  # it was not built, or libjpeg is missing
        problem = str(err)
        if isinstance(err, ModuleNotFoundError) and setting == "":
            return None
    if setting == "require":
        raise WdskitError(f"{_VARIABLE}=require: {problem}.\n  {_INSTALL}")
    _log.warning("%s. wdskit runs without it.\n  %s", problem, _INSTALL)
    return None


def describe_native() -> str:
    """Return "with native code" or "without native code", for `wdskit --version`.

    Raises:
        WdskitError: `WDSKIT_NATIVE` has an unknown value, or is `require` and the module cannot be used.
    """
    return "without native code" if native() is None else "with native code"
