"""Every error that a user can cause.

```
WdskitError
├── StorageError         a URL or file cannot be read, or its scheme is not supported
├── ShardError           the bytes of a shard are damaged or invalid
├── FolderIndexError     the folder's index is missing, unreadable, or does not match its shards
├── SelectionError       a column, a split or a filter is missing, damaged, of other shards, or wrong
├── KeyRuleError         a key or field name that some readers would change
├── DecodeError          the bytes of a field do not have the format of its name
│   └── ImageTooLarge    an image's header gives more pixels than allowed
├── SampleError          a stage failed on one sample
├── PackError            packing cannot start or continue
│   └── RowError         one row (file, manifest line, Python row) cannot be packed
├── ConfigError          a configuration has problems; all of them are listed
├── PipelineError        the stages or settings of a pipeline do not fit together
│   └── StateError       a state cannot be saved, or does not fit
└── RankError            rank or world size is unknown or contradicted
```

Messages read "where: what, with the value. What to do." and the same values are attributes. Each class can be made from
its message alone, so that errors survive pickling and torch's re-raising in the parent process.
"""

from __future__ import annotations

from dataclasses import dataclass

from wdskit.text import hide_secrets

PROCESS_ERRORS = (MemoryError, RecursionError, SystemError)
"""Errors of this process, not of the data: they never count as damage, and no error budget covers them."""


class WdskitError(Exception):
    """Base class of every error that a user can cause or correct. No message shows the password or query of a URL."""

    def __init__(self, message: str = "") -> None:
        super().__init__(hide_secrets(message))


class StorageError(WdskitError):
    """A URL or file cannot be read. `url` names it; `status` is the status of the HTTP response, or 0."""

    def __init__(self, message: str = "", *, url: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.url = hide_secrets(url)
        self.status = status


class ShardError(WdskitError):
    """The bytes of a shard are damaged or invalid.

    Attributes:
        shard: Path or URL of the shard; of a URL without its query, which may be a secret.
        offset: Byte offset of the header, member or byte at fault, from the start of the shard.
        samples_read: Number of whole samples before the fault, or -1 if unknown.
        problem: What is wrong.
        remedy: What to do.
    """

    def __init__(
        self,
        message: str = "",
        *,
        shard: str = "",
        offset: int = -1,
        problem: str = "",
        remedy: str = "",
        samples_read: int = -1,
    ) -> None:
        shard = hide_secrets(shard)
        if not message:
            count = f" ({samples_read} samples read)" if samples_read >= 0 else ""
            message = f"{shard}, byte {offset}: {problem}{count}."
            message += f"\n  {remedy}" if remedy else ""
        super().__init__(message)
        self.shard = shard
        self.offset = offset
        self.problem = problem
        self.remedy = remedy
        self.samples_read = samples_read

    def after(self, samples_read: int) -> ShardError:
        """The same error with the number of whole samples before it."""
        return type(self)(
            shard=self.shard,
            offset=self.offset,
            problem=self.problem,
            remedy=self.remedy,
            samples_read=samples_read,
        )


class UnsupportedMember(ShardError):
    """A member is not a plain file but, for example, a link or a sparse file. Its headers are valid."""


class FolderIndexError(WdskitError):
    """The index of `folder` is missing, unreadable, or does not match the shards."""

    def __init__(self, message: str = "", *, folder: str = "") -> None:
        super().__init__(message)
        self.folder = hide_secrets(folder)


class SelectionError(WdskitError):
    """A column or split of `folder` is missing, damaged or made for other shards, or a filter or condition is wrong.

    If one sample is the reason, `shard`, `key` and `field` name it.
    """

    def __init__(self, message: str = "", *, folder: str = "", shard: str = "", key: str = "", field: str = "") -> None:
        super().__init__(message)
        self.folder = hide_secrets(folder)
        self.shard = hide_secrets(shard)
        self.key = key
        self.field = field


class KeyRuleError(WdskitError):
    """`name`, a key or a field name, does not exist, or some readers would change it."""

    def __init__(self, message: str = "", *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class DecodeError(WdskitError):
    """The bytes of `field` do not have the format of its name."""

    def __init__(self, message: str = "", *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ImageTooLarge(DecodeError):
    """An image's header gives more pixels than allowed."""


class SampleError(WdskitError):
    """A stage failed on one sample: `stage` on `key` of `shard`. The cause is chained. `is_function` is true if a
    function of the user's raised it.
    """

    is_function = False

    def __init__(self, message: str = "", *, stage: str = "", shard: str = "", key: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.shard = hide_secrets(shard)
        self.key = key


class PackError(WdskitError):
    """Packing cannot start or continue."""


class RowError(PackError):
    """One row cannot be packed. `where` is the file, or the manifest and its line."""

    def __init__(self, message: str = "", *, where: str = "", problem: str = "") -> None:
        super().__init__(message)
        self.where = hide_secrets(where)
        self.problem = hide_secrets(problem)


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a configuration.

    Attributes:
        where: `file:line`, or the name of the override or dict.
        path: Dotted path of the setting, `""` for the whole document.
        rule: What is wrong and how to correct it.
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
    """A configuration has problems; `problems` lists all of them in the order of the file."""

    def __init__(self, message: str = "", *, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message or "\n".join(str(problem) for problem in problems))
        self.problems = problems


class PipelineError(WdskitError):
    """The stages or settings of a pipeline do not fit together."""


class RankError(WdskitError):
    """Rank or world size is unknown, or differs from the process group."""


class StateError(PipelineError):
    """A loader's state cannot be saved, is damaged, or does not fit the loader."""


def error_text(err: BaseException) -> str:
    """Class and text of any exception, also of one whose `__str__` raises."""
    try:
        return f"{type(err).__name__}: {err}"
    except Exception:  # noqa: BLE001 (a user's class)
        return type(err).__name__
