"""Objects of a store: the right bytes, or a named error within a time limit. Never wrong bytes, never a hang."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback

import pytest
from fault_server import BODY, FAULTS, NEW_BODY
from folders import REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import read_ranges

from wdskit.errors import StorageError
from wdskit.storage import buckets, objects, requests, stores
from wdskit.storage.buckets import list_objects
from wdskit.storage.objects import ObjectFile, ObjectStream
from wdskit.storage.urls import read_bytes

LIMIT_S = 20
"""No read in these tests takes longer."""
TWO_MB = 2_000_000
SECRET = "hush" * 3
"""A secret, not written as one text, because tracebacks show the lines of this file."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Set short timeouts and waits."""
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    monkeypatch.setattr(stores, "READ_S", 0.5)
    monkeypatch.setattr(stores, "CONNECT_S", 0.5)
    start = time.monotonic()
    yield
    assert time.monotonic() - start < LIMIT_S


@pytest.fixture(params=["s3", "http"])
def place(request, faults, monkeypatch):
    """A folder of the fault server, as a bucket of S3 or by its own URL."""
    if request.param == "http":
        return faults.url
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "true")
    requests.loop_of_this_process("").stores.clear()
    return "s3://fault-bucket"


def problem(read, *arguments) -> str:
    with pytest.raises(StorageError) as caught:
        read(*arguments)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert caught.value.url
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "ok", "busy_3", "busy_until", "too_many_2", "reset_2", "cut", "stall_2", "short", "anonymous", "moved", "weak",
        "hang_up", "http_1_0",
    ],
)  # fmt: skip
def test_what_passes_gives_the_right_bytes(faults, name):
    faults.location = "/ok"
    ranges = [(5, 7), (TWO_MB, TWO_MB + 70), (100, 100), (TWO_MB - 9, len(BODY)), (0, 2_600_000)]
    file = ObjectFile(f"{faults.url}/d/{name}.tar")
    assert read_ranges(file, ranges) == [BODY[start:stop] for start, stop in ranges]
    assert file.num_bytes == len(BODY)
    assert file.etag == {"anonymous": None, "weak": 'W/"one"'}.get(name, '"one"')


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("busy", r"the server answered 503 Service Unavailable \(SlowDown\) \(\d+ tries in"),
        ("denied", r"the server answered 403 Forbidden \(AccessDenied\)\.$"),
        ("missing", r"there is no such object \(NoSuchKey\)\.$"),
        ("reset", r"the connection failed \(9 tries in"),
        ("short_for_ever", r"the server sent 0 of 2000 bytes \(9 tries in"),
        ("more", "the server sent more than bytes 100 to 2100"),
        ("endless", "the server sent more than bytes 100 to 2100"),
        ("other_range", "the server sent a different range than the one requested"),
        ("no_range", "the server does not support range requests"),
        ("size_unknown", r"a header of the server's reply is missing or invalid \(ContentRange\)"),
        ("gzip", r"the server sends it compressed \(gzip\)"),
    ],
)
def test_what_does_not_pass_is_a_named_error(faults, name, what, monkeypatch):
    monkeypatch.setattr(requests, "RETRY_S", 0.5 if name == "busy" else requests.RETRY_S)
    file = ObjectFile(f"{faults.url}/{name}.tar?sig={SECRET}")
    file._is_resolved = True  # without it, redirects are followed first
    with pytest.raises(StorageError, match=what) as caught:
        file.read_at(100, 2000)
    assert str(caught.value).startswith(f"{faults.url}/{name}.tar: ")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert caught.value.url == f"{faults.url}/{name}.tar"


@pytest.mark.parametrize("name", ["stall", "silence"])
def test_a_server_that_says_nothing_more_is_an_error(faults, name, monkeypatch):
    monkeypatch.setattr(stores, "READ_S", 0.1)
    assert "no reply came in time (9 tries" in problem(ObjectFile(f"{faults.url}/{name}.tar").read_at, 0, 5000)


@pytest.mark.parametrize("which", ["request", "part"])
def test_a_body_that_drips_is_an_error_in_the_end(faults, which, monkeypatch):
    """Each byte comes in time, but the whole body never does."""
    monkeypatch.setattr(stores, "REQUEST_S", 0.2 if which == "request" else 60)
    monkeypatch.setattr(objects, "PART_S", 0.5 if which == "part" else 60)
    what = "no reply came in time" if which == "request" else "did not arrive within 0 s"
    assert what in problem(ObjectFile(f"{faults.url}/drip.tar").read_at, 0, TWO_MB)


@pytest.mark.parametrize("name", ["replaced", "replaced_without_etag", "grown", "changed"])
def test_bytes_of_two_objects_are_never_mixed(faults, name):
    file = ObjectFile(f"{faults.url}/{name}.tar")
    assert file.read_at(0, 100) == BODY[:100]
    for _ in range(3):
        assert "the object was replaced while it was read" in problem(file.read_at, 100, 100)
    sent = [headers.get("If-Match") or headers.get("if-match") for _, headers in faults.requests]
    assert sent == [None, *(3 * [None if name == "replaced_without_etag" else '"one"'])]


def read_by_ranges(url: str) -> bytes:
    file = ObjectFile(url)
    halves = read_ranges(file, [(0, 1_500_000), (1_500_000, len(BODY))]) if file.num_bytes else []
    return b"".join(halves)


WAYS = {
    "ranges": read_by_ranges,
    "object stream": lambda url: drain(ObjectStream(url)),
    "small file": lambda url: read_bytes(url, limit=len(BODY)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAULTS)
def test_whatever_a_server_does_the_bytes_are_right_or_there_is_an_error(place, name, way, monkeypatch):
    """The result comes in time, and never mixes the bytes of two objects."""
    monkeypatch.setattr(stores, "READ_S", 0.1)
    monkeypatch.setattr(stores, "REQUEST_S", 0.3)
    monkeypatch.setattr(objects, "PART_S", 0.6)
    right = [BODY, NEW_BODY, *([b""] if name in ("empty", "nothing") else [])]
    try:
        found = WAYS[way](f"{place}/{name}.tar")
    except StorageError as err:
        found, right = str(err).partition(".tar: ")[0], [f"{place}/{name}"]
    assert found in right


@pytest.mark.parametrize("known", [{"num_bytes": 5}, {"etag": '"zero"'}, {"num_bytes": len(BODY) + 1}])
def test_what_is_known_from_an_index_is_compared(faults, known):
    file = ObjectFile(f"{faults.url}/ok.tar", **known)
    assert "the object was replaced" in problem(file.read_at, 0, 3)
    right = ObjectFile(f"{faults.url}/ok.tar", num_bytes=len(BODY), etag="one")  # as in some listings
    assert right.read_at(0, 3) == BODY[:3]


def test_a_stream_with_an_error_never_seems_to_end(faults, monkeypatch):
    monkeypatch.setattr(objects, "CHUNK_BYTES", 1 << 19)
    stream = ObjectStream(f"{faults.url}/ok.tar")
    stream.file.close()
    found = b""
    with pytest.raises(StorageError):
        while piece := stream.read(1 << 20):
            found += piece
    assert 0 < len(found) < len(BODY)
    for _ in range(2):
        with pytest.raises(StorageError):
            stream.read(10)
    stream.close()
    assert stream.read(10) == b""


# Ranges.

RANGES = st.lists(
    st.tuples(st.integers(0, len(BODY)), st.integers(0, 300_000)).map(lambda r: (r[0], min(len(BODY), r[0] + r[1]))),
    max_size=12,
)


@given(ranges=RANGES, part_bytes=st.integers(1000, 200_000))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ranges_are_the_true_bytes(faults, ranges, part_bytes):
    """One server for all examples: the connections to 40 of them took 900 descriptors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "REQUEST_BYTES", part_bytes)
        patch.setattr(objects, "GAP_BYTES", 5000)
        patch.setattr(objects, "CHUNK_BYTES", 10_000)
        found = read_ranges(ObjectFile(f"{faults.url}/ok.tar"), ranges)
        assert found == [BODY[start:stop] for start, stop in ranges]
        assert all(type(data) is bytes for data in found)


# Processes.


def test_a_forked_process_gets_an_error_and_does_not_hang(faults, monkeypatch):
    monkeypatch.setattr(objects, "CHUNK_BYTES", 500_000)
    file = ObjectFile(f"{faults.url}/ok.tar")
    stream = ObjectStream(f"{faults.url}/ok.tar")
    assert file.read_at(0, 3) == BODY[:3]
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            for read in (lambda: file.read_at(0, 3), lambda: ObjectFile(file.url).num_bytes, lambda: drain(stream)):
                try:
                    read()
                except StorageError as err:
                    os.write(theirs, f"{err}\n".encode())
        os._exit(0)
    try:
        os.close(theirs)
        said = b""
        ready = select.poll()  # takes descriptors above 1,023 too
        ready.register(ours, select.POLLIN)
        while ready.poll(10_000) and (part := os.read(ours, 10_000)):
            said += part
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)
    assert said.count(b"this process was forked") == 3
    assert said.count(b'the method "forkserver" or "spawn"') == 3
    assert file.read_at(5, 3) == BODY[5:8]
    stream.close()


SCRIPT = """
import os, sys, threading, time
from wdskit.errors import StorageError
from wdskit.storage.objects import ObjectFile
def read():
    try:
        file.read_at(0, 3_000_000)
    except StorageError as err:
        assert "the read was cancelled" in str(err), err
file = ObjectFile(sys.argv[1])
if sys.argv[2] == "fork":  # before the first read
    pid = os.fork()
    data = file.read_at(0, 3)
    assert len(data) == 3
    if pid:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
elif sys.argv[2] == "read":
    file.num_bytes
else:  # the interpreter ends while a read is under way
    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.3)
"""


@pytest.mark.parametrize(("how", "name"), [("fork", "ok"), ("end", "drip"), ("read", "ok")])
def test_processes_that_fork_first_or_end_early(faults, how, name):
    command = [sys.executable, "-c", SCRIPT, f"{faults.url}/{name}.tar", how]
    done = subprocess.run(command, check=False, capture_output=True, timeout=15, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, b"")


# Streams.


def drain(stream) -> bytes:
    parts = []
    while part := stream.read(100_000):
        assert len(part) <= 100_000
        parts.append(part)
    assert stream.read(1) == b""
    stream.close()
    return b"".join(parts)


@pytest.mark.parametrize("name", ["ok", "cut", "busy_3", "short", "anonymous", "reset_2"])
@pytest.mark.parametrize("part_bytes", [1, 700_000, 8 << 20])
def test_a_stream_is_the_whole_object(place, name, part_bytes, monkeypatch):
    monkeypatch.setattr(objects, "CHUNK_BYTES", part_bytes)
    assert drain(ObjectStream(f"{place}/{name}.tar")) == BODY


@pytest.mark.parametrize("name", ["replaced_after_a_cut", "changed_after_a_cut", "grown_after_a_cut"])
def test_a_stream_is_never_of_two_objects(place, name):
    stream = ObjectStream(f"{place}/{name}.tar")
    assert "the object was replaced" in problem(drain, stream)
    stream.close()
    empty = ObjectStream(f"{place}/empty.tar")
    assert drain(empty) == b""


# Real servers.


def test_a_list_of_several_pages_is_whole_or_an_error(faults, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "true")
    monkeypatch.setattr(buckets, "PART_S", 1.0)
    requests.loop_of_this_process("").stores.clear()
    found = list_objects("s3://pages-bucket/pages/")
    assert [each.url for each in found] == [f"s3://pages-bucket/pages/{page}.tar" for page in range(3)]
    assert "did not answer within 1 s" in problem(list_objects, "s3://pages-bucket/pages_for_ever/")
    assert "list of objects is cut or invalid" in problem(list_objects, "s3://pages-bucket/pages_cut/")
