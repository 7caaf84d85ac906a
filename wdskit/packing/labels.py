"""Labels: a whole number, or a name. All sources share the rule of docs/pack.md, "Labels". `plan.Plan.read` numbers the
names of a run, in sorted order, or as `ClassNames` if the classes are given.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES, parse_classes, read_classes
from wdskit.errors import FolderIndexError, PackError, StorageError
from wdskit.files import describe_missing
from wdskit.packing.row import Label
from wdskit.storage.urls import read_bytes
from wdskit.text import plain_value

NO_CLASS = -1
"""Class number of a sample without a class, as in data sets of Hugging Face."""

_FRACTION = re.compile(r"\s*[+-]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)
_SHOWN_CHARS = 60


def read_label(value: Any) -> Label | None:
    """Return the label that a value means; None for no label: None, NaN or blank text.

    Whole numbers, and text of digits without a leading zero, are numbers: 7 and "7". A float is one if it is whole, as
    pandas writes a column with missing values. All other text is a name: "cat", "01440764".

    Raises:
        ValueError: The value is a fraction, text such as "2.0", a bool, a list or another type, or text that is not
            UTF-8; or a number does not fit 64 bits.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value).decode(errors="surrogateescape")
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        raise ValueError(f"{value!r} is text of a fraction. Write a whole number, or a name")
    plain = plain_value(value.item() if hasattr(value, "item") else value)  # of a scalar of NumPy
    if plain is None:
        return None
    if isinstance(plain, str):
        try:
            plain.encode()
        except UnicodeEncodeError as err:
            raise ValueError(f"the name {plain!r} is not UTF-8") from err
    elif type(plain) is not int:
        shown = repr(value)[:_SHOWN_CHARS]
        raise ValueError(f"{shown} is a {type(value).__name__}. A label is a whole number or a name")
    elif not -(1 << 63) <= plain < 1 << 63:
        raise ValueError(f"{plain} does not fit the 64 bits of a label")
    return Label(plain)


class ClassNames:
    """The classes of `--classes`, or of a folder that is added to.

    Args:
        names: Class names in the order of their numbers.
        where: Source of the names, for messages.

    Raises:
        PackError: There is no name, a name is blank or not text, or a name appears twice.
    """

    def __init__(self, names: Sequence[Any], where: str) -> None:
        wrong = next((name for name in names if not isinstance(name, str) or not name.strip()), None)
        if not names:
            raise PackError(f"{where}: it has no class.")
        if wrong is not None:
            raise PackError(f"{where}: {wrong!r} is not the name of a class. Give each number a name.")
        self.numbers: Mapping[str, int] = {name: number for number, name in enumerate(names)}
        if len(self.numbers) < len(names):
            twice = next(name for number, name in enumerate(names) if self.numbers[name] != number)
            raise PackError(f"{where}: the class {twice!r} appears twice. Give each number a different name.")
        self.where = where
        self._has_number = any(isinstance(plain_value(name), int) for name in names)

    def number(self, label: Label) -> int:
        """Return the number of a label: of its name, or the label itself if it is the number of a class.

        If a class name looks like a number, labels are only compared with names. -1 means "no class".

        Raises:
            ValueError: The label is not one of the classes.
        """
        found = self.numbers.get(str(label.value))
        if found is not None:
            return found
        if isinstance(label.value, int) and not self._has_number and 0 <= label.value < len(self.numbers):
            return label.value
        if label.value == NO_CLASS:
            return NO_CLASS
        near = difflib.get_close_matches(str(label.value), self.numbers, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{label.value!r} is not one of the {len(self.numbers)} classes of {self.where}{hint}")


def find_class_names(classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int]) -> ClassNames:
    """Return the classes of the option `classes`.

    Args:
        classes: A packed folder, its `classes.json`, or a text file with one name per line in the order of the class
            numbers; a list of names in this order; or a mapping of names to the numbers 0 to n-1.

    Raises:
        PackError: The classes cannot be read, or do not have exactly one name for each number.
    """
    if isinstance(classes, Mapping):
        names = sorted(classes, key=lambda name: classes[name])
        if [classes[name] for name in names] != [*range(len(names))]:
            raise PackError(f"classes: the numbers of the {len(names)} names are not 0 to {len(names) - 1}, each once.")
        return ClassNames(names, "`classes`")
    if not isinstance(classes, (str, os.PathLike)):
        return ClassNames([*classes], "`classes`")
    path = os.fsdecode(classes)
    if not Path(path).exists():
        raise PackError(f"{path}: classes: {describe_missing(path, 'file or folder')}")
    try:
        if Path(path).is_dir():
            found = read_classes(Path(path))
            if found is None:
                raise PackError(f"{path}: classes: there is no {CLASSES_NAME} in this folder.")
            return ClassNames(found, os.path.join(path, CLASSES_NAME))
        data = read_bytes(os.path.join(".", path), limit=MAX_CLASSES_BYTES, takes_pipe=True)
        if path.lower().endswith(".json"):
            return ClassNames(parse_classes(data, path), path)
        return ClassNames([line.strip() for line in data.decode("utf-8-sig").strip().splitlines()], path)
    except UnicodeDecodeError as err:
        raise PackError(f"{path}: classes: it is not UTF-8. Write one name per line.") from err
    except (FolderIndexError, StorageError) as err:
        raise PackError(str(err)) from err
