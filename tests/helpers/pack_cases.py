"""What packing's fault tests pack, and what an interrupted run of each may leave."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disks import HastyDisk
from images import make_folder
from shards import bytes_in

from wdskit import finish_pack, pack, split
from wdskit.dataset.index import RUN_FOLDER
from wdskit.files import TEMP_SUFFIX, Disk


@dataclass(frozen=True)
class Scenario:
    """Something to pack, and what is in the folder before.

    Attributes:
        source: As `pack` takes it.
        options: As `pack` takes them.
        before: What is packed there first, None for a folder that is not there.
    """

    source: Any
    options: dict[str, Any]
    before: list[dict[str, Any]] | None = None

    def prepare(self, folder: Path) -> None:
        if self.before is not None:
            options = {"max_samples": 2, "pattern": "p-%02d.tar", "skip_bad": True}
            pack(self.before, folder, disk=HastyDisk(), **options)

    def pack(self, folder: Path, disk: Disk) -> None:
        pack(self.source, folder, disk=disk, pattern="p-%02d.tar", **self.options)

    def check(self, remains: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
        check_remains(remains, before, after)


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(start, stop)]


BAD_ROW = {"__key__": "bad"}


def remains_of(folder: Path) -> dict[str, bytes]:
    return bytes_in(folder) if folder.exists() else {}


def staged(folder: Path) -> Path:
    """The staging folder of the run that was stopped there; the folder itself where there is none."""
    runs = [path for path in (folder / RUN_FOLDER).glob("*") if path.is_dir()]
    assert len(runs) <= 1
    return runs[0] if runs else folder


def without_temp_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Nor what a run that goes on keeps for itself."""
    return {
        name: data for name, data in files.items() if not name.endswith(TEMP_SUFFIX) and not name.startswith(RUN_FOLDER)
    }


def check_remains(remains: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """What an interrupted run leaves under final names is whole; what was there is there; and a new index stands only
    beside all that it tells of.
    """
    finals = without_temp_files(remains)
    assert before.keys() <= finals.keys()
    for name, data in finals.items():
        assert data in (before.get(name), after.get(name))
        assert ".tar" not in name or before.get(name, data) == data
        assert not name.endswith(".tar.idx") or name.removesuffix(".idx") in finals
    if finals.get("index.json") != before.get("index.json"):
        assert finals == after


class Replacing(Scenario):
    """A packed folder with splits is replaced."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        split(folder, "a=0.5,b=0.5", disk=HastyDisk())

    def check(self, remains: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
        """No index ever stands beside anything but all that it tells of."""
        finals = without_temp_files(remains)
        assert all(data in (before.get(name), after.get(name)) for name, data in finals.items())
        assert "index.json" not in finals or finals in (before, after)


class InParts(Scenario):
    """Two parts, the second first, and what joins them."""

    def pack(self, folder: Path, disk: Disk) -> None:
        for part in ("1/2", "0/2"):
            pack(self.source, folder, disk=disk, pattern="p-%02d.tar", part=part, **self.options)
        finish_pack(folder, disk=disk)


class FromStream(Scenario):
    """Rows that come once."""

    def pack(self, folder: Path, disk: Disk) -> None:
        pack(iter(self.source), folder, disk=disk, pattern="p-%02d.tar", **self.options)


class Overwriting(Replacing, FromStream):
    """A packed folder is replaced by rows that come once."""


def make_scenarios(base: Path) -> dict[str, Scenario]:
    """Rows; a folder of classes with a bad image, shuffled; an addition, with bad rows before and now; a packed folder
    that is replaced; parts, and parts of an addition;
    rows that come once, and such that replace a packed folder.
    """
    photos = make_folder(base / "photos", {"cat": 3, "dog": 2})
    (photos / "cat" / "0001.jpg").write_bytes(b"bad")
    return {
        "rows": Scenario([*rows(0, 6), BAD_ROW], {"max_samples": 2, "skip_bad": True}),
        "folder": Scenario(str(photos), {"max_samples": 2, "skip_bad": True, "shuffle": 7}),
        "addition": Scenario(
            [*rows(3, 6), BAD_ROW], {"max_samples": 2, "skip_bad": True, "append": True}, [*rows(0, 3), BAD_ROW]
        ),
        "replacing": Replacing(rows(0, 5), {"max_samples": 2, "overwrite": True}, [*rows(20, 25), BAD_ROW]),
        "parts": InParts([*rows(0, 5), BAD_ROW], {"max_samples": 2, "skip_bad": True}),
        "added parts": InParts(rows(3, 7), {"max_samples": 2, "append": True}, rows(0, 3)),
        "stream": FromStream([*rows(0, 5), BAD_ROW], {"max_samples": 2, "skip_bad": True}),
        "overwriting": Overwriting(rows(0, 3), {"max_samples": 2, "overwrite": True}, rows(20, 25)),
    }


def copy(source: Path, target: Path) -> None:
    """A folder, if it is there."""
    if source.exists():
        shutil.copytree(source, target)
