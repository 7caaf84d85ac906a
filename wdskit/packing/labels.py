"""Convert values to labels and class numbers, and read the class names of the option `--classes`.

docs/pack.md, "Labels", describes the rule. All kinds of source and `reshard` use the same rule.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import numbers
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES, parse_classes, read_classes
from wdskit.errors import FolderIndexError, PackError, StorageError
from wdskit.files import describe_missing
from wdskit.storage.urls import read_bytes

NO_CLASS = -1
"""Class number of a sample without a class, as in data sets of Hugging Face."""
Label: TypeAlias = int | float | str
"""A whole number, a number that is not whole or too large to be exact, or a name."""

_SHOWN = 5
_SHOWN_CHARS = 60
_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,300})(\.0*)?\s*", re.ASCII)
_DECIMAL = re.compile(r"\s*[+-]?([0-9]{1,300}\.[0-9]+|\.[0-9]+)\s*", re.ASCII)
_MAX_LABEL = (1 << 63) - 1  # labels become int64
_MAX_FLOAT = 1 << 53  # floats represent all whole numbers up to this one


def read_label(value: Any) -> Label | None:
    """Convert a value to a label. 2, 2.0, "2" and "2.0" give the same label. None, NaN and blank text give no label.

    Returns:
        An int for a whole number; a float for any other number; the unchanged text for a name; None for no label. A
        float above 2**53 stays a float, because it may not be exact.

    Raises:
        ValueError: The value is not a number or text (a bool is neither), or is text that is not UTF-8.
    """
    if isinstance(value, str):
        if not value or value.isspace():
            return None
        if match := _WHOLE.fullmatch(value):
            return int(match[1]) if match[2] is None else _exact_int(int(match[1]))
        if _DECIMAL.fullmatch(value):
            return float(value)
        if not is_utf8(value):
            raise ValueError(f"{value!r} holds half of a surrogate pair, which is not text")
        return value
    if value is None:
        return None
    is_number = not isinstance(value, bool)
    if is_number and isinstance(value, numbers.Integral):
        return int(value)
    if is_number and isinstance(value, numbers.Real):
        number = float(value)
        if math.isnan(number):
            return None
        return _exact_int(int(number)) if number.is_integer() else number
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    raise ValueError(f"{shown} is a {type(value).__name__}, but a label is one whole number or one name")


def _exact_int(number: int) -> int | float:
    """Return a whole number from -2**53 to 2**53 as an int, any other whole number as a float."""
    return number if abs(number) <= _MAX_FLOAT else float(number)


@dataclass(frozen=True)
class ClassNames:
    """The allowed classes.

    Attributes:
        names: Names of the classes; the position is the class number.
        where: Source of the names, for messages.
    """

    names: tuple[str, ...]
    where: str

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The class number of each class, by the class name."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def _labels(self) -> dict[Label | None, int]:
        """The class number of each class, by the label that `read_label` makes of the class name."""
        return {read_label(name): number for number, name in enumerate(self.names)}

    @cached_property
    def _has_numeric_name(self) -> bool:
        return any(not isinstance(label, str) for label in self._labels)

    def describe(self) -> str:
        """Return a short text that identifies the classes: the first names, the count and a digest."""
        digest = hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:16]
        return f"{self._first_names()} ({len(self.names)} classes, sha256 {digest})"

    def number(self, label: Label) -> int:
        """Return the class number of a label, which is the name or the number of a class.

        If one of the class names is a number, such as `7`, labels are only compared with names. The label -1 means "no
        class" and gives -1, unless it is a class name.

        Raises:
            ValueError: The label is not a class.
        """
        if label in self._labels:
            return self._labels[label]
        if label == NO_CLASS:
            return NO_CLASS
        if not isinstance(label, int) or self._has_numeric_name:
            raise ValueError(self.refusal(str(label)))
        if not 0 <= label < len(self.names):
            raise ValueError(f"{label} is not a number of one of the {len(self.names)} classes of {self.where}")
        return label

    def refusal(self, name: str, more: str = "") -> str:
        """Return the message that `name` is not one of these classes.

        The message shows some class names, then the text `more`, and the most similar class name if there is one.
        """
        near = difflib.get_close_matches(name, self.names, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        what = f"the {len(self.names)} classes of {self.where} ({self._first_names()})"
        return f"{name!r} is not one of {what}{more}.{hint}"

    def _first_names(self) -> str:
        return ", ".join(self.names[:_SHOWN]) + (", ..." if len(self.names) > _SHOWN else "")


def label_number(value: Any, classes: ClassNames | None) -> int | None:
    """Return the number to write into the field `cls`; None for no label (None, NaN or blank text).

    Args:
        value: Value of a column or a field.
        classes: The classes of `--classes` or of the column; None if labels are whole numbers.

    Raises:
        ValueError: The value is not a label or not in `classes`. Without `classes`: it is not a 64-bit whole number.
    """
    label = read_label(value)
    if label is None:
        return None
    if classes is not None:
        return classes.number(label)
    if not isinstance(label, int) or not -_MAX_LABEL - 1 <= label <= _MAX_LABEL:
        what = "a whole number" if isinstance(label, str) else "a whole number of 64 bits"
        raise ValueError(f"{value!r} is not {what}. Name the classes: --classes FILE")
    return label


def classes_of(values: Iterable[tuple[Any, str]], column: str) -> ClassNames | None:
    """Return the different names in a column as classes, sorted by their UTF-8 bytes; None if the column has no names.

    Args:
        values: Each value with its place, for messages. Values that are not labels are ignored.
        column: Name of the column.

    Raises:
        PackError: Some labels are whole numbers and others are names.
    """
    names: set[str] = set()
    first: dict[type, str] = {}
    for value, where in values:
        if value.__class__ is str and value in names:
            continue
        try:
            label = read_label(value)
        except ValueError:
            continue
        if isinstance(label, str):
            names.add(label)
        if isinstance(label, (int, str)) and type(label) not in first:
            first[type(label)] = f"{value!r} ({where})"
    if len(first) > 1:
        msg = f"its column {column!r} has whole numbers, such as {first[int]}, and names, such as {first[str]}"
        remedy = "Correct one of them, leave cells without a label empty, or list all labels as names: --classes FILE."
        raise PackError(f"{msg}.\n  {remedy}")
    return ClassNames(tuple(sorted(names, key=str.encode)), f"the column {column!r}") if names else None


def is_utf8(text: str) -> bool:
    """Return True if UTF-8 can encode the text: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_class_names(classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int]) -> ClassNames:
    """Return the classes of the option `classes`.

    Args:
        classes: A packed folder, its `classes.json`, or a text file with one name per line in the order of the class
            numbers; a list of names in this order; or a mapping of names to numbers.

    Raises:
        PackError: The classes cannot be read, or do not have exactly one name for each number from 0 on; or two names
            mean the same label.
    """
    where = "`classes`"
    names: list[Any]
    if isinstance(classes, (str, os.PathLike)):
        where = os.fsdecode(classes)
        names = [*_read_names(where)]
    elif isinstance(classes, Mapping):
        by_number = {number: name for name, number in classes.items() if type(number) is int}
        names = [by_number.get(number) for number in range(len(classes))]
        if None in names:
            raise PackError(f"classes: the numbers of the {len(names)} names are not 0 to {len(names) - 1}, each once.")
    elif isinstance(classes, Iterable):
        names = [*classes]
    else:
        raise PackError(
            f"classes: {classes!r} is neither a path nor a list of names. Name a packed folder, or pass a list."
        )
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PackError(f"{where}: it holds no classes, or a class without a name. Give each number a name.")
    return checked_classes(names, where)


def checked_classes(names: Sequence[str], where: str) -> ClassNames:
    """Return the classes with these names, in the order of the class numbers. `names` must not be empty. `where` is the
    source of the names, for messages.

    Raises:
        PackError: A name is blank or not UTF-8, or two names mean the same label, such as `1` and `1.0`.
    """
    try:
        labels = [read_label(name) for name in names]
    except ValueError as err:
        raise PackError(f"{where}: a class name: {err}. Correct it.") from err
    if None in labels:
        raise PackError(f"{where}: the class {labels.index(None)} has no name. Give each number a name.")
    [(label, count)] = Counter(labels).most_common(1)
    if count > 1:
        first, second = [name for name, each in zip(names, labels, strict=True) if each == label][:2]
        problem = f"the class {first!r} appears twice" + (f", also as {second!r}" if second != first else "")
        raise PackError(f"{where}: {problem}. Give each number a different name.")
    return ClassNames(tuple(names), where)


def _read_names(path: str) -> Sequence[str]:
    """Return the class names in a folder or file.

    Raises PackError if the path does not exist, cannot be read, or has no valid list of names.
    """
    if not os.path.exists(path):
        raise PackError(f"{path}: classes: {describe_missing(path, 'file or folder')}")
    try:
        if os.path.isdir(path):
            found = read_classes(Path(path))
            if found is None:
                raise PackError(f"{path}: classes: there is no {CLASSES_NAME} in this folder.")
            return found
        data = read_bytes(os.path.join(".", path), limit=MAX_CLASSES_BYTES, takes_pipe=True)
        if path.lower().endswith(".json"):
            return parse_classes(data, path)
        return [line.strip() for line in data.decode("utf-8-sig").strip().splitlines()]
    except UnicodeDecodeError as err:
        raise PackError(f"{path}: classes: it is not UTF-8. Write one name per line, or use a {CLASSES_NAME}.") from err
    except (FolderIndexError, StorageError) as err:
        raise PackError(str(err)) from err
