"""The classes that there may be: those that `--classes` fixes, and those of the texts in a table's column.

`--classes` names a packed folder, its `classes.json`, or a text file with a name a line.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES, parse_classes, read_classes
from wdskit.errors import FolderIndexError, PackError, StorageError
from wdskit.files import describe_missing
from wdskit.storage.urls import read_bytes

_SHOWN = 5


@dataclass(frozen=True)
class ClassNames:
    """The classes that there may be.

    Attributes:
        names: By class number.
        where: Where they come from, for messages.
    """

    names: tuple[str, ...]
    where: str

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each class by name."""
        return {name: number for number, name in enumerate(self.names)}

    def refusal(self, name: str, more: str = "") -> str:
        """What is wrong with a name that is none of them."""
        shown = ", ".join(self.names[:_SHOWN]) + (", ..." if len(self.names) > _SHOWN else "")
        near = difflib.get_close_matches(name, self.names, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        return f"{name!r} is not one of the {len(self.names)} classes of {self.where} ({shown}){more}.{hint}"


def class_number(value: Any, classes: ClassNames | None) -> int:
    """The class number of a column's value: a name or a number of `classes`; any whole number without them.

    Raises:
        ValueError: It is none.
    """
    if classes is not None and isinstance(value, str) and value in classes.numbers:
        return classes.numbers[value]
    number = whole_number(value)
    if number is None:
        if classes is None:
            raise ValueError(f"{value!r} is not a whole number. Name the classes: --classes FILE.")
        raise ValueError(classes.refusal(str(value)))
    if classes is not None and not -1 <= number < len(classes.names):
        raise ValueError(f"{number} is not a number of one of the {len(classes.names)} classes of {classes.where}")
    return number


def classes_of(values: Iterable[Any], column: str) -> ClassNames | None:
    """The classes of a column's values: its texts, sorted by their bytes; None where all are whole numbers."""
    texts = {value for value in values if isinstance(value, str) and value}
    if all(whole_number(text) is not None for text in texts):
        return None
    names = sorted(texts, key=lambda text: text.encode(errors="surrogatepass"))
    return ClassNames(tuple(names), f"the column {column!r}")


def whole_number(value: Any) -> int | None:
    """A label: an int, or decimal text as CSV has it; None for others."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and value.isascii():
        try:
            return int(value)
        except ValueError:  # +-3, or thousands of digits
            return None
    return None


def find_class_names(classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int]) -> ClassNames:
    """The classes that a user names.

    Args:
        classes: A packed folder, its `classes.json`, or a text file with a name a line in the order of their numbers;
            or the names in this order; or their numbers by name.

    Raises:
        PackError: They cannot be read, or are not one name for each number from 0 on.
    """
    where = "`classes`"
    names: list[Any]
    if isinstance(classes, (str, os.PathLike)):
        where = os.fsdecode(classes)
        names = [*_read(where)]
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
    [(name, count)] = Counter(names).most_common(1)
    if count > 1:
        raise PackError(f"{where}: the class {name!r} appears twice. Give each number a different name.")
    return ClassNames(tuple(names), where)


def _read(path: str) -> Sequence[str]:
    if not os.path.exists(path):
        raise PackError(f"{path}: classes: {describe_missing(str(path), 'file or folder')}")
    try:
        if os.path.isdir(path):
            found = read_classes(Path(path))
            if found is None:
                raise PackError(f"{path}: classes: there is no {CLASSES_NAME} in this folder.")
            return found
        data = read_bytes(os.path.join(".", path), limit=MAX_CLASSES_BYTES)
        if path.lower().endswith(".json"):
            return parse_classes(data, path)
        return [line.strip() for line in data.decode("utf-8-sig").strip().splitlines()]
    except UnicodeDecodeError as err:
        raise PackError(f"{path}: classes: it is not UTF-8. Write one name per line, or use a {CLASSES_NAME}.") from err
    except (FolderIndexError, StorageError) as err:
        raise PackError(str(err)) from err
