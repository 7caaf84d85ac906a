"""Packing on disks that the kernel reports as full: a small tmpfs, a limit on the size of files, /dev/full.

The promises are the same for all: an error that says so, no unfinished file under a final name at any moment, and the
bytes of an uninterrupted run as soon as there is room.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disks import HastyDisk, WatchedDisk
from folders import HELPERS
from mounting import MOUNTING
from pack_cases import rows
from shards import bytes_in

from tests.packing.test_faults import bytes_in_place
from wdskit import PackError, pack
from wdskit.files import Disk
from wdskit.packing import publish

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))
OPTIONS = {"max_samples": 3, "pattern": "p-%02d.tar"}

# Packs with a little more room each time, and prints the error and the files after each time.
PROGRAM = """
import json, subprocess, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from pack_cases import rows
from shards import bytes_in

import wdskit

what, folder, reference, step = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])
options = json.loads(sys.argv[6])


def make_room(num_bytes):
    if what == "tmpfs":
        words = ["-o", f"remount,size={num_bytes}", str(folder)]
        subprocess.run(["mount", *words], check=True)
    else:
        import resource, signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


if what == "tmpfs":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4096", "none", str(folder)], check=True)
whole = bytes_in(reference)
room, errors, is_right = 0, [], True
while room < 1 << 20:
    room += step
    make_room(room)
    try:
        wdskit.pack(rows(0, 20), folder / "out", **options)
        break
    except wdskit.WdskitError as err:
        errors.append(str(err))
    left = bytes_in(folder / "out") if (folder / "out").exists() else {}
    finals = {name: data for name, data in left.items() if not name.startswith(".wdskit-run")}
    is_right = is_right and finals.items() <= whole.items() and "index.json" not in finals
is_whole = bytes_in(folder / "out") == whole
make_room(1 << 20)  # what is said below may need a file
print(json.dumps([errors, is_right, is_whole]))
"""


KINDS = {"limit": "File too large", **({"tmpfs": "No space left on device"} if MOUNTING else {})}


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_costs_nothing_that_is_published(tmp_path, kind):
    """Each try has room for some more bytes, so that each file is once the one that does not fit."""
    pack(rows(0, 20), tmp_path / "whole", **OPTIONS, disk=HastyDisk())
    (tmp_path / "small").mkdir()
    step = {"limit": 128 if ALL else 1024, "tmpfs": 4096}[kind]
    words = [str(HELPERS), kind, str(tmp_path / "small"), str(tmp_path / "whole"), str(step)]
    command = [sys.executable, "-c", PROGRAM, *words, json.dumps(OPTIONS)]
    done = subprocess.run(
        [*(MOUNTING if kind == "tmpfs" else []), *command], check=True, capture_output=True, text=True
    )
    errors, is_right, is_whole = json.loads(done.stdout)
    assert is_right
    assert is_whole
    assert len(errors) > 5
    assert all(f": cannot be written: {KINDS[kind]}.".lower() in error.lower() for error in errors)
    assert all(("Free some space and run the same command again" in error) == (kind == "tmpfs") for error in errors)


LOG = 1
"""Number of the log among the opened files, after `run.json`."""


class DevFull(Disk):
    """A disk that opens the kernel's full device in place of its n-th file."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_opened = 0

    def _open(self, fd: int) -> int:
        self.num_opened += 1
        if self.num_opened - 1 != self.number:
            return fd
        os.close(fd)
        return os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)

    def open(self, path):
        return self._open(super().open(path))

    def open_log(self, path):
        return self._open(super().open_log(path))


def fill_up(tmp_path: Path) -> None:
    """Let each file in turn accept no byte."""
    disk = WatchedDisk()
    pack(rows(0, 7), tmp_path / "whole", **OPTIONS, disk=disk)
    whole = bytes_in(tmp_path / "whole")
    num_files = sum(name in ("open", "open_log") for name in disk.operations)
    assert num_files > 15
    for number in range(num_files):
        folder = tmp_path / f"{number}"
        if number == LOG:  # it is created first, and nothing is written to it
            continue
        with pytest.raises(PackError, match=rf"{number}(/[^ ]*)?: cannot be written: {os.strerror(errno.ENOSPC)}"):
            pack(rows(0, 7), folder, **OPTIONS, disk=DevFull(number))
        left = {name: data for name, data in bytes_in(folder).items() if not name.startswith(".wdskit-run")}
        assert left.items() <= whole.items()
        assert "index.json" not in left
        pack(rows(0, 7), folder, **OPTIONS, disk=HastyDisk())
        assert bytes_in(folder) == whole


def test_each_file_may_be_one_that_takes_no_byte(tmp_path):
    fill_up(tmp_path)


def test_a_journal_without_a_draft_is_caught(tmp_path, monkeypatch):
    """The mutant writes the journal without a temporary file."""
    monkeypatch.setattr(publish, "publish_bytes", bytes_in_place)
    with pytest.raises((AssertionError, PackError)):
        fill_up(tmp_path)
