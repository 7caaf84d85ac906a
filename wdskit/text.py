"""Text and numbers as people read them."""

from __future__ import annotations

MAX_TEXT = 300
"""Characters of a key or a problem that are kept."""

_UNITS = ("kB", "MB", "GB", "TB", "PB")


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


def printable(text: str) -> str:
    r"""The text with everything that nothing should act on, or that does not show, as `\x1b`, `\u202e`, ..."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shorten(text: str) -> str:
    """The text, or its beginning: an extension header can give a name of a megabyte."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
