"""The same input gives the same bytes, whatever the machine is set to."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from images import make_folder

from wdskit import pack

# Written down once. A change of any of these is a change of format: it needs a line in the change log.
GOLDEN = {
    "index.bin": "676162fbc572a2b4d08abd5d4d62cf8b1680c4074b0d681f9c5a4657b41892d5",
    "index.json": "0d2a1017da23819e709285fd77505923872d735ff5d6189ef69b14e7c587b6e4",
    "part-00.tar": "ee37498aaa3c8f22272d87774886a0954126c6387e9e414675cf8981d4c5f4e0",
    "part-00.tar.idx": "259f9b84c91b93c10d87f176bd6c0646d3d45a884e271652c9f3272599fb403e",
    "part-01.tar": "63782c0887b856615ad85a125fe912b6c54fe7f15e2afc613e2679739fd1e491",
    "part-01.tar.idx": "66ef3762932d8f48f900563d99ed955d3711397555bdf4866209237a2ee6c9dc",
}

PROGRAM = """
import os, sys, wdskit
if __name__ == "__main__":
    os.umask(int(sys.argv[1], 8))
    wdskit.pack(sys.argv[2], sys.argv[3], workers=int(sys.argv[4]), shuffle=7, max_samples=5, pattern="p-%03d.tar")
"""


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".wdskit.lock"}


def test_golden_files(tmp_path):
    """Rows of plain bytes, so that nothing but the format is in it."""
    rows = [
        {"__key__": "cat/0", "jpg": (Path(__file__).parent / "golden" / "tiny.jpg").read_bytes(), "cls": 0},
        {"__key__": "cat/1", "json": {"caption": "ä", "n": 1}, "txt": "no image"},
        {"__key__": "dog/0", "bin": bytes(range(256)) * 3},
    ]
    pack(rows, tmp_path / "out", max_samples=2, pattern="part-%02d.tar")
    found = {name: hashlib.sha256(data).hexdigest() for name, data in bytes_in(tmp_path / "out").items()}
    assert found == GOLDEN


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("same") / "photos", {"cat": 9, "dog": 8, "ünicode": 3})


@pytest.fixture(scope="module")
def reference(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("same") / "out"
    pack(source, folder, shuffle=7, max_samples=5, pattern="p-%03d.tar")
    return bytes_in(folder)


def run(tmp_path, source, *, umask="022", workers=1, cwd=None, **environment):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), umask, str(source), str(tmp_path / "out"), str(workers)]
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **environment})
    return bytes_in(tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    "environment",
    [{"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}, {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8"}],
    ids=["C", "UTF-8"],
)
def test_workers_hash_seed_zone_umask_and_locale_change_nothing(tmp_path, source, reference, workers, environment):
    umask = "077" if workers == 4 else "002"
    assert run(tmp_path, source, umask=umask, workers=workers, PYTHONUTF8="1", **environment) == reference
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").glob("*.*") if path.suffix != ".lock"}
    assert modes == {0o666 & ~int(umask, 8)}


def test_a_relative_source_gives_the_same_as_an_absolute_one(tmp_path, source, reference):
    assert run(tmp_path, source.name, cwd=source.parent) == reference


def test_times_and_the_order_of_files_on_disk_change_nothing(tmp_path, source, reference):
    """The same files made in another order, at another time."""
    again = tmp_path / "photos"
    for path in sorted(source.rglob("*.jpg"), key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        copy = again / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        os.utime(copy, (1, 1))
    pack(again, tmp_path / "out", shuffle=7, max_samples=5, pattern="p-%03d.tar")
    assert bytes_in(tmp_path / "out") == reference


def test_the_listing_order_of_a_folder_changes_nothing(tmp_path, source, reference, monkeypatch):
    from wdskit.packing import folder

    listed = folder._walk
    monkeypatch.setattr(folder, "_walk", lambda *place: reversed(list(listed(*place))))
    pack(source, tmp_path / "out", shuffle=7, max_samples=5, pattern="p-%03d.tar")
    assert bytes_in(tmp_path / "out") == reference


def test_the_index_lists_what_was_written(reference):
    index = json.loads(reference["index.json"])
    shards = {line["url"]: line for line in index["shardlist"]}
    assert sorted(shards) == [name for name in reference if name.endswith(".tar")]
    for name, line in shards.items():
        assert line["filesize"] == len(reference[name])
        assert line["sha256"] == hashlib.sha256(reference[name]).hexdigest()
    assert sum(line["nsamples"] for line in shards.values()) == 20


@pytest.mark.parametrize("mutant", ["time", "owner", "hash"])
def test_a_writer_that_lets_the_machine_in_is_caught(tmp_path, source, reference, mutant, monkeypatch):
    """Mutants: the time of packing, the user, the order of a set in the bytes."""
    from wdskit.tar import header, writer

    def build(name, size):
        block = bytearray(header.build_header(name, size))
        if mutant == "time":
            block[136:147] = b"%011o" % int(Path(__file__).stat().st_mtime)
        elif mutant == "owner":
            block[265:269] = b"user"
        else:
            block[329:336] = b"%07o" % (hash(name) & 0o7777777)
        return bytes(block)

    monkeypatch.setattr(writer, "build_header", build)
    pack(source, tmp_path / "out", shuffle=7, max_samples=5, pattern="p-%03d.tar")
    assert bytes_in(tmp_path / "out") != reference
