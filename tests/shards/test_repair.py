"""What `repair` saves of damaged shards: whole samples with the contents they had, and never another.

The sweeps damage a shard in every way that its structure can show, and compare what was saved with what there was. For
each rule that keeps a doubtful sample out there is a mutant without it that a sweep must catch. WDSKIT_ALL_FAULTS=1
(`make faults`) damages at more places.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from disks import FailingDisk, HastyDisk, WatchedDisk
from images import image_bytes
from shards import bytes_in, samples_in, write_shard
from tar_corpus import END, long_name, member

from wdskit import ShardError, StorageError, pack, repair, verify
from wdskit.shards import salvage as salvage_module
from wdskit.shards.index import index_folder
from wdskit.tar.reader import TarReader
from wdskit.tar.writer import TarWriter

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))

Samples = dict[str, dict[str, bytes]]

SAMPLES: Samples = {
    f"k{n}": {"bin": random.Random(n).randbytes(1500), "json": b'{"n": %d}' % n, "cls": b"%d" % n} for n in range(6)
}
SIZES = [(512 + 1536), 1024, 1024]  # of the members of a sample
SAMPLE = sum(SIZES)


@pytest.fixture
def folder(tmp_path) -> Path:
    """One shard `a.tar` with its index."""
    path = tmp_path / "data"
    path.mkdir()
    write_shard(path / "a.tar", SAMPLES)
    index_folder(path, disk=HastyDisk())
    return path


def repaired(folder: Path, data: bytes, *, with_idx: bool) -> tuple[Samples, list[str | None]]:
    """What comes out of the folder with other bytes in its shard: samples, and the keys of what was lost."""
    to = folder.with_name("to")
    shutil.rmtree(to, ignore_errors=True)
    (folder / "a.tar").write_bytes(data)
    source = folder
    if not with_idx:
        source = folder.with_name("bare")
        source.mkdir(exist_ok=True)
        (source / "a.tar").write_bytes(data)
    result = repair(source, to, disk=HastyDisk())
    saved = samples_in(to)
    assert result.num_saved == len(saved)
    assert with_idx is any(one.is_suspect for one in result.shards) or data == WHOLE
    return saved, [loss.key for loss in result.lost]


def shard_bytes() -> bytes:
    stream = io.BytesIO()
    writer = TarWriter(stream.write)
    for key, fields in SAMPLES.items():
        for name, data in fields.items():
            writer.add(f"{key}.{name}", data)
    writer.finish()
    return stream.getvalue()


WHOLE = shard_bytes()


def flipped_headers() -> Iterator[bytes]:
    """A bit of each header in turn."""
    at = 0
    for number in range(len(SAMPLES) * 3):
        data = bytearray(WHOLE)
        data[at + number * 7 % 512] ^= 64
        yield bytes(data)
        at += SIZES[number % 3]


def cuts() -> Iterator[bytes]:
    yield from (WHOLE[:at] for at in range(0, len(WHOLE), 61 if ALL else 631))
    yield from (WHOLE[: len(WHOLE) - at] for at in (1, 512, 1024, 1025))
    yield from (WHOLE[: number * SAMPLE] for number in range(1, len(SAMPLES)))


def missing_bytes() -> Iterator[bytes]:
    """So many bytes are gone, from each place on: the rest stands elsewhere, on blocks or between."""
    for size in (1, 100, 512, 700):
        yield from (WHOLE[:at] + WHOLE[at + size :] for at in range(0, len(WHOLE) - size, 97 if ALL else 787))


def foreign_bytes() -> Iterator[bytes]:
    for size in (1, 512, 700):
        yield from (WHOLE[:at] + bytes([7]) * size + WHOLE[at:] for at in range(0, len(WHOLE), 97 if ALL else 1231))


def zeroed_headers() -> Iterator[bytes]:
    at = 0
    for number in range(len(SAMPLES) * 3):
        yield WHOLE[:at] + bytes(512) + WHOLE[at + 512 :]
        yield (
            WHOLE[:at] + bytes(1024) + WHOLE[at + 1024 :]
            if number % 3 == 0
            else WHOLE[:at] + bytes(512) + WHOLE[at + 512 :]
        )
        at += SIZES[number % 3]


def is_shard(data: bytes) -> bool:
    try:
        return bool(list(TarReader(io.BytesIO(data).read, shard="a.tar")))
    except ShardError:
        return False


SWEEPS = [flipped_headers, cuts, missing_bytes, foreign_bytes, zeroed_headers]


def wrongs(folder: Path, damages: Iterable[bytes], *, with_idx: bool) -> Iterator[str]:
    """Samples that were saved and are not what they were; of a field whose bytes were replaced in place nothing can
    tell, so such damage is not in the sweeps.
    """
    for number, data in enumerate(damages):
        if not with_idx and is_shard(data):
            continue  # by chance just a member is gone, which only the offsets know of
        try:
            saved, _ = repaired(folder, data, with_idx=with_idx)
        except ShardError as err:  # what was written does not even read
            yield f"{number}: {err}"
            continue
        if saved and not verify(folder.with_name("to"), workers=1).is_clean:
            yield f"{number}: what was written is not clean"
        yield from (f"{number}: {key}" for key, fields in saved.items() if SAMPLES.get(key) != fields)


@pytest.mark.parametrize("with_idx", [True, False])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_what_is_saved_is_what_it_was(folder, sweep, with_idx):
    assert [*wrongs(folder, sweep(), with_idx=with_idx)] == []


def test_a_damaged_header_costs_its_own_sample_where_there_are_offsets(folder):
    for number, data in enumerate(flipped_headers()):
        saved, lost = repaired(folder, data, with_idx=True)
        own = f"k{number // 3}"
        assert saved == {key: fields for key, fields in SAMPLES.items() if key != own}
        assert set(lost) <= {own, None}


def test_a_damaged_header_costs_its_own_sample_and_its_neighbour_where_there_are_none(folder):
    for number, data in enumerate(flipped_headers()):
        saved, lost = repaired(folder, data, with_idx=False)
        own = number // 3
        gone = {f"k{own}", f"k{own + number % 3 - 1}"} & SAMPLES.keys()  # the one before or behind may be torn too
        assert saved == {key: fields for key, fields in SAMPLES.items() if key not in gone}
        assert set(lost) - {None} >= gone - {f"k{own}"}


def test_a_cut_costs_the_sample_that_it_goes_through(folder):
    for data in cuts():
        saved, _ = repaired(folder, data, with_idx=True)
        in_end_marker = 0 < len(data) - len(SAMPLES) * SAMPLE < 1024  # or a byte of the last sample is gone: who knows
        assert list(saved) == list(SAMPLES)[: len(data) // SAMPLE - in_end_marker]
        saved, _ = repaired(folder, data, with_idx=False)
        whole = min(len(SAMPLES), len(data) // SAMPLE)
        assert list(SAMPLES)[: max(0, whole - 1)] == list(saved)[: max(0, whole - 1)]


# Mutants.


def forgive(monkeypatch, problem: str) -> None:
    """Let a repair save samples in spite of this problem."""
    judge = salvage_module.Walk._judge

    def trusting(self):
        for group in self._groups:
            group.problem = "" if group.problem.startswith(problem) else group.problem
        judge(self)

    monkeypatch.setattr(salvage_module.Walk, "_judge", trusting)


def test_the_sweeps_catch_a_repair_that_trusts_what_stands_before_damage(folder, monkeypatch):
    forgive(monkeypatch, "bytes may be missing before this")
    assert next(wrongs(folder, missing_bytes(), with_idx=False), None)
    assert next(wrongs(folder, cuts(), with_idx=False), None)


def test_the_sweeps_catch_a_repair_that_trusts_what_stands_behind_damage(folder, monkeypatch):
    forgive(monkeypatch, "its first members may be missing")
    assert next(wrongs(folder, flipped_headers(), with_idx=False), None)


def test_the_sweeps_catch_a_repair_that_takes_offsets_for_proof_that_no_byte_is_missing(folder, monkeypatch):
    is_whole = salvage_module.Walk._is_whole
    monkeypatch.setattr(salvage_module, "_next_header", lambda file, at: None)  # which would contradict the offsets
    monkeypatch.setattr(
        salvage_module.Walk,
        "_is_whole",
        lambda self, group, *rest: group.stop in self._starts or is_whole(self, group, *rest),
    )
    assert next(wrongs(folder, missing_bytes(), with_idx=True), None)


# What else there is.


def test_a_folder_without_damage_is_copied_as_it_is(tmp_path):
    rows = [{"__key__": f"k{n}", "jpg": image_bytes(number=n), "cls": n} for n in range(5)]
    pack(rows, tmp_path / "data", max_samples=2, disk=HastyDisk())
    (tmp_path / "data" / "classes.json").write_text('["a"]')
    result = repair(tmp_path / "data", tmp_path / "to")
    assert result.lost == ()
    assert bytes_in(tmp_path / "to") == bytes_in(tmp_path / "data")


def test_the_source_is_never_changed_and_only_an_empty_folder_is_written(folder, tmp_path):
    before = bytes_in(folder)
    repair(folder, tmp_path / "to")
    for to in (folder, tmp_path / "to"):
        with pytest.raises(StorageError, match="this folder is not empty"):
            repair(folder, to)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        repair(folder, tmp_path / "file")
    assert bytes_in(folder) == before


def test_each_disk_operation_may_fail(folder, tmp_path):
    disk = WatchedDisk()
    repair(folder, tmp_path / "whole", disk=disk)
    for number in range(len(disk.operations)):
        to = tmp_path / f"{number}"
        with pytest.raises(StorageError, match="cannot be"):
            repair(folder, to, disk=FailingDisk(number, 28))
        names = {path.name for path in to.iterdir()} if to.exists() else set()
        whole = tmp_path / "whole"
        assert all((to / name).read_bytes() == (whole / name).read_bytes() for name in names - {".wdskit.files"})


def test_samples_with_a_bad_image_or_bad_json_are_lost(tmp_path):
    good = image_bytes()
    samples = {"a": {"jpg": good}, "b": {"jpg": good[:-1]}, "c": {"jpg": good, "json": b"{"}, "d": {"jpg": good}}
    write_shard(tmp_path / "a.tar", samples)
    result = repair(tmp_path / "a.tar", tmp_path / "to")
    assert list(samples_in(tmp_path / "to")) == ["a", "d"]
    assert [loss.key for loss in result.lost] == ["b", "c"]
    assert list(samples_in(repair(tmp_path / "a.tar", tmp_path / "all", images="none").folder)) == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("names", "saved"),
    [
        (["a.cls", "b.cls", "a.txt"], ["b"]),  # both parts of a split sample
        (["a.cls", "b.cls", "a.cls"], ["a", "b"]),  # a second sample of that key
        (["a.cls", "a.cls", "b.cls"], ["b"]),
        (["a.__x__", "b.cls"], ["b"]),
        (["README", "a.cls", "NOTES", "b.cls", "b.cls"], ["a"]),
    ],
)
def test_keys_and_fields_that_come_twice_are_lost(tmp_path, names, saved):
    (tmp_path / "a.tar").write_bytes(b"".join(member(name, b"1") for name in names) + END)
    repair(tmp_path / "a.tar", tmp_path / "to")
    assert list(samples_in(tmp_path / "to")) == saved


def test_a_name_that_lost_its_extension_header_is_never_saved_under_another(tmp_path):
    """The header of a long name is damaged, and what stands behind it has the first 100 bytes of the name."""
    key = "k" * 99
    parts = [
        member("a.cls", b"1"),
        long_name(f"{key}xyz.cls".encode()) + member(f"{key}.", b"2"),
        member("b.cls", b"3"),
    ]
    for at in range(0, 512, 7):
        data = bytearray(b"".join(parts) + END)
        data[1024 + at] ^= 1
        (tmp_path / "a.tar").write_bytes(data)
        to = tmp_path / f"{at}"
        repair(tmp_path / "a.tar", to, disk=HastyDisk())
        assert set(samples_in(to)) <= {"a", "b", f"{key}xyz"}


def test_offsets_of_another_shard_are_not_believed(folder):
    """They would make parts of samples whole."""
    idx = folder / "a.tar.idx"
    offsets = list(range(0, SAMPLE * 6, 1024))
    idx.write_bytes(b"".join(at.to_bytes(8, "little") for at in offsets))
    for data in flipped_headers():
        saved, _ = repaired(folder, data, with_idx=True)
        assert all(SAMPLES[key] == fields for key, fields in saved.items())
        assert len(saved) >= 4


def test_offsets_that_are_wrong_cost_nothing_where_the_shard_is_what_it_was(folder, tmp_path):
    idx = folder / "a.tar.idx"
    whole = idx.read_bytes()
    for data in (whole[:-8], whole + (99 << 20).to_bytes(8, "little"), whole[8:], b"", b"x" * 9):
        idx.write_bytes(data)
        to = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        result = repair(folder, to, disk=HastyDisk())
        assert (result.lost, samples_in(to)) == ((), SAMPLES)


def test_a_tar_inside_of_a_sample_is_not_taken_for_samples(tmp_path):
    """The header of the member that holds it is damaged, so that its own headers are the next valid ones."""
    inner = b"".join(member(f"inner{n}.txt", b"x") for n in range(3)) + END
    samples = {f"k{n}": {"cls": b"%d" % n, "tar": inner} for n in range(4)}
    whole = write_shard(tmp_path / "a.tar", samples).read_bytes()
    data = bytearray(whole)
    data[whole.index(b"k2.tar") + 1] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    result = repair(tmp_path / "a.tar", tmp_path / "to")
    saved = samples_in(tmp_path / "to")
    assert {key: samples[key] for key in saved} == saved
    assert {"k0", "k1", "k3"} >= saved.keys() >= {"k0", "k1"}
    assert "inner1" in {loss.key for loss in result.lost}


def test_bytes_that_changed_inside_of_a_field_are_told_as_a_doubt(folder, tmp_path, run):
    data = bytearray(WHOLE)
    data[600] ^= 1
    (folder / "a.tar").write_bytes(data)
    code, out, _ = run("repair", str(folder), "--to", str(tmp_path / "to"))
    assert code == 1
    assert out.splitlines()[0].startswith(f"doubt: {folder}/a.tar: its SHA-256 differs from the index")


def test_a_missing_shard_and_one_of_which_nothing_is_left_are_listed(tmp_path, run):
    folder = tmp_path / "d"
    folder.mkdir()
    for name in "abc":
        write_shard(folder / f"{name}.tar", {f"{name}{n}": {"cls": b"1"} for n in range(3)})
    index_folder(folder)
    (folder / "a.tar").unlink()
    (folder / "b.tar").write_bytes(bytes(5000))
    code, out, err = run("repair", str(folder), "--to", str(tmp_path / "to"))
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"lost: {folder}/a.tar, bytes 0 to 0: the folder's index lists this shard, but there is no such file",
        f"lost: {folder}/b.tar, bytes 0 to 0: the shard ends, but its .idx continues to byte 3072",
        f"doubt: {folder}/b.tar: its SHA-256 differs from the index, so the saved samples may be damaged too.",
        f"Repaired {tmp_path}/to: 3 samples saved in 1 shard, 0 samples known by key lost.",
    ]
    assert sorted(samples_in(tmp_path / "to")) == ["c0", "c1", "c2"]


def test_the_command_tells_what_was_lost_and_in_json(folder, tmp_path, run):
    (folder / "a.tar").write_bytes(WHOLE[: SAMPLE * 2 + 600])
    code, out, err = run("repair", str(folder / "a.tar"), "--to", str(tmp_path / "x"))
    assert (code, err) == (1, "")
    at = SAMPLE * 2
    assert (
        out.splitlines()[0]
        == f"lost: {folder}/a.tar, bytes {at} to {at + 600}: the shard stops inside a member of 1500 bytes"
    )
    assert out.splitlines()[-1] == f"Repaired {tmp_path}/x: 2 samples saved in 1 shard, 0 samples known by key lost."
    code, out, _ = run("repair", str(folder / "a.tar"), "--to", str(tmp_path / "y"), "--json")
    document = json.loads(out)
    assert (code, document["num_saved"]) == (1, 2)
    assert document["shards"][0]["is_suspect"] is True
    code, _, err = run("repair", str(tmp_path / "none"), "--to", str(tmp_path / "z"))
    assert code == 2
    assert "there is no such shard" in err


def test_what_is_whole_is_exit_0(folder, tmp_path, run):
    code, out, _ = run("repair", str(folder), "--to", str(tmp_path / "x"))
    assert (code, out) == (0, f"Repaired {tmp_path}/x: 6 samples saved in 1 shard, 0 samples known by key lost.")


def test_files_for_other_readers_are_written_again(folder, tmp_path):
    kinds = ("open_clip", "timm", "dali")
    index_folder(folder, export=kinds)
    (folder / "a.tar").write_bytes(WHOLE[: SAMPLE * 2 + 600])
    to = repair(folder, tmp_path / "to").folder
    assert json.loads((to / "sizes.json").read_text()) == {"a.tar": 2}
    assert (to / "_info.json").exists()
    assert (to / "a.idx").exists()
    assert verify(to).is_clean
