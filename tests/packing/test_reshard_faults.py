"""Resharding under failing disks, kills and power losses, with the promises of `test_faults`.

The sweeps are those of packing, with other runs and other mutants to catch.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, PowerLossDisk, killed
from pack_cases import check_remains, copy, remains_of, without_temp_files
from shards import WorkerKillingDisk, bytes_in, write_shard

from tests.packing.test_faults import (
    CODES,
    NoFolderFsync,
    NoFsync,
    WorkerFailingDisk,
    check_power,
    fail,
    kill,
    kill_again_and_again,
    sweep,
)
from tests.packing.test_power import check_replacing, lose_power
from wdskit import PackError, WdskitError, pack, reshard, split
from wdskit.files import Disk
from wdskit.packing import fill
from wdskit.packing.publish import Destination

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))


@dataclass(frozen=True)
class Scenario:
    """Shards to write again, for the sweeps of packing."""

    source: str
    options: dict[str, Any]
    before: bool = False

    def prepare(self, folder: Path) -> None:
        """Leave the folder empty, or pack a folder with splits."""
        if self.before:
            rows = [{"__key__": f"x{n}", "cls": n} for n in range(5)]
            pack(rows, folder, max_samples=2, pattern="p-%02d.tar", disk=HastyDisk())
            split(folder, "a=0.5,b=0.5", disk=HastyDisk())

    def pack(self, folder: Path, disk: Disk) -> None:
        reshard(self.source, folder, disk=disk, pattern="p-%02d.tar", **self.options)

    def check(self, remains: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
        if not self.before:
            check_remains(remains, before, after)
            return
        finals = without_temp_files(remains)
        assert all(data in (before.get(name), after.get(name)) for name, data in finals.items())
        assert "index.json" not in finals or finals in (before, after)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> dict[str, Scenario]:
    """Copies in another order; some samples of foreign shards, written again, with classes; a replaced folder."""
    base = tmp_path_factory.mktemp("reshard-faults")
    rows = [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(7)]
    pack(rows, base / "ours", max_samples=4, disk=HastyDisk())
    (base / "theirs").mkdir()
    write_shard(base / "theirs" / "a.tar", {f"k{n}": {"z": b"z" * n, "cls": b"%d" % n} for n in range(9)})
    (base / "theirs" / "classes.json").write_text('{"a": 0, "b": 1}')
    return {
        "copied": Scenario(str(base / "ours"), {"max_samples": 3, "shuffle": 1}),
        "anew": Scenario(str(base / "theirs"), {"num_shards": 2, "filter": "cls != 4", "rename": "z=y"}),
        "same": Scenario(str(base / "ours"), {"max_samples": 4}),
        "replacing": Scenario(str(base / "ours"), {"max_samples": 3, "overwrite": True}, before=True),
    }


NAMES = ["copied", "anew", "same", "replacing"]
FAULTS = [("copied", errno.ENOSPC, True, 2), ("anew", errno.EIO, False, 2), ("same", errno.EIO, True, 8)]
FAULTS += [("replacing", errno.EINTR, False, 8)]
ALL_FAULTS = [(*each, 1) for each in itertools.product(NAMES, CODES, [False, True])]


@pytest.mark.parametrize(("name", "code", "for_good", "step"), ALL_FAULTS if ALL else FAULTS)
def test_each_disk_operation_may_fail(tmp_path, scenarios, name, code, for_good, step):
    sweep(scenarios[name], tmp_path, fail(code, for_good=for_good), step=step)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", [False, True] if ALL else [True])
def test_it_may_be_killed_at_each_disk_operation(tmp_path, scenarios, name, half):
    sweep(scenarios[name], tmp_path, kill(half=half), step=1 if ALL else 3 if name == "anew" else 7)


@pytest.mark.parametrize("name", NAMES if ALL else ["copied"])
def test_a_second_run_may_be_killed_too(tmp_path, scenarios, name):
    assert kill_again_and_again(scenarios[name], tmp_path) > 15


def mix(scenario: Scenario, others: list[Scenario], tmp_path: Path, *, step: int, has_record: bool = True) -> int:
    """Kill a run at each operation and run with other options: all files are then of that run, or none is changed.
    Return how often the second run was refused.

    Args:
        scenario: The run that is killed.
        others: The runs after it.
        tmp_path: Folder of all runs.
        step: Kill at each `step`-th operation.
        has_record: If False, the staging folder is removed after the kill.
    """
    wholes = []
    for number, other in enumerate(others):
        other.pack(tmp_path / f"whole-{number}", HastyDisk())
        wholes.append(bytes_in(tmp_path / f"whole-{number}"))
    scenario.pack(tmp_path / "own", HastyDisk())
    own = bytes_in(tmp_path / "own")
    num_refused = number = 0
    while killed(lambda disk: scenario.pack(tmp_path / f"{number}", disk), number, half=True):  # noqa: B023
        for at, (other, whole) in enumerate(zip(others, wholes, strict=True)):
            folder = tmp_path / f"{number}-{at}"
            copy(tmp_path / f"{number}", folder)
            if not has_record:
                shutil.rmtree(folder / ".wdskit-run", ignore_errors=True)
            left = without_temp_files(remains_of(folder))
            try:
                other.pack(folder, HastyDisk())
            except PackError:
                num_refused += 1
                assert left.items() <= without_temp_files(bytes_in(folder)).items()
                assert not (folder / "index.json").exists() or bytes_in(folder) == own  # the first run was final before
            else:
                assert "restart" in other.options or left.items() <= whole.items()  # nothing was overwritten
                assert bytes_in(folder) == whole
        number += step
    return num_refused


@pytest.mark.parametrize("has_record", [True, False])
def test_what_a_killed_run_left_is_never_mixed_with_what_other_options_make(tmp_path, scenarios, has_record):
    others: list[dict[str, Any]] = [
        {"max_samples": 3, "shuffle": 2},
        {"max_samples": 2},
        {"max_samples": 3, "shuffle": 1, "filter": "cls > 1"},
        {"max_samples": 3, "shuffle": 1, "drop": "cls"},
    ]
    copied = scenarios["copied"]
    runs = [Scenario(copied.source, options) for options in others]
    num_refused = mix(copied, runs, tmp_path, step=1 if ALL else 8, has_record=has_record)
    assert num_refused > (8 if has_record else 2)


def test_wherever_a_run_was_stopped_another_one_may_begin_anew(tmp_path, scenarios):
    """No file of the first run is left then, unless that run had reached its index."""
    options: list[dict[str, Any]] = [{"max_samples": 2}, {"max_samples": 3, "shuffle": 2}]
    runs = [Scenario(scenarios["same"].source, {**each, "restart": True}) for each in options]
    num_refused = mix(scenarios["same"], runs, tmp_path, step=1 if ALL else 9)
    assert num_refused < (150 if ALL else 15)


def test_a_run_that_takes_over_whatever_has_a_shards_name_is_caught(tmp_path, scenarios, monkeypatch):
    """The mutant takes over any file with the name of a shard."""
    monkeypatch.setattr(Destination, "check_folder", lambda *_: None)
    others = [Scenario(scenarios["copied"].source, {"max_samples": 3, "shuffle": 2})]
    with pytest.raises(AssertionError):
        mix(scenarios["copied"], others, tmp_path, step=2, has_record=False)


@pytest.mark.parametrize("name", ["copied", "anew", "same"])
def test_a_power_loss_at_any_moment_leaves_whole_files(tmp_path, scenarios, name):
    check_power(scenarios[name], tmp_path)


@pytest.mark.parametrize("name", NAMES if ALL else ["same", "replacing"])
def test_whatever_a_power_loss_leaves_the_same_run_goes_on(tmp_path, scenarios, name):
    assert lose_power(scenarios[name], tmp_path, 100 if ALL else 6) > 3


def test_no_power_loss_brings_an_index_back_beside_shards_that_are_gone(tmp_path, scenarios):
    check_replacing(scenarios["replacing"], tmp_path, step=1 if ALL else 40)


def test_a_worker_that_is_killed_is_an_error_and_the_next_run_ends_in_the_same_bytes(tmp_path, scenarios):
    scenario = scenarios["copied"]
    scenario.pack(tmp_path / "reference", HastyDisk())
    workers = Scenario(scenario.source, {**scenario.options, "workers": 2})
    with pytest.raises(WdskitError, match="a worker process was killed"):
        workers.pack(tmp_path / "out", WorkerKillingDisk(3, half=True))
    remains = bytes_in(tmp_path / "out")
    check_remains(remains, {}, bytes_in(tmp_path / "reference"))
    assert without_temp_files(remains) == remains
    workers.pack(tmp_path / "out", HastyDisk())
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "reference")


def test_a_disk_that_fails_in_a_worker_is_an_error_and_no_worker_writes_on(tmp_path, scenarios):
    workers = Scenario(scenarios["copied"].source, {"max_samples": 1, "workers": 2})
    with pytest.raises(PackError, match=r"p-00.tar: cannot be written: No space left on device"):
        workers.pack(tmp_path / "out", WorkerFailingDisk())
    assert remains_of(tmp_path / "out") == {}


# Mutants: ways to write that these sweeps must catch.


@pytest.mark.parametrize("make_disk", [NoFsync, NoFolderFsync])
def test_resharding_without_a_flush_is_caught(tmp_path, scenarios, make_disk: type[PowerLossDisk]):
    with pytest.raises(AssertionError):
        check_power(scenarios["copied"], tmp_path, make_disk)


def test_an_index_that_comes_first_is_caught(tmp_path, scenarios, monkeypatch):
    scenarios["copied"].pack(tmp_path / "known", HastyDisk())
    true_fill = fill.fill_shard

    def hasty(job, **options):
        (job.path.parents[2] / "index.json").write_bytes((tmp_path / "known" / "index.json").read_bytes())
        return true_fill(job, **options)

    def mutant(scenario, folder, disk):
        with monkeypatch.context() as patch:
            patch.setattr(fill, "fill_shard", hasty)
            scenario.pack(folder, disk)

    with pytest.raises(AssertionError):
        sweep(scenarios["copied"], tmp_path, kill(half=False), mutant)
