"""Settings: their base classes, the types of single settings, and the words of messages.

pydantic checks settings and words its errors. `Settings` adds the wrong value, or the nearest name.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from wdskit.dataset.patterns import expand_parts
from wdskit.errors import ConfigError, Problem, StorageError
from wdskit.text import as_int, hide_secrets, printable

Path = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)
Flaw = tuple[Path, str]
"""One problem of a value: the path of the setting inside the value, and the message."""

Kind = Literal["source", "splitter", "each", "streamed", "batch", "epoch"]

MAX_SHOWN = 60
"""Limit for the characters of a value in a message."""

_MARKS = ("[key]", "[number]", "[names]", "[schedule]", "[list]", "[settings]", "[share]")
"""pydantic's mark for a dict's key, and the tags of unions."""


def dotted(path: Path) -> str:
    """Return a path as text: `("pipelines", "train", 2, "shuffle")` becomes `pipelines.train[2].shuffle`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return printable(text.removeprefix("."))


def show(value: object) -> str:
    """Return any value as one short line for messages: text in backticks, other values as Python writes them."""
    if isinstance(value, str) and value and value.isprintable():
        return f"`{value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 1] + '…'}`"
    return reprlib.repr(value)


def wrong_kind(value: object, need: str) -> str:
    """Return the message for a value of the wrong kind. `need` is, for example, "a list is needed"."""
    return f"{need}, not {show(value)}."


def listing(names: Iterable[str]) -> str:
    """Join names to "`a`, `b` and `c`"; one name to "`a`", and no names to ""."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean ...?` with the name in `known` that is nearest to `name`; "" if no name is similar."""
    names, lowered = [*known], name[: 2 * MAX_SHOWN].lower().replace("-", "_")
    # `batch_size` means `size`, although `global_size` shares more letters with it
    near = difflib.get_close_matches(lowered, names, 1, 0.7) or [part for part in lowered.split("_") if part in names]
    return f" Did you mean `{near[-1]}`?" if near else ""


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """Return the message for a setting `name` that does not exist. `known` are the settings of its stage or section."""
    return f"no such setting.{did_you_mean(name, known) or ' Known: ' + (listing(known) or 'none') + '.'}"


def refuse(rule: str) -> PydanticCustomError:
    """Return the error that a validator raises to refuse a value, with `rule` as its message."""
    return PydanticCustomError("wdskit", "{rule}", {"rule": rule})


def invalid(flaws: Iterable[Flaw]) -> ValidationError:
    """Return the error that a validator raises to refuse parts of a value."""
    lines = [InitErrorDetails(type=refuse(rule), loc=path, input=None) for path, rule in flaws]
    return ValidationError.from_exception_data("settings", lines)


def flaws_of(err: ValidationError) -> list[Flaw]:
    """Return the problems in an error of `Settings`."""
    return [(error["loc"], error["msg"]) for error in err.errors()]


def config_error(err: ValidationError, where: str) -> ConfigError:
    """Return the ConfigError that lists all problems in an error of `Settings`. Messages start with `where`."""
    return ConfigError(problems=tuple(Problem(where, dotted(path), rule) for path, rule in flaws_of(err)))


class Settings(BaseModel):
    """The base class of all settings: frozen, and unknown names are errors. A setting that is None is not set."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _word_errors(cls, given: Any, check: Callable[[Any], Any]) -> Any:
        if isinstance(given, Mapping):
            given = {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}
        try:
            return check(given)
        except ValidationError as err:
            errors = err.errors()
            # a list of which no item is valid is not also too short
            inner = {error["loc"][:size] for error in errors for size in range(len(error["loc"]))}
            found = [error for error in errors if error["type"] != "too_short" or error["loc"] not in inner]
            raise invalid(map(cls._flaw, found)) from None

    @classmethod
    def _flaw(cls, error: Mapping[str, Any]) -> Flaw:
        path: Path = tuple(part for part in error["loc"] if part not in _MARKS)
        if error["type"] == "wdskit":
            return path, error["msg"]
        if error["type"] == "extra_forbidden":
            return path, unknown_setting(str(path[-1]), [one.alias or name for name, one in cls.model_fields.items()])
        value = "" if error["type"] in {"missing", "too_short"} else f", not {show(error['input'])}"
        return path, f"{error['msg']}{value}."


class StageSpec(Settings):
    """The settings of one stage: validated, frozen, comparable. It holds no state and opens no file.

    Attributes:
        name: Name of the stage in YAML, in the builder and in messages.
        kind: Effect on the stream: "source" yields the stream, "splitter" selects shards, "each" maps one value to one
            value, "streamed" reorders or drops values, "batch" makes batches, "epoch" sets a number of items.
        shorthand: The setting that a bare value sets (`shuffle: 200`); None if the stage takes no arguments.
        is_mapping: Whether a whole YAML mapping is the value of `shorthand` (`rename: {image: jpg}`).
        is_starred: Name of the `*arguments` of the Python method, if the method takes the items of `shorthand` as
            separate arguments; else empty.
        takes_any: Whether the stage maps a value of any type to a value of any type, as a user's function may.
        calls_user: Whether the stage calls a function of the user, or one that only one thread at a time may call.
        is_light: Whether the stage always holds the GIL, so that several threads only wait for each other.
        is_planned: Whether the stage is a source that knows the position of every sample before the run.
        needs_plan: Whether the stage needs such a source.
        example: Settings for an example in the documentation, if the required settings alone make no example.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    shorthand: ClassVar[str | None] = None
    is_mapping: ClassVar[bool] = False
    is_starred: ClassVar[str] = ""
    takes_any: ClassVar[bool] = False
    calls_user: ClassVar[bool] = False
    is_light: ClassVar[bool] = False
    is_planned: ClassVar[bool] = False
    needs_plan: ClassVar[bool] = False
    example: ClassVar[dict[str, Any]] = {}

    def __repr__(self) -> str:
        return hide_secrets(super().__repr__())

    __str__ = __repr__

    @classmethod
    def expand(cls, value: object) -> dict[str, Any]:
        """Return the settings as a dict, not yet checked. `value` is the value after the stage's name in YAML.

        None gives {}. A mapping of settings is copied. A short form, such as 200 in `shuffle: 200`, gives
        `{shorthand: value}`; so does every mapping if `is_mapping` is True.
        """
        if value is None:
            return {}
        if isinstance(value, Mapping) and not cls.is_mapping:
            return dict(value)
        return {cls.shorthand or "arguments": value}


VALID = "__valid__"
"""The name of the mask that `tail: pad` adds to each batch."""

Stages = Mapping[str, type[StageSpec]]
"""Maps the name of each stage to its class."""


def parse_settings(model: type[Model], settings: Mapping[str, Any], *, where: str) -> Model:
    """Check settings and return them as an object of the class `model`.

    Raises:
        ConfigError: Settings are invalid; all problems are listed. Messages start with `where`.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as err:
        raise config_error(err, where) from err


def split_stage(item: object) -> tuple[object, object]:
    """Return the name and the value of a stage, for an item of a list of stages: `name` or `{name: value}`."""
    return next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else (item, None)


def read_stage(item: object, stages: Stages) -> StageSpec:
    """Return the stage that an item of a list of stages describes: `name`, `{name: value}`, or a `StageSpec`.

    Raises:
        ValidationError: The item is invalid. Paths start with the name of the stage; they are empty if the item does
            not name a known stage.
    """
    if isinstance(item, StageSpec):
        return item
    name, value = split_stage(item)
    if not isinstance(name, str) or name not in stages:
        own = " A stage is one name with its settings, as in `shuffle: 200`. Register functions of yours by name."
        raise invalid([((), f"{show(name)} is not a stage.{did_you_mean(str(name), stages) or own}")])
    try:
        return stages[name].model_validate(stages[name].expand(value), context=stages)
    except ValidationError as err:
        skipped = int(stages[name].is_mapping)  # the stage itself is this setting
        raise invalid(((name, *path[skipped:]), rule) for path, rule in flaws_of(err)) from None


def _split_names(value: object) -> object:
    return value.split() if isinstance(value, str) else value


def _check_shards(value: object) -> object:
    items = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(items, list | tuple) or not items or not all(isinstance(one, str | os.PathLike) for one in items):
        raise refuse(wrong_kind(value, "a path, a pattern or a list of them is needed"))
    texts = tuple(os.fspath(item) for item in items)
    try:
        for text in texts:
            expand_parts(text)
    except StorageError as err:
        raise refuse(" ".join(str(err).split())) from None
    return texts if items is value else texts[0]


WHOLE = BeforeValidator(as_int)
"""Accepts integers of numpy and torch. It must be last in an annotation, so that the schema keeps the bounds."""
Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63), WHOLE]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**63), WHOLE]
_Percent = Annotated[str, Field(strict=True, pattern=r"^(100|[0-9]{1,2}(\.[0-9]+)?)%$")]
CountOrShare = Annotated[
    Annotated[Natural, Tag("[number]")] | Annotated[_Percent, Tag("[share]")],
    Discriminator(lambda value: "[share]" if isinstance(value, str) else "[number]"),
]
Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, pattern=r"\S")]
Positive = Annotated[float, Field(strict=True, gt=0)]
FieldName = Annotated[str, Field(strict=True, pattern=r"^[^\s;]+$")]
Alternatives = Annotated[str, Field(strict=True, pattern=r"^[^\s;]+(;[^\s;]+)*$")]
FieldNames = Annotated[tuple[FieldName, ...], Field(min_length=1), BeforeValidator(_split_names)]
FieldChoices = Annotated[tuple[Alternatives, ...], Field(min_length=1), BeforeValidator(_split_names)]
Shards = Annotated[str | tuple[str, ...], PlainValidator(_check_shards)]
Classes = Literal["same", "any"]
CLASSES: Any = Field(
    "same", description="Whether the `classes.json` of all folders must name the same classes, or may differ."
)
Cluster = Annotated[str, Field(pattern=r"^ray(://[^\s/:@]+:[0-9]{1,5})?$")]
"""`ray` for the cluster that the environment names, or the address of a Ray Client server."""
Few = Annotated[int, Field(strict=True, ge=1, le=65_535), WHOLE]
"""Pixels of a side, and what takes memory at once: processes, threads and batches ahead."""
Size = Annotated[
    Annotated[Few, Tag("[number]")] | Annotated[tuple[Few, Few], Tag("[list]")],
    Discriminator(lambda value: "[list]" if isinstance(value, list | tuple) else "[number]"),
]
