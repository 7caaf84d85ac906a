"""Bytes by URL: local files and http(s) bodies, and the schemes that are refused."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import socket
import threading
from pathlib import Path

import pytest

from wdskit import Pipeline
from wdskit.errors import StorageError
from wdskit.storage import http as http_module
from wdskit.storage.urls import LocalFile, is_local, local_path, open_stream, read_bytes, scheme_of

BODY = bytes(range(256)) * 2000


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = self.path.partition("?")[0][1:]
        getattr(self, f"give_{name}")()

    def give(self, status=200, length=None, body=BODY, **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if length is not False:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def give_whole(self):
        self.give()

    def give_missing(self):
        self.give(404, body=b"nothing here")

    def give_broken(self):
        self.give(503, body=b"later")

    def give_partly(self):
        self.give(206)

    def give_cut(self):
        self.give(length=len(BODY) + 1)
        self.close_connection = True

    def give_chunks_cut(self):
        self.give(length=False, Transfer_Encoding="chunked", body=b"5\r\nhello\r\n9\r\nshor")
        self.close_connection = True

    def give_without_length(self):
        self.give(length=False)
        self.close_connection = True

    def give_moved(self):
        self.give(302, body=b"", Location="/whole")

    def give_moved_to_ftp(self):
        self.give(302, body=b"", Location="ftp://127.0.0.1/whole")

    def give_moved_to_file(self):
        self.give(302, body=b"", Location="file:///etc/hostname")

    def give_round(self):
        self.give(302, body=b"", Location="/round")

    def give_silence(self):
        self.server.released.wait(20)

    def give_encoding(self):
        self.give(body=self.headers.get("Accept-Encoding", "").encode())

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.released = threading.Event()
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.released.set()
        served.shutdown()
        thread.join()


def read_all(url: str, size: int = 5000) -> bytes:
    stream = open_stream(url)
    try:
        parts = []
        while part := stream.read(size):
            assert len(part) <= size
            parts.append(part)
        return b"".join(parts)
    finally:
        stream.close()


@pytest.mark.parametrize("name", ["whole", "whole?token=a/b.tar", "moved", "without_length"])
def test_a_body_is_read_whole(server, name):
    assert read_all(f"{server}/{name}") == BODY


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "the server answered 404"),
        ("broken", "the server answered 503"),
        ("partly", "the server answered 206, not 200"),
        ("cut", "reading failed after|closed after 512000 of 512001 bytes"),
        ("chunks_cut", "reading failed after"),
        ("moved_to_ftp", "a redirect to ftp:"),
        ("moved_to_file", "answered 302"),
        ("round", "answered 302"),
    ],
)
def test_a_body_that_is_not_whole_is_an_error_that_names_the_url(server, name, problem):
    with pytest.raises(StorageError, match=problem) as caught:
        read_all(f"{server}/{name}")
    assert caught.value.url == f"{server}/{name}"
    assert str(caught.value).startswith(f"{server}/{name}: ")


def test_bytes_are_asked_for_as_they_are(server):
    """No gzip on the way, which would make offsets those of another file."""
    assert read_all(f"{server}/encoding") == b"identity"


def test_a_silent_server_is_given_up(server, monkeypatch):
    monkeypatch.setattr(http_module, "TIMEOUT_S", 0.2)
    with pytest.raises(StorageError, match="timed out"):
        open_stream(f"{server}/silence")


def test_a_port_where_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/a.tar"
        with pytest.raises(StorageError, match=r"cannot be opened: .*refused"):
            open_stream(url)


@pytest.mark.parametrize("url", ["http://", "http:///a.tar", "http://[::1", "http://a b/c"])
def test_urls_that_are_none(url):
    with pytest.raises(StorageError):
        open_stream(url)


@pytest.mark.parametrize(
    "scheme", ["s3", "gs", "az", "abfs", "hf", "ftp", "sftp", "ssh", "data", "PIPE", "pipe", "git+ssh"]
)
def test_other_schemes_are_refused_by_name_before_anything_runs(scheme, tmp_path):
    url = f"{scheme}:touch {tmp_path}/ran" if scheme.lower() == "pipe" else f"{scheme}://bucket/a-{{0..3}}.tar"
    for refuse in (open_stream, scheme_of, is_local):
        with pytest.raises(StorageError, match=re.escape(f"`{scheme.lower()}:`")):
            refuse(url)
    with pytest.raises(StorageError, match=re.escape(f"`{scheme.lower()}:`")):
        Pipeline().stream(url).build()
    assert list(tmp_path.iterdir()) == []


def test_paths_and_file_urls(tmp_path):
    path = tmp_path / "a b%.tar"
    path.write_bytes(b"data")
    assert read_all(str(path)) == read_all(path.as_uri()) == read_all(f"FILE://localhost{path.as_uri()[7:]}") == b"data"
    assert local_path("a%20b") == "a%20b"
    with pytest.raises(StorageError, match="not file://elsewhere/"):
        open_stream(f"file://elsewhere{path}")


def test_local_files_that_cannot_be_read(tmp_path):
    with pytest.raises(StorageError, match=r"missing.tar: cannot be opened: No such file"):
        LocalFile(str(tmp_path / "missing.tar"))
    stream = LocalFile(str(tmp_path))
    with pytest.raises(StorageError, match="reading failed: Is a directory"):
        stream.read(10)
    stream.close()
    stream.close()


def test_reading_at_an_offset_leaves_the_stream_where_it_is(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"0123456789")
    stream = LocalFile(str(path))
    assert (stream.read(2), stream.read_at(7, 2), stream.read(2), stream.read_at(9, 5)) == (b"01", b"78", b"23", b"9")
    assert stream.num_bytes == 10
    stream.close()


def test_a_small_file_has_a_limit(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"x" * 100)
    assert read_bytes(str(path), limit=100) == b"x" * 100
    with pytest.raises(StorageError, match="more than 99 bytes"):
        read_bytes(str(path), limit=99)


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_descriptors_are_not_inherited_and_given_back(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"x")
    before = open_descriptors()
    streams = [LocalFile(str(path)) for _ in range(5)]
    assert not any(os.get_inheritable(stream._fd) for stream in streams)
    for stream in streams:
        stream.close()
    assert open_descriptors() == before
