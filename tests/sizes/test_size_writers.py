"""Every writer at real sizes: each payload, key, digest and offset is right."""

from __future__ import annotations

import csv
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from disks import SlowDisk, on
from folders import ALL
from rays import FakeRay
from real_sizes import (
    Samples,
    check_folder,
    large,
    make_samples,
    rows,
    small,
    write_files,
    write_tars,
)

from wdskit import files, pack, reshard
from wdskit.errors import FolderIndexError
from wdskit.tar.writer import TarWriter

SIZES: dict[str, Callable[[], Samples]] = {"large": large, "small": small} if ALL else {"large": large}
LEAST_BYTES = 256 << 10  # of the writes that the mutants spoil: pieces of shards
DAMAGE = (AssertionError, tarfile.TarError)  # errors of `check_folder` for wrong shards


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The large samples in one shard. Tests must not change it."""
    folder = tmp_path_factory.mktemp("packed") / "large"
    pack(rows(large()), folder)
    check_folder(folder, large())
    assert max(path.stat().st_size for path in folder.glob("*.tar")) > 60_000_000
    return folder


@pytest.fixture(scope="module", params=SIZES)
def samples(request: pytest.FixtureRequest) -> Samples:
    return SIZES[request.param]()


def without(samples: Samples, *names: str) -> Samples:
    return {key: {name: data for name, data in fields.items() if name not in names} for key, fields in samples.items()}


# Packing.


@pytest.mark.parametrize("options", [{}, {"workers": 2, "num_shards": 2}], ids=str)
def test_a_folder_of_images(samples: Samples, tmp_path: Path, options: dict[str, int]) -> None:
    source = write_files(tmp_path / "source", samples)
    pack(source, tmp_path / "packed", sidecars=["json"], **options)
    expected = {
        key: {**fields, "json": _with_path(fields.get("json", b"{}"), f"{key}.jpg")}
        for key, fields in without(samples, "cls").items()
    }
    check_folder(tmp_path / "packed", expected)


def _with_path(data: bytes, path: str) -> bytes:
    """Return the JSON of an image with the path that `pack` adds."""
    return json.dumps({**json.loads(data), "path": path}, separators=(",", ":")).encode()


def _csv(folder: Path, samples: Samples) -> Path:
    write_files(folder / "files", without(samples, "json"))
    with (folder / "rows.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "label"])
        table.writerows([f"files/{key}.jpg", fields["cls"].decode()] for key, fields in samples.items())
    return folder / "rows.csv"


def _parquet(folder: Path, samples: Samples) -> Path:
    images = [{"bytes": fields["jpg"], "path": f"files/{key}.jpg"} for key, fields in samples.items()]
    labels = [fields["cls"].decode() for fields in samples.values()]
    pq.write_table(pa.table({"image": images, "label": labels}), folder / "rows.parquet", row_group_size=250)
    return folder / "rows.parquet"


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("write", [_csv, _parquet], ids=["csv", "parquet"])
def test_a_table(samples: Samples, tmp_path: Path, write: Callable[[Path, Samples], Path], shuffle: int | None) -> None:
    source = write(tmp_path, samples)
    pack(source, tmp_path / "packed", shuffle=shuffle)
    expected = {}
    for number, (key, fields) in enumerate(samples.items()):
        path, label = f"files/{key}.jpg", fields["cls"].decode()
        if write is _csv:
            facts: dict[str, object] = {"image": path, "label": label}
            key = f"files/{key}"
        else:
            facts = {"label": label, "image": path}
            key = f"row-{number:09d}"
        expected[key] = {"jpg": fields["jpg"], "json": json.dumps(facts, separators=(",", ":")).encode()}
    check_folder(tmp_path / "packed", expected, in_order=shuffle is None)


def test_tars(samples: Samples, tmp_path: Path) -> None:
    source = write_tars(tmp_path / "source", samples, each=350)
    pack(source, tmp_path / "packed")
    check_folder(tmp_path / "packed", samples)


def test_rows_with_large_members_and_buffers_that_change_behind_them(tmp_path: Path) -> None:
    """A generator may reuse a buffer for its next row."""
    samples = make_samples(40, 1_500_000, 1_600_000)
    buffer = bytearray()

    def generate():
        for key, fields in samples.items():
            buffer[:] = fields["jpg"]
            yield {"__key__": key, "jpg": buffer, "cls": fields["cls"]}

    pack(generate(), tmp_path / "packed")
    check_folder(tmp_path / "packed", without(samples, "json"))


def test_append(samples: Samples, tmp_path: Path) -> None:
    more = make_samples(600, 78_000, 135_000, seed=1)
    pack(rows(samples), tmp_path / "packed")
    pack(rows(more), tmp_path / "packed", append=True)
    check_folder(tmp_path / "packed", {**samples, **more})


@pytest.mark.parametrize("shuffle", [None, 5])
def test_parts(samples: Samples, tmp_path: Path, shuffle: int | None) -> None:
    source = write_tars(tmp_path / "source", samples, each=600)
    for part in ("0/2", "1/2"):
        pack(source, tmp_path / "packed", part=part, num_shards=4, shuffle=shuffle)
    pack(source, tmp_path / "packed", num_shards=4, shuffle=shuffle)
    check_folder(tmp_path / "packed", samples, in_order=shuffle is None)


def test_tasks_of_a_cluster(samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    source = write_tars(tmp_path / "source", samples, each=600)
    pack(source, tmp_path / "packed", on="ray", shuffle=1)
    check_folder(tmp_path / "packed", samples, in_order=False)


# Resharding.

RESHARDS = {
    "plain": ({}, True),
    "into many": ({"num_shards": 7}, True),
    "shuffled": ({"shuffle": 3}, False),
    "workers": ({"num_shards": 3, "workers": 2, "shuffle": 3}, False),
}


@pytest.mark.parametrize("name", RESHARDS)
def test_reshard(packed: Path, tmp_path: Path, name: str) -> None:
    options, in_order = RESHARDS[name]
    reshard(str(packed), tmp_path / "new", **options)
    check_folder(tmp_path / "new", large(), in_order=in_order)


def test_reshard_with_other_fields(packed: Path, tmp_path: Path) -> None:
    reshard(str(packed), tmp_path / "new", drop="json", rename={"cls": "label.cls"})
    expected = {key: {"jpg": fields["jpg"], "label.cls": fields["cls"]} for key, fields in large().items()}
    check_folder(tmp_path / "new", expected)


# The checks above catch each of these faults.


def test_a_buffer_that_is_filled_again_before_it_is_written_is_caught(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TarWriter.__init__

    def wrong(self, write):
        right(self, write)
        self._spare = self._buffer

    monkeypatch.setattr(TarWriter, "__init__", wrong)
    on(SlowDisk(wait_s=0.005), reshard, str(packed), tmp_path / "new")
    with pytest.raises(DAMAGE):
        check_folder(tmp_path / "new", large())


def test_writes_that_take_a_part_only_are_finished(packed: Path, tmp_path: Path) -> None:
    on(SlowDisk(100_000), reshard, str(packed), tmp_path / "new")
    check_folder(tmp_path / "new", large())


def test_a_short_write_that_nobody_looks_at_is_caught(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = files.write_all

    def wrong(fd, rest, disk):
        right(fd, rest, disk) if len(rest) < LEAST_BYTES else disk.write(fd, rest)

    monkeypatch.setattr(files, "write_all", wrong)
    with pytest.raises(FolderIndexError, match=r"this shard or its \.idx is damaged"):
        on(SlowDisk(100_000), reshard, str(packed), tmp_path / "new")
