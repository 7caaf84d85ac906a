"""Change the fields and keys of samples that `reshard` writes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from wdskit.codecs.fields import decode_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.keys import check_field
from wdskit.errors import DecodeError, KeyRuleError, PackError
from wdskit.packing.json_merge import MetadataConflict, add_metadata, replace_member
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import Row, make_row, row_error
from wdskit.packing.sources.records import Records, check_json_fields, json_fields
from wdskit.packing.sources.tar_samples import TarSample


@dataclass(frozen=True)
class Changes:
    """The fields to keep, drop, rename and make, and the rule for new keys.

    Attributes:
        keep: Names of the fields to keep; None keeps all fields.
        drop: Names of the fields to drop.
        rename: Maps old names of fields to new names.
        made: The fields to make from values in a sample's JSON; None makes no fields.
        keys: "given" keeps the keys. "clean" replaces characters that some readers refuse by `_`. "hashed" replaces the
            key by its hash. Both store the old key as the member `key` of the field `json`, which is made if it is
            missing.

    Raises:
        PackError: `keep` and `drop` are both set, a dropped field is renamed, a name is not a valid field name, a field
            of `made` cannot be made from JSON, or `made` has classes but no field `cls`.
    """

    keep: frozenset[str] | None = None
    drop: frozenset[str] = frozenset()
    rename: Mapping[str, str] = field(default_factory=dict)
    keys: str = "given"
    made: Records | None = None

    def __post_init__(self) -> None:
        if self.made is not None:
            check_json_fields(self.made)
        if self.keep is not None and self.drop:
            raise PackError("keep and drop: use only one of them. What is not kept is dropped.")
        for option, names in (
            ("keep", self.keep or ()),
            ("drop", self.drop),
            ("rename", self.rename.keys()),
            ("rename", self.rename.values()),
        ):
            for name in sorted(names):
                try:
                    check_field(name)
                except KeyRuleError as err:
                    raise PackError(f"{option}: {err}") from err
        dropped = [name for name in self.rename if self.new_name(name) is None]
        if dropped:
            raise PackError(f"rename: {dropped[0]} is dropped, so it cannot be renamed.")

    @property
    def named(self) -> frozenset[str]:
        """All names of fields in `keep` and `drop`, and all old names in `rename`."""
        return (self.keep or frozenset()) | self.drop | self.rename.keys()

    def to_dict(self) -> dict[str, object]:
        """Return the options by name, as values for JSON."""
        return {
            "keep": None if self.keep is None else sorted(self.keep),
            "drop": sorted(self.drop),
            "rename": dict(sorted(self.rename.items())),
            "keys": self.keys,
            "fields": {} if self.made is None else dict(self.made.fields),
            "classes": None if self.made is None or self.made.classes is None else self.made.classes.describe(),
        }

    def new_name(self, name: str) -> str | None:
        """Return the new name of the field `name`, or `name` if it has none. Return None if the field is not kept."""
        if name in self.drop or (self.keep is not None and name not in self.keep):
            return None
        return self.rename.get(name, name)

    def new_names(self, names: Collection[str]) -> dict[str, str]:
        """Return a dict of new name to old name for the kept fields, sorted by new name. `names` are the old names.

        Raises:
            ValueError: No field is kept, or two fields get the same name.
        """
        old_names: dict[str, str] = {}
        for name in names:
            new = self.new_name(name)
            if new is None:
                continue
            if new in old_names:
                raise ValueError(f"both {old_names[new]!r} and {name!r} become {new!r}")
            old_names[new] = name
        if not old_names:
            raise ValueError(f"no fields are left of: {', '.join(names)}")
        return dict(sorted(old_names.items()))

    def row(self, sample: TarSample, where: str) -> Row:
        """Return the row of a sample with its new key and fields. `where` is the place of the sample, for messages.

        Raises:
            RowError: No field is left, two fields get the same name, a field cannot be made from the JSON of the
                sample, or the key or a field is invalid.
            StorageError: The sample's JSON is needed and cannot be read.
        """
        try:
            return make_row(sample.key, self._fields(sample), where, keys=self.keys, path=sample.key)
        except ValueError as err:
            remedy = "Change what is renamed, dropped or kept; odd keys: --keys hashed."
            if isinstance(err.__cause__, MetadataConflict):
                remedy = f"Its json has the key of an earlier run. Leave --keys {self.keys} out, or drop json."
            raise row_error(where, str(err), remedy) from err

    def _fields(self, sample: TarSample) -> Mapping[str, FieldBytes]:
        if not self.named and self.keys == "given" and self.made is None:
            return sample.fields
        fields = {new: sample.fields[old] for new, old in self.new_names(sample.fields).items()}
        if self.made is not None:
            made = json_fields(self.made, sample.read("json") if "json" in sample.fields else None, fields.keys())
            if CLASS_FIELD in made and CLASS_FIELD in sample.fields and self.new_name("json") == "json":
                fields["json"] = _with_label(sample.read("json"), sample.read(CLASS_FIELD), made[CLASS_FIELD])
            fields.update(made)
        if self.keys != "given":
            own = fields.get("json", b"{}")
            if not isinstance(own, bytes):
                own = sample.read(next(old for old in sample.fields if self.new_name(old) == "json"))
            try:
                fields["json"] = add_metadata(own, {"key": sample.key})
            except ValueError as err:
                raise ValueError(f"its json: {err}") from err
        return fields


def _with_label(json_bytes: bytes, old_label: bytes, new_label: bytes) -> bytes:
    """Replace the class number in the member `cls` of a sample's JSON. Return the new JSON.

    `old_label` and `new_label` are the field `cls` before and after the change. The JSON is returned unchanged if it
    has no member `cls`, or if this member is not the number in `old_label`.
    Raises DecodeError if `json_bytes` is not valid JSON, ValueError if the member is repeated.
    """
    value = decode_field("json", json_bytes)
    if not isinstance(value, dict) or type(value.get(CLASS_FIELD)) is not int:
        return json_bytes
    with contextlib.suppress(DecodeError):  # the old field may have had a text
        if value[CLASS_FIELD] == decode_field(CLASS_FIELD, old_label):
            return replace_member(json_bytes, CLASS_FIELD, new_label)
    return json_bytes


def make_changes(
    *,
    keep: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    rename: str | Sequence[str] | Mapping[str, str] | None = None,
    keys: str = "given",
    made: Records | None = None,
) -> Changes:
    """Parse options of `reshard` into `Changes`.

    Args:
        keep: The fields to keep: a text, `jpg,cls`, or a list of such texts; None keeps all fields.
        drop: The fields to drop, as a text or list like `keep`; None drops no field.
        rename: A text, `jpeg=jpg,class=cls`, a list of such texts, or a mapping of old names to new names.
        keys: "given", "clean" or "hashed", as in `Changes`. Other values are not refused here.
        made: Makes fields from values in a sample's JSON; None makes no fields.

    Raises:
        PackError: An option is invalid, or two options conflict.
    """
    kept = None if keep is None else _parse_names("keep", keep)
    dropped = frozenset() if drop is None else _parse_names("drop", drop)
    return Changes(kept, dropped, _parse_rename(rename), keys, made)


def _parts(texts: str | Sequence[str]) -> list[str]:
    return [part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in text.split(",")]


def _parse_names(option: str, names: str | Sequence[str]) -> frozenset[str]:
    parts = _parts(names)
    if not all(parts) or not parts:
        raise PackError(f"{option}: {names!r} is not a list of fields. Write jpg,cls.")
    return frozenset(parts)


def _parse_rename(rename: str | Sequence[str] | Mapping[str, str] | None) -> dict[str, str]:
    if rename is None or isinstance(rename, Mapping):
        return dict(rename or {})
    new_names: dict[str, str] = {}
    for part in _parts(rename):
        old, equals, new = part.partition("=")
        if not equals or not old or not new or old in new_names:
            raise PackError(f"rename: {part!r} is not OLD=NEW, or repeats an OLD. Write jpeg=jpg,class=cls.")
        new_names[old] = new
    return new_names
