"""The strict reader against a corpus of archives, through every way that bytes arrive."""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import subprocess
import tarfile
import threading

import pytest
from tar_corpus import CASES, Case

from wdskit.errors import ShardError
from wdskit.storage.urls import open_stream
from wdskit.tar import reader as reader_module
from wdskit.tar.reader import TarReader, locate_members


def read(read, shard="x.tar"):
    """The members that came out, and the error or None."""
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
    """A read function that gives at most so many bytes at a time, the sizes over and over."""
    stream = io.BytesIO(data)
    turn = 0

    def read(size: int) -> bytes:
        nonlocal turn
        turn += 1
        return stream.read(min(size, sizes[turn % len(sizes)]))

    return read


def test_the_corpus_is_large_and_each_case_another():
    assert len(CASES) >= 120
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
    """The path of large members, taken by all: `LARGE_BYTES` decides about speed only."""
    for large in (0, 1, 6, 512, 513):
        monkeypatch.setattr(reader_module, "LARGE_BYTES", large)
        for chunk in (512, 1024, 1536, 10_000):
            monkeypatch.setattr(reader_module, "CHUNK_BYTES", chunk)
            for case in CASES:
                if len(case.data) < 20_000:
                    check(case, *read(io.BytesIO(case.data).read))
    monkeypatch.setattr(reader_module, "MAX_READ_BYTES", 700)
    for case in CASES:
        check(case, *read(io.BytesIO(case.data).read))


def test_files_pipes_and_fifos_give_the_same(tmp_path):
    for number, case in enumerate(CASES):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(case.data)
        stream = open_stream(str(path))
        check(case, *read(stream.read, str(path)))
        stream.close()

        fifo = tmp_path / f"{number}.fifo"
        os.mkfifo(fifo)
        writer = threading.Thread(target=_pour, args=(fifo, case.data))
        writer.start()
        stream = open_stream(str(fifo))
        check(case, *read(stream.read, str(fifo)))
        stream.close()  # before the writer is done where the reader stopped early
        writer.join()


def _pour(path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        pass
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def server():
    """Serves case n under /n with a length, and under /chunked/n without one, in pieces."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            data = CASES[int(self.path.rsplit("/", 1)[1])].data
            self.send_response(200)
            if self.path.startswith("/chunked/"):
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                size = max(999, len(data) // 20)
                for at in range(0, len(data), size):
                    piece = data[at : at + size]
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
            else:
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def handle(self):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader stopped at the fault
                super().handle()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["", "/chunked"])
def test_http_bodies_give_the_same(server, kind):
    for number, case in enumerate(CASES):
        url = f"{server}{kind}/{number}"
        stream = open_stream(url)
        check(case, *read(stream.read, url))
        stream.close()


@pytest.mark.parametrize("case", [case for case in CASES if case.error is None], ids=str)
def test_random_access_finds_the_same_members(case):
    reader = TarReader(io.BytesIO(case.data).read, shard="x")
    starts = [start for _, start, _ in reader]
    for part in range(len(starts)):
        first, stop = starts[part], [*starts, reader.stop][part + 1]
        data = case.data[first:stop]
        found = [
            (name, data[at:end]) for name, at, end in locate_members(data, shard="x", offset=first, stop=len(data))
        ]
        assert found == [case.members[part]]


def test_python_and_gnu_tar_agree_with_the_corpus():
    """What the corpus calls good says the same to others, so that it is not wrong in our favour.

    Python's tarfile takes bytes behind a v7 or GNU header for a prefix, where GNU tar and POSIX do not.
    """
    for case in CASES:
        if case.error is not None:
            continue
        with tarfile.open(fileobj=io.BytesIO(case.data), mode="r:") as archive:
            files = [(info.name, archive.extractfile(info).read()) for info in archive if info.isreg()]
        assert case.name.endswith("ignores-a-prefix") or files == list(case.members), case
        command = ["tar", "--to-stdout", "--extract", "--exclude=d", "--exclude=d/"]
        extracted = subprocess.run(command, input=case.data, check=True, capture_output=True).stdout
        assert extracted == b"".join(data for _, data in case.members), case


@pytest.mark.parametrize("mutant", ["checksum", "behind the end", "type", "pax", "short read"])
def test_the_corpus_catches_a_reader_that_is_not_strict(mutant, monkeypatch):
    """Each check of the reader, taken out, makes some case fail: the corpus can tell."""
    if mutant == "checksum":
        monkeypatch.setattr("wdskit.tar.header.expected_adler", lambda field: _Anything())
        monkeypatch.setattr(reader_module, "expected_adler", lambda field: _Anything())
    elif mutant == "behind the end":
        monkeypatch.setattr(reader_module, "_check_end", lambda window: None)
    elif mutant == "type":
        monkeypatch.setattr(reader_module, "REFUSED_TYPES", {})
        monkeypatch.setattr(reader_module, "REGULAR_TYPES", frozenset(range(256)))
    elif mutant == "pax":
        monkeypatch.setattr(reader_module, "parse_pax", lambda data: reader_module.Overrides())
    else:
        monkeypatch.setattr(TarReader, "__iter__", _takes_cuts_for_the_end)
    failed = 0
    for case in CASES:
        try:
            check(case, *read(io.BytesIO(case.data).read))
        except AssertionError:
            failed += 1
    assert failed
    assert failed < len(CASES)  # it is a mutant, not a wreck


class _Anything:
    """Equal to every checksum."""

    def __eq__(self, other):
        return True

    __hash__ = None


TRUE_ITER = TarReader.__iter__


def _takes_cuts_for_the_end(self):
    """As Python's tarfile does behind the first member."""
    try:
        yield from TRUE_ITER(self)
    except ShardError as err:
        if "stops" not in err.problem:
            raise
