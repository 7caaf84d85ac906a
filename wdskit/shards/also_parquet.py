"""img2dataset's files beside a shard: `<shard>.parquet`, a row a sample, and `<shard>_stats.json`.

The columns are `key` and what stands at the top of the samples' `json`: whole numbers as int64, others as double, text,
booleans; everything else, and a name that has values of several kinds, as JSON text. img2dataset's own have the columns
of its download, which for its shards are those of `json` too.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wdskit.codecs.fields import decode_field
from wdskit.errors import ConfigError, DecodeError, FolderIndexError
from wdskit.shards.also_record import ShardRecord

if TYPE_CHECKING:
    import pyarrow as pa

KEY_COLUMN = "key"

MAX_COLUMNS = 1000
"""More names at the top of the JSON of a shard are not columns but data: they stand in one column `json` then."""

_EXACT = 1 << 53  # whole numbers up to this are exact as a double


def check_pyarrow() -> None:
    """Refuse to begin without it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as err:
        raise ConfigError("parquet: this needs pyarrow, which is not installed: pip install 'wdskit[tables]'.") from err


def parquet_file(record: ShardRecord, shard: str) -> bytes:
    """The samples of a shard as a Parquet file. The same samples and pyarrow give the same bytes.

    Args:
        record: Its samples with their JSON.
        shard: Its path, for messages.

    Raises:
        FolderIndexError: The JSON of a sample does not parse.
    """
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(_table(record, shard), stream)
    return stream.getvalue()


def parquet_problem(data: bytes, record: ShardRecord, shard: str) -> str:
    """In what a Parquet file does not match its shard, "" where it does.

    Args:
        data: The file.
        record: What is in the shard.
        shard: Its path, for messages.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return "it cannot be compared without pyarrow: pip install 'wdskit[tables]'"
    try:
        told = parquet.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as err:
        return f"it does not read: {str(err).partition(chr(10))[0]}"
    try:
        wanted = _table(record, shard)
    except FolderIndexError as err:
        return str(err).partition("\n")[0]
    if told.num_rows != wanted.num_rows:
        return f"it has {told.num_rows} rows, the shard {wanted.num_rows} samples"
    return "" if told.equals(wanted) else "its rows are not those of the shard's samples"


def stats_file(num_samples: int) -> bytes:
    """img2dataset's counts: of what stands in a shard, all was a success."""
    stats = {"count": num_samples, "successes": num_samples, "failed_to_download": 0, "failed_to_resize": 0}
    return (json.dumps({**stats, "status_dict": {"success": num_samples}}, indent=4) + "\n").encode()


def _table(record: ShardRecord, shard: str) -> pa.Table:
    import pyarrow as pa

    documents = [_parsed(key, data, shard) for key, data in zip(record.keys, record.documents, strict=True)]
    columns = {KEY_COLUMN: pa.array(record.keys, pa.string())}
    for name, values in _columns(documents).items():
        name = name if _encodes(name) else ascii(name)
        while name in columns:
            name = f"json.{name}"
        columns[name] = _array(values)
    return pa.table(columns)


def _parsed(key: str, data: bytes | None, shard: str) -> Any:
    if data is None:
        return None
    try:
        return decode_field("json", data)
    except DecodeError as err:
        msg = f"{shard}: key {key!r}: {err}"
        raise FolderIndexError(f"{msg}\n  Mend it, or leave out `parquet`.", folder=shard) from err


def _columns(documents: Sequence[Any]) -> dict[str, list[Any]]:
    """The values of each name at the top, names in the order in which they come."""
    names = dict.fromkeys(name for one in documents if isinstance(one, dict) for name in one)
    plain = all(one is None or isinstance(one, dict) for one in documents)
    if not plain or len(names) > MAX_COLUMNS:
        return {"json": list(documents)}
    return {name: [one.get(name) if one else None for one in documents] for name in names}


def _array(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        return pa.nulls(len(values))
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {str} and all(value is None or _encodes(value) for value in values):
        return pa.array(values, pa.string())
    whole = [value for value in values if type(value) is int]
    if kinds == {int} and all(-(1 << 63) <= value < 1 << 63 for value in whole):
        return pa.array(values, pa.int64())
    if kinds <= {int, float} and all(abs(value) <= _EXACT for value in whole):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if _encodes(text) else json.dumps(value, separators=(",", ":"))


def _encodes(text: str) -> bool:
    """Whether UTF-8 holds it: JSON can escape half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
