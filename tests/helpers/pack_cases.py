"""Scenarios for the fault tests of packing, and checks of the files that an interrupted run leaves."""

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
    """A source to pack, and the folder's content before that.

    Attributes:
        source: The source for `pack`.
        options: The options for `pack`.
        before: Rows that are packed into the folder first; None if the folder does not exist.
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
    """Return the staging folder of the run that was stopped in `folder`, or `folder` if no run has one."""
    runs = [path for path in (folder / RUN_FOLDER).glob("*") if path.is_dir()]
    assert len(runs) <= 1
    return runs[0] if runs else folder


def without_temp_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files without temporary files and without the files of an unfinished run."""
    return {
        name: data for name, data in files.items() if not name.endswith(TEMP_SUFFIX) and not name.startswith(RUN_FOLDER)
    }


def check_remains(remains: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Check that files with final names are whole, that the old files exist, and that a new index comes with all files
    that it lists.
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
    """A run that replaces a packed folder with splits."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        split(folder, "a=0.5,b=0.5", disk=HastyDisk())

    def check(self, remains: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
        """Check that an index exists only together with all files that it lists and no others."""
        finals = without_temp_files(remains)
        assert all(data in (before.get(name), after.get(name)) for name, data in finals.items())
        assert "index.json" not in finals or finals in (before, after)


class InParts(Scenario):
    """A pack in two parts, the second part first, and the `finish_pack` that joins them."""

    def pack(self, folder: Path, disk: Disk) -> None:
        for part in ("1/2", "0/2"):
            pack(self.source, folder, disk=disk, pattern="p-%02d.tar", part=part, **self.options)
        finish_pack(folder, disk=disk)


class FromStream(Scenario):
    """A pack of rows from an iterator, which can be read only once."""

    def pack(self, folder: Path, disk: Disk) -> None:
        pack(iter(self.source), folder, disk=disk, pattern="p-%02d.tar", **self.options)


class Overwriting(Replacing, FromStream):
    """A run that replaces a packed folder by rows from an iterator."""


def make_scenarios(base: Path) -> dict[str, Scenario]:
    """Return the scenarios by name. The image folder of "folder" has one bad image, and several rows are bad."""
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
    """Copy a folder if it exists."""
    if source.exists():
        shutil.copytree(source, target)
