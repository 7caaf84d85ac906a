"""YAML scalars by the core schema of YAML 1.2, and the variables in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from wdskit.errors import WdskitError
from wdskit.limits import MAX_CONFIG_BYTES
from wdskit.pipeline.problems import show

Scalar = str | int | float | bool | None

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = {".nan", ".NaN", ".NAN"}
_SEXAGESIMAL = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?")
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{[^}\n]{0,60}\}?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

MAX_DIGITS = 25
"""Longest number that is read. 2**64 has 20 digits; more is a typing slip or text without its quotes."""


class ScalarError(WdskitError):
    """A scalar that is refused. Callers turn it into a `Problem`; the message is its rule."""


class Variables:
    """Fills in `${NAME}` and `${NAME:-default}`; `$$` is a `$`.

    Args:
        environment: Where names are looked up; by default the process's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = os.environ if environment is None else environment
        self._room = MAX_CONFIG_BYTES

    def fill(self, text: str) -> str:
        """The text with its variables filled in. What is filled in is not looked at again.

        Raises:
            ScalarError: A variable is not set and has no default, or `${` is followed by something else.
        """
        return _VARIABLE.sub(self._value, text) if "$" in text else text

    def _value(self, found: re.Match[str]) -> str:
        name, default = found.groups()
        if found[0] == "$$":
            return "$"
        if name is None:
            msg = f"{show(found[0])} is no variable. Write ${{NAME}} or ${{NAME:-default}}; `$$` gives a `$`."
            raise ScalarError(msg)
        if default is not None and "${" in default:
            raise ScalarError(f"{show(found[0])}: a default cannot hold another variable.")
        value = self.environment.get(name)
        if default is not None and not value:
            return str(default)
        if value is None:
            raise ScalarError(f"the environment variable `{name}` is not set. Set it, or write ${{{name}:-default}}.")
        self._room -= len(value)
        if self._room < 0:
            raise ScalarError(f"the variables fill in more than {MAX_CONFIG_BYTES} characters in all.")
        return value


def type_plain(text: str) -> Scalar:
    """The value of a scalar without quotes.

    Raises:
        ScalarError: Readers of YAML disagree about it, or the number is too long.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text[0] not in "0123456789+-.":
        return text
    if _SEXAGESIMAL.fullmatch(text):
        raise ScalarError(f"{show(text)} is a number of base 60 to some and text to others. Put it in quotes.")
    if _LEADING_ZERO.fullmatch(text):
        raise ScalarError(f"{show(text)} starts with a zero: text needs quotes, a number no zero.")
    return _number(text)


def check_text(text: str) -> str:
    """The text, unless it holds what no setting can.

    Raises:
        ScalarError: It holds a control character or half of a character.
    """
    if bad := _CONTROL.search(text):
        what = "half of a character," if bad[0] >= "\ud800" else "the control character"
        raise ScalarError(f"{show(text)} holds {what} U+{ord(bad[0]):04X}; remove it.")
    return text


def _number(text: str) -> Scalar:
    if text in _NAN:
        return float("nan")
    if found := _INFINITE.fullmatch(text):
        return float(f"{found[1]}inf")
    base = 10 if _INT.fullmatch(text) else 8 if _OCTAL.fullmatch(text) else 16 if _HEX.fullmatch(text) else 0
    if not base and not _FLOAT.fullmatch(text):
        return text
    if len(text) > MAX_DIGITS and base:
        raise ScalarError(f"{show(text)} is a number of {len(text)} digits. If it is text, put it in quotes.")
    if base:
        return int(text.removeprefix("0o").removeprefix("0x"), base)
    number = float(text)
    if abs(number) == float("inf"):
        raise ScalarError(f"{show(text)} is larger than any number. If it is text, put it in quotes.")
    return number
