"""The classes that there may be: those that `--classes` fixes, and those of the texts in a table's column.

`--classes` names a packed folder, its `classes.json`, or a text file with a name a line.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES, parse_classes, read_classes
from wdskit.errors import FolderIndexError, PackError, StorageError
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

    @property
    def digest(self) -> str:
        """What changes when one does."""
        return hashlib.sha256("\n".join(self.names).encode(errors="surrogatepass")).hexdigest()[:16]

    def check(self, folders: Iterable[str], root: str) -> None:
        """Refuse a class folder that is none of them.

        Raises:
            PackError: Names the first.
        """
        unknown = [name for name in folders if name not in self.numbers]
        if not unknown:
            return
        more = f", nor are {len(unknown) - 1} more" if len(unknown) > 1 else ""
        msg = f"{os.path.join(root, unknown[0])}: {self.refusal(unknown[0], more)}"
        raise PackError(f"{msg}\n  Add it there, or move this folder away.")

    def refusal(self, name: str, more: str = "") -> str:
        """What to say of a name that is none of them."""
        shown = ", ".join(self.names[:_SHOWN]) + (", ..." if len(self.names) > _SHOWN else "")
        near = difflib.get_close_matches(name, self.names, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        return f"{name!r} is none of the {len(self.names)} classes of {self.where} ({shown}){more}.{hint}"


@dataclass(frozen=True)
class Labels:
    """What the values of the column that becomes `cls` stand for.

    Attributes:
        names: The classes; None where the values are numbers already, of which nobody knows the names.
    """

    names: ClassNames | None = None

    @property
    def numbers(self) -> dict[str, int]:
        """Number of each class by name."""
        return {} if self.names is None else self.names.numbers

    def number_of(self, value: Any) -> int:
        """The class number of a value.

        Raises:
            ValueError: It is none of the classes, or text where these are numbers.
        """
        if isinstance(value, str) and value in self.numbers:
            return self.numbers[value]
        number = whole_number(value)
        if self.names is None:
            if number is None:
                raise ValueError(f"{value!r} is no whole number. Name the classes: --classes FILE.")
        elif number is None:
            raise ValueError(self.names.refusal(str(value)))
        elif not -1 <= number < len(self.numbers):
            raise ValueError(f"{number} is no number of the {len(self.numbers)} classes of {self.names.where}")
        return number


def labels_of(values: Iterable[Any], column: str) -> Labels:
    """The classes of a column's values: its texts, sorted by their bytes; none where all are whole numbers."""
    texts = {value for value in values if isinstance(value, str) and value}
    if all(whole_number(text) is not None for text in texts):
        return Labels()
    names = sorted(texts, key=lambda text: text.encode(errors="surrogatepass"))
    return Labels(ClassNames(tuple(names), f"the column {column!r}"))


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
    where = os.fsdecode(classes) if isinstance(classes, (str, os.PathLike)) else "`classes`"
    names: list[object]
    if isinstance(classes, (str, os.PathLike)):
        names = [*_read(where)]
    elif isinstance(classes, Mapping):
        by_number = {number: name for name, number in classes.items() if type(number) is int}
        names = [by_number.get(number) for number in range(len(classes))]
        if None in names:
            raise PackError(f"classes: the numbers of the {len(names)} names are not 0 to {len(names) - 1}, each once.")
    elif isinstance(classes, Iterable):
        names = [*classes]
    else:
        raise PackError(f"classes: {classes!r} is neither a path nor names. Name a packed folder, or give a list.")
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PackError(f"{where}: it holds no class, or one without a name. Give each number a name.")
    texts = tuple(map(str, names))
    twice = next((name for name, count in Counter(texts).items() if count > 1), None)
    if twice is not None:
        raise PackError(f"{where}: the class {twice!r} stands there twice. Give each number a name of its own.")
    return ClassNames(texts, where)


def _read(path: str) -> Sequence[str]:
    if not os.path.exists(path):
        raise PackError(f"{path}: classes: there is no such file or folder.")
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
        raise PackError(f"{path}: classes: it is no UTF-8. Write a name a line, or give a {CLASSES_NAME}.") from err
    except (FolderIndexError, StorageError) as err:
        raise PackError(str(err)) from err
