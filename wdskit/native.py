"""Load the optional package `wdskit-native`: functions in C with the same results as the Python code they replace."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from wdskit.errors import WdskitError

INTERFACE = 3
"""Version of the interface that this version of wdskit calls."""

_VARIABLE = "WDSKIT_NATIVE"
_INSTALL = "Install the package that comes with this version: pip install ./native"

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def native() -> Any:
    """Return the module `wdskit_native`; None if the module cannot be used, or if `WDSKIT_NATIVE=0` is set.

    The module cannot be used if it is not installed, cannot be loaded, or does not have the interface `INTERFACE`. A
    warning is logged if it is installed but cannot be used.

    Raises:
        WdskitError: `WDSKIT_NATIVE=require` is set and the module cannot be used, or the value of the variable is not
            0, `require` or empty.
    """
    setting = os.environ.get(_VARIABLE, "")
    if setting not in {"", "0", "require"}:
        raise WdskitError(f"{_VARIABLE}={setting}: unknown. Write `0` to do without it, or `require`.")
    if setting == "0":
        return None
    problem = ""
    try:
        import wdskit_native

        if wdskit_native.INTERFACE == INTERFACE:
            return wdskit_native
        problem = f"wdskit-native has interface {wdskit_native.INTERFACE}, this version of wdskit needs {INTERFACE}"
    except ModuleNotFoundError:
        if setting == "require":
            raise WdskitError(f"{_VARIABLE}=require: wdskit-native is not installed.\n  {_INSTALL}") from None
    except ImportError as err:  # for example, libjpeg is missing
        problem = f"wdskit-native cannot be loaded: {err}"
    if problem and setting == "require":
        raise WdskitError(f"{_VARIABLE}=require: {problem}.\n  {_INSTALL}")
    if problem:
        _log.warning("%s. It is not used.\n  %s", problem, _INSTALL)
    return None


def describe_native() -> str:
    """Return "with wdskit-native 0.1.0" (its version) or "without wdskit-native", for `wdskit --version`.

    Raises:
        WdskitError: `WDSKIT_NATIVE` has an unknown value, or is `require` and the module cannot be used.
    """
    from importlib.metadata import version  # here, because worker processes do not need it

    return f"with wdskit-native {version('wdskit-native')}" if native() is not None else "without wdskit-native"
