"""Packing after a power loss: for any part of the unflushed bytes that a disk has kept, the same command completes.

States are drawn at random: where a run stops, after earlier runs that were killed, and which of the unflushed bytes and
names exist after the power loss. WDSKIT_ALL_FAULTS=1 (`make faults`) draws more states.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest
from disks import OWN, HastyDisk, PowerLossDisk, Stopped, WatchedDisk
from pack_cases import Scenario, copy, make_scenarios, remains_of
from shards import bytes_in

from tests.packing.test_faults import SCENARIOS, NoFolderFsync, NoFsync
from wdskit import PackError
from wdskit.packing.publish import Destination

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))
NUM_STATES = 100 if ALL else 8


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> dict[str, Scenario]:
    return make_scenarios(tmp_path_factory.mktemp("power"))


def lose_power(
    scenario: Scenario,
    tmp_path: Path,
    num_states: int,
    make_disk: type[PowerLossDisk] = PowerLossDisk,
    *,
    seed: int = 0,
) -> int:
    """Draw this number of states and run again in each. Return the number of different states."""
    rng = random.Random(seed)
    scenario.prepare(tmp_path / "before")
    before = remains_of(tmp_path / "before")
    copy(tmp_path / "before", tmp_path / "whole")
    disk = WatchedDisk()
    scenario.pack(tmp_path / "whole", disk)
    after = bytes_in(tmp_path / "whole")
    states = set()
    for number in range(num_states):
        live, folder = tmp_path / f"live-{number}", tmp_path / f"left-{number}"
        copy(tmp_path / "before", live)
        left = _stop(scenario, live, after, make_disk(), len(disk.operations), rng)
        remains = {name: data for name, data in left.items() if Path(name).name not in OWN}
        states.add(frozenset(remains.items()))
        scenario.check(remains, before, after)
        for name, data in left.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        if remains != after:
            scenario.pack(folder, HastyDisk())
            assert bytes_in(folder) == after
    return len(states)


def _stop(
    scenario: Scenario,
    folder: Path,
    after: dict[str, bytes],
    disk: PowerLossDisk,
    num_operations: int,
    rng: random.Random,
) -> dict[str, bytes]:
    """Return the files that may remain after a power loss in a run, after earlier runs that were killed."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        if remains_of(folder) == after:
            break
        disk.stop_in(rng.randrange(num_operations + 1))
        with contextlib.suppress(Stopped):
            scenario.pack(folder, disk)
    return disk.remains(folder, rng)


@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_a_power_loss_leaves_the_same_run_goes_on(tmp_path, scenarios, name):
    num_others = lose_power(scenarios[name], tmp_path, NUM_STATES)
    assert num_others >= NUM_STATES // 10  # with few operations, many states are equal


def test_in_full_these_are_more_than_500_states():
    assert NUM_STATES * len(SCENARIOS) >= (500 if ALL else 60)


@pytest.mark.parametrize("name", ["rows", "replacing", "parts"])
@pytest.mark.parametrize("make_disk", [NoFsync, NoFolderFsync])
def test_packing_without_a_flush_is_caught(tmp_path, scenarios, name, make_disk):
    with pytest.raises((AssertionError, PackError)):
        lose_power(scenarios[name], tmp_path, 60, make_disk)


# Replacing: the old index must be removed, and flushed, before any other file.


def check_replacing(scenario: Scenario, tmp_path: Path, *, step: int) -> None:
    """Kill a run at each operation, and check all states that a power loss may leave at any moment of the next run."""
    scenario.prepare(tmp_path / "before")
    before = remains_of(tmp_path / "before")
    copy(tmp_path / "before", tmp_path / "whole")
    watched = WatchedDisk()
    scenario.pack(tmp_path / "whole", watched)
    after = bytes_in(tmp_path / "whole")
    names = watched.operations
    telling = [at for at in range(1, len(names)) if (names[at - 1], names[at]) == ("remove", "fsync_folder")]
    for number in sorted({*telling, *range(0, len(names), step)}):
        folder = tmp_path / f"{number}"
        copy(tmp_path / "before", folder)

        def check(disk: PowerLossDisk) -> None:
            found = {name: disk.survivors(folder / name) for name in before | after}  # noqa: B023
            index = found.pop("index.json")
            for whole in (before, after):
                if whole["index.json"] in index:
                    assert all(found[name] == {whole.get(name)} for name in found)

        disk = PowerLossDisk(check)
        disk.stop_in(number)
        with pytest.raises(Stopped):
            scenario.pack(folder, disk)
        disk.stop_in(None)
        scenario.pack(folder, disk)
        assert bytes_in(folder) == after


@pytest.mark.parametrize("name", ["replacing", "overwriting"])
def test_no_power_loss_brings_an_index_back_beside_shards_that_are_gone(tmp_path, scenarios, name):
    check_replacing(scenarios[name], tmp_path, step=1 if ALL else 12)


def test_replacing_whose_removals_are_not_flushed_is_caught(tmp_path, scenarios, monkeypatch):
    def hasty(dest, names):
        for name in names:
            if (dest.folder / name).exists():
                dest.options.disk.remove(dest.folder / name)

    monkeypatch.setattr(Destination, "_remove", hasty)
    with pytest.raises(AssertionError):
        check_replacing(scenarios["replacing"], tmp_path, step=12)
