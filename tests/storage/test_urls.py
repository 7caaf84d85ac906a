"""Bytes by URL: local files and http(s) bodies, and the schemes that are refused."""

from __future__ import annotations

import contextlib
import errno
import gzip
import http.server
import os
import re
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wdskit import Pipeline
from wdskit.errors import StorageError
from wdskit.storage import objects, requests, stores
from wdskit.storage import urls as urls_module
from wdskit.storage.urls import LocalFile, is_local, local_path, open_stream, read_bytes, scheme_of
from wdskit.text import hide_secrets

BODY = bytes(range(256)) * 2000


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path.startswith("http:"):  # a request to a proxy
            self.give(body=b"proxied " + self.path.encode())
            return
        name, _, query = self.path[1:].partition("?")
        self.number = int(query) if query.isdigit() else 0
        getattr(self, f"give_{name.partition('/')[0]}")()

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

    def give_without_length(self):
        self.give(length=False)
        self.close_connection = True

    def give_moved(self):
        self.give(302, body=b"", Location="/whole")

    def give_missing_at(self):
        self.give(self.number, body=b"no")

    def give_hop(self):
        self.give(302, body=b"", Location=f"/hop?{self.number - 1}" if self.number else "whole")

    def give_moved_by(self):
        self.give(self.number, body=b"", Location="/whole")

    def give_moved_nowhere(self):
        self.give(302, body=b"")

    def give_moved_to_nothing(self):
        self.give(302, body=b"", Location="http://[::1")

    def give_compressed(self):
        self.give(body=gzip.compress(BODY), Content_Encoding="gzip")

    def give_as_it_is(self):
        self.give(Content_Encoding="Identity")

    def give_half_then_silence(self):
        self.give(length=len(BODY), body=BODY[:1000])
        self.server.released.wait(20)

    def give_path(self):
        self.give(body=self.path.encode())

    def give_cookies(self):
        self.send_response(200)
        for number in range(200):
            self.send_header("Set-Cookie", str(number))
        self.end_headers()
        self.close_connection = True

    def give_long_header(self):
        self.give(X_Long="x" * 70_000)

    def give_garbage(self):
        self.wfile.write(b"\x00\x01garbage\r\n\r\n")
        self.close_connection = True

    def give_nothing_at_all(self):
        self.close_connection = True

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


@pytest.fixture(autouse=True)
def _no_proxy_of_this_machine(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    monkeypatch.setattr(requests, "RETRIES", 2)
    monkeypatch.setattr(requests, "RETRY_S", 0.5)


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.released = threading.Event()
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
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


@pytest.mark.parametrize("name", ["whole", "whole?token=a/b.tar", "moved", "hop?0", "hop?3", "as_it_is"])
def test_a_body_is_read_whole(server, name):
    assert read_all(f"{server}/{name}") == BODY


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "there is no such object"),
        ("broken", "the server answered 503"),
        ("partly", "it cannot be read"),
        ("cut", "the connection broke after .* of 512001 bytes"),
        ("without_length", r"a header of the server's reply is missing or invalid \(MissingContentLength\)"),
        ("moved_to_ftp", "the connection failed"),
        ("moved_to_file", "the server answered 302"),
        ("round", "its redirect is not followed"),
        ("hop?30", "its redirect is not followed"),
        ("moved_nowhere", "it cannot be read: GenericError"),
        ("moved_to_nothing", "the server answered 302"),
        ("compressed", r"sends it compressed \(gzip\)"),
        ("cookies", "its headers are too long"),
        ("garbage", "the server's reply is not valid HTTP"),
        ("nothing_at_all", "the connection failed"),
    ],
)
def test_a_body_that_is_not_whole_is_an_error_that_names_the_url(server, name, problem):
    with pytest.raises(StorageError, match=problem) as caught:
        read_all(f"{server}/{name}")
    assert caught.value.url == f"{server}/{name}".partition("?")[0]
    assert str(caught.value).startswith(f"{caught.value.url}: ")


@pytest.mark.parametrize("status", [300, 304, 305, 400, 401, 403, 407, 410, 416, 429, 500, 502, 599])
def test_any_status_of_no_success_is_an_error(server, status):
    with pytest.raises(StorageError):
        open_stream(f"{server}/missing_at?{status}")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_every_kind_of_redirect_is_followed(server, status):
    assert read_all(f"{server}/moved_by?{status}") == BODY


def test_characters_beyond_ascii_are_sent_as_utf_8(server):
    """Escapes %XX, and the delimiters of the query, do not change."""
    for sent, received in [
        ("ä/雪.tar", "%C3%A4/%E9%9B%AA.tar"),
        ("%C3%A4%2F.tar?a=b&c=%20+d:e@f", "%C3%A4%2F.tar?a=b&c=%20+d:e@f"),
        ("a.tar#part", "a.tar"),
    ]:
        assert read_all(f"{server}/path/{sent}") == f"/path/{received}".encode()


def test_a_password_in_a_url_is_refused_before_anybody_hears_of_it(server):
    for user in ("user:secret@", "user@", ":secret@"):
        with pytest.raises(StorageError, match="a user or password in a URL is not supported") as caught:
            open_stream(server.replace("//", f"//{user}") + "/whole")
        assert caught.value.url == f"{server}/whole"
        assert "secret" not in str(caught.value)
    assert read_all(f"{server}/path?user=a@b") == b"/path?user=a@b"


def test_proxies_are_those_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server)
    assert read_all("http://photos.invalid/a.tar") == b"proxied http://photos.invalid/a.tar"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read_all(f"{server}/whole") == BODY


def test_a_server_that_speaks_no_tls(server):
    with pytest.raises(StorageError, match="the connection failed"):
        open_stream(server.replace("http:", "https:") + "/whole")


def test_a_small_body_has_a_limit(server):
    assert read_bytes(f"{server}/whole", limit=len(BODY)) == BODY
    with pytest.raises(StorageError, match=f"it holds more than {len(BODY) - 1} bytes"):
        read_bytes(f"{server}/whole", limit=len(BODY) - 1)


def test_connections_are_given_back(server):
    """This includes failed connections, and connections closed before the end of a body."""
    before = open_descriptors()
    for name in ("whole", "cut", "missing", "compressed", "partly", "moved_to_ftp", "round", "garbage"):
        with contextlib.suppress(StorageError):
            stream = open_stream(f"{server}/{name}")
            stream.read(10)
            stream.close()
            stream.close()
        with contextlib.suppress(StorageError):
            read_all(f"{server}/{name}")
    port = int(server.rpartition(":")[2])
    assert port not in map(peer_port, open_descriptors() - before)


def peer_port(fd: str) -> int:
    """Return the port that a descriptor is connected to; 0 if it is not a socket, or is closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as copy:
        return copy.getpeername()[1]
    return 0


def test_bytes_are_asked_for_as_they_are(server):
    """With gzip in transit, offsets would be wrong."""
    assert read_all(f"{server}/encoding") == b"identity"


@pytest.mark.parametrize("name", ["silence", "half_then_silence"])
def test_a_server_that_falls_silent_is_given_up(server, name, monkeypatch):
    monkeypatch.setattr(stores, "READ_S", 0.1)
    monkeypatch.setattr(objects, "PIECE_BYTES", 1)
    requests.loop_of_this_process("").stores.clear()
    with pytest.raises(StorageError, match=r"no reply came in time|the connection broke after 1000"):
        read_all(f"{server}/{name}")
    requests.loop_of_this_process("").stores.clear()


@pytest.mark.parametrize("url", ["http://", "http:///a.tar", "http://[::1", "http://a b/c"])
def test_urls_that_are_none(url):
    with pytest.raises(StorageError):
        open_stream(url)


@pytest.mark.parametrize(
    "scheme", ["abfs", "gcs", "wasb", "hdfs", "ftp", "sftp", "ssh", "data", "PIPE", "pipe", "git+ssh"]
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
    for url in (f"file://{path}", f"file://LOCALHOST{path}"):
        assert read_all(url.replace(" ", "%20").replace("%.", "%25.")) == b"data"
    with pytest.raises(StorageError, match="not file://elsewhere/"):
        open_stream(f"file://elsewhere{path}")
    for host in ("[::1", "[", "127.0.0.1", "user@localhost"):
        with pytest.raises(StorageError, match="a file URL names a file on this machine"):
            open_stream(f"file://{host}/a.tar")


@pytest.mark.parametrize(
    "name", ["a#1.tar", "a?b.tar", "a%41.tar", "a;b.tar", "ä\n.tar", "\udcff.tar", "s3:.tar", "{0}.tar"]
)
def test_any_file_name_has_a_url(name, tmp_path):
    """A file whose name is only the part before such a character is never read instead."""
    path = tmp_path / name
    path.write_bytes(b"data")
    for decoy in ("a", "aA.tar", "a%"):
        (tmp_path / decoy).write_bytes(b"decoy")
    assert read_all(path.as_uri()) == read_all(str(path)) == b"data"
    assert local_path(path.as_uri()) == str(path)


def test_a_name_with_a_colon_is_a_path_when_it_is_written_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pipe:id.tar").write_bytes(b"data")
    assert read_all("./pipe:id.tar") == b"data"
    with pytest.raises(StorageError, match="`pipe:` runs a shell command"):
        open_stream("pipe:id.tar")


@pytest.mark.parametrize("url", ["a\x00.tar", "file:///a%00.tar", "\ud800.tar", "", "file:", "x" * 5000, "a.tar/b.tar"])
def test_what_cannot_be_a_file_name_cannot_be_opened(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.tar").write_bytes(b"data")
    with pytest.raises(StorageError, match="cannot be opened") as caught:
        open_stream(url)
    assert caught.value.url == url


@given(st.text(max_size=30) | st.text(alphabet="file:/%?#[]@~.s3{}\x00\ud800 ", max_size=20))
@settings(max_examples=300)
def test_any_text_is_a_stream_or_a_storage_error(text):
    try:
        if is_local(text):
            LocalFile(text).close()
    except StorageError as err:
        shown = err.url
        assert shown in (text, hide_secrets(text))


def test_local_files_that_cannot_be_read(tmp_path):
    with pytest.raises(StorageError, match=r"missing.tar: cannot be opened: No such file"):
        LocalFile(str(tmp_path / "missing.tar"))
    stream = LocalFile(str(tmp_path))
    with pytest.raises(StorageError, match="reading failed: Is a directory"):
        stream.read(10)
    with pytest.raises(StorageError, match="reading failed: Is a directory"):
        stream.read_at(0, 10)
    stream.close()
    stream.close()
    with pytest.raises(StorageError, match="reading failed: Bad file descriptor"):
        stream.read(10)
    (tmp_path / "loop.tar").symlink_to("loop.tar")
    with pytest.raises(StorageError, match="cannot be opened: Too many levels of symbolic links"):
        LocalFile(str(tmp_path / "loop.tar"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.tar"))
        with pytest.raises(StorageError, match="cannot be opened: No such device"):
            LocalFile(str(tmp_path / "socket.tar"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENOMEM, errno.EIO, errno.ESTALE])
def test_a_system_that_refuses_is_told_in_its_words(number, tmp_path, monkeypatch):
    """Errors come at opening and at reading. They are simulated, because tests may run as root."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"data")
    stream = LocalFile(str(path))

    def refuse(*args):
        raise OSError(number, os.strerror(number))

    for name in ("open", "read", "pread"):
        monkeypatch.setattr(urls_module.os, name, refuse)
    for attempt in (lambda: LocalFile(str(path)), lambda: stream.read(1), lambda: stream.read_at(0, 1)):
        with pytest.raises(StorageError, match=re.escape(f": {os.strerror(number)}.")) as caught:
            attempt()
        assert caught.value.url == str(path)
    stream.close()


def test_a_named_pipe_is_read_in_order_only(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe.tar").write_bytes(BODY))
    writer.start()
    stream = LocalFile(str(tmp_path / "pipe.tar"))
    assert stream.num_bytes == 0
    with pytest.raises(StorageError, match="reading failed: Illegal seek"):
        stream.read_at(0, 10)
    parts = iter(lambda: stream.read(70_000), b"")
    assert b"".join(parts) == BODY
    stream.close()
    writer.join()


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
    assert not any(os.get_inheritable(stream.fd) for stream in streams)
    for stream in streams:
        stream.close()
    assert open_descriptors() == before


def test_a_small_file_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(StorageError, match="this is not a plain file"):
        read_bytes(str(tmp_path / "index.json"), limit=100)
