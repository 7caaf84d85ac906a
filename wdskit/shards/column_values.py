"""Compute columns, such as `width`, `cls`, `json.score`, splits and filters. A column has one value per sample.

Each value is computed from one sample only: its key, the header of its image, and its JSON, number and text fields. The
columns of new shards are computed while the shards are written. `wdskit index` computes all columns again.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wdskit.codecs.checks import read_header
from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, TEXT_FIELDS, decode_field, follow_path
from wdskit.codecs.formats import is_image_field
from wdskit.codecs.structure import ImageHeader
from wdskit.dataset.columns import MAX_COLUMNS, Part, check_column_name, pack_values
from wdskit.errors import DecodeError, SelectionError
from wdskit.files import Buffer
from wdskit.limits import MAX_CHECKED_BYTES
from wdskit.shards.filters import Expression, ExpressionError, MissingValue
from wdskit.shards.sampling import draw_of_key, parse_share, threshold_of
from wdskit.shards.split import bounds_of, canonical_text, draws_of, make_draw, parse_by, parse_shares
from wdskit.tar.window import LargeData

Source = Mapping[str, Any]
"""The definition of a column: {"path": "json.score"}, or the options of `split` or `select`."""

ReadPart = Callable[[int], bytes]
"""Returns the given number of bytes from the start of a field; fewer if the field is shorter."""

_SIDES = ("width", "height")
_EXAMPLES = "A column is width, height, cls, txt, a path in JSON (json.score), or the length of a text or list "
_EXAMPLES += "(txt.length, json.boxes.length)"


def parse_columns(names: str | Iterable[str]) -> dict[str, Source]:
    """Parse the names of columns. Return the source of each column by its name.

    Args:
        names: `width,cls,json.score`, or a list of such names. `score=json.aesthetic-score` gives the column the name
            `score`.

    Raises:
        SelectionError: A name is invalid or comes twice, a path cannot give a number or a text, or there are over
            `MAX_COLUMNS` names.
    """
    sources: dict[str, Source] = {}
    for item in parse_names(names):
        name, equals, path = item.partition("=")
        path = path if equals else name
        check_column_name(name)
        if name in sources:
            raise SelectionError(f"columns: {name!r} is named twice.")
        parts = path.split(".")
        is_json = any(part.lower() in JSON_FIELDS for part in parts)
        plain = parts[:-1] if parts[-1] == "length" else parts
        is_field = bool(plain) and plain[-1].lower() in INT_FIELDS | TEXT_FIELDS
        if "" in parts or not path.isprintable() or not (is_json or is_field or _is_side(path)):
            raise SelectionError(f"columns: {path!r} cannot be a column. {_EXAMPLES}.")
        sources[name] = {"path": path}
    if len(sources) > MAX_COLUMNS:
        raise SelectionError(f"{len(sources)} columns are more than the {MAX_COLUMNS} that a folder can have.")
    return sources


def parse_names(names: str | Iterable[str]) -> list[str]:
    """Return the names in a list, or in a text with commas. Spaces around names are removed, and empty names are left
    out.
    """
    listed = names.split(",") if isinstance(names, str) else [*names]
    return [name.strip() for name in listed if name.strip()]


class _SampleFields:
    """The fields of one sample from which the columns are computed."""

    def __init__(self) -> None:
        self.problem = ""  # why a field cannot be read; "" if all fields can be read
        self.names: list[str] = []
        self.headers: dict[str, ImageHeader] = {}
        self.data: dict[str, bytes] = {}
        self._values: dict[str, object] = {}

    def value(self, name: str) -> object:
        """Return the decoded value of the field `name`, whose bytes must be in `data`. DecodeError: The bytes are not
        valid for this name.
        """
        if name not in self._values:
            self._values[name] = decode_field(name, self.data[name])
        return self._values[name]


class _ColumnFunction(ABC):
    """Computes the value of one column for a sample."""

    def wants_header(self, name: str) -> bool:  # noqa: ARG002
        """Return whether `value` needs the header of the image field `name`."""
        return False

    @abstractmethod
    def wants(self, name: str) -> bool:
        """Return whether `value` needs the bytes of `name`, a field that is not an image."""

    @abstractmethod
    def value(self, key: str, fields: _SampleFields) -> object:
        """Return the value of the sample with the key `key`: bool, int, float or str; None if the sample has no value.

        Raises:
            ValueError: The value cannot be in a column, or the sample lacks a needed field.
            DecodeError: The bytes of a field are invalid.
        """


class _ImageSide(_ColumnFunction):
    """Width or height of an image in pixels; None without an image. If the path does not name a field, all images of a
    sample must have the same width and height; otherwise `value` raises ValueError.
    """

    def __init__(self, path: str) -> None:
        self._field, _, self._side = path.rpartition(".")

    def wants_header(self, name: str) -> bool:
        return name == self._field if self._field else True

    def wants(self, name: str) -> bool:  # noqa: ARG002
        return False

    def value(self, key: str, fields: _SampleFields) -> object:  # noqa: ARG002
        headers = {name: fields.headers[name] for name in fields.headers if self.wants_header(name)}
        sizes = {(header.width, header.height) for header in headers.values()}
        if len(sizes) > 1:
            names = ", ".join(f"{name}.{self._side}" for name in headers)
            raise ValueError(f"its images have different sizes. Name the field: {names}")
        return getattr(next(iter(headers.values())), self._side) if headers else None


class _FieldValue(_ColumnFunction):
    """The number or the text at a path such as `cls` or `json.score`. The path starts with the name of a field. If
    several names of fields fit, the longest name is used. None if the sample lacks the field or the value.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def wants(self, name: str) -> bool:
        return self._path == name or self._path.startswith(f"{name}.")

    def value(self, key: str, fields: _SampleFields) -> object:  # noqa: ARG002
        name = max((name for name in fields.names if self.wants(name)), key=len, default=None)
        if name is None:
            return None
        rest = self._path[len(name) + 1 :]
        try:
            found = follow_path(fields.value(name), rest.split(".") if rest else [])
        except KeyError:
            return None
        if isinstance(found, dict | list):
            kind = "an object" if isinstance(found, dict) else "a list"
            what = f"it is {kind}, not a number or a text"
            raise ValueError(f"{what}. Its length can be a column: {self._path}.length")  # noqa: TRY004
        if found is not None and not isinstance(found, bool | int | float | str):
            raise ValueError("it is neither a number nor a text")
        return found


class _SplitName(_ColumnFunction):
    """The name of the split to which a sample belongs. A sample without the value to split by gets the split that the
    source names as `missing`; without `missing`, `value` raises ValueError.
    """

    def __init__(self, source: Source) -> None:
        shares = parse_shares(source["split"])
        self._missing = source.get("missing")
        self._key = parse_by(source.get("by", "key"), seed=source.get("seed", 0), may_miss=self._missing is not None)
        self._names, self._bounds = list(shares), bounds_of(shares).tolist()
        self._draw = make_draw(self._key.seed)

    def wants(self, name: str) -> bool:
        return name == self._key.field

    def value(self, key: str, fields: _SampleFields) -> object:
        text: str | None = key
        if self._key.field is not None:
            found = fields.value(self._key.field) if self._key.field in fields.names else None
            for part in self._key.path:
                found = found.get(part) if isinstance(found, dict) else None
            text = canonical_text(found)
        if text is None:
            if self._missing is None:
                raise ValueError(f"{self._key.text} is missing or empty")
            return self._missing
        return self._names[bisect.bisect_right(self._bounds, int(draws_of([self._draw(text)])[0]))]


class _FilterResult(_ColumnFunction):
    """True if the filter and the random share of a source select a sample. False for all samples of a shard that the
    source's `shards` does not list. For a sample without a value that the filter needs: False if the source's `missing`
    is `skip`; otherwise `value` raises MissingValue.
    """

    def __init__(self, source: Source, shard: str) -> None:
        name = shard.rpartition("/")[2]
        self._is_read = name in source.get("shards", [name])
        self._skip_missing = source.get("missing") == "skip"
        text = source["filter"]
        self._expression = None if text is None else Expression(text)
        sample = source.get("sample")
        self._threshold = None if sample is None else threshold_of(parse_share(sample))
        self._seed = source.get("seed", 0)

    def wants(self, name: str) -> bool:
        return self._is_read and self._expression is not None and name in self._expression.fields

    def value(self, key: str, fields: _SampleFields) -> object:
        if not self._is_read:
            return False
        if self._threshold is not None and draw_of_key(key, self._seed) >= self._threshold:
            return False
        try:
            return self._expression is None or self._expression.holds(key, fields.names, fields.value)
        except MissingValue:
            if self._skip_missing:
                return False
            raise


def _build_function(source: Source, shard: str) -> _ColumnFunction:
    if "split" in source:
        return _SplitName(source)
    if "filter" in source:
        return _FilterResult(source, shard)
    path = str(source["path"])
    return _ImageSide(path) if _is_side(path) else _FieldValue(path)


def _is_side(path: str) -> bool:
    """Return whether a path is `width` or `height`, alone or after the name of an image field."""
    owner, _, side = path.rpartition(".")
    return side in _SIDES and (not owner or is_image_field(owner))


class ColumnBuilder:
    """Computes the columns of one shard, sample by sample.

    For each sample, call `add` for each field while its bytes can be read, then `end`.

    Args:
        sources: Source of each column by name.
        shard: Path or URL of the shard, for messages and for filters that select samples of some shards only.

    Raises:
        SelectionError: A source is invalid.
    """

    def __init__(self, sources: Mapping[str, Source], shard: str) -> None:
        try:
            self._functions = {name: _build_function(source, shard) for name, source in sources.items()}
        except (KeyError, TypeError, AttributeError) as err:
            raise SelectionError(f"columns.json: the source of a column is not understood: {err}.") from err
        self._values: dict[str, list[object]] = {name: [] for name in sources}
        self._shard = shard
        self._fields = _SampleFields()

    def add(self, name: str, num_bytes: int, part: ReadPart) -> None:
        """Add a field of the current sample. Only the bytes that the columns need are read.

        Args:
            name: Name of the field.
            num_bytes: Size of the field.
            part: Function that reads the first bytes of the field. If the bytes are invalid or too many, `end` raises
                the error.
        """
        fields = self._fields
        fields.names.append(name)
        functions = self._functions.values()
        try:
            if is_image_field(name):
                if any(function.wants_header(name) for function in functions):
                    fields.headers[name] = read_header(part)
            elif any(function.wants(name) for function in functions):
                if num_bytes > MAX_CHECKED_BYTES:
                    fields.problem = f"{name}: it has {num_bytes} bytes, too many to read for a column"
                else:
                    fields.data[name] = part(num_bytes)
        except DecodeError as err:
            fields.problem = f"{name}: {str(err).removeprefix(f'{name}: ')}"

    def end(self, key: str) -> None:
        """Compute the values of the sample `key`, whose fields were added. SelectionError: A field cannot be read, or a
        value cannot be computed.
        """
        fields, self._fields = self._fields, _SampleFields()
        if fields.problem:
            raise self._error(key, fields.problem)
        for name, function in self._functions.items():
            try:
                self._values[name].append(function.value(key, fields))
            except (ValueError, DecodeError, ExpressionError) as err:
                raise self._error(key, f"column {name}: {err}") from err

    def values(self) -> dict[str, list[object]]:
        """Return the values of all samples so far by column: bool, int, float, str or None."""
        return self._values

    def parts(self) -> dict[str, Part]:
        """Return the values of all samples so far by column, as arrays. SelectionError: A column cannot hold its
        values.
        """
        return pack_columns(self._values, self._shard)

    def _error(self, key: str, problem: str) -> SelectionError:
        folder = self._shard.rpartition("/")[0] or "."
        return SelectionError(f"{self._shard}: sample {key!r}: {problem}.", folder=folder, shard=self._shard, key=key)


def pack_columns(values: Mapping[str, Sequence[object]], shard: str) -> dict[str, Part]:
    """Return the values of each column as an array or `Texts`. `shard` is for the error. SelectionError: A column mixes
    text and numbers, or has an invalid value, such as an integer that does not fit in int64.
    """
    arrays = {}
    for name, column in values.items():
        try:
            arrays[name] = pack_values(column)
        except ValueError as err:
            raise SelectionError(f"{shard}: column {name}: {err}.", shard=shard) from err
    return arrays


def reader_of(data: Buffer) -> ReadPart:
    """Return the `ReadPart` of a field: a function that returns the first bytes of `data`. The bytes of `LargeData` are
    read from its file.
    """

    def read(num_bytes: int) -> bytes:
        if isinstance(data, LargeData) and data.file is not None:
            data.file.seek(0)
            return data.file.read(num_bytes)
        return bytes(data[:num_bytes])

    return read
