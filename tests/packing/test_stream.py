"""Rows that are read once: no key is packed twice, for any number of keys, with little memory."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from disks import FailingDisk, HastyDisk, WatchedDisk, killed
from pack_cases import remains_of, staged, without_temp_files
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, pack
from wdskit.files import TEMP_SUFFIX
from wdskit.packing import plan as plans

OPTIONS: dict[str, Any] = {"pattern": "p-%02d.tar", "disk": HastyDisk()}


@pytest.fixture
def _few(monkeypatch):
    """Lower the limit of keys in memory to three."""
    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", 3)


def rows_of(keys) -> list[dict[str, Any]]:
    return [{"__key__": key, "cls": number} for number, key in enumerate(keys)]


def drafts_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(f".*{TEMP_SUFFIX}")]


# Repeated keys.


def check_twice(tmp_path: Path, first: int, second: int, num_rows: int, max_samples: int) -> None:
    """Check the error for a repeated key: it has both places, and only shards that end before it exist."""
    keys = [f"k{number}" for number in range(num_rows)]
    whole = tmp_path / f"whole-{max_samples}"
    if not whole.exists():
        pack(rows_of(keys), whole, max_samples=max_samples, **OPTIONS)
    keys[second] = keys[first]
    folder = tmp_path / f"{first}-{second}-{max_samples}"
    message = rf"^row {second} \('k{first}'\): its key 'k{first}' is also the key of row {first} \('k{first}'\)"
    with pytest.raises(RowError, match=message):
        pack(iter(rows_of(keys)), folder, max_samples=max_samples, **OPTIONS)
    num_whole = second // max_samples
    filled = sorted(staged(folder).glob("*.tar"))
    assert [path.name for path in filled] == [f"p-{number:02d}.tar" for number in range(num_whole)]
    assert all(path.read_bytes() == (whole / path.name).read_bytes() for path in filled)
    assert not drafts_in(folder)


@pytest.mark.usefixtures("_few")
def test_a_key_that_comes_twice_is_found_wherever_before_its_shard_is_there(tmp_path):
    for max_samples in (1, 4, 100):
        for first, second in itertools.combinations(range(9), 2):
            check_twice(tmp_path, first, second, 9, max_samples)


@pytest.mark.usefixtures("_few")
def test_of_several_keys_that_come_twice_the_first_is_told(tmp_path):
    """A key that memory finds comes after a key that only the disk finds."""
    for keys, second, first in (("abcdab", 4, 0), ("abcdaed", 4, 0), ("abcdefggb", 7, 6), ("abcdefcgg", 6, 2)):
        for max_samples in (1, 5, 100):
            with pytest.raises(RowError, match=rf"^row {second} .* is also the key of row {first} "):
                pack(iter(rows_of(keys)), tmp_path / f"{keys}-{max_samples}", max_samples=max_samples, **OPTIONS)


@pytest.mark.usefixtures("_few")
def test_keys_of_an_addition_are_compared_with_those_that_are_there(tmp_path):
    pack(rows_of("pqrstuv"), tmp_path / "out", **OPTIONS)
    before = bytes_in(tmp_path / "out")
    for keys in ("aq", "abcdefv", "abcdeq"):
        with pytest.raises(RowError, match=rf"^row {len(keys) - 1} .*: its key '{keys[-1]}' is in .*out already"):
            pack(iter(rows_of(keys)), tmp_path / "out", append=True, **OPTIONS)
        assert bytes_in(tmp_path / "out") == before
    pack(iter(rows_of("abcdef")), tmp_path / "out", append=True, **OPTIONS)
    assert list(samples_in(tmp_path / "out")) == list("pqrstuvabcdef")


def test_lines_of_jsonl_on_stdin_are_named_by_both_places(tmp_path, monkeypatch):
    lines = "".join(f'{{"key": "k{number % 7}"}}\n' for number in range(8))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    with pytest.raises(RowError, match=r"^standard input:8: its key 'k0' is also the key of standard input:1"):
        pack("-", tmp_path / "out", from_="table", allow_no_image=True)


# Disks.


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("kind", ["fail", "kill"])
def test_after_a_fault_at_each_operation_with_keys_on_disk_the_same_call_goes_on(tmp_path, kind):
    given = rows_of("abcdefg")

    def run(folder, disk):
        pack(iter(given), folder, max_samples=4, pattern="p-%02d.tar", disk=disk)

    watched = WatchedDisk()
    run(tmp_path / "whole", watched)
    whole = bytes_in(tmp_path / "whole")
    for number in range(len(watched.operations)):
        folder = tmp_path / f"{number}"
        if kind == "kill":
            assert killed(lambda disk: run(folder, disk), number)  # noqa: B023
        else:
            with contextlib.suppress(PackError):  # the temporary file of the keys need not be removed
                run(folder, FailingDisk(number, errno.ENOSPC))
        left = without_temp_files(remains_of(folder))
        assert left.items() <= whole.items()
        if left != whole:
            run(folder, HastyDisk())
            assert bytes_in(folder) == whole


def test_an_error_of_the_source_stays_what_it_is(tmp_path):
    """This includes an error of the type that disks raise."""

    def rows():
        yield from rows_of("ab")
        raise fault

    for fault in (ConnectionResetError(errno.ECONNRESET, "mine"), ValueError("mine"), KeyboardInterrupt("mine")):
        with pytest.raises(type(fault), match="mine") as caught:
            pack(rows(), tmp_path / "out", **OPTIONS)
        assert caught.value is fault
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".wdskit.lock"]


# Memory.


class Peak:
    """The largest memory that Python allocated in a block, without the memory before it."""

    def __enter__(self):
        tracemalloc.start()
        return self

    def __exit__(self, *_):
        self.num_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def test_of_a_shard_only_some_rows_are_held(tmp_path):
    """The shard has 80 MB."""
    rows = ({"__key__": f"{number}", "bin": bytes([number]) * (2 << 20)} for number in range(40))
    with Peak() as peak:
        pack(rows, tmp_path / "out", **OPTIONS)
    assert peak.num_bytes < 20 << 20
    assert json.loads((tmp_path / "out" / "index.json").read_text())["shardlist"][0]["nsamples"] == 40


# Mutants.


def test_keys_that_are_forgotten_on_the_way_to_the_disk_are_caught(tmp_path, monkeypatch):
    def forget(database):
        with contextlib.suppress(PackError):  # the database of a plan has no such table
            database.insert("DELETE FROM keys WHERE key >= ?", [("",)])

    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", 3)
    monkeypatch.setattr(plans.Database, "move_to_disk", forget)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_key_that_comes_twice_is_found_wherever_before_its_shard_is_there(tmp_path)
