"""The strict reader on a corpus of archives, for every way in which bytes arrive."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
from tar_corpus import CASES, Anything, Case, file_of

from wdskit import LocalShard
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import write_offsets
from wdskit.errors import ShardError
from wdskit.shards.index import scan_shard
from wdskit.storage.urls import open_stream
from wdskit.tar import header as header_module
from wdskit.tar import window as window_module
from wdskit.tar.header import Overrides, expected_adler
from wdskit.tar.reader import TarReader


def read(read, shard="x.tar"):
    """Return the members, and the error or None."""
    members = []
    try:
        for name, _, data in TarReader(read, shard=shard):
            members.append((name, data))
    except ShardError as err:
        return members, err
    return members, None


def check(case: Case, members, error) -> None:
    assert tuple(members) == case.members
    if case.error is None:
        assert error is None
    else:
        assert error is not None
        assert case.error in error.problem
        assert error.offset == case.offset
        assert str(error).startswith(f"{error.shard}, byte {error.offset}: ")
        assert error.remedy


def in_steps(data: bytes, *sizes: int):
    """Return a read function that returns at most `sizes` bytes in turn, repeated for ever."""
    stream = io.BytesIO(data)
    turn = 0

    def read(size: int) -> bytes:
        nonlocal turn
        turn += 1
        return stream.read(min(size, sizes[turn % len(sizes)]))

    return read


def test_the_corpus_is_large_and_each_case_another():
    assert len(CASES) >= 240
    assert sum(case.error is None for case in CASES) >= 90
    assert len({case.name for case in CASES}) == len({case.data for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_read_as_it_says(case):
    check(case, *read(io.BytesIO(case.data).read))


@pytest.mark.parametrize("sizes", [(1,), (511,), (512,), (513,), (1000, 1, 3)], ids=str)
def test_short_reads_change_nothing(sizes):
    for case in CASES:
        if len(case.data) < 20_000 or min(sizes) > 500:
            check(case, *read(in_steps(case.data, *sizes)))


def test_members_that_are_read_for_themselves_are_the_same(monkeypatch):
    """All members take the path of large members: `LARGE_BYTES` only changes the speed."""
    for large in (0, 1, 6, 512, 513):
        monkeypatch.setattr(window_module, "LARGE_BYTES", large)
        for chunk in (512, 1024, 1536, 10_000):
            monkeypatch.setattr(window_module, "CHUNK_BYTES", chunk)
            for case in CASES:
                if len(case.data) < 20_000:
                    check(case, *read(io.BytesIO(case.data).read))
    monkeypatch.setattr(window_module, "MAX_PIECE_BYTES", 700)
    for case in CASES:
        check(case, *read(io.BytesIO(case.data).read))


@pytest.mark.parametrize("kind", ["pipe", "fifo"])
def test_pipes_and_fifos_give_the_same(kind, tmp_path):
    """A pipe is named by its descriptor, as a shell names the output of a command: `<(curl ...)`, `/dev/stdin`."""
    for number, case in enumerate(CASES):
        if kind == "pipe":
            out, into = os.pipe()
            name, opened = f"/dev/fd/{out}", [out]
            writer = threading.Thread(target=_pour, args=(into, case.data))
        else:
            name, opened = str(tmp_path / f"{number}.fifo"), []
            os.mkfifo(name)
            writer = threading.Thread(target=_pour, args=(name, case.data))
        writer.start()
        stream = open_stream(name)
        check(case, *read(stream.read, name))
        stream.close()  # before the writer has ended, if the reader stopped early
        for fd in opened:
            os.close(fd)
        writer.join()


def _pour(target: str | int, data: bytes) -> None:
    fd = os.open(target, os.O_WRONLY) if isinstance(target, str) else target
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        pass
    finally:
        os.close(fd)


def stream_samples(data: bytes):
    """Return the samples of a stream, its error, and its reader."""
    reader = ShardReader(io.BytesIO(data).read, shard="a.tar")
    samples = []
    try:
        for sample in reader:
            fields = {name: value for name, value in sample.items() if not name.startswith("__")}
            samples.append((sample["__key__"], fields))
    except ShardError as err:
        return samples, err, reader
    return samples, None, reader


def test_a_scan_and_random_access_give_the_same_samples_as_the_stream(tmp_path, monkeypatch):
    """An error is the same too, with the same place and the same number of samples."""
    monkeypatch.chdir(tmp_path)
    num_samples = num_errors = 0
    for case in CASES:
        Path("a.tar").write_bytes(case.data)
        samples, err, reader = stream_samples(case.data)
        assert err is None or err.samples_read == len(samples)
        assert reader.num_samples == len(samples)
        if err is not None:
            with pytest.raises(ShardError) as caught:
                scan_shard("a.tar")
            assert str(caught.value) == str(err)
            num_errors += 1
            continue
        scanned = scan_shard("a.tar")
        assert scanned.entry.sha256 == hashlib.sha256(case.data).hexdigest()
        assert tuple(scanned.offsets) == (*reader.starts, reader.stop)
        if not samples:
            continue
        write_offsets(Path("a.tar"), scanned.offsets)
        with LocalShard("a.tar") as shard:
            found = [(shard.key(number), dict(shard[number].items())) for number in range(len(shard))]
        assert found == samples, case
        num_samples += len(found)
    assert num_samples > 800
    assert num_errors > 100


# Python's tarfile takes bytes after a v7 or GNU header for a prefix, fails if a global header is the last, and finds
# an empty file if a pax path ends in a slash. GNU tar and POSIX do not.
TARFILE_DIFFERS = {
    "v7-ignores-a-prefix",
    "gnu-ignores-a-prefix",
    "pax-global-before-the-end",
    "pax-global-alone",
    "git-archive-of-nothing",
    "directory-by-the-slash-of-a-pax-path",
    "pax-path-with-a-slash-at-its-end",
    "gnu-tar-incremental-gnu",
}


def test_python_and_gnu_tar_agree_with_the_corpus():
    """Other programs read the good archives in the same way, so the corpus is not wrong in favour of wdskit."""
    assert {case.name for case in CASES} >= TARFILE_DIFFERS
    for case in CASES:
        if case.error is not None:
            continue
        if case.name not in TARFILE_DIFFERS:
            with tarfile.open(fileobj=io.BytesIO(case.data), mode="r:") as archive:
                files = [file_of(archive, info) for info in archive if not info.isdir()]
            assert files == list(case.members), case
        if "without-a-key" in case.name:  # devices and volumes are no files of this machine
            continue
        command = ["tar", "--absolute-names", "--to-stdout", "--extract", "--exclude=d", "--exclude=d/"]
        extracted = subprocess.run(command, input=case.data, check=True, capture_output=True).stdout
        assert extracted == b"".join(data for _, data in case.members), case


TRUE_ITER = TarReader.__iter__
TRUE_PARSE_OCTAL = header_module.parse_octal
TRUE_SKIP = window_module.Window.skip


def _takes_cuts_for_the_end(self):
    """Mutant: a bad header is taken for the end, as in Python's tarfile after the first member."""
    try:
        yield from TRUE_ITER(self)
    except ShardError as err:
        if "stops" not in err.problem:
            raise


def _takes_what_there_is(self, size):
    """Mutant: a member ends where the bytes end, so that short reads are accepted."""
    try:
        TRUE_SKIP(self, size)
    except ShardError:
        self.data += bytes(window_module.padded(size) - (len(self.data) - self.at))
        self.at += window_module.padded(size)


def _strips(field, what):
    return TRUE_PARSE_OCTAL(field.lstrip(b"\x00") or field, what)


def _stops_at_one_zero_block(window):
    window.at = len(window.data)


MUTANTS = {
    "that does not look at checksums": {
        "header.expected_adler": lambda field: Anything(),
        "reader.expected_adler": lambda field: Anything(),
    },
    "that does not look behind the end": {"reader.check_end": lambda window: None},
    "that ends at a single zero block": {"reader.check_end": _stops_at_one_zero_block},
    "that takes every type for a file": {"reader.ODD_TYPES": {}, "reader.REGULAR_TYPES": frozenset(range(256))},
    "that passes pax headers over": {"reader.parse_pax": lambda data: Overrides()},
    "that believes any size": {"header.check_size": lambda size: None},
    "that needs no end marker": {"reader.TarReader.__iter__": _takes_cuts_for_the_end},
    "that takes short reads": {"window.Window.skip": _takes_what_there_is},
    "that lets the last extension win": {"header.Overrides.combined": lambda self, other: other},
    "that reads extensions of any size": {"reader.MAX_EXTENSION_BYTES": 1 << 40},
    "that passes sparse keywords over": {"header._SPARSE": ()},
    "that passes volume keywords over": {"header._MULTI_VOLUME": ()},
    "that joins any prefix": {"header.POSIX": Anything()},
    "that passes NULs before a number over": {"header.parse_octal": _strips},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_corpus_catches_a_reader_that_is_not_strict(mutant, monkeypatch):
    """Without any one check of the reader, a case of the corpus fails."""
    uncached = expected_adler.__wrapped__  # cached values would outlive the mutant
    for module in ("header", "reader"):
        monkeypatch.setattr(f"wdskit.tar.{module}.expected_adler", uncached)
    for target, replacement in MUTANTS[mutant].items():
        monkeypatch.setattr(f"wdskit.tar.{target}", replacement)
    failed = 0
    for case in CASES:
        try:
            check(case, *read(io.BytesIO(case.data).read))
        except AssertionError:
            failed += 1
    assert failed
    assert failed < len(CASES)  # a mutant still reads some cases
