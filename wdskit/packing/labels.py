"""Labels: a whole number, or a name. Tables, tars and rows share the rule of docs/pack.md, "Labels"; folders and COCO's
categories are names. `plan.Plan.read` numbers the names of a run, in sorted order, or as `ClassNames` if the classes
are given.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES, parse_classes, plain_value
from wdskit.errors import PackError
from wdskit.packing.row import Label
from wdskit.storage.urls import read_bytes

ClassesOption: TypeAlias = str | os.PathLike[str] | Sequence[str] | Mapping[str, int]
"""The values of the option `classes`, as `find_class_names` takes them."""

NO_CLASS = -1
"""Class number of a sample without a class, as in data sets of Hugging Face."""

_FRACTION = re.compile(r"\s*[+-]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)


def read_label(value: Any) -> Label | None:
    """Return the label that a value means; None for no label: None, NaN or blank text.

    Whole numbers, and text of digits without a leading zero, are numbers: 7 and "7". A float is one if it is whole, as
    pandas writes a column with missing values. All other text is a name: "cat", "01440764".

    Raises:
        ValueError: The value is a fraction, text such as "2.0", a bool, a list or another type, or text that is not
            UTF-8; or a number does not fit 64 bits.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value).decode()
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        raise ValueError(f"{value!r} is text of a fraction. Write a whole number, or a name")
    plain = plain_value(value.item() if hasattr(value, "item") else value)  # of a scalar of NumPy
    if plain is None:
        return None
    if isinstance(plain, str):
        plain.encode()  # UnicodeEncodeError: the bytes of a table were not UTF-8
    elif type(plain) is not int or not -(1 << 63) <= plain < 1 << 63:
        raise ValueError(f"the label is neither a name nor a whole number of 64 bits: {value!r}")
    return Label(plain)


class ClassNames:
    """The classes of `--classes`, of a source that numbers them, or of a folder that is added to.

    Args:
        names: Class names in the order of their numbers.
        where: Source of the names, for messages.

    Raises:
        PackError: There is no name, or a name is blank or appears twice.
    """

    def __init__(self, names: Sequence[str], where: str) -> None:
        self.numbers: Mapping[str, int] = {name: number for number, name in enumerate(names)}
        self.where = where
        wrong = [name for number, name in enumerate(names) if not name.strip() or self.numbers[name] != number]
        if wrong or not names:
            raise PackError(f"{where}: each number needs a class name of its own, but here is {''.join(wrong[:1])!r}.")
        self._names = names
        self._has_number = any(isinstance(plain_value(name), int) for name in names)

    def named(self, label: Label) -> Label:
        """Return a label with the name of its class. The label is this name, or the number of the class.

        If a class name looks like a number, labels are only compared with names. -1 means "no class".

        Raises:
            ValueError: The label is not one of the classes.
        """
        if str(label.value) in self.numbers:
            return Label(str(label.value))
        if isinstance(label.value, int) and not self._has_number and 0 <= label.value < len(self.numbers):
            return Label(self._names[label.value])
        if label.value == NO_CLASS:
            return label
        raise ValueError(f"{label.value!r} is not one of the {len(self.numbers)} classes of {self.where}")


def find_class_names(classes: ClassesOption) -> ClassNames:
    """Return the classes of the option `classes`.

    Args:
        classes: A packed folder, its `classes.json`, or a text file with one name per line in the order of the class
            numbers; a list of names in this order; or a mapping of names to the numbers 0 to n-1.

    Raises:
        PackError: The classes do not have exactly one name for each number, or a text file is not UTF-8.
        FolderIndexError: A `classes.json`, a list or a mapping is not as `parse_classes` takes it.
        StorageError: A file cannot be read.
    """
    if not isinstance(classes, (str, os.PathLike)):
        document = json.dumps(dict(classes) if isinstance(classes, Mapping) else classes, default=list)
        return ClassNames(parse_classes(document.encode(), "classes"), "`classes`")
    path = os.fsdecode(classes)
    if os.path.isdir(path):
        path = os.path.join(path, CLASSES_NAME)
    data = read_bytes(os.path.join(".", path), limit=MAX_CLASSES_BYTES, takes_pipe=True)
    if path.lower().endswith(".json"):
        return ClassNames(parse_classes(data, path), path)
    try:
        return ClassNames([line.strip() for line in data.decode("utf-8-sig").strip().splitlines()], path)
    except UnicodeDecodeError as err:
        raise PackError(f"{path}: {err}.") from err
