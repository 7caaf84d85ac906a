"""What happens to the fields and keys of samples that are written again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wdskit.codecs.fields import decode_field
from wdskit.dataset.keys import check_field, check_member_name, hashed_key
from wdskit.errors import KeyRuleError, PackError
from wdskit.packing.json_merge import add_metadata, replace_member
from wdskit.packing.labels import CLASS_FIELD
from wdskit.packing.row import clean_key
from wdskit.packing.samples.choice import check_word
from wdskit.packing.sources.records import Records, check_json_fields, json_fields
from wdskit.tar.names import split_name
from wdskit.tar.reader import locate_members


@dataclass(frozen=True)
class Sample:
    """One sample in the bytes of its shard.

    Attributes:
        key: Its key.
        fields: For each field, where its bytes start and end.
        num_ignored: Members among its own that belong to no sample.
    """

    key: str
    fields: Mapping[str, tuple[int, int]]
    num_ignored: int


@dataclass(frozen=True)
class Changes:
    """Which fields stay, and what they and the keys are called then.

    Attributes:
        keep: Names of those that stay; None for all.
        drop: Names of those that go.
        rename: New names by old ones.
        made: Makes fields of values in a sample's JSON; None for none.
        keys: "given"; or "clean" or "hashed": each key is replaced as `pack` does, and kept in the sample's json.

    Raises:
        PackError: They contradict each other, or a name is none.
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
        for option, names in (("keep", self.keep or ()), ("drop", self.drop), ("rename", self.rename)):
            self._check(option, names)
        self._check("rename", self.rename.values())
        gone = [name for name in self.rename if self.new_name(name) is None]
        if gone:
            raise PackError(f"rename: {gone[0]} is dropped, so it cannot be renamed.")

    def _check(self, option: str, names: Iterable[str]) -> None:
        for name in sorted(names):
            try:
                check_field(name)
            except KeyRuleError as err:
                raise PackError(f"{option}: {err}") from err

    @property
    def rewrites_all(self) -> bool:
        """Whether no sample stays as it is."""
        return self.keys != "given" or self.made is not None

    @property
    def named(self) -> frozenset[str]:
        """The fields that are spoken of: one that no sample has is a mistake."""
        return (self.keep or frozenset()) | self.drop | self.rename.keys()

    def to_dict(self) -> dict[str, object]:
        """As options, by name."""
        return {
            "keep": None if self.keep is None else sorted(self.keep),
            "drop": sorted(self.drop),
            "rename": dict(sorted(self.rename.items())),
            "keys": self.keys,
            "fields": {} if self.made is None else dict(self.made.fields),
            "classes": None if self.made is None or self.made.classes is None else self.made.classes.describe(),
        }

    def new_key(self, key: str) -> str:
        """What a key is then."""
        if self.keys == "given":
            return key
        return hashed_key(key) if self.keys == "hashed" else clean_key(key)

    def new_name(self, name: str) -> str | None:
        """What a field is called then; None for one that goes."""
        if name in self.drop or (self.keep is not None and name not in self.keep):
            return None
        return self.rename.get(name, name)

    def new_names(self, names: Collection[str]) -> dict[str, str]:
        """The fields of a sample that stay: old names by new ones, in the order of their members.

        Raises:
            ValueError: None stays, or two have one name then.
        """
        found: dict[str, str] = {}
        for name in names:
            new = self.new_name(name)
            if new is not None and new in found:
                raise ValueError(f"both {found[new]!r} and {name!r} become {new!r}")
            if new is not None:
                found[new] = name
        if not found:
            raise ValueError(f"no fields are left of: {', '.join(names)}")
        return dict(sorted(found.items()))

    def rewrite(self, sample: Sample, data: memoryview) -> tuple[str, list[tuple[str, memoryview | bytes]]]:
        """Key, and names and bytes of the fields, as they are to be.

        Args:
            sample: What stands in `data`.
            data: The sample's bytes.

        Raises:
            ValueError: They cannot be so; the message says why.
        """
        names = self.new_names(sample.fields)
        fields: dict[str, memoryview | bytes] = {new: data[slice(*sample.fields[old])] for new, old in names.items()}
        if self.made is not None:
            own = sample.fields.get("json")
            made = json_fields(self.made, None if own is None else bytes(data[slice(*own)]), fields.keys())
            if CLASS_FIELD in made and CLASS_FIELD in sample.fields and "json" in fields:
                fields["json"] = _with_label(
                    bytes(fields["json"]), bytes(data[slice(*sample.fields[CLASS_FIELD])]), made[CLASS_FIELD]
                )
            fields.update(made)
        key = sample.key
        if self.keys != "given":
            try:
                fields["json"] = add_metadata(bytes(fields.get("json", b"{}")), {"key": key})
            except ValueError as err:
                raise ValueError(f"its json: {err}") from err
            key = self.new_key(key)
        try:
            check_member_name(key, max(fields, key=len))
        except KeyRuleError as err:
            raise ValueError(str(err)) from err
        return key, sorted(fields.items())


def _with_label(own: bytes, before: bytes, now: bytes) -> bytes:
    """A sample's json. If it has the number of its class under `cls`, as an image folder's has, that is the new one."""
    known = decode_field("json", own)
    if not isinstance(known, dict) or type(known.get(CLASS_FIELD)) is not int:
        return own
    if known[CLASS_FIELD] != decode_field(CLASS_FIELD, before):
        return own
    return replace_member(own, CLASS_FIELD, now)


def find_fields(data: bytes, *, shard: str, offset: int) -> Sample:
    """The sample that these bytes of a shard are, by the strict reader.

    Raises:
        ShardError: A header is not right, or the bytes end inside a member.
        ValueError: They are not one sample.
    """
    key = None
    fields: dict[str, tuple[int, int]] = {}
    num_ignored = 0
    for name, start, stop in locate_members(data, shard=shard, offset=offset, stop=len(data)):
        split = split_name(name)
        if split is None:
            num_ignored += 1
            continue
        key = split[0] if key is None else key
        if split[0] != key or split[1] in fields:
            raise ValueError(f"it holds {name!r} beside the key {key!r}")
        fields[split[1]] = start, stop
    if key is None:
        raise ValueError("it has no member")
    return Sample(key, fields, num_ignored)


def make_changes(
    *,
    keep: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    rename: str | Sequence[str] | Mapping[str, str] | None = None,
    keys: str = "given",
    made: Records | None = None,
) -> Changes:
    """The changes that options describe: `jpg,cls`, `jpeg=jpg,class=cls`, or lists of such.

    Raises:
        PackError: One of them is wrong.
    """
    check_word("keys", keys, ("given", "clean", "hashed"))
    kept = None if keep is None else _parse_names("keep", keep)
    dropped = frozenset() if drop is None else _parse_names("drop", drop)
    return Changes(kept, dropped, _parse_rename(rename), keys, made)


def _parts(texts: str | Sequence[str]) -> list[str]:
    return [part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in text.split(",")]


def _parse_names(option: str, names: str | Sequence[str]) -> frozenset[str]:
    found = _parts(names)
    if not all(found) or not found:
        raise PackError(f"{option}: {names!r} is not a list of fields. Write jpg,cls.")
    return frozenset(found)


def _parse_rename(rename: str | Sequence[str] | Mapping[str, str] | None) -> dict[str, str]:
    if rename is None or isinstance(rename, Mapping):
        return dict(rename or {})
    found: dict[str, str] = {}
    for part in _parts(rename):
        old, equals, new = part.partition("=")
        if not equals or not old or not new or old in found:
            raise PackError(f"rename: {part!r} is not OLD=NEW, or repeats an OLD. Write jpeg=jpg,class=cls.")
        found[old] = new
    return found
