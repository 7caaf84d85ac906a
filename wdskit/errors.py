"""The errors that a user can cause or correct.

```
WdskitError
├── StorageError         a URL or file cannot be read or written, or its scheme is not supported
├── ShardError           the bytes of a shard are damaged or invalid
│   ├── UnsupportedMember    a member is not a plain file
│   └── MemberNameError      a key is in two places, or a field is repeated or has a reserved name
├── FolderIndexError     the folder's index is missing, unreadable, or does not match its shards
├── SelectionError       a column or split is missing, damaged or made for other shards, or a filter is invalid
├── KeyRuleError         a key or field name breaks a rule for names, or is not in the shard
├── DecodeError          the bytes of a field do not have the format of its name
│   └── ImageTooLarge    an image's header gives more pixels than allowed
├── SampleError          a stage failed on one sample
├── PackError            packing cannot start or continue
│   └── RowError         one row (file, manifest line, Python row) cannot be packed
├── ConfigError          a configuration has problems, which are listed
├── PipelineError        the stages or settings of a pipeline do not fit together
│   └── StateError       a loader's state cannot be saved, is damaged, or does not fit the loader
└── RankError            rank or world size is unknown, or differs from the process group
```

Messages have the form "where: what, with the value. What to do." Many values are also attributes. Each class accepts a
message as its only argument, so that errors can be pickled, and torch can raise them again in the parent process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wdskit.limits import MAX_EPOCH
from wdskit.text import as_int, hide_secrets

PROCESS_ERRORS = (MemoryError, RecursionError, SystemError)
"""Errors of the process, not of the data. They never count as bad samples, and `errors.max_bad` does not cover them."""


class WdskitError(Exception):
    """Base class of every error that a user can cause or correct. No message or attribute shows the user, password or
    query of a URL.

    Keyword arguments set the attributes that the class declares.
    """

    def __init__(self, message: str = "", **about: Any) -> None:
        super().__init__(hide_secrets(message))
        for name, value in about.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name}")
            setattr(self, name, hide_secrets(value) if isinstance(value, str) else value)


class StorageError(WdskitError):
    """A URL or file cannot be read or written.

    Attributes:
        url: The URL or path.
        status: Status of the HTTP response; 0 without a response.
    """

    url = ""
    status = 0


class ShardError(WdskitError):
    """The bytes of a shard are damaged or invalid. Without a message, the message is made from the attributes.

    Attributes:
        shard: Path or URL of the shard.
        offset: Byte offset of the damaged header, member or byte from the start of the shard; -1 if unknown.
        samples_read: Number of whole samples before the damage; -1 if unknown.
        problem: Description of the damage.
        remedy: Advice for the user; may be empty.
    """

    shard = ""
    offset = -1
    problem = ""
    remedy = ""
    samples_read = -1

    def __init__(self, message: str = "", **about: Any) -> None:
        super().__init__(message, **about)
        if not message:
            count = f" ({self.samples_read} samples read)" if self.samples_read >= 0 else ""
            text = f"{self.shard}, byte {self.offset}: {self.problem}{count}."
            self.args = (f"{text}\n  {self.remedy}" if self.remedy else text,)

    def after(self, samples_read: int) -> ShardError:
        """Return a copy of this error with another `samples_read`. The message of the copy is made from its
        attributes.
        """
        about = {name: value for name, value in vars(self).items() if hasattr(type(self), name)}  # no `__notes__`
        return type(self)(**about | {"samples_read": samples_read})


class UnsupportedMember(ShardError):
    """A member with a key is not a plain file but, for example, a link or a sparse file, or its name is not UTF-8.

    Attributes:
        key: The key in the member's name.
    """

    key = ""


class MemberNameError(ShardError):
    """The members of a key are not neighbours, or a sample has a field twice or with a reserved name. The shard is not
    damaged but was written wrongly.
    """


class FolderIndexError(WdskitError):
    """The index of `folder` is missing, cannot be read, or does not match the shards."""

    folder = ""


class SelectionError(WdskitError):
    """The data that selects samples is invalid: a column or split of `folder`, a filter, or a condition.

    A column or split may be missing, damaged or made for other shards. If one sample causes the error, `shard`, `key`
    and `field` name it; otherwise they are empty.
    """

    folder = ""
    shard = ""
    key = ""
    field = ""


class KeyRuleError(WdskitError):
    """A key or field name is wrong: readers of shards would change it, or no sample has it.

    `name` is the wrong name.
    """

    name = ""


class DecodeError(WdskitError):
    """The bytes of a field do not have the format of its name, such as `jpg`. `field` is the name."""

    field = ""


class ImageTooLarge(DecodeError):
    """An image's header gives more pixels than allowed."""


class SampleError(WdskitError):
    """The stage `stage` failed on the sample `key` of `shard`. `__cause__` is the original error.

    `is_function` is True if a function of the user raised the original error.
    """

    is_function = False
    stage = ""
    shard = ""
    key = ""


class PackError(WdskitError):
    """Packing cannot start or continue."""


class RowError(PackError):
    """One row, such as a file or a line of a manifest, cannot be packed.

    `where` is the file, or the manifest and its line; `problem` is the reason.
    """

    where = ""
    problem = ""


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    Attributes:
        where: Source of the setting: `file:line`, the text of an override, "config dict", or the name of a function or
            argument.
        path: Dotted path of the setting; `""` for the whole document.
        rule: The message: what is wrong, and how to correct it.
    """

    where: str
    path: str
    rule: str

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, hide_secrets(value))

    def __str__(self) -> str:
        return f"{self.where}: {self.path}: {self.rule}" if self.path else f"{self.where}: {self.rule}"


class ConfigError(WdskitError):
    """A configuration has problems. `problems` lists them in the order of the file; problems of overrides are last."""

    def __init__(self, message: str = "", *, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message or "\n".join(str(problem) for problem in problems))
        self.problems = problems


class PipelineError(WdskitError):
    """The stages or settings of a pipeline do not fit together."""


class RankError(WdskitError):
    """Rank or world size is unknown or invalid, does not fit the ranks of a machine, or differs from the process group.
    Or the process is not in the group.
    """


class StateError(PipelineError):
    """A loader's state cannot be saved, is damaged, or does not fit the loader."""


def check_whole(name: str, value: object, error: type[WdskitError], *, least: int = 0, most: int = MAX_EPOCH) -> int:
    """Return the value of the argument `name`, a whole number of any library, as an int. Raise `error` if it is another
    value, below `least` or above `most`.
    """
    number: int = as_int(value)
    if type(number) is not int or not least <= number <= most:
        raise error(f"{name}={value!r}: a whole number is needed, {least} to {most}.")
    return number


def error_text(err: BaseException) -> str:
    """Return the class name and message of an exception, `ValueError: ...`; only the name if its `__str__` raises."""
    try:
        return f"{type(err).__name__}: {err}"
    except Exception:  # noqa: BLE001 (the class may be the user's)
        return type(err).__name__
