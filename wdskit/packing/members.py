"""What rows from tars and zips have in common: the members of a key become the fields of a sample."""

from __future__ import annotations

from collections.abc import Iterable

from wdskit.errors import RowError
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import SAME_FIELD, Row, json_with_key, make_row, row_error


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
            fields["json"] = json_with_key(fields.get("json", b"{}"), key, where)
        return make_row(key, fields, where, keys=keys, path=key)
    except RowError as err:
        return err
