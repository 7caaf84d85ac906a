"""Settings: the base class of the settings of stages, the types of single settings, and the words of messages.

pydantic checks settings and words its errors; `read_settings` puts the path and the value beside them.
"""

from __future__ import annotations

import difflib
import math
import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Strict,
    Tag,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from wdskit.dataset.patterns import expand_parts
from wdskit.errors import ConfigError, Problem, StorageError
from wdskit.text import as_int, hide_secrets, printable

Path = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)
Kind = Literal["source", "splitter", "each", "stream", "batch", "epoch"]

MAX_SHOWN = 60
"""Limit for the characters of a value in a message."""

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 2, 4, 4
_MARKS = ("[key]", "[number]", "[names]", "[schedule]", "[list]", "[settings]", "[share]")
"""pydantic's mark for a dict's key, and the tags of unions."""


class Flaw(NamedTuple):
    """One problem of a value: the path of the setting inside the value, and the message."""

    path: Path
    rule: str


def dotted(path: Path) -> str:
    """Return a path as text: `("pipelines", "train", 2, "shuffle")` becomes `pipelines.train[2].shuffle`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return printable(text.removeprefix("."))


def show(value: object) -> str:
    """Return any value as one short line for messages: text in backticks, other values as Python writes them."""
    if isinstance(value, str) and value and value.isprintable():
        return f"`{value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 1] + '…'}`"
    if not isinstance(value, str | int | float | list | tuple | dict | None):
        return f"a value of the type {type(value).__name__}"
    return _REPR.repr(value)


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
    near = [part for part in reversed([*lowered.split("_"), lowered]) if part in names]
    near = near or difflib.get_close_matches(lowered, names, n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """Return the message for a setting `name` that does not exist. `known` are the settings of its stage or section."""
    return f"no such setting.{did_you_mean(name, known) or ' Known: ' + (listing(known) or 'none') + '.'}"


class StageSpec(BaseModel):
    """The settings of one stage: validated, frozen, comparable. It holds no state and opens no file.

    Attributes:
        name: Name of the stage in YAML, in the builder and in messages.
        kind: Effect on the stream: "source" yields the stream, "splitter" selects shards, "each" maps one value to one
            value, "stream" reorders or drops values, "batch" makes batches, "epoch" sets a number of items.
        shorthand: The setting that a bare value sets (`shuffle: 200`); None if the stage takes no arguments.
        is_mapping: Whether a whole YAML mapping is the value of `shorthand` (`rename: {image: jpg}`).
        is_starred: Name of the `*arguments` of the Python method, if the method takes the items of `shorthand` as
            separate arguments; else empty.
        takes_any: Whether the stage maps a value of any type to a value of any type, as a user's function may.
        calls_user: Whether the stage calls a function of the user, or one that only one thread at a time may call.
        is_light: Whether the stage always holds the GIL, so that several threads only wait for each other.
        is_planned: Whether the stage is a source that knows the position of every sample before the run.
        needs_plan: Whether the stage needs such a source.
        items: For each setting that is a list of mappings: the class that checks one mapping.
        example: Settings for an example in the documentation, if the required settings alone make no example.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

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
    items: ClassVar[dict[str, type[BaseModel]]] = {}
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

    def written(self) -> Any:
        """Return the stage as an item of a list of stages in YAML: `{name: settings}` without settings that are null,
        or only the name if all are. A mapping that is all settings stands alone: `{rename: {image: jpg}}`.
        """
        fields = {self.__class__.model_fields[name].alias or name: value for name, value in self if value is not None}
        value = fields.get(self.shorthand or "") if self.is_mapping else fields
        return {self.name: value} if value else self.name


VALID = "__valid__"
"""The name of the mask that `tail: pad` adds to each batch."""

Stages = Mapping[str, type[StageSpec]]
"""Maps the name of each stage to its class."""


def refuse(rule: str) -> PydanticCustomError:
    """Return the error that a validator raises to refuse a value, with `rule` as its message."""
    return PydanticCustomError("wdskit", "{rule}", {"rule": rule})


def parse_settings(model: type[Model], settings: Mapping[str, Any], *, where: str) -> Model:
    """Check settings and return them as an object of the class `model`.

    Raises:
        ConfigError: Settings are invalid; all problems are listed. Messages start with `where`.
    """
    flaws: list[Flaw] = []
    return require_valid(read_settings(model, settings, flaws), flaws, where=where)


def require_valid(found: Model | None, flaws: list[Flaw], *, where: str) -> Model:
    """Return `found`, or raise a ConfigError that lists all flaws if it is None. Messages start with `where`."""
    if found is None:
        raise ConfigError(problems=tuple(Problem(where, dotted(flaw.path), flaw.rule) for flaw in flaws))
    return found


def read_settings(
    model: type[Model], settings: object, flaws: list[Flaw], *, stages: Stages | None = None
) -> Model | None:
    """Check settings and return them as an object of the class `model`. If settings are invalid, add what is wrong to
    `flaws` and return None. A setting that is None is not set.

    `stages` are the classes of stages by name, for settings that contain stages.
    """
    if isinstance(settings, Mapping):
        settings = {
            name: value for name, value in settings.items() if value is not None or name not in model.model_fields
        }
    try:
        return model.model_validate(settings, context=stages)
    except ValidationError as err:
        errors = err.errors(include_url=False)
        inner = {error["loc"][:size] for error in errors for size in range(len(error["loc"]))}
        # a list of which no item is valid is not also too short
        found = [error for error in errors if error["type"] != "too_short" or error["loc"] not in inner]
        flaws += dict.fromkeys(_flaw(model, error) for error in found)
        return None


def _flaw(model: type[BaseModel], error: Mapping[str, Any]) -> Flaw:
    path: Path = tuple(part for part in error["loc"] if part not in _MARKS)
    is_whole = error["type"] in {"wdskit", "missing", "too_short"}
    rule = error["msg"] if is_whole else f"{error['msg']}, not {show(error['input'])}"
    if error["type"] == "extra_forbidden":
        owner = getattr(model, "items", {}).get(path[0], model) if len(path) > 1 else model
        rule = unknown_setting(str(path[-1]), [one.alias or name for name, one in owner.model_fields.items()])
    return Flaw(path, rule if rule.endswith((".", "?")) else f"{rule}.")


def read_stage(stages: Stages, item: object, flaws: list[Flaw]) -> StageSpec | None:
    """Return the stage that an item of a list of stages describes: `name`, `{name: value}`, or a `StageSpec`.

    If the item is invalid, add what is wrong to `flaws` and return None. The path of a flaw starts with the name of the
    stage; it is empty if the item does not name a known stage.
    """
    if isinstance(item, StageSpec):
        return item
    name, value = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else (item, None)
    if not isinstance(name, str):
        need = "a stage is one name with its settings, as in `- shuffle: 200` or `- split_by_node`"
        flaws.append(Flaw((), wrong_kind(item, need)))
    elif name not in stages:
        own = " To use your own function, register it and write its name, or `- map: its_name`."
        flaws.append(Flaw((), f"{show(name)} is not a stage.{did_you_mean(name, stages) or own}"))
    else:
        found: list[Flaw] = []
        spec = read_settings(stages[name], stages[name].expand(value), found, stages=stages)
        skipped = int(stages[name].is_mapping)  # the stage itself is this setting
        flaws += [Flaw((name, *flaw.path[skipped:]), flaw.rule) for flaw in found]
        return spec
    return None


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


def _check_size(value: object) -> object:
    sides = [as_int(side) for side in (value if isinstance(value, list | tuple) else [value])]
    is_pair = isinstance(value, list | tuple)
    if len(sides) != 1 + is_pair or not all(type(side) is int and 1 <= side <= 65_535 for side in sides):
        raise refuse(f"{show(value)} is not a size in pixels, 1 to 65535: one number, or [height, width].")
    return tuple(sides) if is_pair else sides[0]


def _check_ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise refuse(f"{show([*pair])} is not [low, high], with low <= high.")
    return pair


def _check_channels(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) not in {1, 3} or not 0 <= min(values) <= max(values) <= 1:
        raise refuse(
            f"{show([*values])} is not 1 number (grey) or 3 (red, green, blue) within 0..1, as the pixels are."
        )
    return values


ImageSpec = Literal[
    "l8", "rgb8", "rgba8", "l", "rgb", "rgba", "torchl8", "torchrgb8", "torchrgba8", "torchl", "torchrgb", "torch",
    "torchrgba", "pill", "pil", "pilrgb", "pilrgba", "index",
]  # fmt: skip
WHOLE = BeforeValidator(as_int)
"""Accepts integers of numpy and torch. It must be last in an annotation, so that the schema keeps the bounds."""
Natural = Annotated[int, Strict(), Field(ge=0, lt=2**63), WHOLE]
Count = Annotated[int, Strict(), Field(ge=1, lt=2**63), WHOLE]
_Percent = Annotated[
    str,
    Strict(),
    Field(pattern=r"^(100|[0-9]{1,2}(\.[0-9]+)?)%$"),
    AfterValidator(lambda share: share if float(share[:-1]) else 0),
]
CountOrShare = Annotated[
    Annotated[Natural, Tag("[number]")] | Annotated[_Percent, Tag("[share]")],
    Discriminator(lambda value: "[share]" if isinstance(value, str) else "[number]"),
]
Device = Annotated[str, Field(pattern=r"^cuda(:[0-9]+)?$")]
Cluster = Annotated[str, Field(pattern=r"^ray(://[^\s/:@]+:[0-9]{1,5})?$")]
Bool = Annotated[bool, Strict()]
Number = Annotated[float, Strict()]
Text = Annotated[str, Strict(), Field(pattern=r"\S")]
Positive = Annotated[float, Strict(), Field(gt=0)]
Timeout = Annotated[float, Strict(), Field(ge=0, lt=math.inf)]
FieldName = Annotated[str, Strict(), Field(pattern=r"^[^\s;]+$")]
Alternatives = Annotated[str, Strict(), Field(pattern=r"^[^\s;]+(;[^\s;]+)*$")]
FieldNames = Annotated[tuple[FieldName, ...], Field(min_length=1), BeforeValidator(_split_names)]
FieldChoices = Annotated[tuple[Alternatives, ...], Field(min_length=1), BeforeValidator(_split_names)]
Shards = Annotated[str | tuple[str, ...], PlainValidator(_check_shards)]
Classes = Literal["same", "any"]
CLASSES: Any = Field(
    "same", description="Whether the `classes.json` of all folders must name the same classes, or may differ."
)
Size = Annotated[int | tuple[int, int], PlainValidator(_check_size)]
Range = Annotated[tuple[Positive, Positive], AfterValidator(_check_ordered)]
_Share = Annotated[float, Strict(), Field(gt=0, le=1)]
ShareRange = Annotated[tuple[_Share, _Share], AfterValidator(_check_ordered)]
Channels = Annotated[tuple[Number, ...], AfterValidator(_check_channels)]
PositiveChannels = Annotated[tuple[Positive, ...], AfterValidator(_check_channels)]
