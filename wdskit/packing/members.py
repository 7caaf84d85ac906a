"""What rows from tars and zips have in common: the members of a key become the fields of a sample."""

from __future__ import annotations

from collections.abc import Iterable

from wdskit.errors import RowError
from wdskit.packing.facts import field_with_facts
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import SAME_FIELD, Row, make_row, row_error, to_json


def row_or_error(key: str, members: Iterable[tuple[str, FieldBytes]], archive: str, keys: str) -> Row | RowError:
    """The row of a key's members, `jpeg` as `jpg`; or what is wrong with it.

    A leading `./`, as tars of a whole folder have it, is no part of the key. A key that is hashed stands in `json`.
    """
    where = f"{archive}: {key}"
    key = key.removeprefix("./")
    try:
        fields: dict[str, FieldBytes] = {}
        for name, data in members:
            field = SAME_FIELD.get(name, name)
            if field in fields:
                raise row_error(where, f"it has the field {field!r} twice", "Rename one of its members.")
            fields[field] = data
        if keys == "hashed":
            fields["json"] = _json_with_key(fields.get("json"), key, where)
        return make_row(key, fields, where, keys=keys, path=key)
    except RowError as err:
        return err


def _json_with_key(own: FieldBytes | None, key: str, where: str) -> bytes:
    try:
        return to_json({"key": key}) if own is None else field_with_facts(own, {"key": key})
    except (OSError, ValueError) as err:
        problem = (err.strerror or str(err)) if isinstance(err, OSError) else str(err)
        raise row_error(where, f"its json: {problem}", "Mend it, or use --skip-bad.") from err
