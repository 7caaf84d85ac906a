"""Resharding under failing disks, kills and power losses: what `test_pack_faults` promises of packing.

The sweeps are those of packing; only what is run differs, and so do the mutants that they must catch.
"""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from disks import HastyDisk, PowerLossDisk, killed
from pack_cases import check_remains, copy, remains_of, without_drafts
from shards import WorkerKillingDisk, bytes_in, write_shard
from test_pack_faults import (
    CODES,
    NoFolderFsync,
    NoFsync,
    check_power,
    fail,
    in_place,
    kill,
    renamed_first,
    sweep,
    without_clean_up,
)

from wdskit import PackError, WdskitError, pack, reshard
from wdskit.files import Disk
from wdskit.packing import reshard as resharding
from wdskit.packing import reshard_fill

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))


@dataclass(frozen=True)
class Scenario:
    """Shards to write anew, as the sweeps of packing take them."""

    source: str
    options: dict[str, Any]

    def prepare(self, folder: Path) -> None:
        """Nothing is there before."""

    def pack(self, folder: Path, disk: Disk) -> None:
        reshard(self.source, folder, disk=disk, pattern="p-%02d.tar", **self.options)

    def check(self, remains: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
        check_remains(remains, before, after)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> dict[str, Scenario]:
    """Samples copied in another order; and of others' shards some, written anew, with a list of classes."""
    base = tmp_path_factory.mktemp("reshard-faults")
    rows = [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(7)]
    pack(rows, base / "ours", max_samples=4, disk=HastyDisk())
    (base / "theirs").mkdir()
    write_shard(base / "theirs" / "a.tar", {f"k{n}": {"z": b"z" * n, "cls": b"%d" % n} for n in range(9)})
    (base / "theirs" / "classes.json").write_text('{"a": 0, "b": 1}')
    return {
        "copied": Scenario(str(base / "ours"), {"max_samples": 3, "shuffle": 1}),
        "anew": Scenario(str(base / "theirs"), {"num_shards": 2, "filter": "cls != 4", "rename": "z=y"}),
    }


NAMES = pytest.mark.parametrize("name", ["copied", "anew"])
FAULTS = [("copied", errno.ENOSPC, True), ("anew", errno.EIO, False)]
ALL_FAULTS = list(itertools.product(["copied", "anew"], CODES, [False, True]))


@pytest.mark.parametrize(("name", "code", "for_good"), ALL_FAULTS if ALL else FAULTS)
def test_each_disk_operation_may_fail(tmp_path, scenarios, name, code, for_good):
    sweep(scenarios[name], tmp_path, fail(code, for_good=for_good))


@pytest.mark.parametrize("name", ["copied", "anew"] if ALL else ["anew"])
@pytest.mark.parametrize("half", [False, True] if ALL else [True])
def test_it_may_be_killed_at_each_disk_operation(tmp_path, scenarios, name, half):
    sweep(scenarios[name], tmp_path, kill(half=half))


@pytest.mark.parametrize("name", ["copied", "anew"] if ALL else ["copied"])
def test_a_second_run_may_be_killed_too(tmp_path, scenarios, name):
    """And a third: at one operation after the other in the same folder, until one is through."""
    scenarios[name].pack(tmp_path / "whole", HastyDisk())
    after = bytes_in(tmp_path / "whole")
    folder = tmp_path / "out"
    number = 0
    while killed(lambda disk: scenarios[name].pack(folder, disk), number, half=True):
        remains = remains_of(folder)
        check_remains(remains, {}, after)
        number += 1
        if "index.json" in remains:
            break
    assert number > 30
    assert bytes_in(folder) == after


def mix(scenario: Scenario, others: list[Scenario], tmp_path: Path, *, step: int) -> int:
    """Kill a run at each operation and go on with other options: all is theirs then, or nothing is touched. Returns
    how often that was refused.
    """
    wholes = []
    for number, other in enumerate(others):
        other.pack(tmp_path / f"whole-{number}", HastyDisk())
        wholes.append(bytes_in(tmp_path / f"whole-{number}"))
    num_refused = number = 0
    while killed(lambda disk: scenario.pack(tmp_path / f"{number}", disk), number, half=True):  # noqa: B023
        for at, (other, whole) in enumerate(zip(others, wholes, strict=True)):
            folder = tmp_path / f"{number}-{at}"
            copy(tmp_path / f"{number}", folder)
            left = without_drafts(remains_of(folder))
            try:
                other.pack(folder, HastyDisk())
            except PackError:
                num_refused += 1
                assert left.items() <= without_drafts(bytes_in(folder)).items()
                assert "index.json" in left or not (folder / "index.json").exists()
            else:
                assert left.items() <= whole.items()  # nothing was overwritten
                assert bytes_in(folder) == whole
        number += step
    return num_refused


def test_what_a_killed_run_left_is_never_mixed_with_what_other_options_make(tmp_path, scenarios):
    others = [
        {"max_samples": 3, "shuffle": 2},
        {"max_samples": 2},
        {"max_samples": 3, "shuffle": 1, "filter": "cls > 1"},
        {"max_samples": 3, "shuffle": 1, "drop": "cls"},
    ]
    copied = scenarios["copied"]
    runs = [Scenario(copied.source, options) for options in others]
    num_refused = mix(copied, runs, tmp_path, step=1 if ALL else 6)
    assert num_refused > 10


def test_a_run_that_takes_over_whatever_has_a_shards_name_is_caught(tmp_path, scenarios, monkeypatch):
    """Mutant."""
    monkeypatch.setattr(reshard_fill, "digest_of", lambda path: mock.ANY)
    others = [Scenario(scenarios["copied"].source, {"max_samples": 3, "shuffle": 2})]
    with pytest.raises(AssertionError):
        mix(scenarios["copied"], others, tmp_path, step=6)


@NAMES
def test_a_power_loss_at_any_moment_leaves_whole_files(tmp_path, scenarios, name):
    check_power(scenarios[name], tmp_path)


def test_a_worker_that_is_killed_is_an_error_and_the_next_run_ends_in_the_same_bytes(tmp_path, scenarios):
    scenario = scenarios["copied"]
    scenario.pack(tmp_path / "reference", HastyDisk())
    workers = Scenario(scenario.source, {**scenario.options, "workers": 2})
    with pytest.raises(WdskitError, match="a worker process was killed"):
        workers.pack(tmp_path / "out", WorkerKillingDisk(3, half=True))
    remains = bytes_in(tmp_path / "out")
    check_remains(remains, {}, bytes_in(tmp_path / "reference"))
    assert without_drafts(remains) == remains
    workers.pack(tmp_path / "out", HastyDisk())
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "reference")


# Mutants: ways to write that these sweeps must catch.


@pytest.mark.parametrize("make_disk", [NoFsync, NoFolderFsync])
def test_resharding_without_a_flush_is_caught(tmp_path, scenarios, make_disk: type[PowerLossDisk]):
    with pytest.raises(AssertionError):
        check_power(scenarios["copied"], tmp_path, make_disk)


@pytest.mark.parametrize(
    ("way", "interrupt"),
    [
        (in_place, kill(half=True)),
        (renamed_first, kill(half=True)),
        (without_clean_up, fail(errno.ENOSPC, for_good=False)),
    ],
)
def test_shards_that_are_not_published_whole_are_caught(tmp_path, scenarios, way, interrupt, monkeypatch):
    def mutant(scenario, folder, disk):
        with monkeypatch.context() as patch:
            patch.setattr(reshard_fill, "publish", way)
            scenario.pack(folder, disk)

    with pytest.raises(AssertionError):
        sweep(scenarios["copied"], tmp_path, interrupt, mutant)


def test_an_index_that_comes_first_is_caught(tmp_path, scenarios, monkeypatch):
    scenarios["copied"].pack(tmp_path / "known", HastyDisk())
    true_fill = resharding.fill_shard

    def hasty(job, **options):
        (job.path.parent / "index.json").write_bytes((tmp_path / "known" / "index.json").read_bytes())
        return true_fill(job, **options)

    def mutant(scenario, folder, disk):
        with monkeypatch.context() as patch:
            patch.setattr(resharding, "fill_shard", hasty)
            scenario.pack(folder, disk)

    with pytest.raises(AssertionError):
        sweep(scenarios["copied"], tmp_path, kill(half=False), mutant)


def test_a_copy_that_takes_the_wrong_bytes_is_no_shard(tmp_path, scenarios, monkeypatch):
    """Mutant of the copy itself: what is about to be written is looked at, whoever put it there."""
    true_read = reshard_fill.read_into

    def shifted(file, view, offset):
        true_read(file, view, max(0, offset - 512))

    monkeypatch.setattr(reshard_fill, "read_into", shifted)
    with pytest.raises(WdskitError, match="the shard changed since the run was planned"):
        scenarios["copied"].pack(tmp_path / "out", HastyDisk())
    assert not list((tmp_path / "out").glob("*.tar"))
