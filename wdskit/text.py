"""Text and numbers as people read them."""

from __future__ import annotations

import operator
import re
from typing import Any

MAX_TEXT = 300
"""Characters of a key or a problem that are kept."""

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""An ASCII control character."""

_URL_SECRETS = re.compile(
    r"""\b([A-Za-z][A-Za-z0-9+.-]*:/{1,2})  # scheme; a Path keeps one slash
    (?:[^\s/?\#'"`]*@)?  # user and password
    ([^ \n?'"`]*)  # host and path
    (?:\?[^ '"`\n][^'"`\n]*?(?=[:.,;)\]}]+(?:\s|$)|['"`\n]|$))?  # query, with its spaces
    """,
    re.VERBOSE,
)
_UNITS = ("kB", "MB", "GB", "TB", "PB")


def as_int(value: Any) -> Any:
    """Return a whole number of numpy, torch or another library as a plain int, and any other value unchanged,
    truth values too.
    """
    if type(value) is int or isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    if getattr(value, "ndim", 0) or "bool" in str(getattr(value, "dtype", "")):
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        return value


def format_bytes(num_bytes: float) -> str:
    """A size in decimal units with three digits: `842 B`, `1.25 MB`."""
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    for unit in _UNITS:
        num_bytes /= 1000
        if num_bytes < 999.5 or unit == _UNITS[-1]:
            break
    digits = 2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0
    return f"{num_bytes:,.{digits}f} {unit}"


def parse_bytes(text: str) -> int:
    """`200MB`, `1.5 GiB` or a number of bytes, as bytes; `ValueError` for what is none."""
    number = text.strip().lower()
    digits = number.rstrip("kmgtpib ")
    unit = number[len(digits) :].strip().removesuffix("b")
    base, unit = (1024, unit[:-1]) if unit.endswith("i") else (1000, unit)
    num_bytes = float(digits) * base ** ("", "k", "m", "g", "t", "p").index(unit)
    if not 0 < num_bytes < 1e18 or (base == 1024 and not unit):
        raise ValueError(text)
    return int(num_bytes)


def format_count(count: float) -> str:
    """A number with its thousands set apart: `1,281,167`, a median of `12.5`."""
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def plural(count: int, noun: str) -> str:
    """A number and what it counts: `1 shard`, `1,281 shards`, `2 classes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{format_count(count)} {noun}{ending}"


def hide_secrets(text: str) -> str:
    """The text with its URLs as messages may show them: without user and password, and without the query, which may be
    a signature.
    """
    return _URL_SECRETS.sub(r"\1\2", text) if ":/" in text else text


def public_url(url: str) -> str:
    """Return the part of a URL that a message may show: without user, password, query, and all after a control
    character. The URL may be invalid.
    """
    scheme, colon, rest = CONTROL.split(url.partition("?")[0])[0].partition("://")
    host, slash, path = rest.partition("/")
    return printable(f"{scheme}{colon}{host.rpartition('@')[2]}{slash}{path}")


def printable(text: str) -> str:
    r"""The text with everything that nothing should act on, or that does not show, as `\x1b`, `\u202e`, ..."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def install_extra(name: str) -> str:
    """Return the sentence that says how to install an extra of wdskit: from a clone, or of a released version."""
    return f"Install it: `pip install '.[{name}]'` in a clone of wdskit, or `pip install 'wdskit[{name}]'`."


def shorten(text: str) -> str:
    """The text, or its beginning: an extension header can give a name of a megabyte."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
