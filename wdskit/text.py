"""Format text and numbers for people, and hide the secrets of URLs."""

from __future__ import annotations

import math
import operator
import re
from decimal import Decimal
from typing import Any

MAX_TEXT = 300
"""Limit for the characters of a key or a problem in a message."""

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""An ASCII control character."""

_URL_SECRETS = re.compile(
    r"""\b([A-Za-z][A-Za-z0-9+.-]*:/{1,2})  # scheme; a Path keeps one slash
    (?:[^\s/?'"`:\[]+:(?!\d+/)[^\s?'"`]*@|[^\s/?'"`]*@)?  # user and password, which may have a slash
    ([^ \n?'"`]*)  # host and path
    (?:\?[^ '"`\n][^'"`\n]*?(?=[:.,;)\]}]+(?:\s|$)|['"`\n]|$))?  # query, with its spaces
    """,
    re.VERBOSE,
)
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}) ?([kmgtp]?)(i?)b?", re.ASCII)
_UNITS = ("kB", "MB", "GB", "TB", "PB")


def as_int(value: Any) -> Any:
    """Return an integer of numpy, torch or another library as an int. Return all other values unchanged, also bools."""
    if type(value) is int or isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    if getattr(value, "ndim", 0) or "bool" in str(getattr(value, "dtype", "")):
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        return value


def format_bytes(num_bytes: float) -> str:
    """Format a size with three digits in decimal units: `842 B`, `1.25 MB`."""
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    for unit in _UNITS:
        num_bytes /= 1000
        if num_bytes < 999.5 or unit == _UNITS[-1]:
            break
    digits = 2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0
    return f"{num_bytes:,.{digits}f} {unit}"


def format_at_least(num_bytes: float) -> str:
    """Format a size with three digits, rounded up to be at least `num_bytes`, without a space: `1.25MB`."""
    unit = 10 ** max(0, len(f"{num_bytes:.0f}") - 3)
    return format_bytes(math.ceil(num_bytes / unit) * unit).replace(" ", "")


def parse_bytes(text: str) -> int:
    """Return the number of bytes of a size such as `200MB`, `1.5 GiB` or `1000`.

    Raises:
        ValueError: The text is not a size of at least 1 byte and less than 10^18 bytes.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    number, unit, is_binary = found.groups() if found else ("0", "", "")
    num_bytes = Decimal(number) * (1024 if is_binary else 1000) ** ("", "k", "m", "g", "t", "p").index(unit)
    if not 1 <= num_bytes < 10**18 or (is_binary and not unit):
        raise ValueError("it is no size such as 200MB or 1.5GiB")
    return int(num_bytes)


def format_count(count: float) -> str:
    """Format a number with commas, and one decimal digit if it is not whole: `1,281,167`, `12.5`."""
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def plural(count: int, noun: str) -> str:
    """Format a number with its noun: `1 shard`, `1,281 shards`, `2 classes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{format_count(count)} {noun}{ending}"


def hide_secrets(text: str) -> str:
    """Return a text without the user, password and query of each URL in the text, which may be secrets."""
    return _URL_SECRETS.sub(r"\1\2", text) if ":/" in text else text


def public_url(url: str) -> str:
    """Return a URL without user, password and query, cut before the first control character. The URL may be invalid."""
    scheme, colon, rest = CONTROL.split(url.partition("?")[0])[0].partition("://")
    host, slash, path = rest.partition("/")
    return printable(f"{scheme}{colon}{host.rpartition('@')[2]}{slash}{path}")


def printable(text: str) -> str:
    r"""Return a text with its control and invisible characters replaced by escapes: `\x1b`, `\u202e`, ..."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def install_extra(name: str) -> str:
    """Return the sentence that tells a user how to install the extra `name` of wdskit."""
    return f"Install it: `pip install '.[{name}]'` in a clone of wdskit, or `pip install 'wdskit[{name}]'`."


def shorten(text: str) -> str:
    """Return a text unchanged, or its first `MAX_TEXT` characters and `...` if it is longer."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
