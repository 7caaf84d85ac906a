"""Check that all readers of tar shards read a key or field unchanged, and clean keys that they would not. Find repeated
keys by 64-bit hashes.

`tar.names` splits the name of a member into key and field.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import KeyRuleError
from wdskit.limits import MAX_NAME_BYTES

_FIELD = re.compile(r"[a-z0-9_+-]+(\.[a-z0-9_+-]+)*")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_UNCLEAN = re.compile(r"[^\w+-]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_KEY = re.compile(r"(?!__)[A-Za-z0-9_+-]+(?:/(?!__)[A-Za-z0-9_+-]+)*")


def check_key(key: str) -> None:
    """Raise KeyRuleError if some reader of shards would lose, split or rename `key`. The message names the rule."""
    problem = None if _PLAIN_KEY.fullmatch(key) else _key_problem(key)  # nearly every key is plain
    if problem:
        raise KeyRuleError(f"key {key!r}: {problem}.", name=key)


def _key_problem(key: str) -> str | None:
    """Return, as text for a message, the first rule that `key` breaks. Return None if `key` is valid."""
    parts = key.split("/")
    rules = {
        "it is empty": not key,
        "it holds a control character": _CONTROL.search(key),
        "it holds white space, which breaks DALI's index": any(map(str.isspace, key)),
        "it cannot be written as UTF-8": _SURROGATE.search(key),
        "it is an absolute path": key.startswith("/"),
        "it is not a plain relative path": not {".", "..", ""}.isdisjoint(parts),
        "a part of it starts with a dot, which hides it": key.startswith(".") or "/." in key,
        "it holds a dot, where every reader would cut it off": "." in key,
        "it holds a backslash, which is a separator on other systems": "\\" in key,
        "a part of it starts with `__`, which readers reserve": key.startswith("__") or "/__" in key,
    }
    return next((rule for rule, is_broken in rules.items() if is_broken), None)


def clean_key(key: str) -> str:
    """Return a key that all readers accept unchanged. In any other key, `_` replaces each character that is no letter,
    digit, `_`, `+`, `-` or slash between names.

    Empty names, `.` and `..` are left out. Several `_` at the start of a name become one, because webdataset ignores
    the name `__a`.
    """
    if _PLAIN_KEY.fullmatch(key) or not _key_problem(key):
        return key
    parts = [_UNCLEAN.sub("_", part) for part in key.split("/") if part not in {"", ".", ".."}]
    return "/".join(part if not part.startswith("__") else f"_{part.lstrip('_')}" for part in parts)


@functools.lru_cache(maxsize=1024)
def check_field(field: str) -> None:
    """Raise KeyRuleError if some reader of shards would change the field name `field`. A valid name has only a-z, 0-9,
    _, + and -, and single dots between these characters. It does not start with `__`.
    """
    if not _FIELD.fullmatch(field) or field.startswith("__"):
        msg = f"field {field!r}: a field name has a-z, 0-9, _, + and -, with single dots between, and no leading __."
        raise KeyRuleError(msg, name=field)


def field_problem(field: str, fields: Container[str]) -> str:
    """Return why `field` cannot be added to a sample with the fields `fields`: its name starts with `__`, or `fields`
    has it already. Return "" if the field can be added.
    """
    if field.startswith("__"):
        return "a name that readers reserve"
    return "twice" if field in fields else ""


def check_member_name(key: str, field: str) -> None:
    """Raise KeyRuleError if the key or the field breaks a rule for names, or if the member's name, `key.field`, has
    more than 100 bytes, the limit of all readers.
    """
    check_key(key)
    check_field(field)
    num_bytes = len(key.encode()) + 1 + len(field)
    if num_bytes > MAX_NAME_BYTES:
        msg = f"key {key!r}: with its field {field!r} it takes {num_bytes} bytes, more than the {MAX_NAME_BYTES} "
        msg += "that all readers accept."
        raise KeyRuleError(msg, name=key)


def hashed_key(path: str) -> str:
    """Return a valid key of 20 hex digits for any path. A path gives the same key on every machine."""
    return hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


def hash_key(key: str) -> bytes:
    """Return a hash of a key, 8 bytes. 10**7 hashes take 80 MB as an array; a set of the keys takes 1.1 GB."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()


def find_repeated(*parts: NDArray[Any]) -> NDArray[Any]:
    """Return the hashes that occur more than once in all parts together, as a sorted array of the parts' type. Each of
    these hashes is in the array once. Without `parts`, return an empty uint64 array. The memory is a copy of all parts.
    """
    hashes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
