"""The same input gives the same bytes, for all settings of the machine."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from disks import SlowDisk
from folders import GOLDEN
from images import make_folder
from shards import bytes_in

from wdskit import pack
from wdskit.packing import api, fill
from wdskit.packing import division as packing_division
from wdskit.packing import plan as packing_plan
from wdskit.packing.sources import folder

TINY = (GOLDEN / "tiny.jpg").read_bytes()

# Committed digests. A change of a digest is a change of the format, and needs a line in CHANGELOG.md.
GOLDEN_ROWS = {
    "index.bin": "c964e6104b42fb2a2b4f3295d0fff93703faeac44e08f0a4b34c3b045158fb51",
    "index.json": "4f9e4fcb866334ae0886c93d2f011e75bc5d59367a43af5d36a8b1460703ba28",
    "part-00.tar": "ee37498aaa3c8f22272d87774886a0954126c6387e9e414675cf8981d4c5f4e0",
    "part-00.tar.idx": "259f9b84c91b93c10d87f176bd6c0646d3d45a884e271652c9f3272599fb403e",
    "part-01.tar": "63782c0887b856615ad85a125fe912b6c54fe7f15e2afc613e2679739fd1e491",
    "part-01.tar.idx": "66ef3762932d8f48f900563d99ed955d3711397555bdf4866209237a2ee6c9dc",
}
GOLDEN_FOLDER = {
    "classes.json": "b5c25ac0b17e2b9a8f3fe5ec2227196921f5af5cf414f0a64b5db2d0f6dbd9f4",
    "index.bin": "74730922da2cff9234f05736c0f6228737a820fcb6da0c9ce970e7b105193a59",
    "index.json": "760741bc69d84c2f016fae4b582fe5912759c54e05042ee88ace7239634e7afc",
    "p-000.tar": "9bd1c0b738b91d390f4e79ce6110b391ef17f45fd4794089b800570a9c6e26fa",
    "p-000.tar.idx": "618ebf0d151536d0d99d493a6d2389c05c04d9c49b1a41bd22218143742f2051",
    "p-001.tar": "aed0070b4d5e6eb02e44c348f391586ca6c7f8c909b9b49a18db7b226daaa546",
    "p-001.tar.idx": "69faeb91b293deb5876236051222d6a2428e446ff02e6c28d2a42b7e9ae919f4",
    "rejected.jsonl": "fc3659aad7fbc21ca8d71947d7af0955de2f521c662916bd95baa5d5c0f05ccc",
}
GOLDEN_MANIFEST = {
    "index.bin": "00b990e4e08bb0e24b2ad8c49d4a738b408b081cd7edbed22b3aef285e1e9a2b",
    "index.json": "e028d366f76defb11947f94ddac4148e11d901efcf126a3a0a5d5f942b6670be",
    "p-0.tar": "0b72d39e5a728ba08fd5cd48033616fc8b629cad1dbd7d3ad36f87692030c852",
    "p-0.tar.idx": "69faeb91b293deb5876236051222d6a2428e446ff02e6c28d2a42b7e9ae919f4",
    "p-1.tar": "d52dab194d6bb812bdce3d470d8db9026a26f09659073a269a77ec634b620314",
    "p-1.tar.idx": "4b936d29b654e50d4ad9b5c45e2cbd73968ddbdb483247cae0a0e1ac830383ca",
}

OPTIONS = {"shuffle": 7, "max_samples": 5, "pattern": "p-%03d.tar", "skip_bad": True}

PROGRAM = """
import json, os, sys, wdskit
if __name__ == "__main__":
    os.umask(int(sys.argv[1], 8))
    wdskit.pack(sys.argv[2], sys.argv[3], workers=int(sys.argv[4]), **json.loads(sys.argv[5]))
"""


def digests_in(packed: Path) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in bytes_in(packed).items()}


def test_golden_files_of_rows(tmp_path):
    """The rows are plain bytes, so that the result depends only on the format."""
    rows = [
        {"__key__": "cat/0", "jpg": TINY, "cls": 0},
        {"__key__": "cat/1", "json": {"caption": "ä", "n": 1}, "txt": "no image"},
        {"__key__": "dog/0", "bin": bytes(range(256)) * 3},
    ]
    pack(rows, tmp_path / "out", max_samples=2, pattern="part-%02d.tar")
    assert digests_in(tmp_path / "out") == GOLDEN_ROWS


def test_golden_files_of_a_folder(tmp_path, monkeypatch):
    """The folder has classes, a shuffle, hashed keys and a rejected file."""
    for name in ("b/0.jpg", "b/1 x.JPEG", "ä/deep/2.jpg", "ä/3.jpg"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(TINY)
    (tmp_path / "photos" / "b" / "4.png").write_bytes(b"bad")
    monkeypatch.chdir(tmp_path)
    pack("photos", "out", keys="hashed", **{**OPTIONS, "max_samples": 3})
    assert digests_in(tmp_path / "out") == GOLDEN_FOLDER


def test_golden_files_of_a_manifest(tmp_path):
    """CSV, with values in `json` as text, and JSONL written as wdskit writes JSON, give the same bytes."""
    (tmp_path / "0.jpg").write_bytes(TINY)
    (tmp_path / "m.csv").write_text("image,caption,cls\n0.jpg,“a”,3\n,b,4\n", encoding="utf-8")
    (tmp_path / "m.jsonl").write_text(
        '{"image":"0.jpg","caption":"“a”","cls":"3"}\n\n{"image":"","caption":"b","cls":"4"}',
        encoding="utf-8",
    )
    for name in ("m.csv", "m.jsonl"):
        pack(tmp_path / name, tmp_path / name[2:], max_bytes=5000, pattern="p-%d.tar", allow_no_image=True)
        assert digests_in(tmp_path / name[2:]) == GOLDEN_MANIFEST


# One folder, packed under different conditions.


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    photos = make_folder(tmp_path_factory.mktemp("same") / "photos", {"cat": 9, "dog": 8, "ünicode": 3, "Z": 1})
    (photos / "dog" / "notes.txt").write_text("no image")
    return photos


@pytest.fixture(scope="module")
def reference(source, tmp_path_factory):
    packed = tmp_path_factory.mktemp("same") / "out"
    pack(source, packed, **OPTIONS)
    return bytes_in(packed)


def run(tmp_path, source, *, umask="022", workers=1, cwd=None, options=OPTIONS, **environment):
    """Pack in a new process with these settings."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, script, umask, source, tmp_path / "out", str(workers), json.dumps(options)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    subprocess.run(command, check=True, cwd=cwd, env={**kept, **environment})
    return bytes_in(tmp_path / "out")


@pytest.mark.parametrize(
    ("workers", "umask", "environment"),
    [
        (1, "002", {"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}),
        (4, "077", {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": "1", "PYTHONOPTIMIZE": "2"}),
    ],
    ids=["1 worker", "4 workers"],
)
def test_workers_hash_seed_zone_umask_and_locale_change_nothing(
    tmp_path, source, reference, workers, umask, environment
):
    assert run(tmp_path, source, umask=umask, workers=workers, **environment) == reference
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").glob("[!.]*")}
    assert modes == {0o666 & ~int(umask, 8)}  # as for any new file


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_a_system_that_knows_ascii_only_gives_the_same(tmp_path, source, reference, kind):
    """On such a system a file's name is text with a surrogate for each byte over 127."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if kind == "manifest":
        lines = [{"image": f"photos/{path.relative_to(source)}", "ü": 1} for path in sorted(source.rglob("*.jpg"))]
        source = source.parent / "m.jsonl"
        source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        pack(source, tmp_path / "reference", **OPTIONS)
        reference = bytes_in(tmp_path / "reference")
    assert run(tmp_path, source, **ascii_only) == reference


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plan_on_disk_changes_nothing(tmp_path, source, reference, workers, monkeypatch):
    """A plan that is too large for memory is on disk; its file is removed."""
    monkeypatch.setattr(packing_plan, "ROWS_IN_MEMORY", 3)
    pack(source, tmp_path / "out", workers=workers, **OPTIONS)
    assert bytes_in(tmp_path / "out") == reference


def test_a_relative_source_gives_the_same_as_an_absolute_one(tmp_path, source, reference):
    assert run(tmp_path, source.name, cwd=source.parent) == reference
    pack(f"{source}/../{source.name}//", tmp_path / "again", **OPTIONS)
    assert bytes_in(tmp_path / "again") == reference


def test_times_modes_and_the_order_of_files_on_disk_change_nothing(tmp_path, source, reference):
    """The same files are made in another order, at another time."""
    again = tmp_path / "photos"
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        copy = again / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1, 1))
    pack(again, tmp_path / "out", **OPTIONS)
    assert bytes_in(tmp_path / "out") == reference


def list_backwards(monkeypatch):
    listed = folder.list_names
    monkeypatch.setattr(folder, "list_names", lambda path: tuple(names[::-1] for names in listed(path)))


def test_the_listing_order_of_a_folder_changes_nothing(tmp_path, source, reference, monkeypatch):
    list_backwards(monkeypatch)
    pack(source, tmp_path / "out", **OPTIONS)
    assert bytes_in(tmp_path / "out") == reference


def test_a_disk_that_takes_little_at_a_time_changes_nothing(tmp_path, source, reference):
    pack(source, tmp_path / "out", disk=SlowDisk(1000), **OPTIONS)
    assert bytes_in(tmp_path / "out") == reference


def test_where_it_is_packed_to_changes_names_only(tmp_path, source):
    options = {**OPTIONS, "pattern": None}
    shards = []
    for name in ("one", "another"):
        entries = pack(source, tmp_path / name, **options).entries
        shards.append([(tmp_path / name / entry.name).read_bytes() for entry in entries])
        assert [entry.name for entry in entries] == [f"{name}-{number:06d}.tar" for number in range(5)]
    assert shards[0] == shards[1]


def test_options_that_change_no_row_change_no_byte(tmp_path, source, reference):
    """`skip_bad` or a large limit are not stored in the shards."""
    pack(source, tmp_path / "out", **{**OPTIONS, "skip_bad": False, "max_bytes": 10**12})
    assert bytes_in(tmp_path / "out") == reference


def test_the_index_lists_what_was_written(reference):
    index = json.loads(reference["index.json"])
    shards = {line["url"]: line for line in index["shardlist"]}
    assert sorted(shards) == [name for name in reference if name.endswith(".tar")]
    for name, line in shards.items():
        assert line["filesize"] == len(reference[name])
        assert line["sha256"] == hashlib.sha256(reference[name]).hexdigest()
        assert line["fields"] == ["cls", "jpg", "json"]
    assert sum(line["nsamples"] for line in shards.values()) == 21


# Mutants: writers that depend on the machine, which the tests above must catch.


@pytest.mark.parametrize("mutant", ["time", "owner", "hash"])
def test_a_writer_that_lets_the_machine_in_is_caught(tmp_path, source, reference, mutant, monkeypatch):
    """The bytes depend on the time of packing, the user, or the order of a set."""
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
    pack(source, tmp_path / "out", **OPTIONS)
    assert bytes_in(tmp_path / "out") != reference


@pytest.mark.parametrize("mutant", ["a part a worker", "as they are done", "a seed a worker"])
def test_a_packer_whose_result_depends_on_its_workers_is_caught(tmp_path, source, reference, mutant, monkeypatch):
    true_limits, true_map, true_read = packing_division.make_limits, fill.map_shards, api.read_rows
    if mutant == "a part a worker":
        monkeypatch.setattr(
            packing_division, "make_limits", lambda most, *args, **options: true_limits(most // 2, *args, **options)
        )
    elif mutant == "as they are done":

        def backwards(*args, **options):
            yield from reversed(list(true_map(*args, **options)))

        monkeypatch.setattr(fill, "map_shards", backwards)
    else:

        def read(found, plan, *, workers, **options):
            true_read(found, plan, workers=workers, **options)
            plan.kept = np.roll(np.arange(len(plan)), workers)

        monkeypatch.setattr(api, "read_rows", read)
    pack(source, tmp_path / "out", workers=2, **OPTIONS)
    assert bytes_in(tmp_path / "out") != reference


@pytest.mark.parametrize("mutant", ["listing order", "locale's names"])
def test_a_source_that_lets_the_machine_in_is_caught(tmp_path, source, reference, mutant, monkeypatch):
    if mutant == "listing order":
        list_backwards(monkeypatch)
        monkeypatch.setattr(folder, "sorted", lambda items, **_: list(items), raising=False)
    else:
        monkeypatch.setattr(folder, "utf8_name", lambda name: os.fsencode(name).decode("latin-1"))
    pack(source, tmp_path / "out", **OPTIONS)
    assert bytes_in(tmp_path / "out") != reference
