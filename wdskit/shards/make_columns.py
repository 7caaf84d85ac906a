"""Compute columns, such as `width`, `cls`, `json.score` and splits. A column has one value per sample.

Each value is computed from one sample only: its key, the header of its image, and its JSON, number and text fields. The
columns of new shards are computed while the shards are written. `wdskit index` computes all columns again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from wdskit.codecs.checks import read_header
from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, TEXT_FIELDS, decode_field, follow_path
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.columns import Part, check_column_name, pack_values
from wdskit.errors import DecodeError, SelectionError
from wdskit.files import Buffer
from wdskit.limits import MAX_CHECKED_BYTES
from wdskit.shards.lazy_shard import read_part
from wdskit.shards.shares import SplitName

Source = Mapping[str, Any]
"""The definition of a column: {"path": "json.score"}, or the options of `split`."""

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
        SelectionError: A name is invalid or comes twice, or a path cannot give a number or a text.
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
    return sources


def parse_names(names: str | Iterable[str]) -> list[str]:
    """Return the names in a list, or in a text with commas. Spaces around names are removed, and empty names are left
    out.
    """
    listed = names.split(",") if isinstance(names, str) else [*names]
    return [name.strip() for name in listed if name.strip()]


class _PathValue:
    """The value of a column with a path: `width`, `jpg.height`, `cls`, `json.score`, `txt.length`. None if a sample
    lacks the field or the value.

    Without the name of a field, `width` and `height` are those of all images of a sample, which must be equal. Other
    paths start with the name of a field; if several names fit, the longest name is used.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._owner, _, self._last = path.rpartition(".")
        self._is_side = _is_side(path)

    def wants(self, name: str) -> bool:
        """Return whether `value` needs the field `name`: of an image the header, of another field the bytes."""
        if is_image_field(name):
            return self._is_side and self._owner in {"", name}
        return not self._is_side and (self._path == name or self._path.startswith(f"{name}."))

    def value(self, _: str, fields: Mapping[str, object]) -> object:
        """Return the value of a sample: bool, int, float or str; None if the sample has no value. `fields` maps the
        name of each field that `wants` accepts to its header or its decoded value.

        Raises:
            ValueError: The value cannot be in a column.
        """
        names = [name for name in fields if self.wants(name)]
        if self._is_side:
            sides = {getattr(fields[name], self._last) for name in names}
            if len(sides) > 1:
                known = ", ".join(f"{name}.{self._last}" for name in names)
                raise ValueError(f"its images have different sizes. Name the field: {known}")
            return sides.pop() if sides else None
        name = max(names, key=len, default=None)
        if name is None:
            return None
        rest = self._path[len(name) + 1 :]
        try:
            found = follow_path(fields[name], rest.split(".") if rest else [])
        except KeyError:
            return None
        if isinstance(found, dict | list):
            raise ValueError(f"it is a list or an object. Its length can be a column: {self._path}.length")  # noqa: TRY004
        return found


def _is_side(path: str) -> bool:
    """Return whether a path is `width` or `height`, alone or after the name of an image field."""
    owner, _, side = path.rpartition(".")
    return side in _SIDES and (not owner or is_image_field(owner))


class ColumnBuilder:
    """Computes the columns of one shard, sample by sample.

    For each sample, call `add` for each field while its bytes can be read, then `end`.

    Args:
        sources: Source of each column by name.
        shard: Path or URL of the shard, for messages.

    Raises:
        SelectionError: A source is invalid.
    """

    def __init__(self, sources: Mapping[str, Source], shard: str) -> None:
        self._shard = shard
        self._columns: dict[str, SplitName | _PathValue] = {}
        for name, source in sources.items():
            if not source.keys() & {"split", "path"}:
                raise self._error(f"columns.json: the source of the column {name!r} is unknown. Remove the column")
            self._columns[name] = SplitName(source) if "split" in source else _PathValue(source["path"])
        self._values: dict[str, list[object]] = {name: [] for name in sources}
        self._fields: dict[str, object] = {}
        self._problem = ""  # why a field of the sample cannot be read

    def add(self, name: str, num_bytes: int, part: ReadPart) -> None:
        """Add a field of the current sample. Only the bytes that the columns need are read.

        Args:
            name: Name of the field.
            num_bytes: Size of the field.
            part: Function that reads the first bytes of the field. If the bytes are invalid or too many, `end` raises
                the error.
        """
        if not any(column.wants(name) for column in self._columns.values()):
            return
        try:
            if is_image_field(name):
                self._fields[name] = read_header(part)
            elif num_bytes > MAX_CHECKED_BYTES:
                self._problem = f"{name}: it has {num_bytes} bytes, too many to read for a column"
            else:
                self._fields[name] = decode_field(name, part(num_bytes))
        except DecodeError as err:
            self._problem = f"{name}: {str(err).removeprefix(f'{name}: ')}"

    def end(self, key: str) -> None:
        """Compute the values of the sample `key`, whose fields were added. SelectionError: A field cannot be read, or a
        value cannot be computed.
        """
        if self._problem:
            raise self._error(f"sample {key!r}: {self._problem}", key=key)
        for name, column in self._columns.items():
            try:
                self._values[name].append(column.value(key, self._fields))
            except ValueError as err:
                raise self._error(f"sample {key!r}: column {name}: {err}", key=key) from err
        self._fields = {}

    def values(self) -> dict[str, list[object]]:
        """Return the values of all samples so far by column: bool, int, float, str or None."""
        return self._values

    def parts(self) -> dict[str, Part]:
        """Return the values of all samples so far by column, as arrays. SelectionError: A column cannot hold its
        values.
        """
        return pack_columns(self._values, self._shard)

    def _error(self, problem: str, *, key: str = "") -> SelectionError:
        folder = self._shard.rpartition("/")[0] or "."
        return SelectionError(f"{self._shard}: {problem}.", folder=folder, shard=self._shard, key=key)


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
    """Return the `ReadPart` of a field: a function that returns the first bytes of `data`."""
    return partial(read_part, data)
