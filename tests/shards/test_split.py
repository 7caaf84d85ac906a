"""Splits: each sample in one split, exact shares, whole groups, and the same result after any change of shards."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import FailingDisk, HastyDisk, PowerLossDisk, WatchedDisk, killed, on
from hypothesis import given
from hypothesis import strategies as st
from shards import write_shard
from writing import hastily

import wdskit
from wdskit import SelectionError, StorageError
from wdskit.dataset.columns import COLUMNS_NAME, Columns, list_columns
from wdskit.dataset.index import read_index
from wdskit.dataset.shard import LocalShard
from wdskit.shards.index import index_folder
from wdskit.shards.shares import canonical_text
from wdskit.storage.urls import LocalFile

SHARES = "train=0.6,val=0.2,test=0.2"

Samples = dict[str, dict[str, bytes]]


def numbered(num: int, *, groups: int = 7) -> Samples:
    """Return samples with a key, a class and, in their JSON, the patient."""
    return {
        f"k{at:05d}": {"cls": b"1", "json": json.dumps({"patient": {"id": f"q{at % groups}"}}).encode()}
        for at in range(num)
    }


def make_folder(folder: Path, shards: list[Samples]) -> Path:
    """Write indexed shards of these samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for at, samples in enumerate(shards):
        write_shard(folder / f"s-{at:03d}.tar", samples)
    on(HastyDisk(), index_folder, folder, workers=1)
    return folder


def cut(samples: Samples, sizes: list[int]) -> list[Samples]:
    """Return the samples in shards of these sizes, the rest in a last shard."""
    items = list(samples.items())
    shards = []
    for size in sizes:
        shards.append(dict(items[:size]))
        items = items[size:]
    return [*shards, dict(items)]


def splits_of(folder: Path) -> dict[str, str]:
    """Return the split of each key of a folder."""
    keys = []
    for entry in read_index(folder).entries:
        with LocalShard(folder / entry.name) as opened:
            keys += [opened.key(number) for number in range(entry.num_samples)]
    return dict(zip(keys, np.asarray(Columns(read_index(folder))["split"]).tolist(), strict=True))


def has_split(folder: Path) -> bool:
    return "split" in list_columns(folder)[1]


def split(folder: Path, shares: Any = SHARES, **options: Any):
    return hastily(wdskit.split, folder, shares, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "data", cut(numbered(60), [25, 0, 20]))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the list of columns, and the files that it names."""
    names = [path.name for path in folder.glob("*.npy")] + [COLUMNS_NAME]
    return {name: (folder / name).read_bytes() for name in sorted(names) if (folder / name).exists()}


# --- each sample in one split, and exact shares


def test_each_sample_is_in_one_split_and_the_report_counts_them(folder: Path) -> None:
    report = split(folder)
    found = splits_of(folder)
    assert found.keys() == numbered(60).keys()
    assert {part.name: part.num_samples for part in report.parts} == Counter(found.values())
    assert [part.name for part in report.parts] == ["train", "val", "test"]
    assert [part.wanted_ratio for part in report.parts] == [0.6, 0.2, 0.2]
    assert report.num_samples == read_index(folder).num_samples == 60
    assert list_columns(folder)[1]["split"].source == {"split": SHARES}


def test_a_split_is_this_hash_of_the_key_for_ever(folder: Path) -> None:
    """Computed here: blake2b of the key, 8 bytes little-endian, the seed as salt, compared with sums of shares."""
    for seed in (0, 7, (1 << 64) - 1):
        split(folder, seed=seed, overwrite=True)
        for key, name in splits_of(folder).items():
            salt = seed.to_bytes(16, "little")
            digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"wdskit split", salt=salt).digest()
            draw = int.from_bytes(digest, "little") / 2**64
            assert name == ("train" if draw < 0.6 else "val" if draw < 0.8 else "test")


# --- the same after any change of shards


def test_old_samples_keep_their_split_when_shards_are_added_reordered_or_packed_anew(tmp_path: Path) -> None:
    samples = numbered(60)
    more = {f"new{at}": fields for at, fields in enumerate(numbered(30).values())}
    for by in ("key", "json:patient.id"):
        found = []
        for number, shards in enumerate(
            [
                cut(samples, [25, 0, 20]),
                cut(samples, [25, 0, 20])[::-1],
                cut(samples, [1] * 10),
                [dict(sorted(samples.items(), key=lambda item: item[0][::-1]))],
                [more, *cut(samples, [25, 0, 20])],
            ]
        ):
            folder = make_folder(tmp_path / by[:3] / str(number), shards)
            split(folder, by=by)
            found.append(splits_of(folder))
        assert all({key: name for key, name in one.items() if key in samples} == found[0] for one in found)
        assert len(found[4]) == 90


def test_the_number_of_workers_and_repetition_change_no_byte(folder: Path) -> None:
    for by in ("key", "json:patient.id"):
        reports = [split(folder, by=by, workers=1, overwrite=True)]
        first = bytes_of(folder)
        assert len(first) == 2
        for workers in (2, 1):
            reports.append(split(folder, by=by, workers=workers))
            assert bytes_of(folder) == first
        assert reports[0] == reports[1] == reports[2]


# --- groups


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 5), st.integers(0, 3))
def test_all_samples_of_a_group_stay_together(tmp_path_factory, groups: list[int], size: int, seed: int) -> None:
    groups = [*groups, *range(100, 120)]  # each split has some of them
    samples = {f"k{at}": {"json": json.dumps({"a": {"b": group}}).encode()} for at, group in enumerate(groups)}
    shards = [dict(list(samples.items())[at : at + size]) for at in range(0, len(samples), size)]
    folder = make_folder(tmp_path_factory.mktemp("groups"), shards)
    split(folder, by="json:a.b", seed=seed)
    found = splits_of(folder)
    assert found.keys() == samples.keys()
    of_group: dict[int, set[str]] = {}
    for key, name in found.items():
        of_group.setdefault(groups[int(key[1:])], set()).add(name)
    assert all(len(names) == 1 for names in of_group.values())


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.text(min_size=1)))
def test_a_value_keeps_its_text_through_json(value: object) -> None:
    assert canonical_text(json.loads(json.dumps(value))) == canonical_text(value)


@given(st.integers(-(2**53), 2**53))
def test_a_whole_number_is_one_group_however_it_is_written(number: int) -> None:
    assert canonical_text(number) == canonical_text(float(number)) == canonical_text(str(number))


MISSING = {
    "no field": {},
    "no such depth": {"json": b'{"patient": 3}'},
    "null": {"json": b'{"patient": {"id": null}}'},
    "empty": {"json": b'{"patient": {"id": ""}}'},
    "not a number": {"json": b'{"patient": {"id": NaN}}'},
}


@pytest.mark.parametrize("fields", MISSING.values(), ids=MISSING)
def test_a_missing_value_is_an_error_or_goes_where_it_is_sent(folder: Path, fields: dict[str, bytes]) -> None:
    write_shard(folder / "s-900.tar", {"bad": {"cls": b"1", **fields}, "good": numbered(1)["k00000"]})
    index_folder(folder, workers=1)
    with pytest.raises(SelectionError) as caught:
        split(folder, by="json:patient.id")
    start = f"{folder}/s-900.tar: sample 'bad': column split: json:patient.id is missing or empty. Name a split"
    assert str(caught.value).startswith(start)
    assert (caught.value.shard, caught.value.key) == (f"{folder}/s-900.tar", "bad")
    assert not has_split(folder)
    for name in ("test", "train"):
        split(folder, by="json:patient.id", missing=name, overwrite=True)
        assert splits_of(folder)["bad"] == name
        expected = {"split": SHARES, "by": "json:patient.id", "missing": name}
        assert list_columns(folder)[1]["split"].source == expected


# --- reads and refusals


def test_keys_come_from_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images of 300 kB only a few kB after each header are read, also to reach the JSON next to them."""
    samples = {key: {"jpg": bytes(300_000), **fields} for key, fields in numbered(10).items()}
    folder = make_folder(tmp_path / "data", [samples])
    num_bytes = 0
    read_at = LocalFile.read_at

    def counted(self, offset, size):
        nonlocal num_bytes
        data = read_at(self, offset, size)
        num_bytes += len(data)
        return data

    monkeypatch.setattr(LocalFile, "read_at", counted)
    for by in ("key", "json:patient.id"):
        num_bytes = 0
        split(folder, by=by, overwrite=True)
        assert 10 * 512 < num_bytes < 400_000


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shares": "train=0.5"}, "add up to 0.5, not to 1"),
        ({"by": "patient.id"}, "by: 'patient.id' is neither `key` nor a value of a JSON field"),
        ({"by": "json:"}, "is neither"),
        ({"by": "json:a\x1b"}, "is neither"),
        ({"seed": True}, f"seed=True: a whole number is needed, 0 to {2**64 - 1}."),
        ({"missing": "train"}, "missing: 'train' must be a split of"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(tmp_path: Path, options, told: str) -> None:
    with pytest.raises(SelectionError) as caught:
        split(tmp_path / "nothing", **options)
    assert told in str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_split_without_a_sample_is_refused_with_the_numbers(tmp_path: Path, count: int) -> None:
    folder = make_folder(tmp_path / "data", [{f"k{number}": {"cls": b"1"} for number in range(count)}])
    with pytest.raises(SelectionError, match=r"split '\w+' would be empty"):
        split(folder)
    assert not has_split(folder)


# --- an existing split


def test_another_split_is_refused_and_replaced_on_request(folder: Path) -> None:
    split(folder)
    before = bytes_of(folder)
    for options in ({"shares": "train=0.5,rest=0.5"}, {"seed": 1}, {"by": "json:patient.id"}):
        with pytest.raises(SelectionError) as caught:
            split(folder, **options)
        told = str(caught.value)
        assert f"another split is already here and would be replaced: split {SHARES}.\n  Replace it with" in told
        assert bytes_of(folder) == before
    split(folder, "train=0.5,rest=0.5", overwrite=True)
    assert set(splits_of(folder).values()) == {"train", "rest"}
    assert splits_of(folder).keys() == numbered(60).keys()
    assert len(bytes_of(folder)) == 2  # the files of the old split are removed


# --- failing disks


def test_no_fault_no_kill_and_no_power_loss_mixes_two_splits(folder: Path) -> None:
    """After each fault the old or the new split is read completely; a second run gives the new split."""
    split(folder)
    old, old_files = splits_of(folder), bytes_of(folder)
    watched = WatchedDisk()
    on(watched, split, folder, OTHER, overwrite=True)
    new = splits_of(folder)
    assert len(watched.operations) >= 8
    for at in range(len(watched.operations)):
        for fault in ("fail", "kill", *["half"] * (watched.operations[at] == "write")):
            restore(folder, old_files)
            if fault == "fail":
                with pytest.raises(StorageError, match="the split cannot be written: No space left"):
                    on(FailingDisk(at, 28), split, folder, OTHER, overwrite=True)
            else:
                run = functools.partial(split, folder, OTHER, overwrite=True)
                assert killed(lambda disk, run=run: on(disk, run), at, half=fault == "half", for_real=at % 6 == 0)
            assert splits_of(folder) in (old, new)
            split(folder, OTHER, overwrite=True)
            assert splits_of(folder) == new
            assert len(bytes_of(folder)) == 2
            assert not list(folder.glob(".*temp"))


def test_after_a_power_loss_the_list_names_files_that_are_whole(folder: Path) -> None:
    split(folder)
    old = bytes_of(folder)[COLUMNS_NAME]

    def check(disk: PowerLossDisk) -> None:
        for found in disk.survivors(folder / COLUMNS_NAME):
            assert found is not None
            [column] = json.loads(found)["columns"]
            name = f"{column['name']}.{column['sha256'][:16]}.npy"
            if found != old:
                [data] = disk.survivors(folder / name)
                assert hashlib.sha256(data).hexdigest() == column["sha256"]
            else:
                assert None not in disk.survivors(folder / name)

    on(PowerLossDisk(check), split, folder, OTHER, overwrite=True)


OTHER = "train=0.5,test=0.5"


def restore(folder: Path, files: dict[str, bytes]) -> None:
    for name in bytes_of(folder):
        (folder / name).unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
